"""`shoal.init` after Accelerate and Fabric have made the process group, which they go on to use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.scripts import AGREEING, Script

pytestmark = [pytest.mark.processes, pytest.mark.peers, pytest.mark.timeout(300)]

BEGIN = {
    "accelerate": """
from accelerate import Accelerator
peer = Accelerator(cpu=True)
size = peer.num_processes
""",
    "fabric": """
from lightning.fabric import Fabric
peer = Fabric(accelerator="cpu", devices=2, strategy="ddp")
peer.launch()
size = peer.world_size
""",
}
END = {
    "accelerate": "total = peer.reduce(torch.ones(1), 'sum').item()",
    "fabric": "total = peer.all_reduce(torch.ones(1), reduce_op='sum').item()",
}


@pytest.mark.parametrize("peer", list(BEGIN))
def test_its_group_is_adopted_and_it_goes_on(peer: str, start: Callable[..., Script]) -> None:
    expected = start(AGREEING, "alone", "1", "0", "run-alone").end()
    assert expected.code == 0, expected.err
    text = f"{BEGIN[peer]}\n{AGREEING}\n{END[peer]}\nassert total == size == 2\n"
    ended = start(text, "torchrun", "2", "0", "run", size=2).end()
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == expected.out.splitlines()[-1]
    assert "of the process group that exists" not in ended.err  # the variables of torchrun agree

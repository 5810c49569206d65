"""`shoal.init` after Accelerate and Fabric have made the process group, which they go on to use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.scripts import AGREEING, Script, trained, trained_alone

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
def test_its_group_is_adopted_and_it_goes_on(
    peer: str, start: Callable[..., Script], tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    expected = trained_alone(tmp_path / "alone")
    text = f"{BEGIN[peer]}\n{AGREEING}\n{END[peer]}\nassert total == size == 2\n"
    ended = start(text, "torchrun", "2", "0", "run", size=2).end()
    assert ended.code == 0, ended.err
    assert trained(ended.out) == [expected]
    assert "of the process group that exists" not in ended.err  # the variables of torchrun agree

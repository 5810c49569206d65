"""Other users of the machine can write into the store of a run; they can't run code by it."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

import shoal
from helpers.commands import Command, wait_for
from helpers.ranks import RankError, Ranks
from helpers.scripts import Script
from shoal._torch.elastic import CheckedBackend
from shoal.util.errors import AgreementError

pytestmark = [pytest.mark.processes, pytest.mark.full]

VICTIM = """
import os, sys, time
from pathlib import Path
import torch
import shoal

def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)

def loss(output, batch):
    return output.square().sum(), len(output)

here = Path(sys.argv[1])
with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(3, 1), world, shoal.Hogwild())
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    loader = shoal.Loader((torch.ones(8, 3),), world, batch_size=4)
    with shoal.Run(here / "run", step, loader, trackers=()) as run:
        batches = loader.epochs(1)
        step(next(batches))
        run.save()
        run.files.checkpoints.background.wait()
        if world.is_rank_zero:
            (here / "port.new").write_text(os.environ["MASTER_PORT"])
            (here / "port.new").rename(here / "port")
        wait_for(here / "poisoned")
        background, store = run.files.checkpoints.background, run.files.checkpoints._store
        collect, write = background.collect, store.write

        def collected(value):
            try:
                return collect(value)
            finally:
                if world.is_rank_zero:
                    (here / "read").touch()

        def late(*arguments):
            if not world.is_rank_zero:
                wait_for(here / "read")
            return write(*arguments)

        background.collect, store.write = collected, late
        step(next(batches))
        run.save()
"""

ATTACKER = """
import encodings.idna, os, re, sys
from datetime import timedelta
import torch.distributed as dist

if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
port, content = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
store = dist.TCPStore(
    "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
)
keys = [re.fullmatch(r"(.*/saves-[0-9a-f]+-0-1)/(\\d+)/\\d+", str(key)) for key in store.list_keys()]
prefix, number = max((key[1], int(key[2])) for key in keys if key)
for later in range(number + 2, number + 20):
    store.set(f"{prefix}/{later}/1", content)
print("poisoned", prefix)
"""


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_save_runs_nothing_from_a_poisoned_store(
    tmp_path: Path, start: Callable[..., Script], start_command: Callable[..., Command]
) -> None:
    """As another user where the tests run as root."""
    marker, port = tmp_path / "unpickled", tmp_path / "port"
    hostile = pickle.dumps(Hostile(marker)).hex()
    victim = start(VICTIM, "shoal run", str(tmp_path))
    wait_for(lambda: port.exists() or victim.process.poll() is not None)
    attacked = start_command([sys.executable, "-c", ATTACKER, port.read_text(), hostile]).end()
    assert "poisoned" in attacked.out, attacked.err
    (tmp_path / "poisoned").touch()
    ended = victim.end()
    assert not marker.exists()
    assert ended.code != 0
    assert "Other users of the machine" in ended.err
    pickle.loads(bytes.fromhex(hostile))
    assert marker.exists()


def impostor(world: shoal.World, marker: Path) -> Any:
    """Rank 1 speaks as torch's object collectives do."""
    if world.rank == 0:
        return world.gather("hello")
    values: list[Any] = [None] * world.size
    lone = torch.tensor([0])
    data, size = distributed_c10d._object_to_tensor(Hostile(marker), torch.device("cpu"), world.group)
    sizes = [torch.empty_like(lone) for _ in range(world.size)]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    data.resize_(longest)
    dist.all_gather([torch.empty_like(data) for _ in values], data)
    return None


def test_a_rank_that_sends_pickles_is_not_believed(tmp_path: Path) -> None:
    """A process that takes the place of a rank in Gloo may send any bytes."""
    with Ranks(2) as ranks:
        found, _ = ranks.attempt(impostor, tmp_path / "unpickled")
    assert isinstance(found, RankError)
    assert isinstance(found.error, AgreementError)
    assert not (tmp_path / "unpickled").exists()


class Mine:
    """No dataclass."""


def gathers(world: shoal.World) -> Any:
    return world.gather(Mine() if world.rank == 1 else "plain")


def test_what_can_not_be_sent_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for error in ranks.errors(AgreementError, gathers):
        assert "rank 1" in error.given
        assert "Mine" in error.found
    assert ranks.call(shoal.World.gather, "plain") == [["plain", "plain"]] * 2


def trains(world: shoal.World, directory: Path, strategy: Any) -> int:
    """Everything in a run's life, where torch's pickling of what ranks send each other raises."""

    def refused(*_: object) -> None:
        raise RuntimeError("a pickle between ranks")

    kept = distributed_c10d._object_to_tensor, distributed_c10d._tensor_to_object
    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refused
    try:
        position = 0
        for _ in range(2):
            world.reseed("weights", by_rank=False)
            layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]
            model = shoal.parallelize(nn.Sequential(*layers), world, strategy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            step = shoal.Step(model, optimizer, shoal.Task(squares))
            loader = shoal.Loader((torch.ones(16, 4),), world, batch_size=4, micro_batches=2)
            with shoal.Run(directory, step, loader, trackers=()) as run:
                run.restore()
                position = step.number
                for batch in loader.epochs(1):
                    step(batch)
                run.save()
        return position
    finally:
        distributed_c10d._object_to_tensor, distributed_c10d._tensor_to_object = kept


def squares(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("replicate=2", shoal.DDP()),
        ("shard=2", shoal.FSDP()),
        ("pipeline=2", shoal.Pipeline(split_points=("2",))),
        ("replicate=2", shoal.LocalSGD(sync_every=2)),
        ("replicate=2", shoal.Hogwild()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_no_strategy_sends_pickles(layout: str, strategy: Any, tmp_path: Path) -> None:
    with Ranks(2, layout=layout) as ranks:
        assert ranks.call(trains, tmp_path / "run", strategy) == [4, 4]


def test_the_state_of_a_rendezvous_runs_nothing(tmp_path: Path) -> None:
    """Torch elastic unpickles what other nodes have written into the store of `shoal run --nodes`."""
    state = _RendezvousState()
    state.participants[_NodeDesc("host", 1, 0)] = 0
    state.participants[_NodeDesc("other", 1, 0)] = Hostile(tmp_path / "ran")  # type: ignore[assignment]
    content = base64.b64encode(pickle.dumps(state))
    store: Any = SimpleNamespace(get=lambda _: content, compare_set=lambda *_: content)
    with pytest.raises(RendezvousStateError):
        CheckedBackend(store, "run").get_state()
    assert not (tmp_path / "ran").exists()

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.distributed.seeds import derive_seed
from shoal.strategies.registry import engines_of
from shoal.util.errors import AgreementError, LaunchError, LayoutError, StepError


def test_a_world_of_one_has_every_method(world: shoal.World) -> None:
    assert (world.rank, world.size, world.data_rank, world.data_size) == (0, 1, 0, 1)
    assert world.is_rank_zero
    tensor = torch.tensor([1.0, 2.0])
    assert world.all_reduce(tensor, "max") is tensor
    assert world.gather({"a": 1}) == [{"a": 1}]
    assert world.broadcast("text") == "text"
    assert world.agree((1, 2), "the pair") == (1, 2)
    world.barrier()
    world.watchdog.begin_step()
    with world.preparing(), world.rank_zero_first() as first:
        assert first
    assert engines_of(world) == []
    assert not dist.is_initialized()
    assert repr(world) == "World(rank 0 of 1, replicate=1, cpu)"


def test_printing_has_the_options_of_python(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.print("a", 1, sep="-", end="!", flush=False)
    assert capsys.readouterr().out == "a-1!"


def test_what_a_world_of_one_can_not_do(world: shoal.World) -> None:
    with pytest.raises(AgreementError, match="'sum', 'max', 'min'"):
        world.all_reduce(torch.zeros(1), "mean")
    with pytest.raises(LayoutError, match="needs a process group"):
        world.mesh  # noqa: B018
    with pytest.raises(LookupError, match="mine"), world.rank_zero_first():
        raise LookupError("mine")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_weights_follow_the_seed() -> None:
    found = []
    for seed in (0, 0, 1):
        with shoal.init(device="cpu", seed=seed):
            found.append(drawn())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[2], strict=True))


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_script_draws_what_it_draws_in_plain_torch(seed: int) -> None:
    seeded(seed)
    expected = drawn(), drawn()
    for script in (False, True):
        if script:
            seeded(seed)
        with shoal.init(device="cpu", seed=None if script else seed) as world:
            found = drawn()
            for _ in range(2):
                shoal.parallelize(nn.utils.skip_init(nn.Linear, 1, 1), world)
            assert world.seed == seed
            next(iter(next(shoal.Loader((torch.ones(2, 1),), world, batch_size=2).epochs(1))))
            assert (found, drawn()) == expected


def test_a_seed_that_nobody_has_given_is_0() -> None:
    found = []
    for _ in range(2):  # the second world is not seeded by the first
        with shoal.init(device="cpu") as world:
            assert world.seed == 0
            found.append(drawn())
    assert found[0] == found[1]
    with pytest.raises(LaunchError, match="18446744073709551616"):
        shoal.init(device="cpu", seed=2**64)


def test_streams_differ_by_seed_purpose_and_rank(world: shoal.World) -> None:
    seeds = {
        derive_seed(seed, purpose, rank)
        for seed in (0, 1, 10)
        for purpose in ("weights", "noise")
        for rank in (0, 1, 11)
    }
    assert len(seeds) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert world.seed_for("noise") == derive_seed(0, "noise", 0)
    first, again = (torch.rand(3, generator=world.generator("mine")) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.rand(3, generator=world.generator("yours")))


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_deterministic_mode_ends_with_the_world(before: str) -> None:
    mode = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(before)
        found = torch.get_deterministic_debug_mode()
        with shoal.init(device="cpu", deterministic=True):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == found
    finally:
        torch.set_deterministic_debug_mode(mode)


def test_closing_twice_and_leaving_nothing() -> None:
    threads = set(threading.enumerate())
    world = shoal.init(device="cpu")
    shoal.parallelize(nn.Linear(1, 1), world)
    world.close()
    world.close()
    assert engines_of(world) == []
    assert set(threading.enumerate()) == threads
    with shoal.init(device="cpu") as again:
        assert again.size == 1


def test_an_error_that_leaves_the_world_says_where() -> None:
    with pytest.raises(StepError) as raised, shoal.init(device="cpu"):
        raise StepError(given="a", found="b", fix="c")
    assert raised.value.where is not None
    assert raised.value.where.startswith("rank 0 of 1 on ")
    assert __file__ in raised.value.where


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"layout": "replicate=2"}, LayoutError, "need 2 processes"),
        ({"timeout": 0.0}, LaunchError, "positive number of seconds"),
        ({"prepare_timeout": -1.0}, LaunchError, "positive number of seconds"),
        ({"backend": "smoke signals"}, LaunchError, "gloo"),
        ({"device": "gpu"}, LaunchError, "device"),
    ],
)
def test_worlds_that_cannot_be(options: dict[str, object], error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        shoal.init(**options)  # type: ignore[arg-type]


def test_a_process_group_of_one_is_an_error_before_ranks_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(LaunchError, match="default process group of one rank") as caught:
            shoal.init(device="cpu")
    finally:
        dist.destroy_process_group()
    assert caught.value.fix.startswith("pass world_size=2 to init_process_group")

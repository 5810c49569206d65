"""Stages that send each other messages by RPC: the numbers of one process, whoever runs what."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.one_process import check_like_one
from helpers.ranks import RankError, Ranks
from helpers.reference import TOLERANCE, Trained, distance
from helpers.token_model import (
    LENGTH,
    SAMPLES,
    STAGES,
    WORDS,
    build,
    dataset,
    expected,
    loss,
    parts,
    train,
)
from shoal.strategies.rpc_pipeline.messages import Inbox, Message, StagePass

pytestmark = pytest.mark.processes

CREWS: dict[str, tuple[str, shoal.RPCPipeline]] = {
    "2": ("pipeline=2", shoal.RPCPipeline(stages=STAGES[2])),
    "3": ("pipeline=3", shoal.RPCPipeline(stages=STAGES[3])),
    "4": ("pipeline=4", shoal.RPCPipeline(stages=STAGES[4])),
    "1 + 2": (
        "pipeline=3",
        shoal.RPCPipeline(stages=STAGES[2], workers={"front": (0,), "back": (1, 2)}),
    ),
    "2 + 1": (
        "pipeline=3",
        shoal.RPCPipeline(stages=STAGES[2], workers={"front": (2, 0), "back": (1,)}),
    ),
    "2 + 2": (
        "pipeline=4",
        shoal.RPCPipeline(stages=STAGES[2], workers={"front": (0, 1), "back": (2, 3)}),
    ),
    "two lines of 2": ("replicate=2,pipeline=2", shoal.RPCPipeline(stages=STAGES[2])),
    "two lines of 1 + 2": (
        "replicate=2,pipeline=3",
        shoal.RPCPipeline(stages=STAGES[2], workers={"front": (1,), "back": (0, 2)}),
    ),
    "one stage on 2": (
        "pipeline=2",
        shoal.RPCPipeline(stages={"all": ("embedding", "blocks", "head")}, workers={"all": (0, 1)}),
    ),
}
SIZES = {"pipeline=2": 2, "pipeline=3": 3, "pipeline=4": 4, "replicate=2,pipeline=2": 4}


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str], Ranks]]:
    """Ranks by layout; those of one size are one set of processes after the other's world."""
    running: dict[int, tuple[str, Ranks]] = {}

    def ranks(layout: str) -> Ranks:
        size = SIZES.get(layout, 6)
        if size not in running:
            running[size] = layout, Ranks(size, layout=layout, seed=0)
        before, some = running[size]
        if before != layout:
            some.divide(layout)
            running[size] = layout, some
        return some

    yield ranks
    for _, some in running.values():
        some.kill()


def crews() -> list[Any]:
    """All, of which CI tries those that start no further processes with several micro-batches."""

    def mark(name: str, count: int) -> pytest.MarkDecorator:
        return pytest.mark.full if count > 1 and CREWS[name][0] in SIZES else pytest.mark.long

    return [
        pytest.param(name, count, marks=mark(name, count))
        for name in sorted(CREWS, key=lambda name: CREWS[name][0])
        for count in (1, 4)
    ]


@pytest.mark.parametrize(("crew", "micro_batches"), crews())
def test_every_crew_trains_and_evaluates_like_one_process(
    started: Callable[[str], Ranks], crew: str, micro_batches: int
) -> None:
    layout, strategy = CREWS[crew]
    results = started(layout).call(train, strategy, micro_batches)
    wanted, means = expected()
    evaluated = {name: pytest.approx(value, rel=1e-12) for name, value in means.items()}
    together = {name: p for found, _ in results for name, p in found.parameters.items()}
    for found, result in results:
        whole = Trained(together | found.parameters, found.norms, found.losses)
        assert distance(whole, wanted) < TOLERANCE
        assert result == {**evaluated, "samples": SAMPLES}


def saved(world: shoal.World, strategy: Any, directory: Path, stops: list[int]) -> list[Tensor]:
    """Train in one directory until each of `stops`, every time anew from what was saved there."""
    tensors: list[Tensor] = []
    for number, stop in enumerate(stops):
        world.reseed(f"run {number}")
        step, data = parts(world, strategy, dropout=0.2 if strategy is not None else 0.0)
        with shoal.Run(directory, step, data) as run:
            run.restore()
            for batch in data.epochs(99):
                step(batch)
                run.tick()
                if step.number == stop:
                    break
            run.save()
        tensors = [p.detach().clone() for p in step.model.parameters()]
    return tensors


@pytest.mark.long
def test_a_resumed_run_is_bit_equal_with_noise_and_replicas(
    started: Callable[[str], Ranks], tmp_path: Path
) -> None:
    """Micro-batches come back in any order; what they give is added in their own."""
    layout, strategy = CREWS["1 + 2"]
    at_once = started(layout).call(saved, strategy, tmp_path / "once", [7])
    again = started(layout).call(saved, strategy, tmp_path / "again", [2, 5, 7])
    for one, other in zip(at_once, again, strict=True):
        assert same(dict(enumerate(one)), dict(enumerate(other)))


def resumed(world: shoal.World, strategy: Any, directory: Path, stop: int) -> dict[str, Any]:
    step, data = parts(world, strategy)
    ema = shoal.EMA(step.model, decay=0.5)
    losses = []
    with shoal.Run(directory, step, data, state={"ema": ema}) as run:
        run.restore()
        for batch in data.epochs(99):
            losses.append(step(batch).loss)
            ema.update()
            run.tick()
            if step.number == stop:
                break
        run.save()
    with ema.applied():
        averaged = shoal.evaluate(step, dataset(), batch_size=8)["loss"]
    return {"losses": losses, "averaged": averaged}


@pytest.mark.long
def test_checkpoints_go_on_in_one_process_and_with_other_workers(
    started: Callable[[str], Ranks], tmp_path: Path
) -> None:
    with shoal.init() as world:
        whole = resumed(world, None, tmp_path / "whole", 9)
    for crew, stop in (("1 + 2", 2), ("4", 4)):
        layout, strategy = CREWS[crew]
        started(layout).call(resumed, strategy, tmp_path / "parts", stop)
    with shoal.init() as world:
        resumed(world, None, tmp_path / "parts", 7)
    layout, strategy = CREWS["two lines of 2"]
    for result in started(layout).call(resumed, strategy, tmp_path / "parts", 9):
        assert result["losses"] == pytest.approx(whole["losses"][7:], rel=1e-11)
        assert result["averaged"] == pytest.approx(whole["averaged"], rel=1e-11)


def asked(world: shoal.World, strategy: Any, caller: int) -> Tensor | None:
    """One rank alone calls the model, whose mode holds, while the others wait in a collective."""
    step, _ = parts(world, strategy, dropout=0.5)
    output = None
    if world.rank == caller:
        with torch.no_grad():
            output = step.model.eval()(tokens=dataset()[0])
    world.barrier()
    assert all(part.training == (world.rank != caller) for part in step.model.modules())
    return output


@pytest.mark.full
@pytest.mark.parametrize("caller", [0, 1, 2])
def test_any_rank_may_call_the_model(started: Callable[[str], Ranks], caller: int) -> None:
    layout, strategy = CREWS["1 + 2"]
    output = started(layout).call(asked, strategy, caller)[caller]
    with torch.no_grad():
        torch.testing.assert_close(output, build()(dataset()[0]), rtol=1e-14, atol=0)


def exported(world: shoal.World, strategy: Any, path: Path) -> str:
    model = shoal.parallelize(build(), world, strategy)
    with pytest.raises(shoal.CheckpointError) as caught:
        shoal.export(model, path, example=(dataset()[0],))
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [CREWS["2"][1], shoal.Pipeline(split_points=["blocks.1"])])
@pytest.mark.parametrize("ending", ["ts", "pt2"])
def test_no_program_is_made_of_one_stage(
    started: Callable[[str], Ranks], strategy: Any, ending: str, tmp_path: Path
) -> None:
    for told in started("pipeline=2").call(exported, strategy, tmp_path / f"model.{ending}"):
        assert "sharded or split over ranks" in told
        assert "shoal.load(model, 'model.safetensors')" in told


def lengths(world: shoal.World, strategy: Any) -> list[float]:
    """Sentences of other lengths in the micro-batches of one batch."""
    model = shoal.parallelize(build(), world, strategy)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    tokens = torch.randint(0, WORDS, (12, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [(row[: 2 + number % 4], row[: 2 + number % 4]) for number, row in enumerate(tokens)]

    def padded(some: Any) -> Any:
        columns = map(list, zip(*some, strict=True))
        return tuple(nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns)

    data = shoal.Loader(rows, world, batch_size=6, micro_batches=6, collate_fn=padded)
    return [step(batch).loss for batch in data.epochs(2)]


@pytest.mark.full
def test_micro_batches_may_have_other_shapes(started: Callable[[str], Ranks]) -> None:
    check_like_one(started("pipeline=2"), lengths, CREWS["2"][1])


def order(world: shoal.World, case: str) -> list[str]:
    """Forwards and backwards of this rank's stage, whose backward takes a while."""
    seen: list[str] = []
    model = build()
    if case == "frozen":
        for layer in (model.embedding, model.blocks[0]):
            layer.requires_grad_(False)
    model = shoal.parallelize(model, world, CREWS["2"][1])
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    if not world.is_rank_zero:
        wide, narrow = (step.model.get_submodule(f"blocks.1.{name}") for name in ("wide", "narrow"))
        wide.register_forward_hook(lambda *_: seen.append("F") if torch.is_grad_enabled() else None)
        next(narrow.parameters()).register_hook(lambda _: time.sleep(0.02))
        next(wide.parameters()).register_hook(lambda _: seen.append("B"))
    if not world.is_rank_zero and case == "differentiated":

        def differentiate(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if torch.is_grad_enabled():
                torch.autograd.grad(output.sum(), inputs, retain_graph=True)

        step.model.get_submodule("blocks.1").register_forward_hook(differentiate)
    for batch in shoal.Loader(dataset(), world, batch_size=16, micro_batches=4).epochs(1):
        step(batch)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("case", ["trained", "frozen", "differentiated"])
def test_no_forward_begins_where_a_backward_runs(started: Callable[[str], Ranks], case: str) -> None:
    """Also where no gradient goes on from there, which tells of its end, or a forward takes one."""
    seen = started("pipeline=2").call(order, case)[1]
    assert "".join(seen) == "FB" * 12  # three batches of four


def heard_at() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("inet")
    heard = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
    return {(str(address.ip), int(address.port)) for address in heard}


def listening(world: shoal.World) -> set[str]:
    before = heard_at()
    shoal.parallelize(build(), world, CREWS["2"][1])
    return {address for address, _ in heard_at() - before}


@pytest.mark.full
def test_calls_are_heard_from_this_machine_alone(started: Callable[[str], Ranks]) -> None:
    """They are pickled: whoever reaches such a port may have anything run."""
    two = started("pipeline=2")
    two.divide("pipeline=2")  # a world in which nobody listens yet
    assert two.call(listening) == [{"127.0.0.1"}] * 2


def until_interrupted(world: shoal.World, victim: int) -> str:
    step, data = parts(world, CREWS["1 + 2"][1])

    def interrupt(*_: Any) -> None:
        if torch.is_grad_enabled():
            raise KeyboardInterrupt

    if world.rank == victim:
        layer = next(m for m in step.model.modules() if isinstance(m, nn.Embedding | nn.Linear))
        layer.register_forward_hook(interrupt)
    try:
        for batch in data.epochs(1):
            step(batch)
    except (shoal.StepError, KeyboardInterrupt) as error:
        return repr(error) if world.rank == victim else str(error)
    return "it has gone on"


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_interrupted_rank_is_named_on_all_others(
    started: Callable[[str], Ranks], victim: int
) -> None:
    """And none takes the step for done, or waits for what that rank had begun."""
    results = started("pipeline=3").call(until_interrupted, victim)
    assert results.pop(victim) == "KeyboardInterrupt()"
    assert all(f"rank {victim} (stage" in found for found in results)


def with_late_gradients(world: shoal.World, *, late: bool) -> list[float]:
    """Norms of two steps, before which one fails whose gradients come late to the first stage."""
    failed = threading.Event()
    post = Inbox.post
    losses = itertools.count(1)

    def post_late(inbox: Inbox, turn: int, message: Message) -> None:
        if isinstance(message, StagePass) and message.kind == "B":
            assert failed.wait(60)
        post(inbox, turn, message)

    def failing(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        if fails and torch.is_grad_enabled() and next(losses) == 2:
            raise ValueError("not this one")
        return loss(output, batch)

    fails = False
    model = shoal.parallelize(build(), world, CREWS["2"][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(failing))
    batches = shoal.Loader(dataset(), world, batch_size=12, micro_batches=2).epochs(1)
    step(next(batches))
    fails = True
    with pytest.MonkeyPatch.context() as patch:
        if late and world.is_rank_zero:
            patch.setattr(Inbox, "post", post_late)
        with pytest.raises((ValueError, shoal.StepError), match="not this one"):
            step(next(batches))
    failed.set()
    fails = False
    return [step(batch).norm for batch in batches]


@pytest.mark.full
def test_no_gradient_of_a_step_that_failed_comes_into_the_next(started: Callable[[str], Ranks]) -> None:
    two = started("pipeline=2")
    in_time, behind = (two.call(partial(with_late_gradients, late=late)) for late in (False, True))
    assert behind[0] == behind[1] == pytest.approx(in_time[0], rel=1e-12)


def until_killed(world: shoal.World, victim: int, where: str) -> str:
    step, data = parts(world, CREWS["3"][1])
    batches = data.epochs(99)
    for batch in itertools.islice(batches, 2):
        step(batch)

    def kill(*_: Any) -> None:
        if torch.is_grad_enabled() or where == "backward":
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == victim:
        if where == "between":
            kill()
        layer = next(m for m in step.model.modules() if isinstance(m, nn.Embedding | nn.Linear))
        if where == "forward":
            layer.register_forward_hook(kill)
        else:
            layer.weight.register_hook(kill)
    try:
        for batch in batches:
            step(batch)
    except shoal.StepError as error:
        return str(error)
    return "it has gone on"


def kills() -> list[Any]:
    few = {(0, "forward"), (1, "backward"), (2, "between")}
    return [
        pytest.param(*kill, marks=pytest.mark.full if kill in few else pytest.mark.long)
        for kill in itertools.product(range(3), ("forward", "backward", "between"))
    ]


@pytest.mark.parametrize(("victim", "where"), kills())
def test_a_killed_worker_is_named_on_all_others(victim: int, where: str) -> None:
    """Whether it drives or not; long before any time limit of torch's would be over."""
    with Ranks(3, layout="pipeline=3", timeout=600, prepare_timeout=600) as three:
        results = three.attempt(until_killed, victim, where)
    for rank, found in enumerate(results):
        if rank == victim:
            assert isinstance(found, RankError)
            assert "died" in found.text
        else:
            assert f"rank {victim} on {os.uname().nodename} is gone" in found

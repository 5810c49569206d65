"""Who runs what of a model in stages, and in which order: decided from plain values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.distributed.watchdog.stacks import communication, stack
from shoal.strategies.partition.assignment import crew_of, split_points
from shoal.strategies.partition.inputs import evaluating
from shoal.strategies.rpc_pipeline.messages import Inbox, PassQueue, StagePass, TurnDone
from shoal.util.errors import LayoutError, StepError

CALLS = ("first", "blocks.0", "drop", "blocks.1", "head")
WAIT = 30.0


def cut(stages: Mapping[str, Sequence[str]], calls: Sequence[str] = CALLS) -> list[str]:
    return split_points(calls, stages, frozenset({"drop"}), "given")


def test_stages_begin_at_their_first_module() -> None:
    assert cut({"front": ("first", "blocks.0"), "back": ("blocks.1", "head")}) == ["blocks.1"]
    assert cut({"a": ("first",), "b": ("blocks",), "c": ("head",)}) == ["blocks.0", "head"]
    assert cut({"whole": ("first", "blocks", "head")}) == []


def test_what_has_no_parameters_goes_with_the_module_before_unless_it_is_named() -> None:
    assert cut({"front": ("first", "blocks.0"), "back": ("drop", "blocks.1", "head")}) == ["drop"]


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        ({"a": ("first", "blocks"), "b": ("tail", "head")}, "'tail', which the model does not call"),
        ({"a": ("first", "blocks.0"), "b": ("head",)}, "blocks.1 has parameters or buffers"),
        ({"a": ("first", "blocks"), "b": ("blocks.1", "head")}, "in the stages 'a' and 'b'"),
        (
            {"a": ("first", "blocks.1"), "b": ("blocks.0", "head")},
            "after blocks.0 of 'b' the model calls blocks.1 of 'a'",
        ),
        (
            {"b": ("blocks", "head"), "a": ("first",)},
            "after the model's inputs the model calls first of 'a'",
        ),
        (
            {"a": ("first",), "c": ("head",), "b": ("blocks",)},
            "after first of 'a' the model calls blocks.0 of 'b'",
        ),
    ],
)
def test_stages_that_do_not_chain_are_refused_by_name(
    stages: Mapping[str, Sequence[str]], found: str
) -> None:
    with pytest.raises(StepError) as caught:
        cut(stages)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        ({"a": ("0",), "b": ("1", "second")}, "'second', which the model does not call"),
        ({"a": ("0",), "b": ("1", "2"), "c": ("3",)}, "stage 'c' has no parameters"),
    ],
)
def test_one_process_calls_nothing_and_refuses_what_ranks_would(
    stages: Mapping[str, Sequence[str]], found: str, world: shoal.World
) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1), nn.Tanh())

    right = shoal.RPCPipeline(stages={"a": ("0", "1"), "b": ("2", "3")})
    assert shoal.parallelize(layers(), world, right)(torch.ones(3, 2)).shape == (3, 1)
    with pytest.raises(StepError) as caught:
        shoal.parallelize(layers(), world, shoal.RPCPipeline(stages=stages))
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("workers", "ranks", "found"),
    [
        (None, 3, "no stage for rank 2 among 3"),
        (None, 1, "no rank 1 among 1"),
        ({"front": (0,), "back": (1, 3)}, 3, "no rank 3 among 3"),
        ({"front": (0,), "back": (2,)}, 4, "no stage for rank 1, 3 among 4"),
    ],
)
def test_each_rank_runs_one_stage(workers: Any, ranks: int, found: str) -> None:
    with pytest.raises(LayoutError) as caught:
        crew_of(("front", "back"), workers, range(ranks), "given")
    assert found in str(caught.value)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_twin_evaluates_with_the_tensors_of_a_module_that_trains(compiled: bool) -> None:
    linear = nn.Linear(2, 2)
    module = nn.Sequential(linear, nn.Dropout(0.9), nn.BatchNorm1d(2))
    if compiled:
        module.compile(backend="eager")
    twin = evaluating(module)
    with torch.no_grad():
        linear.weight.fill_(0.5)
    inputs = torch.arange(8.0).view(4, 2)
    found = twin(inputs)
    assert all(part.training for part in module.modules())
    assert torch.equal(found, module.eval()(inputs))


def test_every_micro_batch_has_one_worker_of_each_stage() -> None:
    workers = {"a": (3, 1), "b": (0,), "c": (4, 2, 5)}
    crew = crew_of((*workers,), workers, [10, 11, 12, 13, 14, 15], "given")
    assert crew.driver == 14
    for stage, ranks in enumerate(crew.ranks):
        taken = sorted(micro for rank in ranks for micro in crew.micros(rank, 7))
        assert taken == list(range(7))
        for rank in ranks:
            assert crew.stage(rank) == stage
            assert {crew.worker(stage, micro) for micro in crew.micros(rank, 7)} <= {rank}
    assert [crew.worker(stage, 1) for stage in range(3)] == [11, 10, 12]
    assert crew.title(15) == "rank 15 (stage 'c')"


def run(line: PassQueue) -> list[str]:
    """The passes that can run now."""
    taken = []
    while line.ready:
        taken.append(line.take())
    assert line.take() is None
    return [f"{each.kind}{each.micro}" for each in taken if each is not None]


def arrive(line: PassQueue, *passes: str) -> list[str]:
    for each in passes:
        line.add(StagePass(each[0], int(each[1:]), ()))
    return run(line)


def test_passes_run_in_the_order_of_their_micro_batches() -> None:
    line = PassQueue(range(1, 8, 2), ahead=9, backward=False)
    assert [arrive(line, each) for each in ("F5", "F1", "F7", "F3")] == [
        [],
        ["F1"],
        [],
        ["F3", "F5", "F7"],
    ]
    assert line.over
    assert PassQueue(range(0), ahead=1, backward=True).over


def test_a_backward_pass_runs_before_forward_passes() -> None:
    line = PassQueue(range(3), ahead=9, backward=True)
    assert arrive(line, "F0", "F1") == ["F0", "F1"]
    assert arrive(line, "F2", "B1") == ["F2"]
    assert not line.over
    assert arrive(line, "B0") == ["B0", "B1"]
    assert arrive(line, "B2") == ["B2"]
    assert line.over


def test_few_micro_batches_are_between_their_passes() -> None:
    """Each keeps its activations."""
    line = PassQueue(range(4), ahead=2, backward=True)
    assert arrive(line, "F0", "F1", "F2", "F3") == ["F0", "F1"]
    assert arrive(line, "B0") == ["B0", "F2"]
    assert arrive(line, "B2") == []
    assert arrive(line, "B1") == ["B1", "B2", "F3"]


def test_messages_wait_for_their_turn_and_none_comes_after_it() -> None:
    looked: list[None] = []
    inbox = Inbox(lambda: looked.append(None))
    inbox.post(2, TurnDone(0, None))
    assert inbox.begin() == 1
    first = StagePass("F", 0, ())
    inbox.post(1, first)
    assert inbox.receive() is first
    assert inbox.receive(wait=False) is None
    inbox.post(1, first)
    inbox.end()
    inbox.post(1, first)
    assert inbox.begin() == 2
    assert inbox.receive() == TurnDone(0, None)
    assert inbox.receive(wait=False) is None
    assert looked == []


def test_a_rank_without_messages_looks_whether_others_live_and_counts_as_waiting() -> None:
    """Else one that hangs would keep the others for ever: the watch asks what they wait in."""
    inbox = Inbox(lambda: None)
    inbox.begin()
    waiting = threading.Thread(target=inbox.receive)
    waiting.start()
    found = ""
    until = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        found = communication(stack(sys._current_frames().get(waiting.ident or 0)))
        if found or until.wait(0.01):
            break
    inbox.post(1, TurnDone(0, None))
    waiting.join(WAIT)
    assert found == "receive"

    class GoneError(Exception):
        pass

    def look() -> None:
        raise GoneError

    with pytest.raises(GoneError):
        Inbox(look).receive()

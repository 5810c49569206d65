from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.tools.verify import properties
from shoal.tools.verify.audit import kill_steps
from shoal.tools.verify.causes import Restart, ScriptSource
from shoal.tools.verify.observations import (
    CalledFunction,
    DeliveredBatch,
    DrawRecord,
    LoaderKey,
    LoaderRecord,
    RankRecord,
    RunRecord,
    Sketch,
    StepRecord,
)
from shoal.tools.verify.operations import PropertyFinding

SCRIPT = """
import numpy as np
def __getitem__(self, index):
    return np.random.normal()
torch.save(state, "state.pt")
"""
SOURCE = ScriptSource(name="train.py", text=SCRIPT)
KEY = LoaderKey("train.py:9", 1)
LOADER = LoaderRecord(
    loader=KEY, size=3, sampler="DistributedSampler", shuffle=True, drop_last=False, line="train.py:9"
)


def step(number: int, indices: tuple[int, ...] = (0,), **changes: object) -> StepRecord:
    value = Sketch(checksum=f"{number}", norm=float(number), projection=0.0)
    record = StepRecord(
        step=number,
        parameters_before=f"{number - 1}",
        optimizer_before=f"{number - 1}",
        buffers_before="",
        generators={"python": "", "numpy": "", "torch": f"{number}"},
        lr=(0.1,),
        gradients={"weight": value},
        parameters={"weight": value},
        batches=(DeliveredBatch(loader=KEY, epoch=0, indices=indices, training=True),),
        scheduler_steps=0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def run(*ranks: RankRecord, name: str = "a") -> RunRecord:
    return RunRecord(name=name, size=len(ranks), ranks=ranks)


STEPS = tuple(step(number, (number,)) for number in range(1, 6))
BASE = run(RankRecord(rank=0, steps=STEPS))


def test_equal_runs_are_repeatable_and_the_first_difference_is_found() -> None:
    assert properties.decide_repeatable(BASE, BASE, SOURCE).answer == "held in 2 runs"
    other = {"weight": Sketch(checksum="x", norm=3.0, projection=0.0)}
    changed = (*STEPS[:2], replace(STEPS[2], gradients=other), *STEPS[3:])
    second = run(RankRecord(rank=0, steps=changed))
    found = properties.decide_repeatable(BASE, second, SOURCE)
    assert found.verdict == "refuted"
    assert "step 3: gradients" in found.evidence


def resumed(**changes: object) -> PropertyFinding:
    first = replace(STEPS[2], **changes)  # type: ignore[arg-type]
    again = run(RankRecord(rank=0, steps=(first, *STEPS[3:])))
    return properties.decide_resume(BASE, [again], SOURCE)


def test_a_resumed_run_is_compared_from_its_first_step() -> None:
    assert resumed().answer == "held in 1 run"
    found = resumed(optimizer_before="0")
    assert found.cause is not None
    assert found.cause.name == "optimizer state not in the checkpoint"
    assert found.cause.line == "train.py:5"
    missed = resumed(batches=step(1, (1,)).batches)
    assert missed.cause is not None
    assert missed.cause.name == "loader position not in the checkpoint"


def test_gradients_that_differ_after_a_restart_are_not_blamed_on_generators() -> None:
    other = {"weight": Sketch(checksum="x", norm=3.0, projection=0.0)}
    found = resumed(gradients=other, generators={"python": "", "numpy": "", "torch": "x"})
    assert found.cause is None
    assert found.difference is not None


def test_state_that_was_saved_and_not_loaded_is_not_restored() -> None:
    calls = tuple(CalledFunction(what=what, line="train.py:4") for what in ("optimizer saved", "save"))
    saved = run(RankRecord(rank=0, steps=STEPS, calls=calls))
    first = replace(STEPS[2], optimizer_before="0")
    load = (CalledFunction(what="load", line="train.py:8"),)
    for restored, cause in (
        ((), ("optimizer state not restored", "train.py:8")),
        ((CalledFunction(what="optimizer restored", line="train.py:9"),), None),
    ):
        again = run(RankRecord(rank=0, steps=(first, *STEPS[3:]), calls=(*load, *restored)))
        found = properties.decide_resume(saved, [again], SOURCE).cause
        assert (None if found is None else (found.name, found.line)) == cause


@pytest.mark.parametrize(("restored", "copied"), [("a", True), ("b", False), ("c", False)])
def test_another_rank_may_continue_with_the_generator_state_of_rank_0(
    restored: str, copied: bool
) -> None:
    def ranks(*states: str) -> list[RankRecord]:
        made = [step(1, generators={"python": "", "numpy": "", "torch": state}) for state in states]
        whats = ("torch generator saved", "torch generator restored")
        calls = tuple(CalledFunction(what=what, line="train.py:8") for what in whats)
        return [RankRecord(rank=r, steps=(each,), calls=calls) for r, each in enumerate(made)]

    restart = Restart(run(*ranks("a", "b")), run(*ranks("a", restored)), 0, SOURCE)
    found = restart.missing("torch")
    name = "generator state of rank 0 restored on all ranks"
    assert (found is not None and (found.name, found.line) == (name, "train.py:8")) == copied


def test_the_first_order_again_is_a_generator_that_was_not_saved_if_no_step_is_repeated() -> None:
    loader = replace(LOADER, sampler="RandomSampler", seed=7)

    def rank(*firsts: int) -> RankRecord:
        batches = [
            DeliveredBatch(loader=KEY, epoch=epoch, indices=(first,), training=True)
            for epoch, first in enumerate(firsts)
        ]
        steps = tuple(step(n, batches=(batch,)) for n, batch in enumerate(batches, start=1))
        return RankRecord(rank=0, steps=steps, loaders={KEY: loader}, delivered=tuple(batches))

    base = run(rank(0, 1, 2))
    for again, name in (
        (rank(0), "generator state not in the checkpoint"),
        (rank(0, 1), None),
    ):
        found = Restart(base, run(again), 2, SOURCE).state_cause("samples", 0, 0)
        assert (None if found is None else found.name) == name


def scaled(factor: float, *, ranks: int, unclipped: bool = False) -> RunRecord:
    value = {"weight": Sketch(checksum="", norm=factor, projection=factor)}
    before = {"unclipped": value, "clip_line": "train.py:6"} if unclipped else {"gradients": value}
    each = step(1, reduce_line="train.py:5", **before)
    name = f"{ranks} ranks"
    parts = (RankRecord(rank=r, steps=(replace(each, batches=()),)) for r in range(ranks))
    return run(*parts, name=name)


@pytest.mark.parametrize("unclipped", [False, True])
@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2.0, "gradients summed over ranks"),
        (0.5, "gradients divided by the number of ranks twice"),
        (1.5, None),
    ],
)
def test_the_scale_of_gradients_is_seen_before_clipping(
    factor: float, cause: str | None, unclipped: bool
) -> None:
    one, two = scaled(1.0, ranks=1, unclipped=unclipped), scaled(factor, ranks=2, unclipped=unclipped)
    found = properties.decide_world_size([one, two], SOURCE)
    assert found.verdict == "refuted"
    assert (None if found.cause is None else found.cause.name) == cause


OTHER = {name: Sketch(checksum="x", norm=1.0, projection=0.0) for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("changes", "names", "cause"),
    [
        ({"wrapped": frozenset({"weight"})}, ("weight",), "model called without its wrapper"),
        (
            {"wrapped": frozenset({"weight"}), "wrapper_calls": 1, "synchronized": False},
            ("weight",),
            "last micro-batch in no_sync",
        ),
        (
            {"wrapped": frozenset({"weight"}), "wrapper_calls": 1},
            ("bias",),
            "parameters outside of DistributedDataParallel",
        ),
        ({"reduce_line": "train.py:5"}, ("bias",), "not all gradients averaged"),
        (
            {"early_line": "train.py:5"},
            ("weight", "bias"),
            "gradients averaged before the last micro-batch",
        ),
        ({"reduce_line": "train.py:5"}, ("weight", "bias"), None),
        ({}, ("weight", "bias"), "gradients not averaged"),
    ],
)
def test_a_reduction_that_fails_has_its_evidence(
    changes: dict[str, object], names: tuple[str, ...], cause: str | None
) -> None:
    same = {name: Sketch(checksum="", norm=1.0, projection=0.0) for name in OTHER}
    other = {**same, **{name: OTHER[name] for name in names}}
    first = replace(step(1, gradients=same, parameters=same), **changes)  # type: ignore[arg-type]
    second = replace(first, gradients=other, parameters=other)
    ranks = run(RankRecord(rank=0, steps=(first,)), RankRecord(rank=1, steps=(second,)))
    found = properties.decide_replicas([ranks], SOURCE).cause
    assert (None if found is None else found.name) == cause


def test_a_restart_that_exceeds_the_time_limit_is_compared_up_to_its_last_step() -> None:
    again = replace(run(RankRecord(rank=0, steps=STEPS[2:4])), code=124)
    assert properties.decide_resume(BASE, [again], SOURCE).answer == "held in 1 run"
    failed = properties.decide_resume(BASE, [replace(again, code=1)], SOURCE)
    assert failed.verdict == "refuted"


def test_a_restart_from_the_initial_parameters_decides_nothing() -> None:
    assert properties.decide_resume(BASE, [BASE], SOURCE).verdict == "not decidable"


def reading(*indices: int, rank: int = 0) -> RankRecord:
    batches = tuple(
        DeliveredBatch(loader=KEY, epoch=epoch, indices=indices, training=True) for epoch in (0, 1)
    )
    return RankRecord(
        rank=rank,
        loaders={KEY: LOADER},
        delivered=batches,
        complete=frozenset({(KEY, 0), (KEY, 1)}),
    )


def test_padding_repeats_samples() -> None:
    found = properties.decide_counts([run(reading(0, 1), reading(2, 0, rank=1))], SOURCE, training=True)
    assert found.cause is not None
    assert (found.cause.name, found.cause.line) == ("DistributedSampler padding", "train.py:9")
    assert "4 samples of 3: 1 repeated, 0 missing" in found.evidence
    clean = properties.decide_counts([run(reading(0, 1), reading(2, rank=1))], SOURCE, training=True)
    assert clean.answer == "held in 1 run"


def test_the_same_order_twice_is_a_forgotten_set_epoch() -> None:
    found = properties.decide_order([run(reading(2, 0, 1))])
    assert found.cause is not None
    assert found.cause.name == "set_epoch forgotten"


def test_a_global_draw_has_the_line_of_the_draw() -> None:
    draw = DrawRecord(generator="numpy", line="train.py:3", worker=1)
    found = properties.decide_draws([run(RankRecord(rank=0, draws=(draw,)))], SOURCE)
    assert found.cause is not None
    assert found.cause.line == "train.py:4"


@pytest.mark.parametrize(
    ("observed", "answer"), [(True, "held in 1 run"), (False, "not decidable here")]
)
def test_draws_are_not_decidable_where_they_are_not_observed(observed: bool, answer: str) -> None:
    loader = replace(LOADER, draws_observed=observed)
    rank = RankRecord(rank=0, loaders={KEY: loader}, delivered=STEPS[0].batches)
    assert properties.decide_draws([run(rank)], SOURCE).answer == answer


def test_numbers_of_ranks_are_equal_up_to_rounding_or_refuted() -> None:
    two = run(*(RankRecord(rank=r, steps=(step(1, (r,)),)) for r in (0, 1)), name="2 ranks")
    one = run(RankRecord(rank=0, steps=(step(1, (0, 1)),)), name="1 rank")
    assert properties.decide_world_size([one, two], SOURCE).evidence == "equal in all bits"
    larger = run(RankRecord(rank=0, steps=(step(1, (0,)),)), name="1 rank")
    found = properties.decide_world_size([larger, two], SOURCE)
    assert found.cause is not None
    assert found.cause.name == "batch size per rank"


def test_samples_of_data_that_the_script_divides_are_not_compared() -> None:
    def ranks(size: int, *read: tuple[int, ...]) -> RunRecord:
        loaders = {KEY: replace(LOADER, size=size)}
        return run(
            *(
                replace(reading(*r, rank=n), loaders=loaders, steps=(step(1, r),))
                for n, r in enumerate(read)
            )
        )

    one = ranks(4, (0, 1, 2, 3))
    for size, verdict in ((2, "held"), (4, "refuted")):
        two = ranks(size, (0, 1), (0, 1))
        assert properties.decide_world_size([one, two], SOURCE).verdict == verdict
        assert properties.decide_counts([one, two], SOURCE, training=True).verdict == verdict


def test_learning_rates_of_later_steps_are_those_of_a_scheduler_stepped_per_rank() -> None:
    rates = [1 / number for number in range(1, 9)]
    one, two = (
        run(*(RankRecord(rank=r, steps=steps) for r in range(size)))
        for size in (1, 2)
        for steps in [tuple(step(1, (), lr=(rate,)) for rate in rates[::size])]
    )
    found = properties.decide_world_size([one, two], SOURCE).cause
    assert found is not None
    assert found.name == "scheduler stepped per micro-batch or per rank"


def test_ranks_without_a_process_group_are_separate_runs() -> None:
    ranks = tuple(RankRecord(rank=r, steps=(step(1, (0,), distributed=False),)) for r in (0, 1))
    assert run(*ranks).separate
    assert run(*ranks).alone().size == 1
    assert not run(*ranks[:1]).separate


def test_samples_that_accelerate_repeats_in_evaluation_are_left_out_of_its_metrics() -> None:
    loader = replace(LOADER, sampler="BatchSamplerShard")
    ranks = [
        replace(
            reading(*indices, rank=rank),
            loaders={KEY: loader},
            delivered=(DeliveredBatch(loader=KEY, epoch=0, indices=indices, training=False),),
        )
        for rank, indices in enumerate(((0, 1), (2, 0)))
    ]
    assert properties.decide_counts([run(*ranks)], SOURCE, training=False).verdict == "not decidable"


def test_replicas_and_schedules_are_compared() -> None:
    other = {"weight": Sketch(checksum="x", norm=1.0, projection=0.0)}
    ranks = RankRecord(rank=0, steps=STEPS[:1]), RankRecord(rank=1, steps=(step(1, parameters=other),))
    assert properties.decide_replicas([run(*ranks)], SOURCE).verdict == "refuted"
    steps = (step(1, scheduler_steps=2, scheduler_line="train.py:7"),)
    twice = RankRecord(rank=0, steps=steps, scheduled=True)
    found = properties.decide_schedule([run(twice)])
    assert found.cause is not None
    assert found.cause.line == "train.py:7"


def test_kills_are_spread_over_the_run() -> None:
    assert kill_steps(12, 1) == [8]
    assert kill_steps(2, 1) == []

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.tools.verify.operations import (
    OperationDifference,
    TracedOperation,
    TracedTensor,
    first_operation,
    first_operation_by_rows,
)


def tensor(*rows: float, checksum: str = "", shape: tuple[int, ...] | None = None) -> TracedTensor:
    return TracedTensor(
        checksum=checksum or str(rows), shape=(len(rows),) if shape is None else shape, rows=rows
    )


def call(name: str, inputs: TracedTensor, outputs: TracedTensor, **changes: Any) -> TracedOperation:
    record = TracedOperation(operation=name, phase="forward", inputs=(inputs,), outputs=(outputs,))
    return replace(record, **changes)


A = call("a", tensor(1.0), tensor(2.0), module="0")
B = call("b", tensor(2.0), tensor(3.0), module="1", arguments=("0.1",))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"operation": "c"}, "operation"),
        ({"arguments": ("0.2",)}, "argument"),
        ({"inputs": (tensor(2.5),)}, "input"),
        ({"outputs": (tensor(3.5),)}, "output"),
        ({"outputs": (tensor(3.5),), "generator": "x"}, "generator"),
    ],
)
def test_the_first_part_that_differs_is_found(changes: dict[str, Any], part: str) -> None:
    found = first_operation([[A, B]], [[A, replace(B, **changes)]])
    assert found is not None
    assert (found.part, found.module) == (part, "1")


def test_equal_runs_have_no_difference_and_the_state_of_an_unused_generator_is_none() -> None:
    assert first_operation([[A, B]], [[A, replace(B, generator="x")]]) is None


def test_the_rank_that_differs_first_counts() -> None:
    changed = [[A, replace(B, inputs=(tensor(9.0),))], [replace(A, outputs=(tensor(9.0),)), B]]
    found = first_operation([[A, B], [A, B]], changed)
    assert found is not None
    assert (found.operation, found.part) == ("a", "output")


def test_a_run_that_ends_earlier_differs_in_its_operations() -> None:
    found = first_operation([[A, B]], [[A]])
    assert found is not None
    assert (found.operation, found.part) == ("b", "operation")


def ranks(
    name: str, *parts: tuple[tuple[float, ...], tuple[float, ...]]
) -> list[list[TracedOperation]]:
    return [[call(name, tensor(*inputs), tensor(*outputs))] for inputs, outputs in parts]


WHOLE = [[call("scale", tensor(1.0, 2.0, 3.0), tensor(2.0, 4.0, 6.0))]]


def test_samples_may_be_on_any_rank_in_any_order_up_to_rounding() -> None:
    split = ranks("scale", ((3.0,), (6.0 + 1e-5,)), ((2.0, 1.0), (4.0, 2.0)))
    assert first_operation_by_rows(WHOLE, split) is None
    other = ranks("scale", ((3.0,), (6.0,)), ((2.0, 1.0), (4.0, 2.5)))
    found = first_operation_by_rows(WHOLE, other)
    assert found is not None
    assert found.part == "output"


def test_an_operation_is_not_to_blame_for_its_inputs() -> None:
    other = ranks("scale", ((3.0,), (6.0,)), ((2.0, 1.5), (4.0, 2.5)))
    assert first_operation_by_rows(WHOLE, other) is None


def test_gradients_of_a_mean_are_larger_on_a_rank_with_fewer_samples() -> None:
    def backward(traces: list[list[TracedOperation]]) -> list[list[TracedOperation]]:
        return [[replace(record, phase="backward") for record in trace] for trace in traces]

    split = ranks("scale", ((9.0,), (18.0,)), ((3.0, 1.5), (6.0, 3.0)))
    assert first_operation_by_rows(backward(WHOLE), backward(split)) is None
    split = ranks("scale", ((9.0,), (18.0,)), ((3.0, 1.5), (6.0, 9.0)))
    assert first_operation_by_rows(backward(WHOLE), backward(split)) is not None


def mean(*samples: float, value: float) -> list[TracedOperation]:
    return [call("mean", tensor(*samples), tensor(value, shape=()))]


def test_a_mean_of_means_is_found_if_no_sample_is_treated_otherwise() -> None:
    even = first_operation_by_rows(
        [mean(1.0, 2.0, value=1.5)], [mean(1.0, value=1.0), mean(2.0, value=2.0)]
    )
    assert even is None
    uneven = [mean(1.0, 2.0, value=1.5), mean(6.0, value=6.0)]
    found = first_operation_by_rows([mean(1.0, 2.0, 6.0, value=3.0)], uneven)
    assert found is not None
    assert found.part == "mean"


def test_another_statistic_over_samples_is_no_mean() -> None:
    def std(*samples: float, value: float) -> list[TracedOperation]:
        return [replace(record, operation="std") for record in mean(*samples, value=value)]

    found = first_operation_by_rows(
        [std(1.0, 2.0, 4.0, 9.0, value=3.6)],
        [std(1.0, 2.0, value=0.7), std(4.0, 9.0, value=3.5)],
    )
    assert found is not None
    assert (found.operation, found.part) == ("std", "output")


def test_an_output_for_each_pair_of_local_samples_depends_on_other_samples() -> None:
    def pairs(*rows: float) -> list[TracedOperation]:
        count = len(rows)
        features = tensor(*rows, shape=(count, 3))
        new = call("arange", features, tensor(*range(count)), arguments=(str(count),))
        new = replace(new, inputs=())
        turned = tensor(1.0, 2.0, float(sum(rows)), shape=(3, count))
        product = tensor(*(row * sum(rows) for row in rows), shape=(count, count))
        return [new, replace(call("mm", features, product), inputs=(features, turned))]

    found = first_operation_by_rows([pairs(1.0, 2.0)], [pairs(1.0), pairs(2.0)])
    assert found is not None
    assert (found.operation, found.part) == ("mm", "output")


def test_the_start_of_a_restarted_script_is_not_compared() -> None:
    start = call("load", tensor(7.0), tensor(7.0), line="train.py:3")
    before = call("save", tensor(8.0), tensor(8.0), line="train.py:4")
    changed = replace(B, arguments=("0.2",))
    found = first_operation([[before, A, B]], [[start, start, A, changed]], restarted=True)
    assert found is not None
    assert found.part == "argument"


def test_a_restart_lacks_no_tensor_that_it_computes_from_the_same_samples() -> None:
    batch, mask, other = tensor(3.0), tensor(1.0), tensor(0.0)
    select = call("where", mask, tensor(5.0), phase="backward")
    restarted = replace(select, inputs=(other,), outputs=(tensor(6.0),))

    def compare(made: TracedOperation) -> OperationDifference | None:
        run = [call("lt", batch, mask, line="train.py:5"), A, select]
        return first_operation([run], [[made, restarted]], restarted=True)

    assert compare(call("gt", batch, other, line="train.py:7")) is None
    assert compare(call("lt", tensor(4.0), other, line="train.py:5")) is None
    found = compare(call("zeros", tensor(), other, line="train.py:2"))
    assert found is not None
    assert found.part == "input"

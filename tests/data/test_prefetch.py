from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.data.prefetch import on_device
from shoal.distributed.to_device import move, tensors_in
from shoal.telemetry.step_timer import Timeline

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


class Graph:
    """A batch of another library: it moves itself."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def test_tensors_move_wherever_they_are_nested() -> None:
    tensor = torch.zeros(2)
    value = {"a": [tensor, (tensor, "text")], "b": Pair(tensor, 3), "c": Graph(tensor), "d": None}
    found = move(value, META)
    assert found["a"][0].device == found["a"][1][0].device == META
    assert found["a"][1][1] == "text"
    assert type(found["a"][1]) is tuple
    assert type(found["b"]) is Pair
    assert found["b"].x.device == META
    assert found["b"].y == 3
    assert found["c"].nodes.device == META
    assert found["d"] is None
    assert tensor.device.type == "cpu"


class Store(dict[str, Any]):
    """A store of a graph batch: a mapping that knows its parent."""

    def __init__(self, parent: Any, **values: Any) -> None:
        super().__init__(values)
        self.parent = parent


def test_tensors_are_found_in_objects_of_other_libraries() -> None:
    nodes, edges, extra = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    graph = Graph(nodes)
    vars(graph)["store"] = Store(graph, edges=edges, kind=Tensor, names=["a", "b"])
    found = list(tensors_in([graph, {"extra": (extra, graph)}, None]))
    assert sorted(map(len, found)) == [1, 2, 3]


def numbered(taken: list[int]) -> Iterator[tuple[int, list[Any]]]:
    for number in range(3):
        taken.append(number)
        yield number, [torch.zeros(1)]


def test_on_the_cpu_values_pass_untouched_and_one_at_a_time() -> None:
    taken: list[int] = []
    found = on_device(numbered(taken), torch.device("cpu"), Timeline())
    assert next(found) == (0, [torch.zeros(1)])
    assert taken == [0]
    assert [number for number, _ in found] == [1, 2]


@needs_cuda
def test_values_arrive_whole_and_in_order_while_the_device_computes() -> None:
    device = torch.device("cuda")
    pinned = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(8)]
    busy = torch.randn(2048, 2048, device=device)
    found = []
    items = ((number, [tensor, Pair(tensor, number)]) for number, tensor in enumerate(pinned))
    for number, (value, pair) in on_device(items, device, Timeline()):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        assert value.device.type == pair.x.device.type == "cuda"
        found.append((number, (value * 1).sum(), pair.x.sum()))
    for number, first, second in found:
        assert first.item() == second.item() == number * (1 << 20)


@needs_cuda
def test_the_next_item_is_copied_before_the_current_one_is_done_with() -> None:
    taken: list[int] = []
    next(on_device(numbered(taken), torch.device("cuda"), Timeline()))
    assert taken == [0, 1]

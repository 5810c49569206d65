"""Batches that are objects of another library, with every kind of dataset; tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import shoal
from shoal.data.loader_arguments import check_fetch
from shoal.util.errors import DataError

SIZE, BATCH = 13, 4


class Graph:
    """One graph, or several as one: it moves itself, and can't be indexed."""

    def __init__(self, x: Tensor, graph: Tensor, y: Tensor) -> None:
        self.x, self.graph, self.y = x, graph, y

    @staticmethod
    def numbered(index: int) -> Graph:
        nodes = 1 + index % 3
        return Graph(
            torch.full((nodes, 2), float(index)), torch.zeros(nodes).long(), torch.tensor([index])
        )

    @classmethod
    def joined(cls, graphs: list[Graph]) -> Graph:
        numbers = [graph.graph + number for number, graph in enumerate(graphs)]
        x, y = torch.cat([graph.x for graph in graphs]), torch.cat([graph.y for graph in graphs])
        return cls(x, torch.cat(numbers), y)

    def to(self, device: Any) -> Graph:
        return Graph(self.x.to(device), self.graph.to(device), self.y.to(device))


class Iterated(IterableDataset[Graph]):
    def __iter__(self) -> Iterator[Graph]:
        return map(Graph.numbered, range(SIZE))


def read(shard: int, start: int) -> Iterator[Graph]:
    return map(Graph.numbered, range(shard * 5 + start, min(SIZE, shard * 5 + 5)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, graph: Graph) -> Tensor:
        sums = torch.zeros(len(graph.y), 1).index_add(0, graph.graph, self.layer(graph.x))
        return sums[:, 0]


def loss(output: Tensor, graph: Graph) -> tuple[Tensor, int]:
    return ((output - graph.y) ** 2).sum(), len(graph.y)


GRAPHS = [Graph.numbered(index) for index in range(SIZE)]
DATASETS = [GRAPHS, Iterated(), shoal.ShardedDataset(range(3), read)]


@pytest.mark.parametrize("dataset", DATASETS, ids=["indexed", "iterated", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_graphs_are_trained_on(world: shoal.World, dataset: Any, num_workers: int) -> None:
    model = shoal.parallelize(Net(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda graph: (graph,)))
    loader = shoal.Loader(
        dataset,
        world,
        batch_size=BATCH,
        micro_batches=2,
        collate_fn=Graph.joined,
        num_workers=num_workers,
    )
    seen = []
    for batch in loader.epochs(1):
        step(batch)
        seen += [int(y) for micro in batch.micros if micro.weight for y in micro.value.y]
    assert sorted(seen) == list(range(SIZE))


def test_samples_on_a_device_need_no_workers_and_no_pinning() -> None:
    check_fetch(torch.device("cuda"), num_workers=0, pin_memory=False)
    for workers, pin in ((1, False), (0, True)):
        check_fetch(torch.device("cpu"), num_workers=workers, pin_memory=pin)
        with pytest.raises(DataError, match="can't read device memory"):
            check_fetch(torch.device("cuda"), num_workers=workers, pin_memory=pin)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_on_the_device_are_served_from_there() -> None:
    data = torch.arange(SIZE, device="cuda")
    with shoal.init(device="cuda") as world:
        loader = shoal.Loader(data, world, batch_size=BATCH)
        values = [micro for batch in loader.epochs(1) for micro in batch]
        assert all(value.is_cuda for value in values)
        assert torch.cat(values).sort().values.tolist() == list(range(SIZE))


def test_samples_that_torch_can_not_collate_ask_for_a_collate_fn(world: shoal.World) -> None:
    wrong: dict[str, list[Any]] = {
        "found <class '.*Graph'>": GRAPHS,
        "equal size": [torch.zeros(1 + index) for index in range(SIZE)],
        "samples of type dict": [{"x": 1} if index % 2 else {"y": 1} for index in range(SIZE)],
    }
    for found, samples in wrong.items():
        with pytest.raises(DataError, match=found) as refused:
            next(shoal.Loader(samples, world, batch_size=BATCH).epochs(1))
        assert "collate_fn=collate" in refused.value.fix


def test_the_error_of_ones_own_collate_fn_is_passed_on(world: shoal.World) -> None:
    def collate(samples: list[int]) -> Any:
        raise LookupError

    with pytest.raises(LookupError):
        next(shoal.Loader(list(range(SIZE)), world, batch_size=BATCH, collate_fn=collate).epochs(1))

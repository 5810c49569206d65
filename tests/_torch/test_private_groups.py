"""Private names of torch.distributed: they are there and do what `shoal._torch` says they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.commands import wait_for
from shoal._torch import c10d, ddp, fsdp, mesh, pipelining, waits

pytestmark = pytest.mark.compat


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_reducer(group: Any) -> None:
    """`prepare_for_forward`, `prepare_for_backward`, `_rebuild_buckets`."""
    model = nn.BatchNorm1d(2)
    reducer = ddp.GradientReducer(model, fake=False, process_group=group)
    buckets: list[int] = []

    def hook(bucket: Any) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    reducer.register_hook(hook)
    reducer.begin()
    for parameter in model.parameters():
        torch.autograd.backward(parameter, torch.ones_like(parameter))
    reducer.rebuild_buckets()
    assert buckets == [0]


def test_graphs_are_split_where_buckets_end(group: Any) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for size, expected in ((1.0, 2), (0.5, 1)):  # torch can't split for the smaller one
        model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4)))
        reducer = ddp.GradientReducer(model, fake=False, process_group=group, bucket_cap_mb=size)
        torch.compiler.reset()
        graphs.clear()
        with reducer.splitting():
            torch.compile(model, backend=backend)(torch.ones(1, 384))
        assert len(graphs) == expected


def test_delay_all_reduce(group: Any) -> None:
    model = nn.Linear(2, 1)
    reducer = ddp.GradientReducer(model, fake=False, process_group=group, static_graph=True)
    loss = model(torch.ones(1, 2)).sum()
    reducer.begin()
    loss.register_hook(lambda _: reducer.reduce_after_backward())
    loss.backward()
    assert model.weight.grad is not None


def test_meshes(group: Any) -> None:
    whole = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = mesh.flatten(whole["b", "c"], "b_c")
    assert (flat.ndim, flat.get_group().size()) == (1, 1)
    assert mesh.concatenate([whole["a"], flat]).ndim == 2
    shard = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert mesh.local_slices(shard) == (slice(0, 4), slice(0, 2))


def test_fsdp(group: Any) -> None:
    model: Any = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert issubclass(type(model), FSDPModule)
    (found,) = fsdp.parameter_groups(model)
    assert len(found.fsdp_params) == 2
    for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
        assert callable(getattr(found, name)), name
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert all(each._unsharded_param.grad is not None for each in found.fsdp_params)
    fsdp.drop_accumulated(model)
    assert all(each._unsharded_param.grad is None for each in found.fsdp_params)
    assert all(each.unsharded_accumulated_grad is None for each in found.fsdp_params)

    # A policy holds from the next forward on.
    model.set_requires_gradient_sync(True)
    assert fsdp.parameter_dtypes(model) == {torch.float32}
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for policy in (half, MixedPrecisionPolicy(), half):
        fsdp.use_policy(model, policy)
        output = model(torch.ones(1, 2))
        assert output.dtype == (policy.param_dtype or torch.float32)
        output.sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_process_groups_and_store(group: Any) -> None:
    store = c10d.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert list(c10d.process_groups()) == [group]
    assert "cpu" in c10d.device_types(group)
    before = c10d.operations_begun(group)
    dist.all_reduce(torch.zeros(1))
    assert c10d.operations_begun(group) == before + 1
    dumped = c10d.recorder_dumps()["_dump_fr_trace_json"]()
    assert b"all_reduce" in dumped or b"entries" in dumped
    c10d.set_timeout(group, timedelta(seconds=77))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    assert c10d.has_rpc_agent() is False
    dist.new_group([0])
    c10d.end_process_groups((), abort=True)
    assert (dist.is_initialized(), list(c10d.process_groups())) == (False, [])


def test_waits() -> None:
    from torch.distributed import _functional_collectives
    from torch.distributed.pipelining import schedules

    seen: list[str] = []

    def wrap(wait: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            seen.append(wait.__name__)
            return wait(*arguments)

        return wrapped

    with waits.tensor_waits(wrap), waits.pipeline_waits(wrap):
        _functional_collectives.wait_tensor(torch.zeros(1))
        schedules._wait_batch_p2p([])
    schedules._wait_batch_p2p([])
    assert seen == ["wait_tensor", "_wait_batch_p2p"]


def test_step_micro_batches() -> None:
    class Schedule:
        def _step_microbatches(self, *arguments: Any, return_outputs: bool) -> None:
            seen.append((*arguments, return_outputs))

    seen: list[Any] = []
    pipelining.step_micro_batches(Schedule(), [{"micro": 0}], [0])
    assert seen == [(None, [{"micro": 0}], [0], False)]


@pytest.mark.full
def test_elastic() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shoal._torch.elastic import CheckedBackend, ElasticAgent, MonitoredRendezvous
    from shoal.launcher.elastic_agent import LocalRendezvous

    class Agent(ElasticAgent):
        def _start_workers(self, *_: Any) -> Any: ...
        def _stop_workers(self, *_: Any) -> Any: ...
        def _monitor_workers(self, *_: Any) -> Any: ...
        def _shutdown(self, *_: Any) -> Any: ...

    agent = Agent(
        WorkerSpec("rank", 1, LocalRendezvous(0, processes=1), entrypoint="x", max_restarts=3)
    )
    agent.grant_restart()
    assert agent.restarts_used == -1

    store = HashStore()
    node = MonitoredRendezvous.from_backend("run", store, CheckedBackend(store, "run"), 1, 1)
    node.next_rendezvous()
    assert (node.round, node.look()) == (0, ([node.me], []))
    node.leave(1.0)
    assert node.look() == ([], [])


@pytest.mark.long
def test_heartbeats_of_nodes_are_timed_by_the_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal._torch.elastic import CheckedBackend, MonitoredRendezvous

    class Clock(datetime):
        """An hour ahead until it is set back by two."""

        offset = timedelta(hours=1)

        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return super().now(tz) + cls.offset

    store = HashStore()

    def node() -> Any:
        backend = CheckedBackend(store, "run")
        return MonitoredRendezvous.from_backend("run", store, backend, 1, 2, keep_alive_interval=3)

    other = node()
    other.next_rendezvous()
    monkeypatch.setattr(dynamic_rendezvous, "datetime", Clock)
    monkeypatch.setattr("shoal._torch.elastic.utc_now", lambda: Clock.now(UTC))
    assert node().look()[0] == [other.me]  # its heartbeat is an hour old by this clock
    Clock.offset = timedelta(hours=-1)

    def heartbeat() -> Any:
        with other._heartbeat_lock:
            other._state_holder.sync()
            return other._state_holder.state.last_heartbeats[other._this_node]

    before = heartbeat()
    wait_for(lambda: heartbeat() < before)
    other.leave(1.0)


def test_the_class_for_mpi_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_MPI_AVAILABLE`: torch then asks the class for a group of these ranks, none for all."""
    asked: list[list[int]] = []

    def create(ranks: Sequence[int]) -> Any:
        asked.append(list(ranks))
        kind: Any = dist.ProcessGroup
        return kind(0, 1)

    monkeypatch.setattr(dist.distributed_c10d, "_MPI_AVAILABLE", False)
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupMPI", None, raising=False)
    c10d.provide_mpi(create)
    try:
        dist.init_process_group("mpi")
        assert (dist.get_backend(), dist.get_world_size()) == ("mpi", 1)
    finally:
        dist.destroy_process_group()
    assert asked == [[]]

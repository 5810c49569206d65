"""Each private name of torch that Shoal uses is there and does what `shoal._torch` says it does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from helpers import rules
from shoal._torch import (
    autograd,
    c10d,
    checkpointing,
    dataloader,
    ddp,
    dispatch,
    fsdp,
    mesh,
    metrics,
    modules,
    names,
    pipelining,
    versions,
    waits,
)
from shoal.util.errors import LaunchError

pytestmark = pytest.mark.compat
SYMBOLS = [symbol for symbols in names.NAMES.values() for symbol in symbols]


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_torch_has(symbol: str) -> None:
    assert names.is_present(symbol), symbol


def test_the_table_has_every_private_name_behind_the_door(repository: Path) -> None:
    text = "\n".join(SYMBOLS)
    used = {
        name
        for path in sorted((repository / "src/shoal/_torch").glob("*.py"))
        for name in rules.private_attributes(ast.parse(path.read_text()))
    }
    assert "_execution_engine" in used
    known_by_others = {
        "_autograd_grad_for_inputs",
        "_reducer",
        "_ddp",
        "_fsdp_param_groups",
        "_dump_nccl_trace_json",
        "_dynamo_source",
        "_param_name_to_source",
    }
    assert sorted(name for name in used - known_by_others if name not in text) == []


def test_what_is_missing_is_said_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(names.missing()) == []
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    [(symbol, _)] = names.missing()
    assert symbol == "torch.distributed.distributed_c10d:_get_default_store"
    with pytest.raises(LaunchError, match="_get_default_store, which a world of several ranks needs"):
        c10d.default_store()
    noted = names.note_untested("99.1")
    assert noted is not None
    assert "_get_default_store" in noted.reason
    with pytest.raises(LaunchError, match="_absent"):
        versions.imported("torch._absent", "name", "nothing")


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.11.0", False), ("2.13.1+cpu", False), ("2.16.0a0+git1", True), ("3.0.0", True)],
)
def test_torch_newer_than_tested_is_noted(version: str, newer: bool) -> None:
    assert (names.note_untested(version) is not None) is newer


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_queue_callback() -> None:
    seen: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    top = leaf * 2

    def hook(_: Tensor) -> None:
        autograd.after_backward(lambda: seen.append("after backward"))

    top.register_hook(hook)
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    top.backward()
    assert seen == ["gradient", "after backward"]


def test_current_autograd_node() -> None:
    seen: list[bool] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(autograd.in_backward()))
    (leaf * 2).backward()
    assert (seen, autograd.in_backward()) == ([True], False)


def test_version() -> None:
    tensor = torch.zeros(1)
    before = autograd.version(tensor)
    tensor.add_(1)
    assert autograd.version(tensor) == before + 1


def test_is_view() -> None:
    tensor = torch.zeros(2)
    assert (autograd.is_view(tensor), autograd.is_view(tensor[:1])) == (False, True)


def test_storage_cdata() -> None:
    tensor = torch.zeros(2, device="meta")
    assert autograd.storage_key(tensor) == autograd.storage_key(tensor[1:])
    assert autograd.storage_key(tensor) != autograd.storage_key(torch.zeros(2, device="meta"))


def test_saved_result() -> None:
    output = torch.randn(3, requires_grad=True).log_softmax(0)
    assert torch.equal(autograd.saved_result(output.grad_fn), output)


def test_reducer(group: Any) -> None:
    """`prepare_for_forward`, `prepare_for_backward`, `_rebuild_buckets`, `_sync_buffers`."""
    model = nn.BatchNorm1d(2)
    reducer = ddp.GradientReducer(model, process_group=group)
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
    reducer.broadcast_buffers()
    assert buckets == [0]


def test_graphs_are_split_where_buckets_end(group: Any) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for size, expected in ((1.0, 2), (0.5, 1)):  # torch can't split for the smaller one
        model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4)))
        reducer = ddp.GradientReducer(model, process_group=group, bucket_cap_mb=size)
        torch.compiler.reset()
        graphs.clear()
        with reducer.splitting():
            torch.compile(model, backend=backend)(torch.ones(1, 384))
        assert len(graphs) == expected


def test_delay_all_reduce(group: Any) -> None:
    model = nn.Linear(2, 1)
    reducer = ddp.GradientReducer(model, process_group=group, static_graph=True)
    loss = model(torch.ones(1, 2)).sum()
    reducer.begin()
    loss.register_hook(lambda _: reducer.reduce_after_backward())
    loss.backward()
    assert model.weight.grad is not None


def test_flatten_and_concatenate(group: Any) -> None:
    whole = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = mesh.flatten(whole["b", "c"], "b_c")
    assert (flat.ndim, flat.get_group().size()) == (1, 1)
    assert mesh.concatenate([whole["a"], flat]).ndim == 2


def test_compute_local_shape_and_global_offset(group: Any) -> None:
    shard = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert mesh.local_slices(shard) == (slice(0, 4), slice(0, 2))


def test_fsdp_parameter_groups(group: Any) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model, FSDPModule)
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


def test_checkpoint_activation() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, given: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(given)

    model = Counting(2, 2)
    assert not checkpointing.is_checkpointed(model)
    checkpointing.checkpoint(model)
    assert checkpointing.is_checkpointed(model)
    model(torch.ones(1, 2)).sum().backward()
    assert (model.calls, list(dict(model.named_parameters()))) == (2, ["weight", "bias"])


def test_dispatch_mode() -> None:
    seen: list[str] = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add(1)
    assert seen == ["ones", "add"]


def test_trees() -> None:
    tree = {"a": [1, (2, "x")]}
    leaves, spec = dispatch.tree_flatten(tree)
    assert isinstance(spec, dispatch.TreeSpec)
    assert (leaves, dispatch.tree_leaves(tree), list(dispatch.tree_iter(tree))) == ([1, 2, "x"],) * 3
    assert dispatch.tree_unflatten(leaves, spec) == tree
    assert dispatch.tree_map(str, tree) == {"a": ["1", ("2", "x")]}
    assert dispatch.tree_map_only(int, lambda n: n + 1, tree) == {"a": [2, (3, "x")]}


def test_tables_of_modules() -> None:
    model = nn.BatchNorm1d(2)
    assert set(modules.parameters(model)) == {"weight", "bias"}
    assert "running_mean" in modules.buffers(model)
    shared = nn.Linear(1, 1)
    assert list(modules.children(nn.Sequential(shared, shared))) == ["0", "1"]


def test_hooks_of_modules() -> None:
    def doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(2 * each for each in args), kwargs

    model = nn.Identity()
    model.register_forward_pre_hook(doubled, with_kwargs=True)
    model.register_forward_hook(lambda *_: torch.zeros(1), always_call=True)
    modules.remove_forward_hooks(model, lambda hook: True)
    assert model(3) == 3


def test_copies_of_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model.compile(backend="eager")

    def evaluating(part: nn.Module) -> nn.Module:
        return modules.copy_with_children(part, evaluating, training=False)

    twin = evaluating(model)
    assert (model.training, model[1].training) == (True, True)
    assert not any(part.training for part in twin.modules())
    assert twin.get_parameter("0.weight") is model.get_parameter("0.weight")
    assert torch.equal(twin(torch.ones(1, 1)), model[0](torch.ones(1, 1)))


def test_process_groups_and_store(group: Any) -> None:
    store = c10d.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert list(c10d.process_groups()) == [group]
    assert "cpu" in c10d.device_types(group)
    before = c10d.operations_begun(group)
    dist.all_reduce(torch.zeros(1))
    assert c10d.operations_begun(group) == before + 1
    c10d.set_timeout(group, timedelta(seconds=77))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_worker_processes() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(2)), num_workers=1)
    (process,) = dataloader.worker_processes(iter(loader))
    assert process.pid is not None
    assert dataloader.worker_processes(iter(DataLoader(TensorDataset(torch.zeros(2))))) == []


def test_rpc_agent() -> None:
    assert c10d.has_rpc_agent() is False


def test_worker_info() -> None:
    class Seen(IterableDataset[bool]):
        def __iter__(self) -> Iterator[bool]:
            yield get_worker_info() is not None
            dataloader.leave_worker()
            yield get_worker_info() is not None

    seen = list(DataLoader(Seen(), num_workers=1, batch_size=None))
    assert seen == [True, False]


def test_saved_reduction() -> None:
    output = torch.randn(3, 2, requires_grad=True)
    for reduction, averaged in (("mean", True), ("sum", False)):
        loss = nn.functional.mse_loss(output, torch.zeros(3, 2), reduction=reduction)
        assert autograd.averages(loss) is averaged
    assert autograd.averages(output.mean()) is True
    assert autograd.averages(output.norm()) is None


def test_forward_cls() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

    output = Same.apply(torch.ones(1, requires_grad=True))
    assert autograd.made_by(output.grad_fn, Same)
    assert not autograd.made_by((output * 2).grad_fn, Same)


def test_intercepted_operators() -> None:
    seen: list[int] = []
    with torch.library._scoped_library("shoal_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        end = dispatch.intercept(
            "shoal_test", {"twice": lambda x: seen.append(int(x))}, "BackendSelect"
        )
        assert end is not None
        assert torch.ops.shoal_test.twice(torch.tensor(3)) == 6
        end()
        assert torch.ops.shoal_test.twice(torch.tensor(4)) == 8
    assert seen == [3]


def test_disable_current_modes() -> None:
    class Mode(dispatch.UncompiledMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(dispatch.overloads_of(func).__name__)
            changed.append([each.alias_info is not None for each in dispatch.schema_of(func).arguments])
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    changed: list[list[bool]] = []
    ones = torch.ones(2)
    with Mode():
        ones.mul_(2)
        with dispatch.without_modes():
            ones.mul_(2)
    assert (seen, changed) == (["mul_"], [[True, False]])


def test_recorder(group: Any) -> None:
    dist.all_reduce(torch.zeros(1))
    dumped = c10d.recorder_dumps()["_dump_fr_trace_json"]()
    assert b"all_reduce" in dumped or b"entries" in dumped


def test_compiled_calls() -> None:
    model = nn.Linear(1, 1)
    assert (modules.has_compiled_call(model), modules.compiled_module(model)) == (False, None)
    wrapped = torch.compile(model, backend="eager")
    assert modules.compiled_module(wrapped) is model
    assert modules.compiler_of(wrapped) is not None
    modules.set_compiled_call(model, lambda given: "compiled")
    assert modules.has_compiled_call(model)
    given = torch.ones(1, 1)
    assert model(given) == "compiled"
    assert modules.call_uncompiled(model, given).shape == (1, 1)


def test_hooks_and_tables_of_copies() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_full_backward_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None)
    assert len(modules.call_hooks(model)) == 2
    shell = nn.Module()
    vars(shell).update(modules.copied_attributes(model))
    modules.set_tables(shell, {}, {}, {"0": None})
    assert (modules.call_hooks(shell), modules.children(shell)) == ([], {"0": None})
    assert set(modules.TABLES) <= set(vars(model))
    modules.move_own_tensors(model, lambda tensor: tensor.to("meta"))
    assert model[0].weight.device.type == "cpu"
    modules.move_own_tensors(model[0], lambda tensor: tensor.to("meta"))
    assert model[0].weight.device.type == "meta"


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


def test_metrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.SumMetric()
    assert set(metrics.reductions(metric) or {}) == set(metric.metric_state)
    assert metrics.reductions(torchmetrics.MetricCollection([metric])) is None
    metrics.mark_updated(metric)
    assert metric.update_count == 1


@pytest.mark.full
def test_elastic() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shoal._torch.elastic import CheckedBackend, ElasticAgent, MonitoredRendezvous
    from shoal.launcher.elastic_agent import LocalRendezvous

    class Agent(ElasticAgent):
        def _start_workers(self, *_: Any) -> Any: ...
        def _stop_workers(self, *_: Any) -> Any: ...
        def _monitor_workers(self, *_: Any) -> Any: ...
        def _shutdown(self, *_: Any) -> Any: ...

    agent = Agent(WorkerSpec("rank", 1, LocalRendezvous(0), entrypoint="x", max_restarts=3))
    agent.grant_restart()
    assert agent.restarts_used == -1

    store = HashStore()
    node = MonitoredRendezvous.from_backend("run", store, CheckedBackend(store, "run"), 1, 1)
    node.next_rendezvous()
    assert (node.round, node.look()) == (0, ([node.me], []))
    node.leave(1.0)
    assert node.look() == ([], [])


def test_the_door_is_not_opened_by_importing_shoal() -> None:
    code = "import sys, shoal, shoal._torch.versions; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"

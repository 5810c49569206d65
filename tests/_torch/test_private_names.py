"""Each private name of torch that Shoal uses is there and does what `shoal._torch` says it does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from shoal._torch import autograd, c10d, checkpointing, dataloader, ddp, dispatch, fsdp, mesh, modules


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
    assert c10d.ranks_of(group) == [0]
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

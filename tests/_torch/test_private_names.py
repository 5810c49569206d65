"""Each private name of torch that Shoal uses is there and does what `shoal._torch` says it does."""

from __future__ import annotations

import ast
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from helpers import rules
from shoal._torch import (
    autograd,
    c10d,
    dataloader,
    dispatch,
    foreach,
    metrics,
    modules,
    names,
    optimizers,
    versions,
)
from shoal.util.errors import LaunchError

pytestmark = pytest.mark.compat


def test_the_table_has_every_private_name_behind_the_door(repository: Path) -> None:
    text = "\n".join(symbol for symbols in names.NAMES.values() for symbol in symbols)
    used = {
        name
        for path in sorted((repository / "src/shoal/_torch").glob("*.py"))
        for name in rules.private_attributes(ast.parse(path.read_text()))
    }
    assert "_execution_engine" in used
    known_by_others = {
        *("_autograd_grad_for_inputs", "_reducer", "_ddp", "_fsdp_param_groups"),
        *("_dump_nccl_trace_json", "_dynamo_source", "_param_name_to_source"),
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


def test_torch_newer_than_tested_is_noted() -> None:
    versions = {"2.11.0": False, "2.13.1+cpu": False, "2.16.0a0+git1": True, "3.0.0": True}
    assert {version: names.note_untested(version) is not None for version in versions} == versions


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


def test_autograd() -> None:
    """`_current_autograd_node`, `_version`, `_is_view`, `_cdata`, `_saved_result`, `_forward_cls`."""
    assert not autograd.saved_tensor_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert autograd.saved_tensor_hooks()
    seen: list[bool] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(autograd.in_backward()))
    (leaf * 2).backward()
    assert (seen, autograd.in_backward()) == ([True], False)

    tensor = torch.zeros(2, device="meta")
    before = autograd.version(tensor)
    tensor.add_(1)
    assert autograd.version(tensor) == before + 1
    assert (autograd.is_view(tensor), autograd.is_view(tensor[:1])) == (False, True)
    assert autograd.storage_key(tensor) == autograd.storage_key(tensor[1:])
    assert autograd.storage_key(tensor) != autograd.storage_key(torch.zeros(2, device="meta"))

    result = torch.randn(3, requires_grad=True).log_softmax(0)
    assert torch.equal(autograd.saved_result(result.grad_fn), result)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

    output = Same.apply(torch.ones(1, requires_grad=True))
    assert autograd.made_by(output.grad_fn, Same)
    assert not autograd.made_by((output * 2).grad_fn, Same)


def test_saved_reduction() -> None:
    output = torch.randn(3, 2, requires_grad=True)
    for reduction, averaged in (("mean", True), ("sum", False)):
        loss = nn.functional.mse_loss(output, torch.zeros(3, 2), reduction=reduction)
        assert autograd.averages(loss) is averaged
    assert autograd.averages(output.mean()) is True
    assert autograd.averages(output.norm()) is None


def test_checkpoint_activation() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, given: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(given)

    model = Counting(2, 2)
    assert not autograd.is_checkpointed(model)
    autograd.checkpoint(model)
    assert autograd.is_checkpointed(model)
    model(torch.ones(1, 2)).sum().backward()
    assert (model.calls, list(dict(model.named_parameters()))) == (2, ["weight", "bias"])


def test_trees() -> None:
    tree = {"a": [1, (2, "x")]}
    leaves, spec = dispatch.tree_flatten(tree)
    assert isinstance(spec, dispatch.TreeSpec)
    assert (leaves, dispatch.tree_leaves(tree), list(dispatch.tree_iter(tree))) == ([1, 2, "x"],) * 3
    assert dispatch.tree_unflatten(leaves, spec) == tree
    assert dispatch.tree_map(str, tree) == {"a": ["1", ("2", "x")]}
    assert dispatch.tree_map_only(int, lambda n: n + 1, tree) == {"a": [2, (3, "x")]}


def test_dispatch_modes() -> None:
    class Mode(dispatch.UncompiledMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func._overloadpacket.__name__ == dispatch.overloads_of(func).__name__
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


def test_workers_of_loaders() -> None:
    class Seen(IterableDataset[bool]):
        def __iter__(self) -> Iterator[bool]:
            yield get_worker_info() is not None
            dataloader.leave_worker()
            yield get_worker_info() is not None

    batches = iter(DataLoader(Seen(), num_workers=1, batch_size=None))
    (process,) = dataloader.worker_processes(batches)
    assert process.pid is not None
    assert list(batches) == [True, False]
    assert dataloader.worker_processes(iter(DataLoader(TensorDataset(torch.zeros(2))))) == []


def test_metrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.SumMetric()
    assert set(metrics.reductions(metric) or {}) == set(metric.metric_state)
    assert metrics.reductions(torchmetrics.MetricCollection([metric])) is None
    metrics.mark_updated(metric)
    assert metric.update_count == 1


@pytest.mark.parametrize("fused", [True, False])
def test_foreach(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        for name in ("add_", "copy_", "lerp_", "mul_", "neg_", "norm", "sub_"):
            monkeypatch.delattr(torch, f"_foreach_{name}")
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    foreach.mul_(tensors, 2)
    foreach.add_(tensors, [torch.ones(2), torch.ones(1)], alpha=2)
    foreach.sub_(tensors, [torch.ones(2), torch.ones(1)])
    foreach.neg_(tensors)
    assert [each.tolist() for each in tensors] == [[-7, -9], [-3]]
    foreach.lerp_(tensors, [torch.zeros(2), torch.zeros(1)], 0.5)
    foreach.copy_(tensors[1:], [torch.full((1,), 2.0)])
    assert [each.tolist() for each in tensors] == [[-3.5, -4.5], [2]]
    mixed = [torch.tensor([3.0]), torch.tensor([3.0], dtype=torch.float64), torch.tensor(3.0)]
    on_device = [tensor.clone() for tensor in mixed]
    foreach.mul_(mixed, 1 / 3)
    foreach.mul_(on_device, torch.tensor(1 / 3, dtype=torch.float64))
    assert all(map(torch.equal, mixed, on_device))
    assert on_device[1].dtype == torch.float64
    lengths = foreach.norm([torch.tensor([3.0, 4.0], dtype=torch.float16)], torch.float32)
    assert (lengths[0].item(), lengths[0].dtype) == (5, torch.float32)


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_skipping(kind: str, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5, fused=True)
    if kind == "Adagrad" and not hasattr(optimizer, "_step_supports_amp_scaling"):  # torch 2.11
        assert not optimizers.skips_on_device(optimizer)
        return
    assert optimizers.skips_on_device(optimizer)
    moved = []
    for skip in (0.0, 1.0, 0.0):
        before = [parameter.clone(), *(each.clone() for each in optimizer.state[parameter].values())]
        parameter.grad = torch.full_like(parameter, torch.nan if skip else 1.0)
        with optimizers.skipping(optimizer, torch.tensor(skip)):
            optimizer.step()
        after = [parameter, *optimizer.state[parameter].values()]
        moved.append(not all(map(torch.equal, before, after)))
    assert moved == [True, False, True]
    assert not hasattr(optimizer, "found_inf")
    assert not optimizers.skips_on_device(getattr(torch.optim, kind)([parameter], lr=0.5))
    assert not optimizers.skips_on_device(torch.optim.RMSprop([parameter]))


def test_the_module_of_a_frame() -> None:
    frames: list[FrameType] = []
    model = nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: frames.append(sys._getframe(1)))
    model(torch.ones(1, 1))
    assert any(modules.module_called_in(frame) is model for frame, _ in traceback.walk_stack(frames[0]))
    assert modules.module_called_in(sys._getframe()) is None


@pytest.mark.full
def test_random_operations_are_replaced() -> None:
    program = """
import torch
from torch import nn
from shoal._torch.graphs import in_backward, replace_draws

def instead(original, tensor, low=0.0, high=1.0, *, generator=None):
    return original() if generator is not None else tensor.fill_(7)

assert replace_draws({"uniform_": instead})
assert torch.rand(2).tolist() == [7, 7]
assert torch.rand(2, generator=torch.Generator()).max() < 1
seen = []
x = torch.ones(1, requires_grad=True)
x.register_hook(lambda _: seen.append(in_backward()))
x.sum().backward()
assert seen == [True] and not in_backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_attention_is_replaced() -> None:
    program = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from shoal._torch.graphs import replace_attention

def result(x):
    x = x.clone().requires_grad_()
    y = attention(x, x, x, is_causal=True)
    y.square().sum().backward()
    return y.detach(), x.grad

x = torch.randn(2, 3, 4, 8)
expected, seen = result(x), []

def instead(original, query, key, value, mask=None, dropout_p=0.0, *rest, **named):
    seen.append(dropout_p)
    return original()

replace_attention(instead, "AutogradCPU")
assert all(map(torch.equal, result(x), expected))
torch.nn.MultiheadAttention(8, 2, 0.25)(x[0], x[0], x[0], need_weights=False)
assert seen == [0.0, 0.25]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_door_is_not_opened_by_importing_shoal() -> None:
    code = "import sys, shoal, shoal._torch.versions; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"

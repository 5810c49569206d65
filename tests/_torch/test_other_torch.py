"""What a user sees with a torch that is newer than those tested, or that lacks a private name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import shoal
from shoal._torch import autograd, c10d, dispatch, fsdp, mesh, pipelining, versions
from shoal.util.errors import LaunchError

pytestmark = pytest.mark.compat

MESH = "torch.distributed.device_mesh:DeviceMesh"


def test_init_says_once_that_torch_is_newer_than_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "99.1")
    with shoal.init(device="cpu") as world:
        (decision,) = [each for each in world.decisions if each.what == "torch"]
    tested = f"newer than those tested, {' to '.join(versions.TESTED)}"
    assert (decision.value, decision.reason) == ("99.1", tested)
    output = capsys.readouterr()
    assert (output.out + output.err).count(f"torch 99.1 is {tested}") == 1


LACKING: list[tuple[str, str, Callable[[], object]]] = [
    ("torch.autograd:Variable", "_execution_engine", lambda: autograd.after_backward(print)),
    ("torch:_C", "_current_autograd_node", autograd.in_backward),
    ("torch.distributed:distributed_c10d", "_get_default_store", c10d.default_store),
    (
        "torch.distributed._composable:checkpoint_activation",
        "checkpoint",
        lambda: autograd.checkpoint(nn.Linear(1, 1)),
    ),
    (
        "torch.distributed._composable.contract:",
        "_get_registry",
        lambda: autograd.is_checkpointed(nn.Linear(1, 1)),
    ),
    (
        "torch.distributed.fsdp:FSDPModule",
        "_get_fsdp_state",
        lambda: fsdp.parameter_groups(object.__new__(FSDPModule)),
    ),
    (MESH, "_flatten", lambda: mesh.flatten(object.__new__(DeviceMesh), "a_b")),
    (MESH, "_concatenate", lambda: mesh.concatenate([object.__new__(DeviceMesh)])),
    (
        "torch.distributed.tensor._utils:",
        "compute_local_shape_and_global_offset",
        lambda: mesh.local_slices(cast(Any, None)),
    ),
    # Attributes that objects of torch lack.
    ("", "_version", lambda: autograd.version(cast(Any, object()))),
    ("", "_is_view", lambda: autograd.is_view(cast(Any, object()))),
    ("", "_saved_result", lambda: autograd.saved_result(object())),
    ("", "_schema", lambda: dispatch.schema_of(object())),
    ("", "_step_microbatches", lambda: pipelining.step_micro_batches(object(), [], [])),
]


@pytest.mark.parametrize(("place", "name", "call"), LACKING, ids=[name for _, name, _ in LACKING])
def test_a_name_that_torch_lacks_is_an_error_that_names_it(
    place: str, name: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, owner = place.partition(":")
    if module:
        imported = import_module(module)
        monkeypatch.delattr(getattr(imported, owner) if owner else imported, name)
    with pytest.raises(LaunchError) as caught:
        call()
    assert caught.value.given.startswith("torch ")
    assert f".{name}, which " in caught.value.found
    assert "pip install" in caught.value.fix


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        codes = []
        frame = sys._getframe().f_back
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        ctx.framed = autograd._framed_apply.__code__ in codes
        return torch.add(2 * x, float(ctx.framed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_apply_of_functions_has_a_frame_inside_the_block_only() -> None:
    leaf = torch.ones(1, requires_grad=True)
    before = Doubled.apply(leaf)
    with autograd.framed_apply():
        inside = Doubled.apply(leaf)
    after = Doubled.apply(leaf)
    assert [value.item() for value in (before, inside, after)] == [2.0, 3.0, 2.0]
    inside.backward()
    assert leaf.grad == 2

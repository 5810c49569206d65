"""Layers divided over neighbouring ranks: tensor parallelism (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from shoal.engine import Engine
from shoal.errors import LayoutError, StepError
from shoal.parallel.local import LocalEngine
from shoal.parallel.units import named_like
from shoal.world import World

WAYS = ("column", "row", "head", "vocabulary")

HUGGING_FACE = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "head",
    "colwise_gather_output": "head",
    "embedding_rowwise": "vocabulary",
}
"""The words of the plans that transformers' models carry."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Linear layers and embeddings divided over the axis `tensor` of the layout.

    `plan` says which, by patterns of module names, and how: "column" divides a Linear's outputs and
    leaves them divided, "row" divides its inputs and sums its outputs, "head" divides outputs and
    gathers them, "vocabulary" divides the rows of an Embedding. A column layer is followed by a row
    layer; between them is what acts on each feature, or head, alone. Without a plan, that of a Hugging
    Face model is taken.

        shoal.Tensor(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor", "replicate")
    defers: ClassVar[bool] = False

    plan: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, way in self.plan.items():
            if way not in WAYS:
                raise StepError(
                    given=f"shoal.Tensor(plan={{{pattern!r}: {way!r}}})",
                    found=f"a layer is divided in one of these ways: {', '.join(WAYS)}",
                    fix='shoal.Tensor(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})',
                )

    def spread(self, model: nn.Module, world: World) -> None:
        """Divide the layers of the plan in place."""
        model.to(world.device)
        degree = world.layout.degree("tensor")
        layers = _planned(model, self.plan or _carried(model))
        _check_divisible(model, layers, degree)
        if degree > 1:
            from shoal.parallel.divided import divide

            divide(model, layers, world)

    def apply(self, model: nn.Module, world: World) -> Engine:
        """Divide the layers, and return an engine that sums gradients over replicas."""
        self.spread(model, world)
        if world.size == 1:
            return LocalEngine(model, world)
        from shoal.parallel.divided import TensorEngine

        return TensorEngine(model, world)


def _carried(model: nn.Module) -> dict[str, str]:
    """The plan that a Hugging Face model carries, in our words."""
    carried: Any = getattr(model, "_tp_plan", None)
    if not carried:
        raise StepError(
            given=f"shoal.Tensor() without a plan for a {type(model).__name__}",
            found="the model does not carry one, as those of Hugging Face do",
            fix='shoal.Tensor(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})',
        )
    unknown = sorted({way for way in carried.values() if way not in HUGGING_FACE})
    if unknown:
        raise StepError(
            given=f"shoal.Tensor() and the plan of a {type(model).__name__}",
            found=f"it divides layers in ways that are not known here: {', '.join(unknown)}",
            fix="a plan of your own: shoal.Tensor(plan={…})",
        )
    return {pattern: HUGGING_FACE[way] for pattern, way in carried.items()}


def _planned(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The way of each layer that the plan names."""
    layers: dict[str, str] = {}
    for pattern, way in plan.items():
        for name in named_like(model, pattern, f"shoal.Tensor(plan={{{pattern!r}: …}})"):
            layers[name] = way
            layer = model.get_submodule(name)
            wanted: type[nn.Module] = nn.Embedding if way == "vocabulary" else nn.Linear
            if not isinstance(layer, wanted):
                raise StepError(
                    given=f"shoal.Tensor(plan={{{pattern!r}: {way!r}}})",
                    found=f"{name} is a {type(layer).__name__}, not a {wanted.__name__}",
                    fix="name the linear layers and embeddings themselves",
                )
    return layers


def _check_divisible(model: nn.Module, layers: Mapping[str, str], degree: int) -> None:
    for name, way in layers.items():
        layer: Any = model.get_submodule(name)
        what = {"row": "in_features", "vocabulary": "num_embeddings"}.get(way, "out_features")
        size = getattr(layer, what)
        if size % degree:
            raise LayoutError(
                given=f"layout with tensor={degree} and {name} divided by {way}",
                found=f"its {what} are {size}, which {degree} does not divide",
                fix=f"tensor=N with an N that divides {size}, or a plan without {name}",
            )

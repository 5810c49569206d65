"""Plans of tensor parallelism: explicit, from a Hugging Face model, or derived; and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal.distributed.layout import Layout
from shoal.strategies.module_patterns import named_like
from shoal.util.errors import LayoutError, StepError

HUGGING_FACE = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "head",
    "colwise_gather_output": "head",
    "embedding_rowwise": "vocabulary",
}
"""The words of the plans of Hugging Face models."""

KINDS: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "head": nn.Linear,
    "logits": nn.Linear,
    "vocabulary": nn.Embedding,
    "sequence": nn.Module,
}
"""The kinds of sharding, and the class of layers for each."""

FEATURE_WISE = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Softplus),
)
"""Modules that act on each feature separately."""

PROJECTION = re.compile(r"w?[qkv]|c_attn|.*(qkv|query|key|value|[qkv]_?(proj|lin))", re.IGNORECASE)
"""Names of layers whose outputs are attention heads."""

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads")


def planned(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of sharding of each layer in `plan`. Raise StepError for wrong layers."""
    layers: dict[str, str] = {}
    for pattern, way in plan.items():
        given = f"shoal.TensorParallel(plan={{{pattern!r}: {way!r}}})"
        for name in named_like(model, pattern, f"shoal.TensorParallel(plan={{{pattern!r}: …}})"):
            layer = model.get_submodule(name)
            if layers.setdefault(name, way) != way:
                raise StepError(
                    given=given,
                    found=f"another pattern shards {name} by {layers[name]!r}",
                    fix="change the patterns so that each layer matches only one",
                )
            if not isinstance(layer, KINDS[way]):
                raise StepError(
                    given=given,
                    found=f"the module {name} is a {_class(type(layer))}, not a {_class(KINDS[way])}",
                    fix=f"use a pattern for modules of the second class, or a plan without {name}",
                )
    return layers


def _class(kind: type[nn.Module]) -> str:
    """Return a class with its module, since libraries have classes with the names of torch's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def carried_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a Hugging Face model in Shoal's words; empty without one."""
    carried: Any = getattr(model, "_tp_plan", None) or {}
    unknown = sorted({way for way in carried.values() if way not in HUGGING_FACE})
    if unknown:
        raise StepError(
            given=f"shoal.TensorParallel() and the plan of a {type(model).__name__}",
            found=f"the plan of the model has unknown kinds of sharding: {', '.join(unknown)}",
            fix="use shoal.TensorParallel(plan={…}) with your own plan",
        )
    return {pattern: HUGGING_FACE[way] for pattern, way in carried.items()}


def derived_plan(model: nn.Module, degree: int) -> dict[str, str]:
    """Return a plan for the layers that can be recognized: feed-forward pairs, embedding and head.

    Attention is not sharded: its code shows only from inside whether it supports fewer heads. Raises
    StepError if no layer is recognized.
    """
    layers = {
        f"{name}.{child}" if name else child: way
        for name, part in model.named_modules()
        for child, way in _feed_forward(part, degree)
    }
    layers |= _vocabulary(model, degree)
    if not layers:
        raise StepError(
            given=f"shoal.TensorParallel() without a plan for a {type(model).__name__}",
            found="the model has no plan, unlike Hugging Face models, and no feed-forward pairs with a "
            f"width divisible by {degree}",
            fix='shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"})',
        )
    return _patterns(model, layers)


def _feed_forward(part: nn.Module, degree: int) -> Iterator[tuple[str, str]]:
    """Yield children of `part` that widen and narrow with only feature-wise layers in between."""
    linear = {name: child for name, child in part.named_children() if isinstance(child, nn.Linear)}
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        return
    for name, narrow in linear.items():
        width, wide = narrow.out_features, narrow.in_features
        if wide <= width or wide % degree:
            continue
        widening = [n for n, c in linear.items() if (c.in_features, c.out_features) == (width, wide)]
        narrowing = [n for n, c in linear.items() if (c.in_features, c.out_features) == (wide, width)]
        if isinstance(part, nn.Sequential):
            widening = [n for n in widening if _only_feature_wise_between(part, n, name)]
        if len(widening) in (1, 2) and (len(narrowing) == 1 or isinstance(part, nn.Sequential)):
            yield from ((each, "column") for each in widening)
            yield name, "row"


def _only_feature_wise_between(part: nn.Sequential, first: str, last: str) -> bool:
    names = list(dict(part.named_children()))
    start, stop = names.index(first), names.index(last)
    between = [part.get_submodule(name) for name in names[start + 1 : stop]]
    return start < stop and all(isinstance(module, FEATURE_WISE) for module in between)


def _vocabulary(model: nn.Module, degree: int) -> dict[str, str]:
    """Return the embedding and its output head, a Linear of the same size, tied to it or not."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and not part.num_embeddings % degree:
            sizes = (part.embedding_dim, part.num_embeddings)
            heads = [
                n
                for n, p in model.named_modules()
                if isinstance(p, nn.Linear) and (p.in_features, p.out_features) == sizes
            ]
            if len(heads) == 1:
                found[name] = heads[0]
    if len(found) != 1:
        return {}
    ((embedding, head),) = found.items()
    return {embedding: "vocabulary", head: "head"}


def _patterns(model: nn.Module, layers: Mapping[str, str]) -> dict[str, str]:
    """Return `layers` with `*` for numbers, unless that matches other layers."""
    plan = {}
    for name, way in layers.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        same = all(layers.get(other) == way for other in named_like(model, pattern, pattern))
        plan[pattern if same else name] = way
    return plan


def check_divisible(model: nn.Module, layers: Mapping[str, str], degree: int) -> None:
    """Raise LayoutError for a size, or a number of heads, that is not divisible by `degree`."""
    for name, way in layers.items():
        if way == "sequence":
            continue
        layer: Any = model.get_submodule(name)
        what = {"row": "in_features", "vocabulary": "num_embeddings"}.get(way, "out_features")
        sizes = {f"its {what}": getattr(layer, what)}
        if way == "column":
            sizes |= _heads(model, name)
        for thing, size in sizes.items():
            if size % degree:
                raise LayoutError(
                    given=f"layout with tensor={degree} and {name} sharded by {way}",
                    found=f"{thing} = {size}, not divisible by {degree}",
                    fix=f"use tensor=N with an N that divides {size}, or a plan without {name}",
                )


def check_sequences(layers: Mapping[str, str], layout: Layout) -> None:
    """Raise LayoutError if two axes split the sequences."""
    split = [name for name, way in layers.items() if way == "sequence"]
    if split and layout.degree("context") > 1:
        raise LayoutError(
            given=f"layout '{layout}' and {split[0]} sharded by sequence",
            found="shoal.ContextParallel splits the sequences already",
            fix='leave "sequence" out of the plan, or the context axis out of the layout',
        )


def _heads(model: nn.Module, name: str) -> dict[str, int]:
    """Return the numbers of heads in the parent module of a projection, or in its configuration."""
    above, _, own = name.rpartition(".")
    if not PROJECTION.fullmatch(own):
        return {}
    parent = model.get_submodule(above)
    places: dict[str, Any] = {above or type(model).__name__: parent}
    if hasattr(parent, "config"):
        places[f"{above}.config"] = parent.config
    return {
        f"the {attribute} of {place}": value
        for place, holder in places.items()
        for attribute in (*HEADS, *KEY_HEADS)
        for value in [getattr(holder, attribute, None)]
        if isinstance(value, int)
    }

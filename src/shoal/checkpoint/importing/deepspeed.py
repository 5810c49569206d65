"""Directories of DeepSpeed's `save_checkpoint`: without ZeRO, ZeRO 1 to 3, and universal checkpoints.

ZeRO keeps the parameters of an optimizer's group, and their states, one after another in flat tensors,
of which each rank has a part (Rajbhandari et al. 2020). Stages 1 and 2 cut the flat tensor of a group
into parts; stage 3 cuts each parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.importing.foreign_state import (
    ORDER,
    RANDOM,
    ForeignState,
    optimizer_of,
    read_file,
    reading,
    unreadable,
)
from shoal.checkpoint.importing.torch_file import plain_tree
from shoal.util.pickling import InertObject

_LATEST = "latest"
_MODEL = "mp_rank_00_model_states.pt"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(optim|model)_states\.pt")
_UNIVERSAL = "zero"
_OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "universal_checkpoint_info",
    "sparse_tensor_module_names",
}


class FlatGroup(NamedTuple):
    """A group of an optimizer: shapes by name, the elements of padding after each, and its options."""

    shapes: dict[str, tuple[int, ...]]
    paddings: Sequence[int]
    options: dict[str, Any]


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is one of `save_checkpoint`, or one of its tags."""
    return (path / _LATEST).is_file() or bool(list(path.glob("*mp_rank_00_model_states.pt")))


def read_deepspeed(path: Path) -> ForeignState:
    """Return the state in a directory of `save_checkpoint`, or in one of its tags.

    Raises CheckpointError.
    """
    if (path / _LATEST).is_file():
        with reading(path):
            tag = (path / _LATEST).read_text(errors="replace").strip()
            if not tag or Path(tag).name != tag:
                raise ValueError(f"the file {_LATEST} names {tag!r}")
        path = path / tag
    if list(path.glob("mp_rank_01_*")) or list(path.glob("*expert_*")) or list(path.glob("layer_*")):
        raise unreadable(
            path,
            "it is of a model that several ranks hold in parts (tensor or pipeline parallel, experts)",
            "write a universal checkpoint: python -m deepspeed.checkpoint.ds_to_universal",
        )
    files = _rank_files(path)
    first = path / _MODEL if (path / _MODEL).exists() else files["model"][0]
    models = [read_file(each) for each in (files["model"] or [first])]
    if (path / _UNIVERSAL).is_dir():
        with reading(path):
            return _universal(path, models, stage=1 if first.name == _MODEL else 3)
    states = [read_file(each, _with_scaler) for each in files["optim"]]
    with reading(path):
        found = _common(models[0])
        if states:
            _read_zero(found, models, [state["optimizer_state_dict"] for state in states])
        elif models[0].get("optimizer"):
            found.optimizer = optimizer_of(first, models[0]["optimizer"])
        return found


def _rank_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of all ranks, in order. Raises CheckpointError if one is missing."""
    found: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for each in path.glob("*_states.pt"):
        if match := _RANK.fullmatch(each.name):
            found[match[2]][int(match[1])] = each
    for files in found.values():
        if files and sorted(files) != [*range(len(files))]:
            raise unreadable(path, f"the file of a rank is missing: it has those of {sorted(files)}")
    if not (path / _MODEL).exists() and not found["model"]:
        raise unreadable(path, f"{_MODEL} is missing")
    return {kind: [files[rank] for rank in sorted(files)] for kind, files in found.items()}


def _with_scaler(value: Any) -> Any:
    """Return the plain values of a file of a rank, with the stage and the scaler as numbers."""
    state = value["optimizer_state_dict"]
    scaler, stage = state.get("loss_scaler"), state.get("zero_stage")
    plain = plain_tree(value)
    kept = plain["optimizer_state_dict"]
    if isinstance(scaler, InertObject) and isinstance(scaler.state, dict):
        kept["scale"] = scaler.state.get("cur_scale") if scaler.state.get("dynamic") else None
    kept["zero_stage"] = stage.args[0] if isinstance(stage, InertObject) else stage
    return plain


def _common(state: Mapping[str, Any]) -> ForeignState:
    """Return what all stages keep in the same place; the parameters may be missing."""
    step = int(state["global_steps"])
    schedule = state.get("lr_scheduler")
    left = [RANDOM, ORDER]
    if isinstance(schedule, dict) and "last_epoch" not in schedule:
        schedule = {"last_epoch": step}
        left.append(
            f"arguments of DeepSpeed's schedule: the one of the script continues at step {step}"
        )
    if others := [key for key in state if key not in _OWN and state[key]]:
        left.append(f"{', '.join(others)}: client_state and other state of DeepSpeed")
    module = state["module"]
    return ForeignState(
        tool="DeepSpeed",
        model={name: value for name, value in module.items() if isinstance(value, Tensor)},
        step=step,
        schedule=schedule if isinstance(schedule, dict) and schedule else None,
        left=left,
    )


def _read_zero(
    found: ForeignState, models: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> None:
    """Add the parameters and the states of the optimizer from the parts of all ranks."""
    first, stage = ranks[0], ranks[0]["zero_stage"]
    if stage == 3:
        base, masters = "optimizer_state_dict", "fp32_flat_groups"
        groups = _groups(models[0], first[base]["param_groups"], None)
        split = _cut_parameters
    else:
        base, masters = "base_optimizer_state", "single_partition_of_fp32_groups"
        if not isinstance(first[base], dict):
            raise ValueError("its optimizer state is of elastic_checkpoint, which later versions lack")
        groups = _groups(models[0], first[base]["param_groups"], first.get("param_alignment_paddings"))
        split = _cut_groups
    count = len(first[masters])
    state: dict[str, dict[str, Any]] = {name: {} for group in groups for name in group.shapes}
    entries = [[rank[base]["state"].get(number, {}) for number in range(count)] for rank in ranks]
    for key, value in entries[0][0].items():
        if _is_flat(value):
            parts = [[entry[key] for entry in rank] for rank in entries]
            for name, tensor in split(groups, parts):
                state[name][key] = tensor
        else:
            for entry in state.values():
                entry[key] = value
    found.model = _buffers(models, found.model, stage)
    found.model |= dict(split(groups, [[*rank[masters]] for rank in ranks]))
    _finish(found, models[0], groups, state)
    if first.get("scale") is not None:
        found.scale = {"value": float(first["scale"]), "good": 0}


def _groups(
    model: Mapping[str, Any], options: Sequence[Mapping[str, Any]], paddings: Any
) -> list[FlatGroup]:
    shapes = [{n: tuple(size) for n, size in group.items()} for group in model["param_shapes"]]
    pads = paddings or [[0] * len(group) for group in shapes]
    return [FlatGroup(*each) for each in zip(shapes, pads, map(dict, options), strict=True)]


def _buffers(
    models: Sequence[Mapping[str, Any]], module: Mapping[str, Tensor], stage: int
) -> dict[str, Tensor]:
    """Return what the optimizer does not have: buffers and frozen parameters."""
    if stage < 3:
        return dict(module)
    kept = {name: module[name] for name in models[0]["buffer_names"] if name in module}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        kept[name] = _shaped(torch.cat(pieces), 0, tuple(shape), name)
    return kept


def _cut_groups(groups: Sequence[FlatGroup], parts: Sequence[Sequence[Tensor]]) -> Iterator[Any]:
    """Yield each parameter's tensor from the parts of each group on each rank (stages 1 and 2)."""
    for number, group in enumerate(groups):
        flat = torch.cat([rank[number].reshape(-1) for rank in parts])
        offset = 0
        for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
            yield name, _shaped(flat, offset, shape, name)
            offset += math.prod(shape) + padding


def _cut_parameters(groups: Sequence[FlatGroup], parts: Sequence[Sequence[Tensor]]) -> Iterator[Any]:
    """Yield each parameter's tensor from its parts on each rank (stage 3)."""
    flats = [torch.cat([part.reshape(-1) for part in rank]) for rank in parts]
    offset = 0
    for name, shape in ((n, s) for group in groups for n, s in group.shapes.items()):
        size = -(-math.prod(shape) // len(flats))
        yield name, _shaped(torch.cat([f[offset : offset + size] for f in flats]), 0, shape, name)
        offset += size


def _shaped(flat: Tensor, offset: int, shape: tuple[int, ...], name: str) -> Tensor:
    """Return a copy of a part of a flat tensor in its shape, so that the flat one can be freed."""
    size = math.prod(shape)
    if len(flat) < offset + size:
        raise ValueError(f"its flat tensors end before {name}")
    return flat[offset : offset + size].reshape(shape).clone()


def _universal(path: Path, models: Sequence[Mapping[str, Any]], stage: int) -> ForeignState:
    """Return the state in a directory that `ds_to_universal` wrote: a folder for each parameter."""
    found = _common(models[0])
    found.tool = "DeepSpeed (universal)"
    found.model = _buffers(models, found.model, stage)
    folder = path / _UNIVERSAL
    options = read_file(folder / "optimizer_state.pt")
    flat = (options.get("optimizer_state_dict") or {}).get("state", {}).get(0, {})
    common = {key: value for key, value in flat.items() if not _is_flat(value)}
    groups = _groups(models[0], options["param_groups"], None)
    state: dict[str, dict[str, Any]] = {}
    for name, shape in (each for group in groups for each in group.shapes.items()):
        if Path(name).name != name:
            raise ValueError(f"it names the parameter {name!r}")
        files = sorted((folder / name).glob("*.pt"))
        read = {file.stem: read_file(file, _parameter) for file in files}
        for key, value in read.items():
            if _is_flat(value):  # stage 3 leaves them flat
                read[key] = _shaped(value.reshape(-1), 0, shape, name)
        state[name] = common | read
        found.model[name] = state[name].pop("fp32")
    _finish(found, models[0], groups, state)
    return found


def _finish(
    found: ForeignState,
    model: Mapping[str, Any],
    groups: Sequence[FlatGroup],
    state: Mapping[str, dict[str, Any]],
) -> None:
    for alias, name in (model.get("shared_params") or {}).items():
        found.model[alias] = found.model[name]
    found.optimizer = {
        "state": state if any(state.values()) else {},
        "param_groups": [{**group.options, "params": [*group.shapes]} for group in groups],
    }


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _parameter(value: Any) -> Any:
    return value["param"] if isinstance(value, dict) else value

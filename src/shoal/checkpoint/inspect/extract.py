"""Export of a model from a checkpoint, without its code and without the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.checkpoint.inspect.manifest import CheckpointManifest, Reference
from shoal.checkpoint.inspect.tensor_reader import TensorFiles, blocks
from shoal.checkpoint.state_tree import safetensors_header
from shoal.util.errors import CheckpointError
from shoal.util.regular_file import appearing

PICKLED = (".pt", ".pth")
ENDINGS = (".safetensors", *PICKLED)

_BLOCK = 1 << 26


@dataclass(frozen=True, kw_only=True)
class ExtractedModel:
    """The file that was written: the model of a Step, with averaged parameters if `ema` has their name.

    `left` are the entries of its state_dict that are not tensors, which are not written.
    """

    path: Path
    step: str
    ema: str | None
    tensors: int
    bytes: int
    left: tuple[str, ...]


class SelectedModel(NamedTuple):
    """The names of a model's tensors in a checkpoint, by the user's names, and its other entries.

    `state` is the state of its Step.
    """

    step: str
    state: dict[str, Any]
    tensors: dict[str, str]
    left: tuple[str, ...]


def extract(
    contents: CheckpointManifest, path: Path, *, step: str | None, ema: str | None
) -> ExtractedModel:
    """Write the tensors of a model under the user's names, as `shoal.export` does.

    The extension of `path` sets the format: `.safetensors` is written block by block, `.pt` and `.pth`
    need as much memory as the model. `step` is the name of one of several Steps. Default: the first.
    `ema` is the name of an EMA in the user's state, whose averages replace the parameters. The file is
    complete when it appears.

    Raises CheckpointError for another extension, or if the checkpoint has no such model.
    """
    if path.suffix not in ENDINGS:
        raise CheckpointError(
            given=f"shoal checkpoint export … {path}",
            found=f"the extensions are {', '.join(ENDINGS)}; other formats need the model's code",
            fix="use OUT.safetensors; for .ts and .pt2 load that file into the model, then call "
            "shoal.export",
        )
    selected = select_model(contents, step=step, ema=ema)
    model = selected.tensors
    with TensorFiles(contents) as values, appearing(path) as partial:
        if path.suffix in PICKLED:
            save_pickled({name: values.whole(of).clone() for name, of in model.items()}, partial)
        else:
            _write(model, contents, values, partial)
    size = sum(contents.tensors[of].bytes for of in model.values())
    return ExtractedModel(
        path=path,
        step=selected.step,
        ema=ema,
        tensors=len(model),
        bytes=size,
        left=selected.left,
    )


def select_model(contents: CheckpointManifest, *, step: str | None, ema: str | None) -> SelectedModel:
    """Return the model of the Step named `step`, or of the first one, as `extract` writes it.

    Raises CheckpointError if the checkpoint has no such model.
    """
    steps = section(contents.state, "steps")
    chosen = _choose(contents, "Step", step, steps) if step or not steps else next(iter(steps))
    entries = section(steps[chosen], "model")
    model = _tensors(entries)
    left = tuple(str(name) for name in entries if str(name) not in model)
    if ema is not None:
        items = section(contents.state, "state")
        averaged = {name: item for name, item in items.items() if section(item, "averages")}
        averages = _tensors(averaged[_choose(contents, "EMA", ema, averaged)]["averages"])
        model = {name: averages.get(name, own) for name, own in model.items()}
    if not model:
        raise _without(contents, "the Step has a model without tensors")
    return SelectedModel(chosen, steps[chosen], model, left)


def save_pickled(tensors: dict[str, Any], path: Path) -> None:
    """Write a `.pt` file; raises OSError if it can't be written."""
    try:
        with path.open("wb") as file:
            torch.save(tensors, file)
    except RuntimeError as error:
        # For a full disk, torch only reports an unexpected position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def section(tree: Any, key: str) -> dict[str, Any]:
    """Return the dict at `key`, or an empty one."""
    found = tree.get(key) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def _tensors(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the tensors in the checkpoint, by the user's names."""
    return {
        str(name): item.name
        for name, item in tree.items()
        if isinstance(item, Reference) and item.kind == "tensor"
    }


def _choose(contents: CheckpointManifest, what: str, name: str | None, there: Mapping[str, Any]) -> str:
    if name is not None and name in there:
        return name
    names = ", ".join(there) or "none"
    raise _without(contents, f"no {what} named {name}; there is: {names}" if name else f"no {what}")


def _without(contents: CheckpointManifest, found: str) -> CheckpointError:
    return CheckpointError(
        given=f"the checkpoint {contents.path}",
        found=found,
        fix=f"list its contents: shoal checkpoint show {contents.path}",
    )


def _write(
    model: Mapping[str, str], contents: CheckpointManifest, values: TensorFiles, path: Path
) -> None:
    """Write a safetensors file."""
    rows = {name: contents.tensors[of] for name, of in model.items()}
    dtypes = {name: getattr(torch, row.dtype) for name, row in rows.items()}
    odd = [name for name, dtype in dtypes.items() if dtype is torch.complex128]
    if odd:
        raise _without(contents, f"{odd[0]} is complex128, which only .pt can hold")
    header, places = safetensors_header(
        {name: (dtypes[name], row.shape, row.bytes) for name, row in rows.items()}
    )
    with path.open("wb") as file:
        file.write(header)
        for name in places:
            for spans in blocks(rows[name], _BLOCK):
                part = values.part(model[name], spans).contiguous().reshape(-1)
                file.write(part.view(torch.uint8).numpy().data)

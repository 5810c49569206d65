"""A training state of another tool as plain values, before it becomes a checkpoint of Shoal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.checkpoint.importing.torch_file import plain_tree, read_torch_file
from shoal.checkpoint.paths import open_file
from shoal.checkpoint.store import DamageError
from shoal.util.errors import CheckpointError

FIX = "save the checkpoint again with that tool, or import an earlier one"
RANDOM = "random states: dropout and augmentation continue with other random numbers"
ORDER = (
    "order of the data: the current epoch continues in the order of shoal.Loader, so some of its "
    "samples repeat and others are left out"
)

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(kw_only=True)
class ForeignState:
    """The state that a tool saved.

    `optimizer` has the form of `torch.optim.Optimizer.state_dict`; the keys of its parameters are
    names or, as in torch, their numbers in the optimizer. `step` counts optimizer steps, `epoch` is
    that of the tool. `schedule` is the state of a torch scheduler, or only its `last_epoch`. `scale`
    is the state of a GradScaler. `left` says what is not carried over.
    """

    tool: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None = None
    step: int | None = None
    epoch: float | None = None
    schedule: dict[str, Any] | None = None
    scale: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert the errors of reading a file, or a directory, of another tool to CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise unreadable(path, f"{Path(str(error.filename)).name} is missing") from None
    except (OSError, SafetensorError, DamageError) as error:
        raise unreadable(path, str(error)) from None
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError) as error:
        raise unreadable(path, f"{type(error).__name__}: {error}") from None
    except MemoryError:
        raise unreadable(path, "it needs more memory than there is") from None


def unreadable(path: Path, found: str, fix: str = FIX) -> CheckpointError:
    """Return the error for a file or a directory that can't be imported."""
    return CheckpointError(given=f"the import of {path}", found=found, fix=fix)


def read_file(path: Path, part: Callable[[Any], Any] = plain_tree) -> Any:
    """Return a part of the value in a file of `torch.save`. Raises CheckpointError."""
    with reading(path):
        return part(read_torch_file(path))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError."""
    with reading(path), open_file(path) as file:
        found = json.loads(file.read())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return found


def read_model(directory: Path) -> dict[str, Tensor]:
    """Return the weights in a directory: safetensors in one or several files, or `torch.save`."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    pickled = directory / "pytorch_model.bin"
    if index.exists() and not whole.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        model: dict[str, Tensor] = {}
        for name in names:
            if Path(name).name != name:
                raise unreadable(index, f"it names a file outside of its directory: {name}")
            model |= _read_safetensors(directory / name)
        return model
    if pickled.exists() and not whole.exists():
        return tensors_of(pickled, read_file(pickled))
    return _read_safetensors(whole)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with reading(path):
        open_file(path).close()  # a link or a pipe raises an error
        found: dict[str, Tensor] = load_file(path)
        return found


def tensors_of(path: Path, found: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's state. Raises CheckpointError if there are none."""
    items = found.items() if isinstance(found, Mapping) else ()
    model = {key: value for key, value in items if isinstance(value, Tensor)}
    if not model:
        raise unreadable(path, "it has no state_dict of a model")
    return model


def optimizer_of(path: Path, found: Any) -> dict[str, Any]:
    """Return the state of an optimizer, checked. Raises CheckpointError if it is none."""
    groups = found.get("param_groups") if isinstance(found, dict) else None
    if (
        not isinstance(groups, list)
        or not isinstance(found.get("state"), dict)
        or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    ):
        raise unreadable(path, "it has no state_dict of an optimizer")
    return {"state": found["state"], "param_groups": groups}


def steps_of(optimizer: Mapping[str, Any] | None) -> int | None:
    """Return the number of steps that an optimizer has counted; None if it counts none."""
    counted = [
        int(entry["step"])
        for entry in (optimizer["state"].values() if optimizer else ())
        if isinstance(entry, dict) and "step" in entry
    ]
    return max(counted, default=None)


def scale_of(state: Any) -> dict[str, Any] | None:
    """Return the loss scale in the state of a GradScaler; None if it has none."""
    if not isinstance(state, dict) or "scale" not in state:
        return None
    return {"value": float(state["scale"]), "good": int(state.get("_growth_tracker", 0))}


def bare_names(model: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a dict by the user's names, without what DDP, FSDP and torch.compile put before them."""

    def bare(name: Any) -> Any:
        for wrapper in _WRAPPERS if isinstance(name, str) else ():
            name = name.replace(wrapper, "")
        return name

    named = {bare(name): value for name, value in model.items()}
    if named and all(isinstance(name, str) and name.startswith("module.") for name in named):
        return {name.removeprefix("module."): value for name, value in named.items()}
    return named

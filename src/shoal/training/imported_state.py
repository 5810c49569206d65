"""Restoring of a training state that another tool saved: the Run adds its own parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from shoal.checkpoint.importing import IMPORTED
from shoal.data import Loader
from shoal.strategies.dtensor import shared_like
from shoal.training.optimizer_state import parameter_names
from shoal.training.several import kind_of, parts_of
from shoal.training.state_names import first_names
from shoal.training.train_state import TrainState
from shoal.util.errors import CheckpointError

_IMPLEMENTATION = {
    "bias_correction",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "initial_lr",
    "param_names",
    "params",
}
"""Options of a group that another optimizer of the same kind may lack."""


def completed(
    saved: Mapping[str, Any], steps: Mapping[str, TrainState], loader: Loader, user: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return an imported state as this Run would have saved it, and what could not be carried over.

    Optimizer states are matched with the parameters of the Run's own optimizer: by name, or by their
    order in it if the tool numbers them. `user` are the names of the Run's user state. Collective.

    Raises CheckpointError if the state does not fit.
    """
    about = saved[IMPORTED]
    left = list(about["left"])
    if len(steps) != 1:
        raise _unfit(about, f"a Run with {len(steps)} Steps", "an import fits one model", _ONE_MODEL)
    [(name, step)] = steps.items()
    if step.engine.world.layout.degree("pipeline") > 1:
        raise _unfit(
            about,
            "a Run whose ranks hold stages of the model",
            "an import needs the whole model on each rank, or its shards",
            "restore it once with shoal.FSDP() or on one process, call run.save(), then use the "
            "pipeline",
        )
    [(_, found)] = saved["steps"].items()
    own = step.form()
    state = {**own, "number": found["number"]}
    state["model"], prefix = _model(step.model, found["model"])
    if prefix and (others := [name for name in found["model"] if not name.startswith(prefix)]):
        left.append(f"{first_names(others)}: not of the model {prefix.rstrip('.')}")
    state["optimizer"] = _optimizer(step, own["optimizer"], found["optimizer"], prefix, about)
    for part, lost in (("schedule", "the Run has none"), ("scale", "the Run has no fp16")):
        if part in found and part not in own:
            left.append(f"{part}: {lost}")
    if "schedule" in own and "schedule" in found:
        state["schedule"] = _schedule(own["schedule"], found["schedule"], state["optimizer"], about)
    if "scale" in own and "scale" in found:
        state["scale"] = found["scale"]
    if "schedule" in own and "schedule" not in found:
        left.append("learning rates: the schedule of the script begins at step 0")
        for group, mine in zip(state["optimizer"]["groups"], own["optimizer"]["groups"], strict=True):
            group |= {key: mine[key] for key in ("lr", "initial_lr") if key in mine}
    if "scale" in own and "scale" not in found:
        left.append(f"loss scale: the checkpoint has none, and it begins at {own['scale']['value']:g}")
    if user:
        left.append(f"{', '.join(user)}: user state, which keeps the values of the script")
    position, epoch = _position(found["number"], loader)
    if about["epoch"] is not None and not epoch - 1 <= about["epoch"] <= epoch + 1:
        left.append(
            f"epoch {about['epoch']:.4g}: with this batch size, step {found['number']:,} is in epoch "
            f"{epoch}"
        )
    return {
        "steps": {name: state},
        "state": {},
        "loader": {**loader.state_dict(), "position": position},
    }, left


def _position(step: int, loader: Loader) -> tuple[int, int]:
    """Return the position in samples after `step` global batches, and its epoch."""
    size = loader.epoch_size
    if size is None:
        return step * loader.batch_size, 0
    epoch, batches = divmod(step, -(-size // loader.batch_size))
    return epoch * size + batches * loader.batch_size, epoch


def _model(model: nn.Module, found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the tensors by the names of `model`, and the prefix that they had.

    A module that holds the model, such as a LightningModule, puts its own name first. Tied parameters
    may be stored once.
    """
    own = model.state_dict()
    prefix = _prefix(own, found)
    named = {name: found[prefix + name] for name in own if prefix + name in found}
    aliases: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in named:
            aliases.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in named and id(parameter) in aliases:
            named[name] = named[aliases[id(parameter)]]
    others = {} if prefix else {name: value for name, value in found.items() if name not in named}
    shared = {
        name: shared_like(value, own[name]) if _fits(value, own[name]) else value
        for name, value in named.items()
    }
    ordered = {name: shared[name] for name in own if name in shared}
    plain = {name: v for name, v in own.items() if name not in ordered and not isinstance(v, Tensor)}
    return ordered | plain | others, prefix


def _prefix(own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return what stands before all of the model's names in a saved state."""
    first = next(iter(own), "")
    for name in () if first in found else found:
        head = name.removesuffix(first)
        if all(head + each in found for each in own):
            return head
    return ""


def _fits(value: Any, like: Any) -> bool:
    whole = isinstance(value, Tensor) and isinstance(like, Tensor) and type(value) is Tensor
    return whole and value.shape == like.shape


def _optimizer(
    step: TrainState,
    own: Mapping[str, Any],
    found: Mapping[str, Any],
    prefix: str,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state of an optimizer as the Run saves it, with the imported values."""
    groups = found["groups"]
    if not groups:
        return {**own, "state": {}}
    names = parameter_names(step.model, step.optimizer)
    sizes = [len(group["params"]) for group in step.optimizer.param_groups]
    if len(parts_of(step.optimizer)) > 1:
        raise _unfit(about, "a Step with several optimizers", "the import has one", _ONE_MODEL)
    numbered = not all(isinstance(each, str) for group in groups for each in group["params"])
    if numbered:
        there = [len(group["params"]) for group in groups]
        if there != sizes:
            raise _unfit(
                about,
                f"{kind_of(step.optimizer)} with groups of {sizes} parameters",
                f"groups of {there} parameters, which the tool numbers",
                "build the groups of the old script, in its order",
            )
        order = [key for group in groups for key in group["params"]]
        of = dict(zip(names, order, strict=True))
        options = groups
    else:
        of = {name: prefix + name for name in names}
        group_of = {each: group for group in groups for each in group["params"]}
        missing = [name for name in names if of[name] not in group_of]
        extra = sorted(set(group_of) - set(of.values()))
        if missing or extra:
            raise _unfit(
                about,
                f"{kind_of(step.optimizer)} over {len(names)} parameters",
                f"missing in it: {first_names(missing)}; unexpected: {first_names(extra)}",
                "give the optimizer the parameters that it had in the old script",
            )
        ends = list(accumulate(sizes))
        options = [
            _common([group_of[of[name]] for name in names[end - size : end]], about)
            for size, end in zip(sizes, ends, strict=True)
        ]
    parameters = dict(step.model.named_parameters())
    state = {
        name: _entries(name, parameters[name], found["state"][key], about)
        for name, key in of.items()
        if key in found["state"]
    }
    merged = [_options(step, *each, about) for each in zip(own["groups"], options, strict=True)]
    return {**own, "state": state, "groups": merged}


def _common(groups: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the saved groups of one group's parameters, which must be the same."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if any(each != options[0] for each in options):
        keys = [key for key in options[0] if len({repr(each.get(key)) for each in options}) > 1]
        raise _unfit(
            about,
            f"a parameter group of {len(groups)} parameters",
            f"they had different options: {', '.join(keys)}",
            "build the groups of the old script",
        )
    return options[0] if options else {}


def _options(
    step: TrainState, own: Mapping[str, Any], found: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    unknown = [key for key in found if key not in own and key not in _IMPLEMENTATION]
    decoupled = "decoupled_weight_decay"
    if decoupled in own and found.get(decoupled, own[decoupled]) != own[decoupled]:
        unknown.append(f"{decoupled}={found[decoupled]}")
    if unknown:
        raise _unfit(
            about,
            f"a Step with {kind_of(step.optimizer)}",
            f"an optimizer with {', '.join(unknown)}, which {kind_of(step.optimizer)} lacks",
            "build the optimizer of the old script",
        )
    of_here = {"foreach", "fused"}  # how this machine computes the same
    kept = {k: v for k, v in found.items() if k == "initial_lr" or k in own.keys() - of_here}
    return {**own, **kept}


def _entries(
    name: str, parameter: Tensor, found: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the states of one parameter, sharded as it is."""
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            raise _unfit(
                about,
                f"the parameter {name} of shape {tuple(parameter.shape)}",
                f"its {key} has shape {tuple(value.shape)}",
                "build the optimizer of the old script, with its parameters in the same order",
            )
    return {
        key: shared_like(value, parameter) if _fits(value, parameter) else value
        for key, value in found.items()
    }


def _schedule(
    own: Mapping[str, Any],
    found: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    if "schedules" in own:
        raise _unfit(about, "a Step with several schedules", "the import has one", _ONE_MODEL)
    state = {**own, **{key: value for key, value in found.items() if _carries(own, key, value)}}
    if "_step_count" in own and "_step_count" not in found:
        state["_step_count"] = found["last_epoch"] + 1
    for key, option in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        if key in own and key not in found:
            state[key] = [group[option] for group in optimizer["groups"]]
    return state


def _carries(own: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether an entry of a schedule's state carries over; its functions do not."""
    if key not in own or key == "lr_lambdas":
        return False
    return not isinstance(value, list) or len(value) == len(own[key])


_ONE_MODEL = "import into a Run with one Step, one optimizer and one schedule"


def _unfit(about: Mapping[str, Any], given: str, found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        given=given, found=f"the state imported from {about['tool']} does not fit: {found}", fix=fix
    )

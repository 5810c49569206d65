"""How an optimizer can update a model of which each rank has a part: tried on small parameters."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal._torch.mesh import local_slices
from shoal._torch.optimizers import step_without_hooks, twin_of
from shoal.data.micro import Drawing
from shoal.distributed.layout import AXES
from shoal.distributed.seeds import random_state, set_random_state
from shoal.distributed.world import World
from shoal.strategies.dtensor import copy_share, is_divided, share
from shoal.strategies.separate_updates import SeparateUpdates, tensors_of
from shoal.util.errors import StepError

STEPS = 6
"""Enough that moments matter, and that gradients of each size occur twice."""
TOLERANCE = 1e-6
"""The largest difference between two updates, as a fraction of the largest element."""
_RATE = 0.01
_COUPLED = (
    "its update of a parameter depends on more than that parameter and its state, and each rank has "
    "only a part of the model"
)
_RANDOM = "its updates depend on random numbers, and each rank draws different ones"


def prepare_optimizers(optimizers: Sequence[Optimizer], world: World) -> None:
    """Let optimizers update a model on several ranks as one process would. Collective.

    Raises StepError, on all ranks, if one of them cannot. In a plan, other ranks have no values.
    """
    if world.simulated:
        return
    if world.size > 1 and not has_parts(world):
        for optimizer in optimizers:
            if _draws_random_numbers(optimizer):
                raise _refused(optimizer, world, _RANDOM)
    elif has_parts(world):
        known = world.service(_Checked).optimizers
        checks = {each: OptimizerCheck(world) for each in optimizers if each not in known}
        if not checks:  # on all ranks
            return
        for reasons in world.gather([check.choose(optimizer) for optimizer, check in checks.items()]):
            for optimizer, reason in zip(checks, reasons, strict=False):
                if reason:
                    raise _refused(optimizer, world, reason)
        for optimizer, check in checks.items():
            check.register(optimizer)
            known.add(optimizer)


class _Checked:
    """The optimizers of a World that have been checked."""

    def __init__(self, world: World) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def close(self) -> None:
        """Forget them."""
        self.optimizers.clear()


def has_parts(world: World) -> bool:
    """Return whether ranks have different parts of a model."""
    return any(world.layout.degree(axis) > 1 for axis in AXES if axis != "replicate")


class OptimizerCheck:
    """Hooks of an optimizer that choose how it updates sharded parameters, once for its groups.

    An optimizer is elementwise if its update of a block of a matrix needs only that block. It steps
    on DTensors if it can, and else on shards. Any other gets whole parameters, gathered one by one, if
    its update of a parameter needs only that parameter.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._separate: SeparateUpdates | None = None
        self._checked: list[int] = []

    def choose(self, optimizer: Optimizer) -> str:
        """Choose how the optimizer steps with its current groups; return why it can't, or ""."""
        self._checked = [len(group["params"]) for group in optimizer.param_groups]
        with Drawing(None), _random_state_kept():  # a loop over micro-batches may be running
            try:
                self._separate, reason = _tried(optimizer)
            except Exception as error:  # an optimizer may raise anything
                text = str(error).partition("\n")[0]
                return f"a trial step on small parameters raises {type(error).__name__}: {text:.200}"
        return reason

    def register(self, optimizer: Optimizer) -> None:
        """Hook into the steps of the optimizer."""
        optimizer.register_step_pre_hook(self)
        optimizer.register_step_post_hook(self._update)
        if self._separate is not None and self._separate.gathers:
            kind = type(optimizer).__name__
            self._world.print(
                f"shoal: {kind} needs whole parameters; its step gathers the sharded ones, one by one"
            )

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        """Choose again if groups have changed; hide the gradients that the step must not find."""
        if self._checked != [len(group["params"]) for group in optimizer.param_groups]:
            reason = self.choose(optimizer)
            if reason:
                raise _refused(optimizer, self._world, reason)
        if self._separate is not None:
            self._separate.hide(optimizer)

    def _update(self, optimizer: Optimizer, *_: object) -> None:
        if self._separate is not None:
            self._separate.update(optimizer)


def _refused(optimizer: Optimizer, world: World, reason: str) -> StepError:
    return StepError(
        given=f"{type(optimizer).__name__} with layout='{world.layout}'",
        found=reason,
        fix="use another optimizer, such as torch.optim.AdamW"
        if reason == _RANDOM
        else "use shoal.init(layout='replicate=-1'), in which each rank has the complete model, or "
        "another optimizer, such as torch.optim.AdamW",
    )


class _Small(NamedTuple):
    """A small parameter in the group `number`, in place of `like`: its start and its gradients."""

    number: int
    like: Tensor
    values: list[Tensor]

    def each(self, change: Callable[[Tensor], Tensor]) -> _Small:
        """Return it with all values changed."""
        return self._replace(values=[change(value) for value in self.values])


def _tried(optimizer: Optimizer) -> tuple[SeparateUpdates | None, str]:
    """Return how the optimizer updates sharded parameters, and why it can't, or ""."""
    small = list(_small_parameters(optimizer))
    together = _run(optimizer, small)
    if together.draws:
        return None, _RANDOM
    corners = [_corner(each.values[0]) for each in small]
    elementwise = not any(
        map(_statistics, together.states, [each.values[0] for each in small])
    ) and all(
        _agree(_run(optimizer, [each.each(partial(_block, place))]), together.only(number, place))
        for number, (each, place) in enumerate(zip(small, corners, strict=True))
    )
    if not elementwise and not all(
        _agree(_run(optimizer, [each]), together.only(number)) for number, each in enumerate(small)
    ):
        return None, _COUPLED
    if not any(is_divided(each.like) for each in small):  # a stage of a pipeline
        return None, ""
    sharded = [each.each(partial(_sharded, each.like)) for each in small]
    shards = [
        update[local_slices(each.values[0])] if is_divided(each.values[0]) else update
        for each, update in zip(sharded, together.updates, strict=True)
    ]
    expected = together._replace(updates=shards, options=[])
    if elementwise:
        with suppress(Exception):  # torch lacks some operations for DTensors
            if _agree(_run(optimizer, sharded), expected):
                return None, ""
    separate = SeparateUpdates(gathers=not elementwise)
    return separate, "" if _agree(_run(optimizer, sharded, separate), expected) else _COUPLED


def _draws_random_numbers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer draws random numbers; False if it can't be tried."""
    with suppress(Exception), _random_state_kept():
        return _run(optimizer, list(_small_parameters(optimizer))).draws
    return False


def _small_parameters(optimizer: Optimizer) -> Iterator[_Small]:
    """Yield two small parameters for each kind of parameters, one of them with a single row."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for number, group in enumerate(optimizer.param_groups):
        options = {k: bool(v) if isinstance(v, float) else repr(v) for k, v in _options(group).items()}
        for like in group["params"]:
            where = (str(like.device_mesh), like.placements) if is_divided(like) else None
            kind = (repr(options), like.dim(), where)
            if kind in seen:
                continue
            seen.add(kind)
            dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
            for rows in (67, 1):
                shape = (rows, *((71,) if like.dim() == 2 else (7, *[3] * (like.dim() - 2))))
                shape = {0: (), 1: (rows,)}.get(like.dim(), shape)
                start = torch.randn(shape, generator=generator, dtype=torch.float64)
                late = torch.ones(shape, dtype=torch.float64)
                late[_corner(late)] = 0.0  # the corner has its large gradients at other steps
                gradients = [
                    torch.randn(shape, generator=generator, dtype=torch.float64)
                    * 10.0 ** ((step + late) % 3 - 1)
                    for step in range(STEPS)
                ]
                yield _Small(number, like, [v.to(like.device, dtype) for v in (start, *gradients)])


class _TrialSteps(NamedTuple):
    """How a copy of the optimizer changed parameters on this rank, their states, and their groups."""

    updates: list[Tensor]
    states: list[Any]
    options: list[dict[str, Any]]
    error: list[float]
    draws: bool = False
    """Whether it drew random numbers."""

    def only(self, number: int, place: tuple[slice, ...] = ()) -> _TrialSteps:
        """Return the steps of one parameter, or of a block of it."""
        update, error = self.updates[number][place], self.error[number]
        return _TrialSteps([update], [self.states[number]], [self.options[number]], [error])


def _run(
    optimizer: Optimizer, small: Sequence[_Small], separate: SeparateUpdates | None = None
) -> _TrialSteps:
    """Take some steps with a copy of the optimizer."""
    before = random_state()
    next_numbers = _next_random(small)
    set_random_state(before)
    parameters = [nn.Parameter(each.values[0].clone()) for each in small]
    groups: dict[int, dict[str, Any]] = {}
    for each, parameter in zip(small, parameters, strict=True):
        group = _options(optimizer.param_groups[each.number]) | {"params": []}
        groups.setdefault(each.number, group)["params"].append(parameter)
    state = {
        p: _begun(optimizer.state[each.like], each, p)
        for each, p in zip(small, parameters, strict=True)
        if each.like in optimizer.state
    }
    twin = twin_of(optimizer, list(groups.values()), state, copied=True)
    for step in range(1, STEPS + 1):
        for each, parameter in zip(small, parameters, strict=True):
            parameter.grad = each.values[step].clone()
        if separate is not None:
            separate.hide(twin)
        step_without_hooks(twin)
        if separate is not None:
            separate.update(twin)
    with torch.no_grad():
        updates = [share(p) - share(each.values[0]) for each, p in zip(small, parameters, strict=True)]
    return _TrialSteps(
        updates,
        [twin.state.get(parameter, {}) for parameter in parameters],
        [_options(groups[each.number]) for each in small],
        [32 * torch.finfo(each.values[0].dtype).eps for each in small],
        draws=_next_random(small) != next_numbers,
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group, with a learning rate at which an update can be seen."""
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    options = copy.deepcopy(kept)
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        options["lr"] = rate.clamp(min=_RATE)
    elif rate is not None:
        options["lr"] = max(rate, _RATE)
    return options


def _begun(state: Any, small: _Small, parameter: Tensor) -> Any:
    """Return the initial state of a small parameter, for optimizers that begin with one (Adagrad)."""

    def resized(value: Tensor) -> Tensor:
        if value.shape != small.like.shape:
            return value.clone()
        first = share(value).flatten()[:1]
        return torch.full_like(parameter, float(first) if first.numel() else 0.0, dtype=value.dtype)

    return tensors_of(state, resized) if not _statistics(state, small.like) else {}


def _statistics(tree: Any, like: Tensor) -> bool:
    """Return whether a state has tensors for more than single elements, such as means of rows."""
    found: list[bool] = []

    def note(value: Tensor) -> Tensor:
        found.append(value.numel() > 1 and value.shape != like.shape)
        return value

    tensors_of(tree, note)
    return any(found)


def _agree(found: _TrialSteps, expected: _TrialSteps) -> bool:
    """Return whether updates, and options that a step changes, are the same up to rounding."""
    return all(
        not b.numel() or float((a - b).abs().max()) <= error + TOLERANCE * float(b.abs().max())
        for a, b, error in zip(found.updates, expected.updates, expected.error, strict=True)
    ) and all(
        a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
        for a, b in zip(found.options, expected.options, strict=False)
    )


def _next_random(small: Sequence[_Small]) -> list[float]:
    """Draw a number from each of the global generators that an optimizer may use."""
    devices = dict.fromkeys([torch.device("cpu"), *(each.like.device for each in small)])
    drawn = [float(torch.rand((), device=device)) for device in devices]
    return [random.random(), float(np.random.random()), *drawn]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float | Tensor) and isinstance(other, float | Tensor):
        return bool(torch.as_tensor(one).isclose(torch.as_tensor(other), rtol=TOLERANCE).all())
    return bool(one == other)


def _corner(value: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, -(-size // 3)) for size in value.shape)


def _block(place: tuple[slice, ...], value: Tensor) -> Tensor:
    return value[place].clone()


def _sharded(like: Tensor, value: Tensor) -> Tensor:
    if not is_divided(like):
        return value
    from torch.distributed.tensor import empty

    mesh, placements = like.device_mesh, like.placements
    target = empty(value.shape, dtype=value.dtype, device_mesh=mesh, placements=placements)
    copy_share(value, target)
    return target


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)

"""The outer forward of a model as a graph: torch.fx with proxies that behave like tensors.

torch's proxies are not tensors, have every attribute, and forget under which `no_grad` they were
computed, so that a forward pass silently takes other branches with them than with tensors. Here a proxy
is a tensor when the forward asks for its class, and a node of the graph verifies this on every batch.
Code that a graph cannot represent raises StepError with the line of the forward.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import checkpoint

from shoal._torch.autograd import APPLY_CODES, framed_apply
from shoal._torch.modules import call_hooks, parameters
from shoal.strategies.eval_mode import attributes_kept, random_states_kept, tables
from shoal.util.errors import ShoalError, StepError

IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
"""The functions of `operator` for `+=` and the other in-place operators."""

_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__)
_OWN = {"tracer", "node", "root", "attr", "_node"}
"""Attributes that torch itself sets on a proxy."""
_MODULE = "move that code into a submodule, which is not split"


class _TraceMode(NamedTuple):
    """Mode in which a forward pass is traced."""

    training: bool = True
    gradients: bool = True
    autocast: bool = False


_MODES = (
    (_TraceMode(), "each time: it counts, or reads a value that changes elsewhere", _MODULE),
    (
        _TraceMode(training=False),
        "in training as in evaluation",
        "move the difference into a submodule: nn.Dropout in place of F.dropout",
    ),
    (_TraceMode(gradients=False), "with gradients as without them", _MODULE),
    (_TraceMode(training=False, gradients=False), "with gradients as without them", _MODULE),
    (_TraceMode(autocast=True), "under autocast as without it", _MODULE),
)
"""Modes of the further traces, with the difference and the fix to report for another graph."""


class _RefusedError(Exception):
    """Error for code that a graph cannot represent, with its replacement."""

    def __init__(self, found: str, fix: str = _MODULE) -> None:
        super().__init__(found)
        self.fix = fix


def expect_tensor(value: object, where: str) -> None:
    """Raise StepError unless `value` is a tensor, as tracing assumed. This function is a graph node."""
    if not isinstance(value, Tensor):
        raise StepError(
            given=f"a model in stages, whose forward checks the class of a value at {where}",
            found=f"the value is a {type(value).__name__}; the stages were traced with a tensor",
            fix=f"{_MODULE}, or pass a tensor",
        )


class _Value(fx.Proxy):
    """Proxy of a value of the forward.

    Its `__class__` is not Tensor: torch's code would then read it as a real tensor.
    """

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _OWN:
            raise _RefusedError(f"it sets the attribute {name!r} of a value")
        object.__setattr__(self, name, value)


class _Attribute(_Value, fx.proxy.Attribute):
    """Proxy of an attribute or a method of a value."""


def _changing(name: str) -> Callable[[_Value, object], Any]:
    def change(self: _Value, other: object) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return change


for _name in IN_PLACE:  # torch's proxies treat `h += x` as `h = h + x`
    setattr(_Value, f"__{_name}__", _changing(_name))


_isinstance, _hasattr, _getattr, _callable = isinstance, hasattr, getattr, callable


def _kind(value: object) -> type | None:
    """Return the class that a proxy represents if the forward asks, or None for other values."""
    if type(value) not in (_Value, _Attribute) or _asked_by_fx():
        return None
    known: Any = value
    return known.tracer.kind_of(known)  # type: ignore[no-any-return]


def _true_isinstance(value: Any, kinds: Any, /) -> bool:
    kind = _kind(value)
    return _isinstance(value, kinds) if kind is None else issubclass(kind, kinds)


def _true_hasattr(value: Any, name: str, /) -> bool:
    kind = _kind(value)
    return _hasattr(value, name) if kind is None else _has(kind, name)


def _true_getattr(value: Any, name: str, /, *default: Any) -> Any:
    kind = _kind(value)
    if kind is None or _has(kind, name):
        return _getattr(value, name, *default)
    return _getattr(object(), name, *default)  # an object without this attribute


def _true_callable(value: Any, /) -> bool:
    kind = _kind(value)
    return _callable(value) if kind is None else _has(kind, "__call__")


def _has(kind: type, name: str) -> bool:
    """Return whether objects of a class have this attribute."""
    return any(name in vars(base) for base in kind.__mro__)


_ANSWERS = {
    "isinstance": _true_isinstance,
    "hasattr": _true_hasattr,
    "getattr": _true_getattr,
    "callable": _true_callable,
}
"""Replacements of these functions while a forward pass is traced."""


@contextmanager
def _answering() -> Iterator[None]:
    """Make isinstance, hasattr, getattr and callable answer for the value that a proxy represents."""
    before = {name: vars(builtins)[name] for name in _ANSWERS}
    vars(builtins).update(_ANSWERS)
    try:
        yield
    finally:
        vars(builtins).update(before)


class _Tracer(fx.Tracer):
    """Tracer of the forward of `model` with the inputs of `signature`, into the modules `opened`."""

    proxy_buffer_attributes = True  # else values computed from buffers now would be constants

    def __init__(self, model: nn.Module, opened: set[str], signature: inspect.Signature) -> None:
        super().__init__()
        self._model = model
        self._opened = opened
        self._signature = signature
        self._assumed: set[fx.Node] = set()
        self._settings = _settings()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return placeholders for the required inputs. The others keep their defaults."""
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}
        positional, named = by_kind(self._signature, given)

        def forward(model: nn.Module) -> Any:  # finds a forward set on the instance too
            return model.forward(*positional, **named)

        return forward, [self._model]

    @property
    def _inputs(self) -> Sequence[str]:
        return list(self._signature.parameters)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind not in ("placeholder", "output"):
            _check_frames(_frames())
            if _settings() != self._settings:
                raise _RefusedError(
                    "it changes a setting (torch.no_grad, torch.autocast), which the stages would "
                    "not do",
                    "move the block into a submodule; in place of no_grad: .detach(), and "
                    "requires_grad_(False) for frozen parameters",
                )
        return super().create_node(kind, *args, **kwargs)

    def kind_of(self, value: fx.Proxy) -> type:
        """Return the class of a value: a tensor, which is verified whenever the stage runs."""
        if value.node.op == "get_attr":
            owner, _, name = str(value.node.target).rpartition(".")
            return type(getattr(self._model.get_submodule(owner), name))
        if value.node not in self._assumed:
            self._assumed.add(value.node)
            where = place(_frames())
            self.create_proxy("call_function", expect_tensor, (value, where), {})
        return Tensor


def by_kind(
    signature: inspect.Signature, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs, given by name, as positional and keyword arguments."""
    bound = inspect.BoundArguments(signature, dict(values))
    return bound.args, bound.kwargs


def graph_of(model: nn.Module, opened: set[str], signature: inspect.Signature, given: str) -> fx.Graph:
    """Return the graph of the forward, the same in all modes. Raise StepError if there is none."""
    _refuse_hooks(model, given)
    _refuse_bound([model, *(model.get_submodule(name) for name in opened)], given)
    first = _traced(model, opened, signature, _TraceMode(), given)
    for mode, difference, fix in _MODES:
        if str(_traced(model, opened, signature, mode, given)) != str(first):
            raise StepError(
                given=given, found=f"its forward does not compute the same {difference}", fix=fix
            )
    return first


def _traced(
    model: nn.Module,
    opened: set[str],
    signature: inspect.Signature,
    mode: _TraceMode,
    given: str,
) -> fx.Graph:
    opened_parts = [model, *(model.get_submodule(name) for name in opened)]
    held = [table for part in opened_parts for table in (*tables(part), parameters(part))]
    with ExitStack() as stack:
        stack.enter_context(random_states_kept(model))
        stack.enter_context(_in_mode(model, mode))
        kept = stack.enter_context(attributes_kept(held))
        states = _random_states()
        try:
            with _answering(), framed_apply():
                graph = _Tracer(model, opened, signature).trace(model)
        except Exception as error:
            raise _explained(error, given) from error
        drawn = not all(map(_equal, states, _random_states()))
    if kept:
        raise StepError(
            given=given,
            found="its forward creates tensors without inputs (torch.arange, torch.randn), or stores "
            f"values in attributes of the model: {', '.join(sorted(kept))}",
            fix=f"{_MODULE}, or make such a tensor a buffer",
        )
    if drawn:
        raise StepError(
            given=given,
            found="its forward draws random numbers (random.random(), torch.rand(1)), which would be "
            "the same in every batch",
            fix=_MODULE,
        )
    return graph


@contextmanager
def _in_mode(model: nn.Module, mode: _TraceMode) -> Iterator[None]:
    """Set all modules to one mode, including those whose `training` the forward reads."""
    modes = [(module, module.training) for module in model.modules()]
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if mode.autocast else []
    with ExitStack() as settings:
        settings.enter_context(torch.set_grad_enabled(mode.gradients))
        for kind in kinds:
            settings.enter_context(torch.autocast(kind, torch.bfloat16))
        try:
            for module, _ in modes:
                module.training = mode.training
            yield
        finally:
            for module, was in modes:
                module.training = was


def _random_states() -> list[Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy: Any = np.random.get_state()
    return [random.getstate(), numpy, torch.get_rng_state(), *cuda]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def _settings() -> tuple[object, ...]:
    """Return the settings that change the result of an operation, apart from its arguments."""
    kinds = ("cpu", "cuda")
    autocast = [torch.is_autocast_enabled(kind) for kind in kinds]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        *(torch.get_autocast_dtype(kind) for kind in kinds if any(autocast)),
    )


def _refuse_bound(parts: Sequence[nn.Module], given: str) -> None:
    """Raise StepError for a forward bound to another object, which the comparison could not run."""
    for part in parts:
        forward = vars(part).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not part:
            raise StepError(
                given=given,
                found=f"the forward of a {type(part).__name__} was replaced on the object",
                fix="write def forward(self, …): … in its class, or use types.MethodType(forward, "
                "module)",
            )


def _refuse_hooks(model: nn.Module, given: str) -> None:
    """Raise StepError for hooks of the model, which would not run: the stages are called instead."""
    from shoal.strategies.sharded_layers.sharded_modules import (
        division_of,  # a pipeline does the work of its hooks
    )

    division = division_of(model)
    hooks = call_hooks(model)
    if any(getattr(hook, "__self__", None) is not division or division is None for hook in hooks):
        raise StepError(
            given=given,
            found="the model itself has hooks, which would not run: only its submodules are called",
            fix="register them on one of its submodules, or move their code into its forward",
        )


def _frames() -> list[FrameType]:
    """Return the frames between the forward and this function, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _traced.__code__:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _check_frames(frames: Sequence[FrameType]) -> None:
    """Raise _RefusedError for calls that change backward or recompute: a graph would lose them."""
    for frame in frames:
        if frame.f_code in APPLY_CODES:
            raise _RefusedError("it calls a torch.autograd.Function, whose backward a graph would lose")
        if frame.f_code.co_filename == checkpoint.__file__:
            raise _RefusedError(
                "it calls torch.utils.checkpoint, which a graph would lose",
                "[shoal.ActivationCheckpointing(…), shoal.Pipeline(…)] in place of it, or a submodule "
                "that calls it",
            )


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return path != _HERE and _TORCH not in path.parents and not filename.startswith("<")


def place(frames: Sequence[FrameType]) -> str:
    """Return file:line of the innermost frame outside torch and this file."""
    for frame in frames:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "an unknown place"


def _asked_by_fx() -> bool:
    """Return whether torch.fx is the caller, directly or through other parts of torch."""
    frame = sys._getframe(3)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch.fx") or frame.f_code.co_filename == str(_HERE):
            return True
        if not name.startswith("torch"):
            return False
        frame = frame.f_back
    return False


def _explained(error: Exception, given: str) -> ShoalError:
    """Return the StepError for a forward pass that failed while it was traced."""
    if isinstance(error, ShoalError):
        return error
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    lines = [f"{f.f_code.co_filename}:{n}" for f, n in frames if _is_users(f.f_code.co_filename)]
    where = f" at {lines[-1]}" if lines else ""
    try:
        _check_frames([frame for frame, _ in frames])
    except _RefusedError as refused:
        error = refused
    if isinstance(error, _RefusedError):
        found = f"its forward cannot be split{where}: {error}"
        return StepError(given=given, found=found, fix=error.fix)
    return StepError(
        given=given,
        found=f"its forward cannot be split{where}, because it branches on the values or the number of "
        f"tensors: {error}",
        fix=f"{_MODULE}, or choose split points that are not inside this module",
    )

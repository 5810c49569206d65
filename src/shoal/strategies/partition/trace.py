"""The outer forward of a model as a graph: torch.fx, with values that say truly what they stand for.

torch's own proxies are no tensors, have every attribute, and forget under which `no_grad` they were
computed, so that a forward takes other branches with them than with tensors, in silence. Here a value
is a tensor when the forward asks for its class, which a node of the graph verifies on every batch;
whatever a graph can't hold raises StepError with the line of the forward.
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
"""The functions of `operator` for `+=` and its like."""

_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__)
_OWN = {"tracer", "node", "root", "attr", "_node"}
"""What torch itself sets on a proxy."""
_MODULE = "move that code into a submodule, which then stays whole"


class _TraceMode(NamedTuple):
    """In which a forward is traced."""

    training: bool = True
    gradients: bool = True
    autocast: bool = False


_MODES = (
    (_TraceMode(), "each time: it counts, or reads what changes outside of it", _MODULE),
    (
        _TraceMode(training=False),
        "in training as in evaluation",
        "put what differs into modules of its own: nn.Dropout in place of F.dropout",
    ),
    (_TraceMode(gradients=False), "with gradients as without them", _MODULE),
    (_TraceMode(training=False, gradients=False), "with gradients as without them", _MODULE),
    (_TraceMode(autocast=True), "under autocast as without it", _MODULE),
)
"""Where it is traced again, and what to say if the graph is another one there."""


class _RefusedError(Exception):
    """What a graph can't hold, and what to write in its place."""

    def __init__(self, found: str, fix: str = _MODULE) -> None:
        super().__init__(found)
        self.fix = fix


def expect_tensor(value: object, where: str) -> None:
    """A node of the graph: raise StepError unless `value` is the tensor that tracing took it for."""
    if not isinstance(value, Tensor):
        raise StepError(
            given=f"a model in stages, whose forward asks at {where} what a value is",
            found=f"it is a {type(value).__name__}; the model was cut for a tensor",
            fix=f"{_MODULE}, or pass a tensor",
        )


class _Value(fx.Proxy):
    """Stands for a value that the forward computes with.

    Not by its `__class__`: torch's own code would then read it as the tensor that it is not.
    """

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _OWN:
            raise _RefusedError(f"it sets {name!r} of a value")
        object.__setattr__(self, name, value)


class _Attribute(_Value, fx.proxy.Attribute):
    """An attribute of a value, and perhaps a method of it."""


def _changing(name: str) -> Callable[[_Value, object], Any]:
    def change(self: _Value, other: object) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return change


for _name in IN_PLACE:  # torch's own proxies take `h += x` for `h = h + x`
    setattr(_Value, f"__{_name}__", _changing(_name))


_isinstance, _hasattr, _getattr, _callable = isinstance, hasattr, getattr, callable


def _kind(value: object) -> type | None:
    """The class of what `value` stands for, where the forward asks; None where `value` is meant."""
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
    return _getattr(object(), name, *default)  # which has it neither


def _true_callable(value: Any, /) -> bool:
    kind = _kind(value)
    return _callable(value) if kind is None else _has(kind, "__call__")


def _has(kind: type, name: str) -> bool:
    """Whether objects of a class have this attribute."""
    return any(name in vars(base) for base in kind.__mro__)


_ANSWERS = {
    "isinstance": _true_isinstance,
    "hasattr": _true_hasattr,
    "getattr": _true_getattr,
    "callable": _true_callable,
}
"""What takes the place of these functions while a forward is traced."""


@contextmanager
def _answering() -> Iterator[None]:
    """Python's own questions are answered for what a value stands for."""
    before = {name: vars(builtins)[name] for name in _ANSWERS}
    vars(builtins).update(_ANSWERS)
    try:
        yield
    finally:
        vars(builtins).update(before)


class _Tracer(fx.Tracer):
    """Traces the forward of `model` with the inputs of `signature`; modules not `opened` stay whole."""

    proxy_buffer_attributes = True  # else what is computed of buffers now would be for ever

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
        """Placeholders for required inputs; the others keep their defaults."""
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}
        positional, named = by_kind(self._signature, given)

        def forward(model: nn.Module) -> Any:  # also one that was set on the instance
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
                    "it computes under a setting of its own (torch.no_grad, torch.autocast), which "
                    "stages would not have",
                    "put the block into a module of its own; in place of no_grad: .detach(), and "
                    "requires_grad_(False) for what does not learn",
                )
        return super().create_node(kind, *args, **kwargs)

    def kind_of(self, value: fx.Proxy) -> type:
        """The forward asks what `value` is: a tensor, which is verified whenever the stage runs."""
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
    """Inputs, by name, as positional arguments and keywords."""
    bound = inspect.BoundArguments(signature, dict(values))
    return bound.args, bound.kwargs


def graph_of(model: nn.Module, opened: set[str], signature: inspect.Signature, given: str) -> fx.Graph:
    """The graph of the forward, the same in all modes; StepError, with `given`, where there is none."""
    _refuse_hooks(model, given)
    _refuse_bound([model, *(model.get_submodule(name) for name in opened)], given)
    first = _traced(model, opened, signature, _TraceMode(), given)
    for mode, difference, fix in _MODES:
        if str(_traced(model, opened, signature, mode, given)) != str(first):
            raise StepError(
                given=given, found=f"its own forward does not compute the same {difference}", fix=fix
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
    with ExitStack() as aside:
        aside.enter_context(random_states_kept(model))
        aside.enter_context(_in_mode(model, mode))
        kept = aside.enter_context(attributes_kept(held))
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
            found="its own forward makes tensors of nothing (torch.arange, torch.randn), or keeps what "
            f"it computes on the model: {', '.join(sorted(kept))}",
            fix=f"{_MODULE}, or make such a tensor a buffer",
        )
    if drawn:
        raise StepError(
            given=given,
            found="its own forward draws random numbers (random.random(), torch.rand(1)), which would "
            "be the same in every batch",
            fix=_MODULE,
        )
    return graph


@contextmanager
def _in_mode(model: nn.Module, mode: _TraceMode) -> Iterator[None]:
    """All modules in one mode, also those whose `training` the forward reads."""
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
    """What changes how an operation computes, beside its arguments."""
    kinds = ("cpu", "cuda")
    autocast = [torch.is_autocast_enabled(kind) for kind in kinds]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        *(torch.get_autocast_dtype(kind) for kind in kinds if any(autocast)),
    )


def _refuse_bound(parts: Sequence[nn.Module], given: str) -> None:
    """A forward set on an object runs on that object only, not on the shell that `uncut` runs."""
    for part in parts:
        forward = vars(part).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not part:
            raise StepError(
                given=given,
                found=f"the forward of a {type(part).__name__} was replaced on the object",
                fix="def forward(self, …): … in its class, or types.MethodType(forward, module)",
            )


def _refuse_hooks(model: nn.Module, given: str) -> None:
    """A model in stages is never called itself, so its own hooks would not run."""
    from shoal.strategies.tensor_parallel.sharded_modules import (
        division_of,  # whose own hooks a pipeline stands in for
    )

    division = division_of(model)
    hooks = call_hooks(model)
    if any(getattr(hook, "__self__", None) is not division or division is None for hook in hooks):
        raise StepError(
            given=given,
            found="the model itself has hooks, which would not run: only its modules are called",
            fix="register them on one of its modules, or put what they do into its forward",
        )


def _frames() -> list[FrameType]:
    """The frames between the forward and here, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _traced.__code__:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _check_frames(frames: Sequence[FrameType]) -> None:
    """Raise StepError for calls that change backward or run again in it: a graph would lose them."""
    for frame in frames:
        if frame.f_code in APPLY_CODES:
            raise _RefusedError("it calls a torch.autograd.Function, whose backward a graph would lose")
        if frame.f_code.co_filename == checkpoint.__file__:
            raise _RefusedError(
                "it calls torch.utils.checkpoint, which a graph would lose",
                "[shoal.ActivationCheckpointing(…), shoal.Pipeline(…)] in place of it, or a module of "
                "its own that "
                "calls it",
            )


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return path != _HERE and _TORCH not in path.parents and not filename.startswith("<")


def place(frames: Sequence[FrameType]) -> str:
    """file:line of the innermost frame that is neither torch's nor this file's."""
    for frame in frames:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "a place that is not known"


def _asked_by_fx() -> bool:
    """Whether torch.fx itself is the caller, directly or through other parts of torch."""
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
    """The StepError for a forward that failed while it was traced."""
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
        return StepError(given=given, found=f"its forward can't be cut{where}: {error}", fix=error.fix)
    return StepError(
        given=given,
        found=f"its forward can't be cut{where}, because it decides by what tensors hold or how many "
        f"there are: {error}",
        fix=f"{_MODULE}, or name split points further outside",
    )

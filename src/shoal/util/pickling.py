"""Pickled data between the caller of `shoal.launch`, its launcher and the ranks, through pipes.

No other module pickles. Only the caller and the ranks unpickle, and only data from each other, which is
never in a file. If torch itself unpickles data of other nodes, `holds_only` checks it first. Files of
other tools are read by `read_inert`, which neither imports nor calls what they name.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import IO, Any

from shoal.util.errors import LaunchError

RETURNED, FAILED, REFUSED = b"returned", b"failed", b"refused"
"""The beginning of a launcher's answer: one value per rank, a failure or an error follows."""

_LENGTH = 8


def write_framed(stream: IO[bytes], data: bytes) -> None:
    """Write bytes, preceded by their number."""
    stream.write(len(data).to_bytes(_LENGTH, "big"))
    stream.write(data)
    stream.flush()


def read_framed(stream: IO[bytes]) -> bytes:
    """Return the bytes that `write_framed` wrote. Raises EOFError if the other end closes before the
    end.
    """
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH), "big"))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError(f"{len(data)} of {size} bytes")
    return data


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], *, given: str) -> bytes:
    """Pickle a call. Raises LaunchError, with the cause, if that is impossible."""
    try:
        return pickle_value((function, args))
    except Exception as error:
        what = _unpicklable(function, args)
        raise LaunchError(
            given=f"{given} with {what}",
            found=f"it can't be pickled, so Shoal can't send it to the processes ({error})",
            fix="create it inside the function, or pass its source: a path, not an open file",
        ) from None


def pickle_value(value: object) -> bytes:
    """Pickle, with functions and classes of `__main__` and of notebooks by value."""
    import cloudpickle

    # cloudpickle has no annotations.
    data: bytes = cloudpickle.dumps(value)
    return data


def unpickle(data: bytes) -> Any:
    """Return the value that was pickled at the other end."""
    return pickle.loads(data)


def holds_only(data: bytes, classes: Collection[type]) -> bool:
    """Return whether unpickling `data` calls only these classes, each known to be harmless."""
    try:
        _Restricted(data, classes).load()
    except Exception:  # forged bytes can raise any error
        return False
    return True


class _Restricted(pickle.Unpickler):
    """An unpickler that knows only the names of some classes."""

    def __init__(self, data: bytes, classes: Collection[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = {(kind.__module__, kind.__qualname__): kind for kind in classes}

    def find_class(self, module: str, name: str) -> type:
        """Return the class of this name. Raises UnpicklingError for any other."""
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return self._classes[module, name]


class InertObject(dict[Any, Any]):
    """An object of a file whose class is not known: its name, arguments, state and items, as data."""

    name = ""
    args: tuple[Any, ...]
    state: Any
    items_added: list[Any]

    def __new__(cls, *args: Any, **options: Any) -> InertObject:
        """Keep the arguments, of whatever would have been called."""
        made = super().__new__(cls)
        made.args, made.state, made.items_added = args, None, []
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any) -> InertObject:
        """Return another object that does nothing, for a method that would have been called."""
        return InertObject(*args)

    def __hash__(self) -> int:  # type: ignore[override]  # as the key of a dict
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def append(self, item: Any) -> None:
        """Keep an item of a list or a set."""
        self.items_added.append(item)

    def extend(self, items: Any) -> None:
        """Keep several items."""
        self.items_added.extend(items)

    add = append


def read_inert(
    data: bytes, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return a pickled value of a file; an object of another class becomes an InertObject.

    `known` has what the file may name, each harmless when called with any arguments. `persistent`
    returns the value of a persistent id. Nothing else is imported or called. Raises ValueError for data
    that are not a pickle.
    """
    try:
        return _Inert(data, known, persistent).load()
    except Exception as error:  # forged bytes can raise any error
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from None


class _Inert(pickle.Unpickler):
    """An unpickler that knows a few names, and puts inert classes in place of all others."""

    def __init__(
        self, data: bytes, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent
        self._inert: dict[str, type[InertObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what is known by this name, or a class without effects."""
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        return self._inert.setdefault(full, type("InertObject", (InertObject,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id. Raises UnpicklingError if there are none."""
        if self._persistent is None:
            raise pickle.UnpicklingError("a persistent id")
        return self._persistent(pid)


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the argument, or the variable used by the function, that can't be pickled."""
    for number, value in enumerate(args, 1):
        if not _picklable(value):
            return f"argument {number}, {type(value).__qualname__}"
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        for name, value in [*used.nonlocals.items(), *used.globals.items()]:
            if not _picklable(value):
                return f"the variable {name} that it uses, {type(value).__qualname__}"
    return "this function"


def _picklable(value: object) -> bool:
    try:
        pickle_value(value)
    except Exception:
        return False
    return True

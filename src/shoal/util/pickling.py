"""What crosses between the caller of `shoal.launch`, its launcher and the ranks, through pipes.

The only place that pickles. Only the caller and the ranks unpickle, and only what came from each
other; nothing is ever in a file. Where torch itself unpickles what other nodes wrote, `holds_only`
reads it first.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable, Collection
from typing import IO, Any

from shoal.util.errors import LaunchError

RETURNED, FAILED, REFUSED = b"returned", b"failed", b"refused"
"""What a launcher's answer begins with: one value for each rank, a failure or an error follows."""

_LENGTH = 8


def write_framed(stream: IO[bytes], data: bytes) -> None:
    """Write bytes, preceded by how many they are."""
    stream.write(len(data).to_bytes(_LENGTH, "big"))
    stream.write(data)
    stream.flush()


def read_framed(stream: IO[bytes]) -> bytes:
    """Read what `write_framed` wrote; EOFError where the other end is gone before all of it came."""
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH), "big"))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError(f"{len(data)} of {size} bytes")
    return data


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], *, given: str) -> bytes:
    """Pickle a call; LaunchError where that can't be, naming what is to blame."""
    try:
        return pickle_value((function, args))
    except Exception as error:
        what = _unpicklable(function, args)
        raise LaunchError(
            given=f"{given} with {what}",
            found=f"it can't be pickled, and so not be sent to the processes ({error})",
            fix="make it inside the function, or give what it is made from: a path, not an open file",
        ) from None


def pickle_value(value: object) -> bytes:
    """Pickle, with functions and classes of `__main__` and of notebooks by value."""
    import cloudpickle

    # cloudpickle has no annotations.
    data: bytes = cloudpickle.dumps(value)
    return data


def unpickle(data: bytes) -> Any:
    """What was pickled at the other end."""
    return pickle.loads(data)


def holds_only(data: bytes, classes: Collection[type]) -> bool:
    """Whether unpickling `data` calls nothing but some classes, each known to do no harm."""
    try:
        _Restricted(data, classes).load()
    except Exception:  # whatever forged bytes lead to
        return False
    return True


class _Restricted(pickle.Unpickler):
    """Knows no names but those of some classes."""

    def __init__(self, data: bytes, classes: Collection[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = {(kind.__module__, kind.__qualname__): kind for kind in classes}

    def find_class(self, module: str, name: str) -> type:
        """The class of this name. Raises UnpicklingError for any other."""
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return self._classes[module, name]


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name the argument, or the variable that the function uses, that can't be pickled."""
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

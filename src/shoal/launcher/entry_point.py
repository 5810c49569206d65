"""The code that the ranks of a run execute: a script, as `python script.py` would run it, or a call."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import shlex
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Protocol

from shoal.util.errors import LaunchError
from shoal.util.pickling import pickle_value, unpickle


class EntryPoint(Protocol):
    """The code that each rank runs; multiprocessing sends it to the ranks."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def safe_path(self) -> bool:
        """Whether Python must not look for modules in the script's directory (`-P`)."""

    def run(self) -> bytes | None:
        """Run it. The launcher receives the result; None means that there is none."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python file and its arguments, as typed."""

    path: str
    args: tuple[str, ...] = ()
    safe_path: bool = False

    @property
    def name(self) -> str:
        """The command."""
        return shlex.join((self.path, *self.args))

    def run(self) -> None:
        """Execute the file as the module `__main__`.

        The module is a real one with a `__file__`, so that processes which the script starts by spawn
        or forkserver can import it again, and `inspect` and TorchScript find its source.
        """
        path = os.path.abspath(self.path)
        module = types.ModuleType("__main__")
        module.__file__ = path
        module.__loader__ = SourceFileLoader("__main__", path)
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.argv = [self.path, *self.args]
        if not self.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        with io.open_code(path) as file:
            # Do not inherit this file's own `from __future__` lines.
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function and its arguments, pickled by the process that called `shoal.launch`.

    `cells` has the source of code without a file, as in a notebook, by its name in tracebacks.
    """

    name: str
    pickled: bytes
    cells: Mapping[str, str]
    safe_path: bool = False

    def run(self) -> bytes:
        """Call the function and return its result, pickled. Raises LaunchError if it can't be."""
        for name, text in self.cells.items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        function, args = unpickle(self.pickled)
        value = function(*args)
        try:
            return pickle_value(value)
        except Exception as error:
            raise LaunchError(
                given=f"the result of {self.name}",
                found=f"a {type(value).__qualname__} that can't be pickled and sent ({error})",
                fix="return numbers, arrays, tensors, a state_dict or other plain values",
            ) from None

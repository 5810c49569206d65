"""The code that ranks execute: a script or module, as `python` would run it, or a call."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import shlex
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from typing import Protocol

from shoal.util.arguments import check_file
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
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        with io.open_code(path) as file:
            # Do not inherit this file's own `from __future__` lines.
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)


@dataclass(frozen=True, kw_only=True)
class Module:
    """The dotted name of a module and its arguments, as typed after `-m`."""

    module: str
    args: tuple[str, ...] = ()
    safe_path: bool = False

    @property
    def name(self) -> str:
        """The command."""
        return shlex.join(("-m", self.module, *self.args))

    def run(self) -> None:
        """Execute the module as `__main__`, as `python -m` does.

        Processes that it starts by spawn or forkserver import it again by the name in its spec.
        """
        sys.argv = ["-m", *self.args]
        if not self.safe_path:
            sys.path.insert(0, os.getcwd())
        spec = find_spec(self.module)  # imports the packages that the module is in
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{self.module}.__main__")
        loader = spec and spec.loader
        if spec is None or not isinstance(loader, InspectLoader):
            raise _no_module(self.module, f"there is no module {self.module}")
        module = module_from_spec(spec)
        module.__name__ = "__main__"
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.argv[0] = spec.origin or self.module
        code = loader.get_code(spec.name)
        if code is not None:
            exec(code, module.__dict__)


def find_script(path: str, command: str = "shoal run -n 2 script.py") -> str:
    """Return the path if it is a file. Raises LaunchError, with a command that takes one."""
    interpreter = os.path.basename(path).startswith("python")
    fix = f"leave {path} out" if interpreter else "give the path of a Python file"
    check_file(LaunchError, path, path, fix=f"{fix}: {command}")
    return path


def find_module(name: str, *, safe_path: bool) -> str:
    """Return the file of the module that `python -m name` would run, and import nothing.

    `safe_path` leaves out the current directory, as `python -P` does. Raises LaunchError.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise _no_module(name, "not the name of a module")
    places: Sequence[str] | None = sys.path if safe_path else [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    for count in range(1, len(parts) + 1):
        known = ".".join(parts[:count])
        spec = PathFinder.find_spec(known, places)
        if spec is None and count == 1:
            spec = find_spec(known)  # installed in editable mode, or in an archive
        if spec is None:
            raise _no_module(name, f"there is no module {known}")
        places = spec.submodule_search_locations or []
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
        if spec is None:
            raise _no_module(name, f"the package {name} has no __main__.py")
    return (spec and spec.origin) or name


def _no_module(name: str, found: str) -> LaunchError:
    file = name.removesuffix(".py").strip("./").replace("/", ".")
    meant = file if file != name and all(map(str.isidentifier, file.split("."))) else "package.module"
    return LaunchError(
        given=f"-m {name}",
        found=found,
        fix=f"start in the directory that contains the package: shoal run -n 2 -m {meant}",
    )


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function and its arguments, pickled by the process that called `shoal.launch`.

    `cells` has the source of code without a file, as in a notebook, by its name in tracebacks. `path`
    is that process's `sys.path`.
    """

    name: str
    pickled: bytes
    cells: Mapping[str, str]
    path: tuple[str, ...]
    safe_path: bool = False

    def run(self) -> bytes:
        """Call the function and return its result, pickled. Raises LaunchError if it can't be."""
        sys.path[:] = self.path
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

"""Names of a package that are imported when they are first used (PEP 562).

Its stub `__init__.pyi` imports each name from its module, for type checkers, and is read here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from shoal.util.call_errors import explain_calls


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], object]]:
    """Return the names of a package whose `__init__.py` is `file`, and its `__getattr__`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def find(name: str) -> object:
        if name not in modules:
            near = get_close_matches(name, modules, n=1)
            hint = f"; did you mean {package}.{near[0]}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module = import_module(modules[name])
        found = explain_calls(getattr(module, name), f"{package}.{name}")
        for each in (module, sys.modules[package]):  # pickle looks a function up in its own module
            setattr(each, name, found)
        return found

    return sorted(modules), find

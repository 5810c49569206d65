"""What the user names as `package.module:name` or `path/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.distributed import env_vars
from shoal.util.errors import LaunchError, ShoalError


def require_alone(command: str) -> None:
    """Raises LaunchError for one of several ranks: what is measured is one process."""
    here = env_vars.placement()
    if here.size > 1:
        raise LaunchError(
            given=f"{command}, on rank {here.rank} of {here.size}",
            found="it measures one process",
            fix=f"srun -n 1 {command}, or without a launcher",
        )


def import_named(text: str, what: str) -> Any:
    """The object that `text` names; `what` is what it should be, for errors.

    Modules are looked for from the current directory on, as `python -m` does. A file is imported under
    its own name, so that what stands under `if __name__ == "__main__":` does not run.
    Raises LaunchError where there is none, or importing it fails.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not place:
        raise LaunchError(
            given=text,
            found="no name after a colon" if not name.isidentifier() or not colon else "no module",
            fix=f"package.module:{what}, or path/train.py:{what}",
        )
    module = _imported(place, text)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise LaunchError(
            given=text,
            found=f"{place} has no {name}; it has {', '.join(names[:8]) or 'no functions'}",
            fix=f"name what returns the {what}",
        ) from None


def call_target(function: Callable[..., Any], text: str, *arguments: Any) -> Any:
    """What a function of the user's returns; it gets as many of the arguments as it takes.

    Raises LaunchError, with the place, where it raises.
    """
    try:
        wanted = [
            each
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty
            and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        wanted = []
    if len(wanted) > len(arguments):
        raise LaunchError(
            given=text,
            found=f"it wants {', '.join(each.name for each in wanted)}; it is given "
            + ("the world" if arguments else "nothing"),
            fix="a function around it that needs nothing",
        )
    try:
        return function(*arguments[: len(wanted)])
    except ShoalError:
        raise
    except Exception as error:
        raise target_error(text, error) from error


def target_error(given: str, error: Exception) -> LaunchError:
    """The user's own exception as an error that names its place, innermost line of the user's last."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip()
    # A worker's exception brings its traceback along, whose last line is the exception itself.
    line = text.splitlines()[-1] if text else ""
    told = line if line.startswith(type(error).__name__) else f"{type(error).__name__}: {line}"
    return LaunchError(given=given, found=f"it raises {told}{place}", fix="make it run alone first")


def _imported(place: str, text: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise LaunchError(
                given=text, found=f"there is no file {path.absolute()}", fix="give the path of a script"
            )
        return _loaded(path, text)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise LaunchError(
            given=text,
            found=str(error),
            fix=f"python -c 'import {place}' in this directory, or path/file.py:name",
        ) from None
    except Exception as error:
        raise target_error(text, error) from error


def _loaded(path: Path, text: str) -> ModuleType:
    """The file as a module that its own workers can find again."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LaunchError(
            given=text, found=f"{path} is no Python file", fix="give the path of a script"
        )
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise target_error(text, error) from error
    return module

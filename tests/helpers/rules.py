"""The rules of the house as functions of a directory; each yields one line per violation."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 70


def python_files(root: Path) -> list[Path]:
    """Every Python file below `root`, in a fixed order."""
    return sorted(root.rglob("*.py"))


@cache
def parsed(code: str) -> ast.Module:
    """The tree of a file, parsed once for all rules."""
    return ast.parse(code)


@cache
def nodes_of(code: str) -> Sequence[ast.AST]:
    """All nodes of a file, found once for all rules."""
    return list(ast.walk(parsed(code)))


def text_files(root: Path) -> Iterator[Path]:
    """Every text file of a checkout, but for what `.gitignore` names."""
    ignored = [".git", *_gitignored(root)]

    def kept(names: list[str]) -> list[str]:
        return sorted(n for n in names if not any(fnmatch(n, pattern) for pattern in ignored))

    for folder, folders, files in os.walk(root):
        folders[:] = kept(folders)
        for path in (Path(folder, name) for name in kept(files)):
            if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes():
                yield path


def _gitignored(root: Path) -> list[str]:
    listed = root / ".gitignore"
    return [line.strip("/") for line in listed.read_text().split()] if listed.exists() else []


def repeated_classes(package: Path) -> Iterator[str]:
    """Yield the names of classes that several modules define."""
    modules: dict[str, list[str]] = {}
    for path in python_files(package):
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(str(path.relative_to(package)))
    for name, places in sorted(modules.items()):
        if len(places) > 1:
            yield f"{name}: {', '.join(places)}"


VAGUE = {"read", "check", "look", "judge", "write"}


def vague_functions(package: Path) -> Iterator[str]:
    """Yield functions of modules whose names say nothing."""
    for path in python_files(package):
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in VAGUE:
                yield f"{path.relative_to(package)}:{node.lineno}: {node.name}"


def long_files(root: Path) -> Iterator[str]:
    """Files that do not fit in a head."""
    for path in python_files(root):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES:
            yield f"{path.relative_to(root)}: {lines} lines"


def long_functions(root: Path) -> Iterator[str]:
    """Yield functions whose code does not fit on a screen; their docstrings do not count."""
    for path in python_files(root):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"{path.relative_to(root)}:{node.lineno}: {node.name}, {lines} lines"


MAY_ASSIGN_WORLD = "distributed/world.py"


def assigned_worlds(package: Path) -> Iterator[str]:
    """Yield assignments to attributes of a World outside its own module."""
    for path in python_files(package):
        inside = path.relative_to(package)
        if str(inside) == MAY_ASSIGN_WORLD:
            continue
        for node in nodes_of(path.read_text()):
            match node:
                case ast.Attribute(
                    value=ast.Name(id="world") | ast.Attribute(attr="world" | "_world"),
                    ctx=ast.Store() | ast.Del(),
                ):
                    yield f"{inside}:{node.lineno}: assigns {ast.unparse(node)}"


MAY_WRITE_PICKLES = {"checkpoint/inspect/extract.py"}
"""Where a `.pt` is written because the user names one; nothing ever reads it back."""
MAY_PICKLE = "util/pickling.py"
"""Calls and what they return cross by it between processes of one run; files are only data to it."""
PICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAY_READ_ENVIRONMENT = ("distributed/env_vars.py",)
MAY_START_PYTHON = "util/python.py"
"""Its commands import nothing from the current directory; so does multiprocessing in `safe_path()`."""
MAY_FORK = ("launcher/launcher.py", "launcher/workers.py", "tools/report/reader.py")
MAY_READ_TIME = "util/clock.py"
MAY_PRINT = ("cli/", "launcher/", "distributed/init.py", "distributed/world.py")


def habits(package: Path) -> Iterator[str]:
    """What the library never does: asserts, pickles, prints, reads the environment anywhere."""
    for path in python_files(package):
        inside = path.relative_to(package)
        for node in nodes_of(path.read_text()):
            fault = _fault(node, inside)
            if fault is not None and isinstance(node, ast.stmt | ast.expr | ast.keyword):
                yield f"{inside}:{node.lineno}: {fault}"


def _fault(node: ast.AST, inside: Path) -> str | None:
    match node:
        case ast.Assert():
            return "assert; raise an error of shoal.util.errors"
        case ast.Import(names=names) if _roots(names) & PICKLERS and str(inside) != MAY_PICKLE:
            return "pickles; nothing is unpickled from files"
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLERS:
            return "pickles; nothing is unpickled from files"
        case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as called) if not (
            called == "save" and str(inside) in MAY_WRITE_PICKLES
        ):
            return "torch.load and torch.save pickle"
        case ast.ImportFrom(module="torch", names=names) if _roots(names) & {"load", "save"}:
            return "torch.load and torch.save pickle"
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
            return "allow_pickle; nothing is unpickled from files"
    if str(inside) != MAY_START_PYTHON and _uses(node, {"executable", "_base_executable"}):
        return f"sys.executable; only {MAY_START_PYTHON} has the commands that start Python"
    if str(inside) not in MAY_FORK and _uses(node, {"get_context", "ProcessPoolExecutor"}):
        return "processes of multiprocessing; only " + ", ".join(MAY_FORK) + " start them"
    if str(inside) not in MAY_READ_ENVIRONMENT and _touches_environment(node):
        return "the environment; only distributed/env_vars.py reads and writes it"
    if str(inside) != MAY_READ_TIME and _reads_time(node):
        return f"time; only {MAY_READ_TIME} reads a clock or sleeps"
    may_print = str(inside).startswith(MAY_PRINT)
    if not may_print and _prints(node):
        return "print; only " + ", ".join(MAY_PRINT) + " speak to people"
    return None


def _uses(node: ast.AST, names: set[str]) -> bool:
    """Whether a node is one of these names of a module, or imports one."""
    match node:
        case ast.Attribute(attr=attr):
            return attr in names
        case ast.ImportFrom(names=imported):
            return bool(_roots(imported) & names)
    return False


def _touches_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=attr):
            return attr in ENVIRONMENT
        case ast.ImportFrom(module="os", names=names):
            return bool(_roots(names) & ENVIRONMENT)
    return False


def _reads_time(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return "time" in _roots(names)
        case ast.ImportFrom(module="time"):
            return True
        case ast.Attribute(value=ast.Name(id="datetime" | "date"), attr="now" | "utcnow" | "today"):
            return True
    return False


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _roots(names: list[ast.alias]) -> set[str]:
    return {name.name.split(".")[0] for name in names}


LIBRARIES = {"torch", "torchmetrics"}
DOOR = "_torch"
"""The only package that may use private names of these libraries."""
PRIVATE_ATTRIBUTES = {
    *("_parameters", "_buffers", "_modules", "_apply", "_call_impl", "_compiled_call_impl"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_orig_mod"),
    *("_version", "_is_view", "_cdata", "_schema", "_overloadpacket", "_forward_cls"),
    *("_flatten", "_concatenate", "_device_types", "_get_sequence_number_for_group", "_get_backend"),
    *("_workers", "_worker_info", "_reductions", "_update_count", "_destroy"),
    *("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups"),
    *("_step_microbatches", "_rebuild_buckets", "_delay_all_reduce"),
    *("_execution_engine", "_unsharded_param"),
}
"""Of modules, tensors, nodes, operations, groups and other objects of the libraries."""

INHERITED = {
    *("_remaining_restarts", "_worker_group", "_op_executor", "_state_holder", "_this_node"),
    *("_heartbeat_lock", "_stop_heartbeats"),
}
"""Of torch elastic's classes that Shoal extends, where `self` is no object of Shoal's alone."""
KNOWN = PRIVATE_ATTRIBUTES | INHERITED


def private_names(package: Path) -> Iterator[str]:
    """Private names of torch and torchmetrics that are used outside the package `DOOR`."""
    for path in python_files(package):
        inside = path.relative_to(package)
        if inside.parts[0] == DOOR:
            continue
        nodes = nodes_of(path.read_text())
        imported, own = _imported_from_libraries(nodes), _set_by_shoal(nodes)
        for node in nodes:
            for name in _private_uses(node, imported, own):
                yield f"{inside}:{getattr(node, 'lineno', 0)}: {name}; use or add a function of _torch"


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """The private attributes that are accessed on other objects than `self`, or named by getattr."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if _is_private(name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "required"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if _is_private(name):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imported_from_libraries(nodes: Sequence[ast.AST]) -> set[str]:
    """The names in a module that stand for a library, or for something imported from one."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                roots = ((each, each.name.split(".")[0]) for each in names)
                found |= {each.asname or root for each, root in roots if root in LIBRARIES}
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LIBRARIES:
                found |= {each.asname or each.name for each in node.names}
    return found


def _private_uses(node: ast.AST, imported: Collection[str], own: Collection[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            paths = [each.name for each in names]
        case ast.ImportFrom(module=str(module), names=names):
            paths = [f"{module}.{each.name}" for each in names]
        case ast.Constant(value=str(text)) if text in KNOWN:
            yield text
            return
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in own:
            return
        case ast.Attribute(attr=name) if name in KNOWN or name.startswith("_saved_"):
            yield name
            return
        case ast.Attribute(attr=name) if _is_private(name):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(node)
            return
        case _:
            return
    for path in paths:
        root_name, *parts = path.split(".")
        if root_name in LIBRARIES and any(_is_private(part) for part in parts):
            yield path


def _set_by_shoal(nodes: Sequence[ast.AST]) -> set[str]:
    """The attributes that the classes of a module give their own objects."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Assign(targets=targets):
                pass
            case ast.AnnAssign(target=target):
                targets = [target]
            case _:
                continue
        for stored in (each for one in targets for each in ast.walk(one)):
            match stored:
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    found.add(name)
    return found - INHERITED


# Spelled so that the patterns do not match themselves.
LEFTOVERS = (
    re.compile(r"(?<![\w.~*-])/(?:home|root|work)/"),
    re.compile(r"\b(?:TO[D]O|FIX[M]E|X{3})\b"),
)


def leftovers(root: Path) -> Iterator[str]:
    """Paths of somebody's machine, and notes to oneself."""
    for path in text_files(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern in LEFTOVERS:
                for found in pattern.finditer(line):
                    yield f"{path.relative_to(root)}:{number}: {found.group()}"


def targets(makefile: str) -> set[str]:
    """The targets that a Makefile defines."""
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def unknown_targets(document: str, known: Collection[str]) -> Iterator[str]:
    """`make X` in code of a document where the Makefile has no X."""
    for code in re.findall(r"```.*?```|`[^`\n]+`", document, re.DOTALL):
        for command in re.findall(r"\bmake((?: +\w[\w./=-]*)+)", code):
            for name in command.split():
                if "=" not in name and name not in known:
                    yield f"make {name}"


def missing_paths(document: str, root: Path) -> Iterator[str]:
    """Paths of the repository, in backticks or as link targets, that are not there."""
    ignored = _gitignored(root)
    folders = "|".join(
        re.escape(path.name)
        for path in sorted(root.iterdir())
        if path.is_dir() and path.name not in ignored
    )
    inside = rf"(?:(?:{folders})/|(?=[\w.-]+\.(?:md|toml|txt|yaml)$))[\w./-]*"
    quoted = [found for found in re.findall(r"`([^`\n]+)`", document) if re.fullmatch(inside, found)]
    linked = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", document)
    for path in [*quoted, *linked]:
        if not (root / path).exists():
            yield path

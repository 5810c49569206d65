"""Small faults of Python code: an operator, a constant, a condition or a deleted statement.

A fault is a value that can be kept in a file and planted in a source that has changed since.
`plant_faults.py` plants some at random and runs the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from random import Random

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
}
NOT_RUN = {"annotation", "returns", "decorator_list"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An edit of one place, which is found by the text of its line if the file has changed since."""

    path: str
    line: int
    text: str
    nth: int
    """Of the lines with this text, the number of this one."""
    column: int
    """In the line without its indentation."""
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"{self.path}:{self.line}: {self.kind}: `{before}` -> `{after}`"


def _run_code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without messages, annotations, and lines that never run in a test."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NOT_RUN and not _passed_over(child):
                yield from _run_code(child)


def _passed_over(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.If(test=test):
            return bool({"TYPE_CHECKING", "__name__"} & set(re.findall(r"\w+", ast.unparse(test))))
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Expr(value=ast.Call(func=called)):
            return ast.unparse(called).startswith(("logging.", "logger.", "warnings."))
    return False


def _edits(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST | None, str, str]]:
    """Yield kind, node, the node after the operator if there is one, and text before and after."""
    match node:
        case (
            ast.Compare(left=left, ops=[op], comparators=[right])
            | ast.BinOp(left=left, op=op, right=right)
            | ast.BoolOp(op=op, values=[left, right, *_])
        ):
            sides = (left, right)
            text = any(isinstance(s, ast.JoinedStr) or _constant(s, str) for s in sides)
            if type(op) in OPERATORS and not (isinstance(node, ast.BinOp) and text):
                yield "operator", left, right, *OPERATORS[type(op)]
        case ast.Constant(value=bool(value)):
            yield "constant", node, None, "", str(not value)
        case ast.Constant(value=int(number) | float(number)):
            yield "constant", node, None, "", repr(number + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition", test, None, "", "not ({})"
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.AugAssign()
            | ast.Raise()
        ):
            yield "statement", node, None, "", "pass"
        case ast.Return(value=ast.AST() as value) if not _constant(value, type(None)):
            yield "statement", node, None, "", "return None"


def _constant(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def find_faults(path: str, source: str) -> list[Fault]:
    """Return all faults that can be planted in a file."""
    data, lines = source.encode(), source.splitlines()
    starts = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]

    def place(node: ast.AST, end: str = "") -> int:
        return int(starts[getattr(node, f"{end}lineno") - 1] + getattr(node, f"{end}col_offset"))

    found = []
    for node in _run_code(ast.parse(source)):
        for kind, first, second, old, new in _edits(node):
            begin, end = place(first), place(first, "end_")
            if second is not None:
                begin, end = end, place(second)
                between = data[begin:end].decode()
                if "#" in between or old not in between:
                    continue
                begin += between.index(old)
                end = begin + len(old)
            line = data.count(b"\n", 0, begin)
            before, text = data[begin:end].decode(), lines[line].strip()
            head = data[starts[line] : begin].decode()
            found.append(
                Fault(
                    path=path,
                    line=line + 1,
                    text=text,
                    nth=sum(other.strip() == text for other in lines[:line]),
                    column=len(head) - (len(lines[line]) - len(lines[line].lstrip())),
                    kind=kind,
                    before=before,
                    after=new.format(before) if kind == "condition" else new,
                )
            )
    return found


def plant_fault(source: str, fault: Fault) -> str | None:
    """Return the source with the fault; None if it has no such place, or would not compile."""
    begin = _find_place(source, fault)
    if begin is None:
        return None
    planted = source[:begin] + fault.after + source[begin + len(fault.before) :]
    try:
        changed = ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
        compile(planted, fault.path, "exec")
    except SyntaxError:
        return None
    return planted if changed else None


def _find_place(source: str, fault: Fault) -> int | None:
    lines = source.splitlines(keepends=True)
    places = [index for index, line in enumerate(lines) if line.strip() == fault.text]
    if len(places) <= fault.nth:
        return None
    index = places[fault.nth]
    indent = len(lines[index]) - len(lines[index].lstrip())
    begin = sum(map(len, lines[:index])) + indent + fault.column
    return begin if source.startswith(fault.before, begin) else None


def mark_places(source: str, marks: Mapping[str, Fault]) -> str:
    """Insert each mark, a statement, before the statement that has the fault.

    Faults outside functions get no mark: imports run them, for all tests that follow.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    inserted = []
    for mark, fault in marks.items():
        begin = _find_place(source, fault)
        line = None if begin is None else _statement_line(tree, lines, source.count("\n", 0, begin) + 1)
        if line is not None:
            inserted.append((line, mark))
    for line, mark in sorted(inserted, reverse=True):
        text = lines[line - 1]
        lines.insert(line - 1, f"{text[: len(text) - len(text.lstrip())]}{mark}\n")
    return "".join(lines)


def _statement_line(tree: ast.AST, lines: Sequence[str], line: int) -> int | None:
    """The line of the innermost statement of a function on a line, if it begins with a statement."""
    found = None
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (inner for part in function.body for inner in ast.walk(part)):
                if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
                    decorators = getattr(node, "decorator_list", [])
                    first = min([node.lineno, *(part.lineno for part in decorators)])
                    alone = not lines[first - 1][: node.col_offset - bool(decorators)].strip()
                    if alone and not lines[first - 1].lstrip().startswith("elif"):
                        found = max(first, found or first)
    return found


def choose_faults(sources: Mapping[str, Mapping[str, str]], number: int, seed: int) -> list[Fault]:
    """Choose faults of packages in turn, and in a package of each kind in turn."""
    draws = [_draw_faults(sources[name], Random(f"{seed} {name}")) for name in sorted(sources)]
    return list(islice(_in_turn(draws), number))


def _draw_faults(files: Mapping[str, str], random: Random) -> Iterator[Fault]:
    kinds: dict[str, list[Fault]] = {}
    for path in sorted(files):
        for fault in find_faults(path, files[path]):
            kinds.setdefault(fault.kind, []).append(fault)
    order = sorted(kinds)
    random.shuffle(order)
    for faults in kinds.values():
        random.shuffle(faults)
    for fault in _in_turn([iter(kinds[kind]) for kind in order]):
        if plant_fault(files[fault.path], fault) is not None:
            yield fault


def _in_turn(draws: Sequence[Iterator[Fault]]) -> Iterator[Fault]:
    """Yield one fault of each iterator, and again, until all have ended."""
    waiting = list(draws)
    while waiting:
        draw = waiting.pop(0)
        with suppress(StopIteration):
            yield next(draw)
            waiting.append(draw)

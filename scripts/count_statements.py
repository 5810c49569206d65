"""Count the statements and syntax nodes of the source by package, and the lines of the tests.

`python scripts/count_statements.py [CHECKOUT]`. Docstrings count as neither. Lines of tests are all
lines of the Python files of tests/ that git knows, with helpers.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path


def count_code(text: str) -> Counter[str]:
    """Return the numbers of statements and of nodes in a source, without docstrings."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    found = Counter[str]()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) not in docstrings:
            found["nodes"] += 1
            found["statements"] += isinstance(node, ast.stmt)
            waiting += ast.iter_child_nodes(node)
    return found


def main() -> None:
    """Print a table of the packages, and the lines of the tests."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    source = root / "src" / "shoal"
    counted: dict[str, Counter[str]] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts[:-1]
        package = "/".join(parts[: 2 if parts[:1] == ("tools",) else 1]) or "shoal"
        counted.setdefault(package, Counter()).update(count_code(path.read_text()))
    counted["all"] = sum(counted.values(), Counter())
    print(f"{'package':16}{'statements':>12}{'nodes':>10}")
    for name, counts in counted.items():
        print(f"{name:16}{counts['statements']:12,}{counts['nodes']:10,}")
    listed = ["git", "-C", str(root), "ls-files", "tests"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    tests = [(root / name).read_text() for name in files if name.endswith(".py")]
    print(f"lines of tests: {sum(len(text.splitlines()) for text in tests):,}")


if __name__ == "__main__":
    main()

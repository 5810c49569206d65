"""Lines of a script by their calls, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

GLOBAL_DRAWS = {
    "numpy": ("np.random.", "numpy.random."),
    "python": ("random.",),
    "torch": ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial"),
}


def find_calls(source: str, names: Collection[str]) -> list[int]:
    """Return the lines that call a function with one of these names, with or without a module."""
    found = []
    for node in _calls(source):
        called = ast.unparse(node.func)
        if called in names or called.split(".")[-1] in names:
            found.append(node.lineno)
    return sorted(found)


def find_global_draw(source: str, generator: str, after: int) -> int | None:
    """Return the first line from `after` that draws from a global generator, or None."""
    for node in sorted(_calls(source), key=lambda call: call.lineno):
        called = ast.unparse(node.func)
        explicit = any(word.arg == "generator" for word in node.keywords)
        if node.lineno >= after and not explicit and called.startswith(GLOBAL_DRAWS[generator]):
            return node.lineno
    return None


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))

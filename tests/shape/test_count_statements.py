from __future__ import annotations

from count_statements import count_code


def test_docstrings_are_neither_statements_nor_nodes() -> None:
    bare = count_code("x = 1\nasync def f():\n    return g(x)\n")
    assert bare["statements"] == 3
    described = '"""A."""\nx = 1\nasync def f():\n    """B."""\n    return g(x)\n'
    assert count_code(described) == bare
    assert count_code("x = 1\n'a text that is no docstring'\n")["statements"] == 2

"""The Python API: its pages are up to date, and the docstrings describe every parameter."""

from __future__ import annotations

import inspect
import re

import write_reference as reference

import shoal


def entry(text: str, name: str) -> bool:
    """Return whether a docstring has a line for an argument or attribute."""
    return re.search(rf"^    \*{{0,2}}{re.escape(name)}( \(.*\))?: \S", text, re.MULTILINE) is not None


def test_the_pages_are_what_the_script_writes() -> None:
    outdated = [
        path.name
        for path, text in reference.texts().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert outdated == [], "run `python scripts/write_reference.py`"


def test_every_public_name_is_on_one_page() -> None:
    listed = [name for page in reference.PAGES for name in page.names]
    assert sorted(listed) == sorted(shoal.__all__)


def test_a_docstring_describes_each_parameter_and_the_result() -> None:
    for name, function in reference.callables():
        text = inspect.getdoc(function) or ""
        signature = inspect.signature(function)
        missing = [
            parameter
            for parameter in signature.parameters
            if parameter not in {"self", "cls"} and not entry(text, parameter)
        ]
        nothing = (None, "None", inspect.Signature.empty)
        if not inspect.isclass(function) and signature.return_annotation not in nothing:
            missing += [] if re.search(r"^(Returns|Yields):$", text, re.MULTILINE) else ["Returns"]
        assert missing == [], name


def test_a_public_name_has_an_example_or_says_when_it_is_raised() -> None:
    for name in sorted(set(shoal.__all__) - {"__version__"}):
        public = getattr(shoal, name)
        if inspect.isclass(public) and issubclass(public, shoal.ShoalError):
            assert len((inspect.getdoc(public) or "").split()) > 5, name
        else:
            assert re.search(r"^ *>>> ", inspect.getdoc(public) or "", re.MULTILINE), name

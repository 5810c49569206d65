"""The pages of the Python API are up to date."""

from __future__ import annotations

import write_reference as reference

import shoal


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

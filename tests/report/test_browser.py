"""The page of `shoal report` in a real browser: chromium, headless."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.browser import Browser, browser, program
from helpers.synthetic_runs import BEGAN, Plant, simulate, write
from shoal.cli.main import app

pytestmark = [
    pytest.mark.processes,
    pytest.mark.system,
    pytest.mark.skipif(program() is None, reason="no chromium here"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("report") / "run"
    plants = [Plant(part="forward", ranks=[2], seconds=5e-3, since=200)]
    start = {
        "host": "a-very-long-name-of-a-host-that-nobody-would-type.cluster.example.org",
        "config": {"<script>alert(1)</script>": "x" * 400, "rate": 0.1},
    }
    write(run, simulate(4, 500, plants), start=start)
    write(run, simulate(4, 500), append=True, began=BEGAN + 60, first=400, start=start)
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    return run / "report" / "index.html"


def test_it_is_legible_at_any_width_and_in_the_dark(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as chromium:
        for width in (1280, 390):
            for dark in (False, True):
                seen = chromium.open(page, width=width, dark=dark)
                assert seen.errors == []
                assert seen.requests == []
                assert not seen.scrolls, f"{seen.width} at {width}"
                assert "efficient: " in seen.text
                light, ink = brightness(chromium, "background-color"), brightness(chromium, "color")
                assert (light < 64 and ink > 192) if dark else (light > 192 and ink < 64)
                figures = chromium.evaluate(VISIBLE)
                assert len(figures) == 4
                assert min(figures) > 0.8 * (min(width, 992) - 32)


def test_tables_can_be_reached_and_scrolled_by_keyboard(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as chromium:
        chromium.open(page, width=390)
        assert chromium.evaluate(REACHABLE) is True


def brightness(chromium: Browser, name: str) -> float:
    red, green, blue = chromium.evaluate(
        f"getComputedStyle(document.body).getPropertyValue('{name}').match(/\\d+/g).map(Number)"
    )[:3]
    return float(red + green + blue) / 3


VISIBLE = """
[...document.querySelectorAll('.drawing svg')].map(svg => svg.getBoundingClientRect().width)
    .filter(width => width > 0)
"""
REACHABLE = """
[...document.querySelectorAll('.scroll')].every(each => each.tabIndex === 0
    && document.getElementById(each.getAttribute('aria-labelledby')).textContent.trim() !== '')
"""

"""The pages of studies in a real browser: nothing asked for, nothing complained of, nothing cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.browser import browser, program
from shoal.tools.bench.scaling import study as scaling
from shoal.tools.bench.scaling.aggregate import Repeat, summarize
from shoal.tools.bench.scaling.configurations import StudyOptions
from shoal.tools.bench.scaling.directory import Study, begin_study

pytestmark = [pytest.mark.processes, pytest.mark.system]

CUT_OFF = """[...document.querySelectorAll('.drawing svg text')].filter(text => {
    const own = text.getBoundingClientRect(), all = text.closest('svg').getBoundingClientRect();
    return own.width && (own.right > all.right + 1 || own.left < all.left - 1);
}).map(text => text.textContent)"""
"""What of a drawing's words is outside of it."""
WHITE = "rgb(255, 255, 255)"
HOSTILE = "<script>alert(1)</script> $x$ </svg>"


def made_up(path: Path, *, faster: float = 1.0) -> Study:
    """Up to 16 processes, over two backends, with a straggler; the greatest one fails."""
    options = StudyOptions(
        model="gpt",
        processes=(1, 2, 4, 8, 16),
        scalings=("strong", "weak"),
        backends=("nccl", "gloo"),
        batch=64,
        rounds=2,
    )
    study = begin_study(path, options)
    for number, each in study.missing():
        repeat = Repeat(key=each.key, round=number, began=0.0, seconds=9.0, measured=None)
        if each.processes == 16 and each.backend == "gloo":
            study.keep(each, replace(repeat, reason=HOSTILE))
            continue
        own = each.batch / each.processes / faster * (1 + 0.05 * number)
        alone = each.processes == 1
        slow = np.zeros((each.processes, 3))
        slow[-1] = 0.0 if alone else own / 5000
        exposed = 0.0 if alone else 0.002 * each.processes * (1 + (each.backend == "gloo"))
        parts = {
            "wait": np.full_like(slow, 0.001),
            "forward": own / 3000 + slow,
            "backward": np.full_like(slow, own / 1500),
            "communication": exposed + slow.max() - slow,
            "update": np.full_like(slow, 0.002),
        }
        walls = np.sum(list(parts.values()), axis=0) + 0.001
        hosts = tuple(f"node{rank // 4}" for rank in range(each.processes))
        devices = tuple(f"cuda:{rank % 4}" for rank in range(each.processes))
        found = summarize(walls, parts, samples=[each.batch] * 3, hosts=hosts, loss=1.0)
        study.keep(each, replace(repeat, measured=found, hosts=hosts, devices=devices))
    return study


@pytest.mark.skipif(program() is None, reason="needs chromium")
def test_the_pages_of_studies_are_whole_in_every_window(tmp_path: Path) -> None:
    quad, octo = made_up(tmp_path / "quad"), made_up(tmp_path / "octo", faster=2.0)
    scaling.show_study(quad)
    scaling.compare_studies(quad.path, octo.path, tmp_path / "both")
    with browser(tmp_path / "profile") as window:
        for page in (tmp_path / "quad" / "index.html", tmp_path / "both" / "index.html"):
            for width in (1280, 390):
                for dark in (False, True):
                    seen = window.open(page, width=width, dark=dark)
                    assert (seen.errors, seen.requests, seen.scrolls) == ([], [], False), page
                    assert window.evaluate(CUT_OFF) == []
            window.call("Emulation.setEmulatedMedia", media="print")
            assert window.evaluate("document.documentElement.scrollWidth") == 390
            assert window.evaluate("getComputedStyle(document.body).backgroundColor") == WHITE
            window.call("Emulation.setEmulatedMedia", media="")
            drawings = window.evaluate("[...document.querySelectorAll('svg')].length")
            assert drawings >= 3
        assert "octo gives" in seen.text
        told = window.open(tmp_path / "quad" / "index.html").text
        assert "strong, nccl: 16 processes give" in told
        assert "waiting for rank 15 on node3 (forward)" in told
        assert HOSTILE in told

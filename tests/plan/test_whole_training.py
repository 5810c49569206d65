from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from helpers.cli import shoal
from shoal.tools.plan.training.whole_training import (
    Training,
    estimate_training,
    parse_training,
    simulate_training,
)
from shoal.util.errors import ShoalError

TRAINING = Training(steps=100_000, mtbf=50_000, save=20, restart=300, price=2)


def by_steps(training: Training, step: float, steps: int, interval: float, gaps: list[float]) -> float:
    """The seconds of a training, from a simulation of each step, save and restart."""
    failures = list(itertools.accumulate(gaps))
    now = saved_at = 0.0
    done = saved = 0
    while True:
        failed = next((each for each in failures if each > now), math.inf)
        save = done + 1 == steps or (done + 1 - saved) * step >= interval
        end = now + step + (training.save if save else 0)
        if failed < end:
            done, now = saved, failed
            while (failed := next((x for x in failures if x > now), math.inf)) < now + training.restart:
                now = failed
            now += training.restart
            continue
        now, done = end, done + 1
        if save:
            saved, saved_at = done, now
        if done == steps:
            return saved_at


def test_a_simulation_is_that_of_each_step() -> None:
    training = Training(steps=20, save=3.5, restart=7.25)
    histories = [[], [95.0], [3.0, 1.0, 40.0, 9.9, 70.5], [30.1] * 7, [1.0] * 30]
    for gaps, interval in itertools.product(histories, (1.0, 11.0, 12.0, 35.0, 500.0, math.inf)):
        found = simulate_training(training, 4.0, 20, interval, iter(gaps))
        expected = by_steps(training, 4.0, 20, interval, gaps)
        assert found.total == pytest.approx(expected), (gaps, interval)
        assert found.steps == 80


def test_the_mean_is_that_of_daly() -> None:
    devices = 16_384
    found = estimate_training(TRAINING, 5.0, devices, 1)
    mean, tau = 3600 * TRAINING.mtbf / devices, found.interval
    # Daly 2006, equation 13.
    segments = 500_000 / tau
    factor = math.exp(TRAINING.restart / mean) * math.expm1((tau + TRAINING.save) / mean)
    measured = sum(each.total for each in found.simulated) / len(found.simulated)
    assert measured == pytest.approx(mean * factor * segments, rel=2e-3)


def test_without_failures() -> None:
    found = estimate_training(Training(tokens=1e6, queue=2, price=2), 5.0, 8, 1000)
    assert found.median.total == 2 * 3600 + 1000 * 5
    assert found.device_hours == pytest.approx(8 * 5000 / 3600)
    assert found.price == pytest.approx(2 * found.device_hours)


def test_wrong_values() -> None:
    for text, found in (
        ("", "'' is not one NAME=NUMBER"),
        ("steps=0", "'steps=0' is not"),
        ("steps=nan", "'steps=nan' is not"),
        ("steps=1e300", "at most 1e+18"),
        ("steps=5,steps=6", "'steps=6' is not"),
        ("weeks=3", "'weeks=3' is not"),
        ("mtbf=3,save=1,restart=1", "either steps or tokens"),
        ("steps=5,tokens=6", "either steps or tokens"),
        ("steps=5,mtbf=6,save=1", "mtbf without restart"),
        ("steps=5,trace=a.csv,save=1,restart=2", "trace without start"),
        ("steps=5,spare=2", "spare must be an integer, and needs trace"),
    ):
        with pytest.raises(ShoalError) as caught:
            parse_training(text)
        assert found in caught.value.found, text


def test_a_training_that_does_not_end() -> None:
    training = Training(steps=10**6, mtbf=0.05, save=500, restart=3000)
    with pytest.raises(ShoalError, match="has not ended"):
        estimate_training(training, 5.0, 64, 1)


def test_the_command(tmp_path: Path) -> None:
    words = ["plan", "--model", "llama-7b", "-n", "64", "--training"]
    given = "steps=100000,mtbf=500,save=20,restart=300,price=2"
    done = shoal(*words, given, "--html", str(tmp_path))
    assert "Save every" in done.stdout
    assert "Whole training" in (tmp_path / "index.html").read_text()
    values = json.loads(shoal(*words, given, "--json").stdout)
    low, high = values["best"][0]["training"]["seconds_80_percent"]
    assert 100_000 * values["best"][0]["step_seconds"] < low < high
    refused = shoal("plan", "--model", "dense:", "--training", "tokens=1e9")
    assert "tokens in a sample" in str(refused.exception)
    refused = shoal("plan", "--model", "llama-7b", "--check", "runs/a", "--training", given)
    assert "--training with --check" in str(refused.exception)

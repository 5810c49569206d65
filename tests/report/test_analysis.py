from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.synthetic_runs import BEGAN, Plant, lines, simulate, write, write_two_steps
from shoal.tools.report import SHOWN, BottleneckReport, History, Reader, find_bottleneck, profile
from shoal.tools.report import reader as reading
from shoal.util.errors import CheckpointError
from shoal.util.units import duration


def load(directory: Path) -> History:
    reader = Reader(directory)
    reader.poll()
    return reader.history


def verdict(
    directory: Path, *plants: Plant, ranks: int = 3, steps: int = 500, **more: Any
) -> BottleneckReport:
    return find_bottleneck(load(write(directory, simulate(ranks, steps, plants, **more))))


def named(found: BottleneckReport) -> set[tuple[int, str]]:
    return {(each.rank, each.part) for each in found.stragglers}


WAIT = Plant(part="wait", ranks=[1], seconds=5e-3)
SLOW = Plant(part="forward", ranks=[2], seconds=8e-3)


def test_parts_add_up_to_the_wall_time(tmp_path: Path) -> None:
    found = profile(load(write(tmp_path, simulate(3, 200, [WAIT]))).attempts[0], windows=5)
    assert found is not None
    assert found.mean.shape == (len(SHOWN), 3, 5)
    assert found.mean.sum(axis=0) == pytest.approx(found.wall, rel=1e-4)


def test_the_least_anyone_waits_is_communication_and_the_rest_waiting(tmp_path: Path) -> None:
    found = profile(load(write(tmp_path, simulate(3, 200, [SLOW], noise=0.0))).attempts[0])
    assert found is not None
    for rank, waited in ((0, 8e-3), (1, 8e-3), (2, 0.0)):
        of = found.of_rank(rank)
        assert of["communication"] == pytest.approx(1e-3, abs=5e-6)
        assert of["waiting"] == pytest.approx(waited, abs=5e-6)


def test_nothing_is_blamed_where_nothing_is_wrong(tmp_path: Path) -> None:
    found = verdict(tmp_path, noise=0.1)
    assert found.stragglers == []
    assert found.findings == []


def test_two_causes_at_once_are_both_named(tmp_path: Path) -> None:
    found = verdict(tmp_path, WAIT, SLOW)
    assert named(found) == {(1, "wait"), (2, "forward")}
    [forward] = [each for each in found.stragglers if each.part == "forward"]
    assert forward.excess == pytest.approx(8e-3, rel=0.1)
    assert forward.usual == pytest.approx(5e-3, rel=0.1)
    assert "a slow forward (rank 2 on node1)" in found.sentence
    assert "rank 1 on node0 in data" in found.sentence, "though another is slower still"


def test_each_is_blamed_for_the_steps_in_which_it_is_the_slower(tmp_path: Path) -> None:
    """Rank 1 loses 10 ms in every other step, rank 2 4 ms in each: half of the steps are of each."""
    often = Plant(part="wait", ranks=[1], seconds=10e-3, every=2)
    steady = Plant(part="forward", ranks=[2], seconds=4e-3)
    found = verdict(tmp_path, often, steady, noise=0.02)
    assert named(found) == {(1, "wait"), (2, "forward")}
    cost = {each.part: each.cost for each in found.stragglers}
    assert cost["wait"] == pytest.approx(5e-3, rel=0.15)
    assert cost["forward"] == pytest.approx(2e-3, rel=0.15)


def test_between_two_meetings_the_slowest_is_who_comes_last_to_the_next(tmp_path: Path) -> None:
    """As under LocalSGD, whose ranks wait for each other now and then."""
    found = verdict(tmp_path, SLOW, meet=8, steps=800)
    [straggler] = found.stragglers
    assert (straggler.rank, straggler.part) == (2, "forward")
    assert straggler.cost == pytest.approx(8e-3, rel=0.1)


def test_since_when_and_until_when(tmp_path: Path) -> None:
    plant = Plant(part="backward", ranks=[0], seconds=6e-3, since=211, until=400)
    [found] = verdict(tmp_path, plant, steps=800).stragglers
    assert (found.rank, found.part) == (0, "backward")
    assert abs(found.since - 211) <= 2
    assert found.until is not None
    assert abs(found.until - 400) <= 16


def test_one_long_step_is_no_straggler(tmp_path: Path) -> None:
    plant = Plant(part="wait", ranks=[1], seconds=0.5, since=300, until=300)
    assert verdict(tmp_path, plant).stragglers == []


def test_a_stall_now_and_then_is(tmp_path: Path) -> None:
    plant = Plant(part="wait", ranks=[1], seconds=0.2, every=25)
    found = verdict(tmp_path, plant)
    assert named(found) == {(1, "wait")}
    assert "data (rank 1 on node0)" in found.sentence


def test_steps_that_warm_up_are_told_apart(tmp_path: Path) -> None:
    plant = Plant(part="forward", ranks=[2], seconds=3.0, until=5)
    found = verdict(tmp_path, plant, warm=5)
    assert found.stragglers == []
    assert found.judged[0].warm_up == 5
    assert found.judged[0].warm_up_seconds > 15


def test_a_narrow_link_is_nobodys_fault(tmp_path: Path) -> None:
    found = verdict(tmp_path, network=30e-3)
    assert found.stragglers == []
    [finding] = found.findings
    assert "over the network between node0 and node1" in finding.text
    assert "shoal doctor" in finding.advice


def test_slow_saves(tmp_path: Path) -> None:
    for ranks, guilty in (([1], {(1, "checkpoint")}), ([0, 1, 2], set())):
        found = verdict(
            tmp_path, Plant(part="checkpoint", ranks=ranks, seconds=0.5, every=50), steps=2000
        )
        assert named(found) == guilty, ranks
        assert found.shares["checkpoint"] == pytest.approx(0.36, abs=0.05), ranks
        assert any("YoungDaly" in each.advice for each in found.findings), ranks


def test_a_world_of_one_has_no_stragglers(tmp_path: Path) -> None:
    found = verdict(tmp_path, Plant(part="wait", ranks=[0], seconds=20e-3), ranks=1)
    assert found.stragglers == []
    assert found.shares["wait"] > 0.5
    assert any(each.text.startswith("Ranks wait for data") for each in found.findings)
    assert not any("all ranks" in each.text for each in found.findings)


@pytest.mark.full
@given(st.integers(0, 2**16), st.sampled_from([2, 3, 4, 8, 16]), st.sampled_from([0.02, 0.1, 0.3]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_noise_is_not_blamed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, noise: float
) -> None:
    found = verdict(tmp_path_factory.mktemp("run"), ranks=ranks, seed=seed, noise=noise, steps=300)
    assert found.stragglers == []


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", simulate(2, 1200))
    grown = tmp_path / "grown" / "events"
    grown.mkdir(parents=True)
    reader, cut = None, 997
    contents = {path.name: path.read_bytes() for path in whole.glob("events/*")}
    for end in range(cut, max(map(len, contents.values())) + cut, cut * 29):
        for name, content in contents.items():
            (grown / name).write_bytes(content[:end])
        reader = reader or Reader(grown.parent)
        reader.poll()
    assert reader is not None
    for name, content in contents.items():
        (grown / name).write_bytes(content)
    assert reader.poll()
    assert not reader.poll()
    again = load(whole)
    for rank in (0, 1):
        both = [history.attempts[0].ticks(rank) for history in (reader.history, again)]
        assert len(both[0]) == 1200
        assert np.array_equal(both[0], both[1])
    assert reader.history.skipped == 0


def test_a_run_that_was_begun_anew_in_its_place_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 1200))
    reader = Reader(tmp_path)
    reader.poll()
    write(tmp_path, simulate(2, 100), began=BEGAN + 1000)
    reader.poll()
    assert [attempt.last for attempt in reader.history.attempts] == [100]


@pytest.mark.full
def test_several_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, simulate(3, 600, [SLOW]))
    alone = reading.read_history(tmp_path)
    monkeypatch.setattr(reading, "LARGE", 0)
    together = reading.read_history(tmp_path)
    assert together.files == alone.files == 3
    assert find_bottleneck(together).sentence == find_bottleneck(alone).sentence
    assert np.array_equal(together.attempts[0].ticks(2), alone.attempts[0].ticks(2))


def test_a_line_cut_in_two_costs_itself_alone(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 1200))
    path = tmp_path / "events" / "rank-1.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\n" + content[content.rindex(b"\n", 0, -1) + 1 :])
    history = load(tmp_path)
    assert history.skipped == 1
    assert len(history.attempts[0].ticks(1)) < 1200
    assert find_bottleneck(history).efficient is not None


def test_what_a_killed_attempt_did_again_counts_in_both(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 300))
    write(tmp_path, simulate(2, 300), append=True, began=BEGAN + 100, first=200)
    history = load(tmp_path)
    assert [(each.first, each.last) for each in history.attempts] == [(1, 300), (201, 500)]
    assert sum(one.profile.steps for one in find_bottleneck(history).judged) > 580


def test_ranks_that_left_no_file_are_named(tmp_path: Path) -> None:
    write(tmp_path, simulate(4, 300, [WAIT]))
    (tmp_path / "events" / "rank-3.jsonl").unlink()
    found = find_bottleneck(load(tmp_path))
    assert named(found) == {(1, "wait")}
    assert any(each.text == "Nothing was recorded by rank 3." for each in found.findings)


def test_a_rank_that_recorded_little_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, simulate(3, 1400, [WAIT]))
    path = tmp_path / "events" / "rank-2.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    found = find_bottleneck(load(tmp_path))
    assert found.judged[0].profile.ranks == (0, 1)
    assert any("rank 2" in each.text for each in found.findings)


def test_several_steps_of_one_batch_are_one_tick(tmp_path: Path) -> None:
    parts = simulate(2, 100)
    second = {part: values * (part in ("forward", "backward")) for part, values in parts.items()}
    second["wall"] = parts["wall"] * 0
    folder = tmp_path / "events"
    folder.mkdir()
    for rank in (0, 1):
        [start, block] = lines(parts, rank, name="critic")
        other = json.loads(list(lines(second, rank, name="generator"))[1])
        other |= {name: json.loads(block)[name] for name in ("t", "at")}
        (folder / f"rank-{rank}.jsonl").write_text("\n".join([start, block, json.dumps(other)]) + "\n")
    rows = load(tmp_path).attempts[0].ticks(0)
    assert len(rows) == 100
    assert rows["forward"] == pytest.approx(2 * parts["forward"][0], abs=4e-6)
    assert rows["wait"] == pytest.approx(parts["wait"][0], abs=2e-6)


HOSTILE = [
    b"\x00\xff\xfe" * 100,
    b"[" * 100_000,
    b'{"event": "steps"}',
    b'{"event": 3, "t": {}}',
    b'{"event": "start", "t": "x", "began": NaN}',
    b'{"event": "steps", "t":1, "name":"s", "step": [1, 2], "wall": [1], "load": [0, 0], "at": [0, 0]}',
    b'{"event": "steps", "t":1, "name":"s", "step": [[1]], "wall": [[1]], "load": [[0]], "at": [[0]]}',
    b'{"event": "steps", "t": 1, "name": "step", "step": [1e400], "wall": [1], "load": [0], "at": [0]}',
    b'{"event": "steps", "t": 1, "name": [], "step": [1], "wall": [1], "load": [0], "at": [0]}',
    b'{"event": "usage", "t": 1, "rss": "much"}',
    b'{"event": "collectives", "t": 1, "kinds": [{"kind": "x"}]}',
    b'{"event": "collectives", "t": 1, "kinds": 7}',
    b'"event"',
    b"9" * 5000,
]


def test_what_no_run_has_written_is_passed_over(tmp_path: Path) -> None:
    for line in HOSTILE:
        write(tmp_path, simulate(2, 100))
        path = tmp_path / "events" / "rank-0.jsonl"
        path.write_bytes(line + b"\n" + path.read_bytes() + line + b"\n")
        history = load(tmp_path)
        assert history.skipped == 2, line
        assert find_bottleneck(history).judged[0].profile.steps > 90, line


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for made, found in (
        ("nothing", "no such directory"),
        ("empty", "no events in it"),
        ("file", "it is a file"),
    ):
        place = tmp_path / made
        if made == "empty":
            place.mkdir()
        elif made == "file":
            place.write_text("")
        with pytest.raises(CheckpointError, match=found):
            Reader(place)


def test_runs_inside_are_offered(tmp_path: Path) -> None:
    write(tmp_path / "a", simulate(1, 10))
    with pytest.raises(CheckpointError, match=str(tmp_path / "a")):
        Reader(tmp_path)


def test_files_without_a_step_say_so(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0.jsonl").write_text("")
    assert find_bottleneck(load(tmp_path)).sentence == "Nothing has been recorded yet."
    [start, _] = lines(simulate(1, 10), 0)
    (tmp_path / "events" / "rank-0.jsonl").write_text(start + "\n")
    assert find_bottleneck(load(tmp_path)).sentence == "No step has been recorded yet."


def test_of_several_steps_the_one_taken_most_often_numbers_the_ticks(tmp_path: Path) -> None:
    write_two_steps(tmp_path, ticks=100, every=5, began=BEGAN, first=0)
    write_two_steps(tmp_path, ticks=100, every=5, began=BEGAN + 60, first=60)
    before, after = load(tmp_path).attempts
    assert before.ticks(0)["step"].tolist() == list(range(1, 101))
    assert (before.first, before.last) == (1, 100)
    assert (after.first, after.last) == (61, 160)
    found = find_bottleneck(load(tmp_path))
    assert [one.profile.last[-1] for one in found.judged] == [100, 160]


def test_what_takes_all_ranks_long_is_worth_a_finding(tmp_path: Path) -> None:
    for part in ("evaluation", "transfer", "other"):
        planted = simulate(2, 100)
        planted.setdefault(part, np.zeros_like(planted["wall"]))
        planted[part] += 10e-3
        planted["wall"] += 10e-3
        found = find_bottleneck(load(write(tmp_path, planted)))
        assert found.shares[part] > 0.3
        (finding,) = found.findings
        assert "of the time on all ranks." in finding.text, part


def test_attempts_stand_as_ranks_wrote_of_them_whatever_the_clock_said(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 20), began=BEGAN)
    write(tmp_path, simulate(3, 20), append=True, began=BEGAN - 3600, first=20)
    write(tmp_path, simulate(1, 20), append=True, began=BEGAN + 3600, first=40)
    whole = load(tmp_path)
    joined = History(tmp_path)
    for rank in (1, 2, 0):
        reader = Reader(tmp_path, only=rank)
        reader.poll()
        joined.join(reader.history)
    for history in (whole, joined):
        assert [each.first for each in history.attempts] == [1, 21, 41]


def test_attempts_of_which_no_rank_has_both_are_ordered_by_time(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 20), began=BEGAN)
    (tmp_path / "events" / "rank-0.jsonl").unlink()
    write(tmp_path, simulate(1, 20), append=True, began=BEGAN + 60, first=20)
    assert [each.first for each in load(tmp_path).attempts] == [1, 21]


def test_ranks_without_a_step_in_common_are_no_run_without_steps(tmp_path: Path) -> None:
    write(tmp_path, simulate(2, 20))
    other = "\n".join(lines(simulate(2, 20), 1, first=20))
    (tmp_path / "events" / "rank-1.jsonl").write_text(other + "\n")
    assert find_bottleneck(load(tmp_path)).sentence == "The ranks have not recorded any step in common."


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_too_large_are_passed_over_without_a_word(tmp_path: Path) -> None:
    [start, block] = lines(simulate(1, 20), 0)
    beyond = json.loads(block) | {"loss": [1e300] * 20, "wall": [0] * 20, "forward": [10**60] * 20}
    far = {"event": "end", "t": 1e300, "reason": "closed"}
    (tmp_path / "events").mkdir()
    text = "\n".join([start, json.dumps(beyond), json.dumps(far)])
    (tmp_path / "events" / "rank-0.jsonl").write_text(text + "\n")
    history = load(tmp_path)
    assert sum(find_bottleneck(history).shares.values()) == pytest.approx(1)
    assert history.attempts[0].seen < BEGAN + 60


def test_long_times_are_written_out() -> None:
    spelled = [duration(seconds) for seconds in (3e-6, 0.25, 100.0, 7200.0, 86400 * 999, 86400 * 1234)]
    assert spelled == ["3 µs", "250 ms", "100 s", "2 h", "999 d", "1,234 d"]


def test_a_file_that_cannot_be_read_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path, simulate(3, 20))
    for rank in (1, 2):
        (tmp_path / "events" / f"rank-{rank}.jsonl").unlink()
    # Of which nobody may read the first byte.
    (tmp_path / "events" / "rank-1.jsonl").symlink_to("/proc/self/mem")
    told = [each.text for each in find_bottleneck(load(tmp_path)).findings]
    assert told == [
        "The events of rank 1 can't be read: Input/output error.",
        "Nothing was recorded by rank 2.",
    ]
    (tmp_path / "events" / "rank-0.jsonl").unlink()
    assert find_bottleneck(load(tmp_path)).sentence == "The events can't be read: Input/output error."

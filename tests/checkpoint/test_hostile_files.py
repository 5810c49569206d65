"""Files that somebody made to harm: refused, with nothing unpickled, run, removed or awaited.

Their sums are right: whoever can write files can write those too.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers import rules
from helpers.checkpoint_files import Alone, Hostile, forge, names
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.inspect import locate
from shoal.checkpoint.inspect import manifest as contents
from shoal.checkpoint.inspect.tensor_reader import TensorFiles
from shoal.checkpoint.state_tree import DTYPES
from shoal.checkpoint.store import DamageError, FileRecord, Manifest
from shoal.checkpoint.tensor_index import BYTES
from shoal.telemetry import events
from shoal.util.errors import CheckpointError

TENSORS = "rank-0.safetensors"
SUM = "0" * 64
DEEP = 100_000


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    state = {"weight": torch.arange(6.0).reshape(2, 3), "other": torch.ones(2)}
    Checkpoints(tmp_path / "run", Alone()).save(1, state, {}, {})
    return tmp_path / "run" / "step-1"


def assert_refused(step: Path, found: str = "") -> None:
    """By a restore and by the tools, without another exception."""
    for action in (
        lambda: Checkpoints(step.parent, Alone()).restore(),
        lambda: read_all(step),
    ):
        with pytest.raises(CheckpointError) as caught:
            action()
        assert found in caught.value.found
        assert len(str(caught.value)) < 1000


def read_all(step: Path) -> None:
    looked = contents.inspect_checkpoint(step)
    with TensorFiles(looked) as values:
        for name in looked.tensors:
            values.whole(name)


IMPOSSIBLE = "has values that no checkpoint can have"
BAD_NAMES = [
    *("../../x", "/etc/passwd", "..", ".", "", "a/b", "manifest.json", ".hidden", "x ", "x\n"),
    *("a\0b", "\ud800", "\x1b[2J", "[red]", "-rf", "C:x", "ﬁle"),
]
BAD_VALUES: dict[str, list[Any]] = {
    "bytes": [-1, True, 1.0, "3", None, []],
    "sha256": [None, 3, "", "x" * 64, SUM + "0", SUM.replace("0", "A")],
    "step": [-1, True, 1.0, "1", None, {}],
    "world_size": [0, -1, True, "1", None],
    "name": BAD_NAMES,
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values]
)
def test_a_manifest_holds_possible_values_and_files_of_its_own_directory(
    key: str, value: Any, step: Path
) -> None:
    given = {"bytes": 0, "sha256": SUM, "step": 1, "world_size": 1, "name": "file", key: value}
    files = {given["name"]: FileRecord(given["bytes"], given["sha256"])}
    raw = Manifest(given["step"], given["world_size"], None, files).render()
    with pytest.raises(DamageError, match=IMPOSSIBLE):
        Manifest.parse(raw)
    (step / "manifest.json").write_bytes(raw)
    assert_refused(step, "manifest.json")


@pytest.mark.parametrize(
    "raw",
    [
        Manifest(1, 1, None, {"file": FileRecord(10**400, SUM)}).render(),
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"NaN",
        b'{"format": "shoal checkpoint", "version": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"format": "shoal checkpoint", "version": 1, "manifest": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format": "shoal checkpoint", "version": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_a_manifest_of_any_depth(raw: bytes, step: Path) -> None:
    (step / "manifest.json").write_bytes(raw)
    assert_refused(step)


def test_nan_and_names_that_come_twice(step: Path) -> None:
    raw = (step / "manifest.json").read_text()
    for old, new in (('"step": 1', '"step": NaN'), ('"step": 1', '"step": 1, "step": 1')):
        (step / "manifest.json").write_text(raw.replace(old, new))
        assert_refused(step, "altered")


def state_of(state: bytes, tensors: bytes = b"{}") -> bytes:
    return b'{"state": ' + state + b', "rank_state": [{"dict": {}}], "tensors": ' + tensors + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"null", b"{}", b"[" * DEEP, b'{"state":' * DEEP, b"\x80\x04N.", b"\xff\xfe"),
        b'{"state": {}, "rank_state": [], "tensors": {}}',
        b'{"state": NaN, "rank_state": [{}], "tensors": {}}',
        b'{"state": {}, "state": {}, "rank_state": [{}], "tensors": {}}',
        state_of(b'{"dict": {"x": {"tensor": "y"}}}'),
        state_of(b'{"dict": {"x": {"tensor": []}}}'),
        state_of(b'{"eval": "1"}'),
        state_of(b'{"dict": [[[], 1]]}'),
        state_of(b'{"int": "z"}'),
        state_of(b'{"bytes": "!"}'),
        state_of(b"[" * 900 + b"]" * 900),
        b'{"state": {}, "rank_state": [{}], "tensors": []}',
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_a_state_that_is_none(raw: bytes, step: Path) -> None:
    forge(step, "state.json", raw)
    assert_refused(step)


@pytest.mark.parametrize(
    "state", [b'{"int": "0x' + b"f" * 5000 + b'"}', b"[" * 300 + b"]" * 300], ids=len
)
def test_a_state_that_nobody_can_show(state: bytes, step: Path) -> None:
    forge(step, "state.json", state_of(state))
    with pytest.raises(CheckpointError, match=r"digits|deeply"):
        contents.inspect_checkpoint(step)


@pytest.mark.parametrize(
    "row",
    [
        *({"dtype": dtype} for dtype in ("object", ["float32"])),
        *({"shape": shape} for shape in ([-2, -3], [2, True], [2.0, 3], [2, 3, 1], [10**30, 3], "23")),
        *({"shape": shape} for shape in ([1] * 65, [10**12, 10**12])),
        {"shape": [0, 2**62, 2**62], "chunks": []},
        {"shape": [1000, 1000], "chunks": [{"sizes": [1000, 1000]}]},  # more than the file has
        {"chunks": []},
        {"chunks": None},
        {"chunks": [None]},
        {"chunks": [{}, {}]},
        {"chunks": [{"offsets": [0, 0], "sizes": [2, 2]}]},
        {"chunks": [{"offsets": [0, 0], "sizes": [2, 4]}]},
        {"chunks": [{"offsets": [0, 1], "sizes": [2, 3]}]},
        {"chunks": [{"offsets": [0, -1], "sizes": [2, 3]}]},
        {"chunks": [{"offsets": [0], "sizes": [6]}]},
        {"chunks": [{"sizes": [1, 3]}, {"sizes": [2, 3]}]},
        {"chunks": [{"sizes": [2, 2]}, {"offsets": [0, 1], "sizes": [2, 2]}]},
        {"chunks": [{"key": None}]},
        *(
            {"chunks": [{"file": name}]}
            for name in ("../../elsewhere", "../step-2.a1/x", "/etc/passwd", "manifest.json", 3)
        ),
    ],
    ids=repr,
)
def test_a_table_that_no_tensor_has(row: dict[str, Any], step: Path) -> None:
    forged = json.loads((step / "state.json").read_text())
    right = forged["tensors"]["state/weight"]
    [chunk] = right["chunks"]
    if isinstance(row.get("chunks"), list):
        row = {"chunks": [each if each is None else chunk | each for each in row["chunks"]]}
    forged["tensors"]["state/weight"] = right | row
    forge(step, "state.json", json.dumps(forged).encode())
    assert_refused(step, "state.json")
    assert locate.examine(step, read=True).problems


def test_a_table_without_a_tensor(step: Path) -> None:
    forged = json.loads((step / "state.json").read_text())
    del forged["tensors"]["state/weight"]
    forge(step, "state.json", json.dumps(forged).encode())
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(step.parent, Alone()).restore()
    assert str(step) in caught.value.given
    assert "state/weight" in caught.value.found


def header(entries: dict[str, Any] | bytes, data: bytes = b"\0" * 32) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), start: int = 0, end: int = 24) -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


GOOD = {"state/weight": entry(), "state/other": entry(shape=(2,), start=24, end=32)}


# One name for two places; readers don't agree which of them counts.
TWICE = (
    json.dumps(GOOD)[:-1] + ", " + json.dumps({"state/weight": entry(start=8, end=32)})[1:]
).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 40,
        (2**63).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (10**8 + 1).to_bytes(8, "little") + b"{" + b" " * 40,
        header(b"[" * DEEP),
        header(b'{"a":' * DEEP),
        header(b"not JSON at all"),
        header({}),
        header(GOOD, b"\0" * 31),
        header(GOOD, b"\0" * 33),
        header(GOOD | {"state/weight": entry(end=10**15)}),
        header(GOOD | {"state/weight": entry(start=-8, end=16)}),
        header(GOOD | {"state/weight": entry(start=24, end=0)}),
        header(GOOD | {"state/other": entry(shape=(2,), start=16, end=24)}),  # overlap
        header(GOOD | {"state/weight": entry("F64", (2, 3), 0, 24)}),
        header(GOOD | {"state/weight": entry("I32")}),  # other values of the same size
        header(GOOD | {"state/weight": entry(shape=(3, 2))}),
        header(GOOD | {"state/weight": entry(shape=(6,))}),
        header(GOOD | {"state/weight": entry(shape=(2**62, 8))}),
        header({"state/other": entry(shape=(8,), end=32)}),
        header(TWICE),
        header({"state/weight": entry(shape=(8,), end=32)}),
        header({"state/weight": entry(shape=(1, 1), end=4)}, b"\0" * 4),  # would be repeated
        pickle.dumps({"weight": 1}) + b"\0" * 100,
    ],
    ids=lambda raw: repr(raw[:80]),
)
def test_a_safetensors_file_that_is_none(raw: bytes, step: Path) -> None:
    forge(step, TENSORS, header(GOOD))
    read_all(step)
    forge(step, TENSORS, raw)
    assert_refused(step)


NO_FILES: dict[str, Callable[[Path, Path], None]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "link": Path.symlink_to,
    "device": lambda path, _: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", TENSORS])
def test_what_is_no_file(name: str, kind: str, step: Path) -> None:
    """Nobody waits for a pipe that no one writes to, or follows a link out of the directory."""
    original = Path(shutil.copy(step / name, step.parent.parent / "elsewhere"))
    (step / name).unlink()
    NO_FILES[kind](step / name, original)
    assert_refused(step, name)
    assert any(name in problem for problem in locate.examine(step, read=True).problems)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_state_that_no_manifest_names_is_not_waited_for(kind: str, step: Path) -> None:
    said = Manifest.parse((step / "manifest.json").read_bytes())
    files = {name: record for name, record in said.files.items() if name != "state.json"}
    (step / "manifest.json").write_bytes(replace(said, files=files).render())
    (step / "state.json").unlink()
    NO_FILES[kind](step / "state.json", step)
    assert_refused(step, "state.json")
    assert locate.examine(step, read=True).problems


@pytest.mark.parametrize("form", ["step-0", "step-2.partial", "step-2.trash", "step-1.trash"])
def test_removal_does_not_go_through_links(form: str, step: Path) -> None:
    """A directory elsewhere, of any content, keeps its files."""
    precious = shutil.copytree(step, step.parent.parent / "precious")
    (precious / "thesis.txt").write_text("years")
    if form != "step-0":
        (precious / "manifest.json").unlink()
    (step.parent / form).symlink_to(precious)
    before = names(precious)
    checkpoints = Checkpoints(step.parent, Alone(), keep=1)
    assert checkpoints.restore() is not None
    for number in (1, 2):
        checkpoints.save(number, {"weight": torch.zeros(1)}, {}, {})
    assert names(precious) == before
    assert names(step.parent) == ["step-2"]


def test_links_are_in_nobody_s_way_and_not_followed(step: Path) -> None:
    precious = step.parent.parent / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    for form in ("step-3.partial", "step-1.trash"):
        (step.parent / form).symlink_to("nowhere")
    (step.parent / "step-2.partial").mkdir()
    (step.parent / "step-2.partial" / "link").symlink_to(precious)
    for number in (1, 2, 3):
        Checkpoints(step.parent, Alone()).save(number, {"weight": torch.zeros(1)}, {}, {})
    assert (precious / "thesis.txt").read_text() == "years"
    assert names(step.parent) == ["step-1", "step-2", "step-3"]


def test_pickles_where_events_and_weights_should_be(tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    content = pickle.dumps(Hostile(marker))
    for name in ("rank-0.jsonl", "model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(content)
    assert list(events.read_events(tmp_path / "rank-0.jsonl")) == []
    assert events.steps_by_rank(tmp_path) == {}
    for name in ("model.safetensors", "model.pt"):
        with pytest.raises(CheckpointError):
            shoal.load(nn.Linear(2, 2), tmp_path / name)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()


HOSTILE_LINES = [
    b"[" * DEEP,
    b'{"event":' * DEEP,
    b"\xff\xfe\x00",
    b'{"event": "step"}',
    b'{"event": "step", "name": [], "step": 1, "share": [0, 4]}',
    b'{"event": "step", "name": "step", "step": NaN, "share": [0, 4]}',
    b'{"event": "step", "name": "step", "step": 1, "share": [0]}',
    b'{"event": "step", "name": "step", "step": 1, "share": [0, "4"]}',
    b'{"event": "step", "name": "step", "step": 1, "share": {"0": 1}}',
    b'{"event": "start"}',
    b'{"event": ["start"], "began": 1}',
    b'{"event": "step", "step": ' + b"9" * 5000 + b"}",
]


def test_events_of_somebody_else(tmp_path: Path) -> None:
    good = b'{"event": "steps", "t": 1, "name": "step", "step": [1], "load": [0], "share": [[0, 4]]}'
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0.jsonl").write_bytes(b"\n".join([*HOSTILE_LINES, good, b""]))
    for name in ("rank-.jsonl", "rank-x.jsonl", "rank--1.jsonl", "rank-1e3.jsonl"):
        (tmp_path / "events" / name).write_bytes(good)
    assert {key: list(ranks) for key, ranks in events.steps_by_rank(tmp_path).items()} == {
        ("step", 1): [0]
    }
    assert shoal.coverage(tmp_path).end == 4


def test_dtypes_are_known_by_their_names() -> None:
    named = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}
    assert named == BYTES


OBJECTS = {"all_gather_object", "broadcast_object_list", "send_object_list", "recv_object_list"}
OBJECTS |= {"gather_object", "scatter_object_list"}
LOADERS = {"torch", "np", "numpy", "joblib", "pickle", "cloudpickle", "serialization", "jit", "package"}


def test_nothing_in_the_library_unpickles_files_or_what_ranks_send(repository: Path) -> None:
    """By its imports and calls, torch's object collectives among them."""
    package = repository / "src" / "shoal"
    loads, objects = [], set()
    for path in rules.python_files(package):
        inside = str(path.relative_to(package))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called, owner = node.func.attr, ast.unparse(node.func.value).split(".")[-1]
                if called in ("load", "loads", "Unpickler") and owner in LOADERS:
                    options = {(option.arg, ast.unparse(option.value)) for option in node.keywords}
                    safe = options & {("weights_only", "True"), ("allow_pickle", "False")}
                    loads += [] if safe else [f"{inside}: {ast.unparse(node.func)}"]
                if called in OBJECTS:
                    objects.add(inside)
    assert loads == ["util/pickling.py: pickle.loads"]
    assert objects == set()

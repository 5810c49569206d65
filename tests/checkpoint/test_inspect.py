"""`shoal checkpoint`: what is there, whether it is whole, how two differ, the model out of one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from helpers.checkpoint_files import Alone, checkpoint, flip, truncate
from helpers.killed_training import same
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.inspect import diff, documents, extract, locate, manifest
from shoal.util import units
from shoal.util.document import Text
from shoal.util.errors import CheckpointError

VALUES = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
ODD = "[red]\x1b[2J\n"


class Net(nn.Module):
    """With a tied weight, a buffer of zeros, a complex parameter, and a name that is markup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        shared = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleDict({"[bold]x[/]": shared})
        self.head = nn.Linear(4, 4)
        self.head.weight = shared.weight
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("zeros", torch.zeros(4))
        nn.init.zeros_(self.head.bias)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers["[bold]x[/]"](values).tanh())
        return output * self.phase.abs()


class Notes:
    def __init__(self, text: str) -> None:
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        return {ODD: self.text, "curve": torch.arange(3), "seen": list(range(1000))}

    def load_state_dict(self, state: Any) -> None:
        self.text = state[ODD]


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def step(world: shoal.World) -> shoal.Step:
    model = shoal.parallelize(Net(), world)
    return shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=0.1), shoal.Task(loss))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two Steps with checkpoints 2 and 3 and `best/`, and what shoal.export made of it."""
    folder = tmp_path_factory.mktemp("tools")
    with shoal.init(seed=0) as world:
        first, second = step(world), step(world)
        ema = shoal.EMA(first.model, decay=0.5)
        data = shoal.Loader((VALUES,), world, batch_size=8)
        state: dict[str, Any] = {"ema": ema, "notes": Notes("kept"), "mark": Notes("")}
        with shoal.Run(folder / "run", {"one": first, "[two]": second}, data, state=state) as run:
            for batch in data.epochs(1):
                for each in (first, second):
                    each(batch)
                ema.update()
                run.tick()
                if run.step > 1:
                    run.save()
            run.save(to="best")
            for suffix in extract.ENDINGS:
                shoal.export(run, folder / f"first{suffix}")
                shoal.export(second, folder / f"second{suffix}")
                with ema.applied():
                    shoal.export(run, folder / f"averaged{suffix}")
    return folder


@pytest.fixture
def run(exported: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(exported / "run", tmp_path / "run", copy_function=shutil.copy2)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.full
def test_listing_needs_neither_torch_nor_time(run: Path) -> None:
    probe = (
        f"import sys\nsys.argv = ['shoal', 'checkpoint', sys.argv[1], {str(run)!r}]\n"
        "from shoal.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])\n"
    )
    for command in ("ls", "show", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", probe, command], capture_output=True, text=True, check=True
        )
        assert "step-3" in done.stdout
        assert done.stdout.splitlines()[-1] == "[]", command


def test_all_that_is_there_is_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-2", folder / "step-4.partial")
    (folder / "step-4.partial" / "manifest.json").unlink()
    shutil.copytree(folder / "step-2", folder / "step-1.trash")
    (folder / ".probe-0").touch()
    (folder / "step-2" / "state.json").unlink()
    monkeypatch.setenv("COLUMNS", "80")
    code, out = checkpoint("ls", run)
    assert code == 0
    usual, best = out.split(f"{run}/best")
    rows = {line.split()[0]: line.rstrip() for line in usual.splitlines() if " kB  " in line}
    assert rows["step-2"].endswith("damaged")
    assert re.search(r"^step-3 +24 +1 +\d+ (s|min) +1 +\S+ +[\d.]+ kB +complete$", rows["step-3"])
    assert "step-2 state.json is missing" in out
    assert re.search(r"step-4\.partial, [\d.]+ kB: an interrupted or running save", words(out))
    assert re.search(r"step-1\.trash, [\d.]+ kB: an interrupted or running removal", words(out))
    assert ".probe-0, 0 B: " in out
    assert "step-3" in best

    flip(folder / "step-3" / "state.json")
    assert "altered" not in checkpoint("ls", run)[1]
    assert "step-3 state.json is altered" in words(checkpoint("ls", "--verify", run)[1])
    assert "step-3 " in checkpoint("ls", folder / "step-3")[1]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_everything_is_said_at_any_width(
    width: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(run.parent)
    flip(Path("run/best/step-3/state.json"))
    (Path("run/checkpoints") / "step-4.partial").mkdir()
    steps = ("run/checkpoints/step-2", "run/checkpoints/step-3")
    printed = [checkpoint(*each)[1] for each in (("ls", "run"), ("show", "run"), ("diff", *steps))]
    for out in printed:
        assert max(map(len, out.splitlines())) <= width
        assert "\x1b" not in out
        assert not re.search(r"…(?! \()", out)
    shown = printed[1]
    for text in ("step-3", "one: model", "[two]: model", "float32", "complex64", "4 x 4", "AdamW"):
        assert text in shown
    flat = "".join(shown.split())
    for text in (
        "layers.[bold]x[/].weight",
        "[red]\\x1b[2J\\n",
        "kept",
        "exp_avg_sq",
        "(4,890characters)",
    ):
        assert text in flat, text
    assert re.search(r"^lr +0\.1 *$", shown, re.MULTILINE)
    assert "State of each of 1 rank: python, numpy, torch; " in words(shown)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(flip, "is altered"), (truncate, "bytes, should have"), (Path.unlink, "is missing")],
)
def test_every_damaged_file_is_named(run: Path, harm: Callable[[Path], None], said: str) -> None:
    code, out = checkpoint("verify", run)
    assert (code, words(out).count(": complete (step ")) == (0, 3)
    damaged = run / "checkpoints" / "step-2"
    for name in ("rank-0.safetensors", "state.json"):
        harm(damaged / name)
    code, out = checkpoint("verify", run)
    assert code == 1
    for name in ("rank-0.safetensors", "state.json"):
        assert re.search(rf"step-2: damaged: {name} [\d, has]*{said}", words(out))
    assert words(out).count(": complete (") == 2
    assert checkpoint("verify", run / "best", run / "checkpoints" / "step-3")[0] == 0
    assert checkpoint("verify", damaged)[0] == 1


@pytest.mark.parametrize("command", ["ls", "show", "verify", "export", "diff"])
def test_what_is_no_checkpoint(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "photos").mkdir(parents=True)
    (tmp_path / "begun" / "step-1.partial").mkdir(parents=True)
    more = {"export": [tmp_path / "out.pt"], "diff": [tmp_path]}.get(command, [])
    found = {
        "nothing": "there is no such directory",
        "file": "it is a file",
        "empty": "it holds nothing",
        "other": "it holds photos",
        "begun": "it contains no finished save",
    }
    if command == "ls":
        found.pop("begun")
        assert "an interrupted or running save" in words(checkpoint("ls", tmp_path / "begun")[1])
    for given, said in found.items():
        with pytest.raises(CheckpointError) as caught:
            checkpoint(command, tmp_path / given, *more)
        assert caught.value.given == str(tmp_path / given)
        assert said in caught.value.found
    assert not (tmp_path / "out.pt").exists()


def test_damaged_and_newer_ones_are_refused(run: Path) -> None:
    folder = run / "checkpoints"
    flip(folder / "step-3" / "manifest.json")
    assert "step 2" in words(checkpoint("show", folder)[1])  # as a restore would
    with pytest.raises(CheckpointError, match=r"manifest\.json is"):
        checkpoint("show", folder / "step-3")
    truncate(folder / "step-2" / "state.json")
    with pytest.raises(CheckpointError, match=r"none is complete: step-3: .*; step-2: state\.json has"):
        checkpoint("show", folder)
    path = run / "best" / "step-3" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="format version 2, this Shoal reads 1") as caught:
        checkpoint("export", run / "best" / "step-3", run / "out.pt")
    assert "--upgrade" in caught.value.fix


def test_a_copy_by_another_name_is_the_same(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run / "checkpoints" / "step-3", tmp_path / "copy [1]")
    code, out = checkpoint("diff", copy, run)
    assert (code, out) == (0, "The same state: 36 tensors, all equal.\n")
    assert checkpoint("verify", copy)[0] == 0
    assert "[two]: model" in checkpoint("show", copy)[1]


def test_circumstances_that_somebody_made_up(tmp_path: Path) -> None:
    for value in (1e300, -1, float("nan"), float("inf"), True, "now", 10**400, {"a": 1}):
        info = dict.fromkeys(("time", "position", "epoch", "layout"), value)
        save(tmp_path, {"n": 1}, **info)
        for command in ("ls", "show"):
            code, out = checkpoint(command, tmp_path)
            assert code == 0, value
            assert "step-1" in out, value


def test_sizes_as_people_say_them() -> None:
    said = {0: "0 B", 999: "999 B", 1000: "1 kB", 1234: "1.23 kB", 999_499: "999 kB"}
    said |= {999_600: "1 MB", 123_456_789: "123 MB", 10**12: "1 TB", 10**18: "1,000 PB"}
    assert {count: units.size(count) for count in said} == said


def save(directory: Path, state: dict[str, Any], **info: Any) -> manifest.CheckpointManifest:
    return manifest.inspect_checkpoint(Checkpoints(directory, Alone()).save(1, state, {}, info))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("block", [diff.BLOCK, 16])
@pytest.mark.parametrize(
    ("first", "second", "absolute", "relative"),
    [
        (torch.arange(24.0).reshape(6, 4), (3, 2, 30.0), 16.0, 16 / 23),
        (torch.arange(24, dtype=torch.int64).reshape(6, 4), (5, 3, 0), 23.0, 1.0),
        (torch.zeros(3), (1, 1e-30), 1e-30, INF),
        (torch.tensor([1.0, INF, NAN]), (0, 3.0), 2.0, NAN),
        (torch.tensor([1.0, INF]), (1, 0.0), INF, NAN),
        (torch.tensor([2.0, 1.0]), (1, NAN), NAN, NAN),
        (torch.tensor([0.0, 4.0]), (0, -0.0), 0.0, 0.0),
        (torch.tensor([3 + 4j, 1]), (1, 1 + 1j), 1.0, 0.2),
        (torch.tensor([True, False]), (1, True), 1.0, 1.0),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), (0, 2.0), 1.0, 0.5),
        (torch.tensor([2**63, 1], dtype=torch.uint64), (1, 3), 2.0, 2.0 / 2**63),
        (torch.tensor(2.0), (3.0,), 1.0, 0.5),
    ],
)
def test_by_how_much_values_differ(
    first: Tensor,
    second: tuple[Any, ...],
    absolute: float,
    relative: float,
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors at once and in blocks of a few elements."""
    monkeypatch.setattr(diff, "BLOCK", block)
    *place, value = second
    other = first.clone()
    other[tuple(place)] = value
    one = save(tmp_path / "a", {"same": torch.ones(4, 4), "t": first})
    two = save(tmp_path / "b", {"same": torch.ones(4, 4), "t": other})
    found = diff.compare(one, two)
    [changed] = found.changed
    assert (changed.name, changed.elements, changed.of) == ("state/t", 1, first.numel())
    assert changed.absolute == pytest.approx(absolute, nan_ok=True)
    assert changed.relative == pytest.approx(relative, nan_ok=True)
    assert not found.same
    assert diff.compare(one, one).same


def test_nans_of_any_bits_are_alike(tmp_path: Path) -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    one = save(tmp_path / "a", {"t": nans})
    assert diff.compare(one, save(tmp_path / "b", {"t": nans.flip(0)})).same


def test_all_kinds_of_differences(tmp_path: Path) -> None:
    ones = torch.ones(2, 3)
    save(tmp_path / "a", {"gone": ones, "dtype": ones, "shape": ones, "lr": 0.1, "n": 1}, at=1)
    save(tmp_path / "b", {"new": ones, "dtype": ones.half(), "shape": ones.T, "lr": 0.2, "m": 1}, at=2)
    code, out = checkpoint("diff", tmp_path / "a", tmp_path / "b")
    text = words(out)
    assert code == 1
    assert re.search(rf"Only in {tmp_path}/a/step-1 tensor ─+ gone Only in", text)
    assert re.search(rf"Only in {tmp_path}/b/step-1 tensor ─+ new Tensors of another", text)
    assert " dtype float32 2 x 3 float16 2 x 3" in text
    assert " shape float32 2 x 3 float32 3 x 2" in text
    assert "lr 0.1 0.2 n 1 (none) m (none) 1" in text
    assert "Other info of the save" in text
    assert text.endswith("4 of 4 tensors and 3 plain values differ.")
    for host in ("x", "y"):  # the circumstances of a save are no difference
        save(tmp_path / host, {"n": 1}, host=host)
    code, out = checkpoint("diff", tmp_path / "x", tmp_path / "y")
    assert code == 0
    assert "host 'x' 'y'" in words(out)


@pytest.mark.parametrize("suffix", extract.ENDINGS)
@pytest.mark.parametrize(
    ("options", "of"),
    [
        ((), "first"),
        (("--step", "[two]"), "second"),
        (("--ema", "ema"), "averaged"),
    ],
)
def test_the_model_is_what_shoal_exports(
    options: tuple[str, ...], of: str, suffix: str, exported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / f"model{suffix}"
    code, said = checkpoint("export", exported / "run", out, *options)
    assert code == 0
    assert "step-3" in said
    assert [path.name for path in out.parent.iterdir()] == [out.name]

    def read(path: Path) -> Any:
        return load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)

    expected = read(exported / f"{of}{suffix}")
    assert same(read(out), expected)
    assert set(expected) == set(Net().state_dict())
    Net().load_state_dict(read(out))


def test_a_model_that_is_not_there(exported: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "model.safetensors"
    for options, found in (
        (("--step", "three"), r"no Step named three; there is: one, \[two\]"),
        (("--ema", "notes"), "no EMA named notes; there is: ema"),
    ):
        with pytest.raises(CheckpointError, match=found):
            checkpoint("export", run, out, *options)
    with pytest.raises(CheckpointError, match=r"\.ts"):
        checkpoint("export", run, tmp_path / "model.ts")
    plain = save(tmp_path / "plain", {"weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no Step"):
        checkpoint("export", plain.path, out)
    assert not out.parent.exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        checkpoint("export", run, tmp_path / "file" / "model.pt")


@pytest.mark.parametrize("block", [1, 1 << 26])
def test_large_tensors_are_written_in_blocks(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "_BLOCK", block)
    model = {
        "large": torch.randn(70, 3),
        "wide": torch.randn(1, 5, dtype=torch.float64),
        "small": torch.tensor(3, dtype=torch.int8),
        "none": torch.empty(0, 4),
        "half": torch.randn(7).to(torch.bfloat16),
    }
    found = save(tmp_path / "a", {"steps": {"step": {"model": model}}})
    done = extract.extract(found, tmp_path / "out.safetensors", step=None, ema=None)
    assert same(load_file(done.path), model)
    assert (done.tensors, done.bytes) == (5, sum(tensor.nbytes for tensor in model.values()))


def save_steps(directory: Path, *steps: int) -> None:
    checkpoints = Checkpoints(directory, Alone(), keep=1)
    for step in steps:
        checkpoints.save(step, {"values": torch.ones(3)}, {}, {"position": step})


def test_a_checkpoint_that_a_live_run_renames_is_found_again(tmp_path: Path) -> None:
    """A save ends, and `step-8.partial` becomes `step-8`, between two reads."""
    save_steps(tmp_path, 8)
    final, partial = tmp_path / "step-8", tmp_path / "step-8.partial"
    final.rename(partial)

    def compare(found: list[manifest.CheckpointManifest]) -> diff.Comparison:
        if partial.exists():
            partial.rename(final)
        return diff.compare(*found)

    assert locate.read_newest([tmp_path, tmp_path], compare).same
    found = locate.examine_listed(partial, read=True)
    assert found is not None
    assert (found.path, found.problems) == (final, [])
    shutil.rmtree(final)
    assert locate.examine_listed(final, read=True) is None
    said = documents.verdict_document(found).sections[0].blocks
    assert list(said) == [Text(text=f"{final}: complete (step 8)", whole=True)]


def test_a_checkpoint_that_is_damaged_and_there_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 8)
    (file,) = (tmp_path / "step-8").glob("*.safetensors")
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError):
        locate.read_newest([tmp_path, tmp_path], lambda found: diff.compare(*found))


@pytest.mark.filterwarnings("error")
def test_a_plain_file_named_like_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "step-30"
    notes.write_text("mine")
    save_steps(tmp_path, 29, 30, 31, 32)
    assert notes.read_text() == "mine"
    assert [path.name for path in locate.checkpoints(tmp_path)] == ["step-32"]


def test_entries_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    model = {"weight": torch.ones(2), "_extra_state": {"calls": 3}}
    save(tmp_path / "a", {"steps": {"step": {"model": model}}})
    code, said = checkpoint("export", tmp_path / "a", tmp_path / "model.safetensors")
    assert code == 0
    assert "Not written, because they are not tensors: _extra_state" in words(said)

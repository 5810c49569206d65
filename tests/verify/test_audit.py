from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.audits import SCRIPTS, audit
from helpers.cli import refused, shoal
from shoal.tools.verify import audit as audits
from shoal.tools.verify import variants
from shoal.util.errors import LaunchError

LINES = (SCRIPTS / "ddp.py").read_text().splitlines()
FAULTS = [
    ("draw", (1,), 0, "global numpy draw in Dataset.__getitem__", "draw"),
    ("no ddp", (2,), 0, "gradients not averaged", "step"),
    ("batch size", (1, 2), 0, "batch size per rank", "loader"),
]
MORE = [
    ("set epoch", (2,), 0, "set_epoch forgotten", "loader"),
    ("position", (1,), 1, "loader position not in the checkpoint", "save"),
    ("padding", (2,), 0, "DistributedSampler padding", "loader"),
    ("drop last", (2,), 0, "drop_last", "loader"),
    ("no sampler", (2,), 0, "no distributed sampler", "no sampler"),
    ("evaluation", (2,), 0, "DistributedSampler padding", "evaluation"),
    ("files", (2,), 0, "each rank writes the same file", "files"),
    ("schedule", (1,), 0, "scheduler stepped per micro-batch or per rank", "schedule"),
    ("rank seed", (2,), 0, "initial parameters depend on the rank", "seed"),
    ("unseeded", (1,), 0, "unseeded numpy generator", "unseeded"),
    ("file order", (1,), 0, "file order", "file order"),
    ("no optimizer", (1,), 1, "optimizer state not restored", "load"),
    ("no scheduler", (1,), 1, "scheduler state not restored", "load"),
    ("generators", (1,), 1, "generator state not restored", "load"),
    ("buffers", (1,), 1, "buffers not in the checkpoint", "save"),
    ("clipping", (1, 2), 0, "gradients clipped before they are averaged", "clipping"),
]
OPERATIONS = [
    (
        "noisy",
        (1,),
        ("operation is not deterministic", "noisy"),
        "forward of 1, planted.noisy.default: equal inputs, different output",
    ),
    (
        "unordered",
        (1,),
        ("value from outside of torch", "unordered"),
        "forward of 1, aten.slice.Tensor: the argument is",
    ),
    (
        "forward by rank",
        (1, 2),
        ("value depends on the rank", "forward by rank"),
        "forward of 1, aten.mul.Tensor: the argument is ('1',) and ('2',)",
    ),
    (
        "backward by rank",
        (1, 2),
        ("value depends on the rank", "backward by rank"),
        "backward of 1, aten.mul.Tensor: the argument is ('1',) and ('2',)",
    ),
    (
        "random",
        (1, 2),
        ("random numbers drawn per rank", "random"),
        "forward of 1, aten.rand.default",
    ),
    ("dropout", (1, 2), ("dropout drawn per rank", "dropout"), "forward of 2, aten.bernoulli_.float"),
    (
        "batch norm",
        (1, 2),
        ("BatchNorm over the local batch", "batch norm"),
        "forward of 1, aten.native_batch_norm.default",
    ),
    (
        "means",
        (1, 2),
        ("mean of means", "backward"),
        "forward, aten.mse_loss.default: equal inputs, but",
    ),
]
# Each row is one script with all of these.
CLEAN = [
    "accumulation",
    "activation checkpointing",
    "adamw",
    "cosine",
    "keyed draws",
    "layer norm",
    "persistent workers",
    "sorted files",
    "clipping, evaluation on rank 0, foreach, keyed torch draws, no shuffling, one cycle, seeded, "
    "sorted set, two workers",
    "frozen batch norm, two groups, weighted means",
    "dropout on one rank",
]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("ways", CLEAN)
def test_other_clean_scripts_raise_no_alarm(home: Path, ways: str) -> None:
    ranks = (1,) if ways == "dropout on one rank" else (1, 2)
    report = audit(home, "clean_script.py", *ways.split(", "), ranks=ranks, kills=1)
    refuted = [(each.name, each.evidence) for each in report.findings if each.verdict == "refuted"]
    assert refuted == []
    assert sum(finding.verdict == "held" for finding in report.findings) >= 5


@pytest.mark.processes
def test_a_clean_script_raises_no_alarm(home: Path) -> None:
    report = audit(home, "ddp.py", kills=1)
    assert [
        (finding.name, finding.evidence) for finding in report.findings if finding.verdict != "held"
    ] == [("independent of the number of micro-batches", "the script uses no shoal.Loader")]


ONE_PROCESS = """
import os
import torch

torch.manual_seed(0)
model, first = torch.nn.Linear(3, 1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("last.pt"):
    state, first = torch.load("last.pt")
    model.load_state_dict(state)


def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    return loss


for step in range(first, 6):
    optimizer.step(closure)
    torch.save((model.state_dict(), step + 1), "new.pt")
    os.replace("new.pt", "last.pt")  # fails, if another process has renamed the file
"""


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("ranks", [(1, 2), (2,)])
def test_a_script_for_one_process_is_compared_on_one_rank(home: Path, ranks: tuple[int, ...]) -> None:
    (home / "one.py").write_text(ONE_PROCESS)
    report = audit(home, "one.py", ranks=ranks, kills=1)
    found = {finding.name: finding for finding in report.findings}
    assert report.refuted == 0
    assert found["resume bit-equal"].verdict == "held"
    assert "no process group" in found["independent of the number of ranks"].evidence


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(("restart_args", "verdict"), [((), "not decidable"), (("--resume",), "held")])
def test_a_script_may_need_an_argument_to_resume(
    home: Path, restart_args: tuple[str, ...], verdict: str
) -> None:
    report = audit(home, "ddp.py", "resume", ranks=(1,), kills=1, restart_args=restart_args)
    found = {finding.name: finding.verdict for finding in report.findings}
    assert found["resume bit-equal"] == verdict


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "ranks", "kills", "name", "mark"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.full) for fault in MORE)],
)
def test_planted_faults_are_found_with_their_line(
    home: Path, fault: str, ranks: tuple[int, ...], kills: int, name: str, mark: str
) -> None:
    report = audit(home, "ddp.py", fault, ranks=ranks, kills=kills)
    line = next(n for n, text in enumerate(LINES, 1) if text.endswith(f"# line: {mark}"))
    causes = [(finding.cause.name, finding.cause.line) for finding in report.findings if finding.cause]
    assert (name, f"ddp.py:{line}") in causes


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "ranks", "cause", "operation"),
    [OPERATIONS[0], *(pytest.param(*row, marks=pytest.mark.long) for row in OPERATIONS[1:])],
)
def test_the_operation_that_differs_is_found(
    home: Path, fault: str, ranks: tuple[int, ...], cause: tuple[str, str], operation: str
) -> None:
    report = audit(home, "ddp.py", fault, ranks=ranks)
    name, mark = cause
    line = next(n for n, text in enumerate(LINES, 1) if text.endswith(f"# line: {mark}"))
    (finding,) = (finding for finding in report.findings if finding.operation)
    assert operation in finding.evidence
    assert finding.cause is not None
    assert (finding.cause.name, finding.cause.line) == (name, f"ddp.py:{line}")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "found", "fix"),
    [
        ("raise ValueError('too small')", "ValueError: too small", "run it by itself"),
        ("input()", "reads standard input (bad.py:1)", "as arguments"),
        ("print('nothing')", "without a call of Optimizer.step", "run it by itself"),
        ("import os; print('left', flush=True); os._exit(3)", "exit code 3", "run it by itself"),
        (
            "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()",
            "starts processes itself (bad.py:2)",
            "one rank per process",
        ),
        (
            "import subprocess, sys\nsubprocess.run(args=[sys.executable, '-c', ''], check=True)",
            "starts processes itself (bad.py:2)",
            "one rank per process",
        ),
        ("import torch\ntorch.zeros(1, device='cuda')", "cuda", "machine with a GPU"),
    ],
)
def test_a_script_that_can_not_be_observed_gets_a_reason(
    home: Path, text: str, found: str, fix: str
) -> None:
    if "cuda" in text and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (home / "bad.py").write_text(text)
    with pytest.raises(LaunchError) as error:
        audit(home, "bad.py", ranks=(1,))
    assert found.lower() in error.value.found.lower()
    assert fix in error.value.fix


@pytest.mark.processes
@pytest.mark.full
def test_the_command_runs_ranks_and_writes_json_and_an_escaped_page(home: Path) -> None:
    command = [sys.executable, "-m", "shoal", "verify", "--json", "--html", "a.html", "--ranks", "1"]
    command += ["--kills", "0", "--steps", "2", "ddp.py", "hash order", "<b>"]
    result = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    line = next(n for n, text in enumerate(LINES, 1) if text.endswith("# line: hash order"))
    cause = found["findings"][0]["cause"]
    assert (cause["name"], cause["line"]) == ("hash order", f"ddp.py:{line}")
    page = (home / "a.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_a_missing_script_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "verify", "missing.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "there is no file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        (("../outside.py",), "outside of the current directory", "cd .. && shoal verify outside.py"),
        (("--ranks", "9" * 20, "ddp.py"), "a number of ranks is 1 to 1,024", "--ranks 1,2"),
        (("--ranks", "0", "ddp.py"), "a number of ranks is 1 to 1,024", "--ranks 1,2"),
    ],
)
def test_what_can_not_be_run_is_an_error(
    home: Path, arguments: tuple[str, ...], found: str, fix: str
) -> None:
    (home.parent / "outside.py").touch()
    error = refused("verify", *arguments)
    assert found in error.found
    assert fix in error.fix


@pytest.mark.processes
def test_a_script_is_named_by_its_path_in_the_current_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(audits, "audit_script", lambda request, *_: started.append(request.script))
    shoal("verify", str(home / "files" / ".." / "ddp.py"))
    assert started == ["ddp.py"]


@pytest.mark.processes
def test_pipes_sockets_and_files_that_vanish_are_not_copied(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(home / "pipe")
    (home / "files" / "gone").touch()
    copy = variants._copy

    def vanish(source: str, target: str) -> None:
        if source.endswith("gone"):
            os.unlink(source)
        copy(source, target)

    monkeypatch.setattr(variants, "_copy", vanish)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        report = audit(home, "ddp.py", ranks=(1,))
    assert report.findings[0].verdict == "held"


def test_a_file_that_can_not_be_copied_is_an_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied", source)

    monkeypatch.setattr(variants, "_copy", refuse)
    with pytest.raises(LaunchError, match="Permission denied"):
        variants.copy_directory(home, tmp_path / "copy")

"""`shoal info` in one process: readable at any width, quick, and of use where the launch is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.rank_facts import SHOAL, call, words
from shoal.tools.doctor.checks.host import cgroup_limits
from shoal.tools.doctor.findings import RankFacts
from shoal.tools.doctor.info import (
    RankInfo,
    decisions_table,
    maker,
    packages,
    rows,
    version_differences,
)
from shoal.util.decision import Decision
from shoal.util.differences import spans
from shoal.util.document import Document, Section
from shoal.util.tables import rendered

INFO = [*SHOAL, "info"]


@pytest.mark.full
def test_everything_is_said_in_a_narrow_window() -> None:
    width = 60
    done = call(INFO, COLUMNS=width, WANDB_API_KEY="s3cret", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert "s3cret" not in done.stdout
    for text in ("Shoal", "Python", "torch", "cores", "memory", "CUDA_VISIBLE_DEVICES", "torchmetrics"):
        assert text in done.stdout
    # Reasons are a column of their own: what is left of a line without the others.
    table = done.stdout.partition("Decisions and their reasons")[2].splitlines()
    start = table[1].index("reason, and")
    reasons = words(" ".join(line[start:] for line in table[3:]))
    assert "no launcher's variables are set not torchrun, shoal run: LOCAL_WORLD_SIZE and" in reasons
    assert "not srun: SLURM_STEP_ID and SLURM_PROCID not set" in reasons
    assert "the default: deterministic algorithms are slower" in reasons


@pytest.mark.full
def test_a_contradictory_environment_is_shown_with_the_error() -> None:
    done = call(INFO, RANK="1", WORLD_SIZE="2", SLURM_PROCID="3")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["given", "found", "fix"]
    assert "SLURM_STEP_ID not set" in done.stderr
    assert "torch" in done.stdout
    lines = [words(line) for line in done.stdout.splitlines()]
    assert "env:// RANK=1" in lines
    assert "srun SLURM_PROCID=3" in lines
    assert "Flux none" in lines


QUIET = """
import sys
events = []
sys.addaudithook(lambda event, found: events.append(event) if event in WATCHED else None)
WATCHED = {"socket.bind", "socket.connect"}
sys.argv = ["shoal", "info"]
from shoal.cli.main import main
try:
    main()
finally:
    print(events, [name for name in ("matplotlib", "datasets", "torchmetrics") if name in sys.modules])
"""


@pytest.mark.full
def test_one_process_opens_no_port_and_imports_no_more_than_it_needs() -> None:
    done = call([sys.executable, "-c", QUIET])
    assert done.stdout.splitlines()[-1] == "[] []"


LATE = """
import sys
from rich.console import Console
from shoal.tools.doctor import info
from shoal.util.errors import LaunchError

info.JOIN_SECONDS = 0.5
try:
    info.print_info(Console(color_system=None))
except LaunchError as error:
    print("LaunchError", error)
"""


@pytest.mark.parametrize(
    ("rank", "told"),
    [(0, "rank 1 did not join the rendezvous"), (1, "looked for rank 0")],
)
@pytest.mark.full
def test_ranks_that_do_not_come_are_told_as_elsewhere(rank: int, told: str, tmp_path: Path) -> None:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    done = call([sys.executable, "-c", LATE], **variables, PMIX_NAMESPACE=tmp_path.name)
    before, _, after = done.stdout.partition("LaunchError")
    assert told in after
    # What could be found is there once, with the launcher's reasons.
    assert ("OMPI_COMM_WORLD_RANK=0" in before) is (rank == 0)


def printed(width: int, *made: Decision[object]) -> str:
    return rendered(Document(title="", sections=[Section(blocks=[decisions_table(made)])]), width)


def test_lists_of_hosts_are_no_markup_and_long_words_are_folded() -> None:
    path = "/scratch/" + "x" * 100
    text = printed(60, Decision(what="address", value=("node[01-03]",), reason=f"found in {path}"))
    assert "node[01-03]" in text
    assert text.count("x") == 100


def rank(number: int, *, host: str = "a", **versions: str) -> RankFacts[RankInfo]:
    facts = RankInfo(
        local_rank=number % 8,
        cores=4,
        threads=4,
        device=f"cuda:{number % 2}",
        versions={"torch": "2.13.0", **versions},
    )
    return RankFacts(rank=number, host=host, facts=facts)


def test_few_ranks_have_a_row_each_and_many_one_for_each_machine() -> None:
    few = [rank(number) for number in range(4)]
    assert rows(few)[2] == ("2", "a", "2", "4", "4", "cuda:0")
    many = [rank(number, host=f"n{number // 8}") for number in range(64)]
    assert len(rows(many)) == 8
    assert rows(many)[1] == ("8-15", "n1", "0-7", "4 each", "4 each", "cuda:0 x4, cuda:1 x4")


def test_ranks_that_differ_are_named() -> None:
    same = [rank(number) for number in range(4)]
    assert list(version_differences(same)) == []
    odd = [*same[:2], rank(2, host="b", torch="2.11.0"), same[3]]
    (line,) = version_differences(odd)
    assert line == "torch differs: 2.13.0 on 3 of 4 ranks, 2.11.0 on rank 2 (b)"


def test_spans() -> None:
    for numbers, text in (([0], "0"), ([2, 0, 1, 5], "0-2,5"), ([0, 2, 4], "0,2,4")):
        assert spans(numbers) == text


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_version_2_count_at_every_level(tmp_path: Path) -> None:
    write(tmp_path / "job", cpu__max="400000 100000\n", memory__max="8589934592\n")
    write(tmp_path / "job/step", cpu__max="max 100000\n", memory__max="max\n")
    assert cgroup_limits("0::/job/step\n", tmp_path) == (4.0, 8 * 2**30)


def test_limits_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    write(tmp_path / "cpu/a", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    write(tmp_path / "memory", memory__limit_in_bytes="1073741824\n")
    text = "4:memory:/elsewhere\n1:cpu:/a\n0::/\n"
    assert cgroup_limits(text, tmp_path) == (1.5, 2**30)


def test_without_limits(tmp_path: Path) -> None:
    assert cgroup_limits("", tmp_path) == cgroup_limits("0::/a\n", tmp_path) == (None, None)


def test_packages_that_are_not_there_say_what_to_type() -> None:
    wanted = ['no-such-package>=1.5; extra == "hf"', "pytest>=8 ; extra == 'wandb'"]
    found = dict(packages([*wanted, "numpy>=1", 'mypy>=1; extra == "dev"']))
    assert found["no-such-package"] == "not installed: pip install 'no-such-package>=1.5'"
    assert found["pytest"] == pytest.__version__
    assert len(found) == 2


def test_whose_launcher_it_is() -> None:
    for said, whose in (
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs\n", "mpirun (Open MPI) 4.1.4"),
        ("HYDRA build details:\n    Version:      4.0.2\n", "Hydra (MPICH) 4.0.2"),
        ("slurm-wlm 22.05.8\n", "slurm-wlm 22.05.8"),
        ("", "which does not print its version"),
    ):
        assert maker(said) == whose

"""Shared fixtures, and the rule that nothing skips in CI."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import shoal
    from helpers.cluster.slurm import Cluster
    from helpers.commands import Command
    from helpers.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What a machine may lack even in CI. Everything else `.ci/run` installs, so a skip hides a failure.
MAY_BE_MISSING = ("needs CUDA", "needs an accelerator", "needs root", "needs namespaces")


# The same examples each time, however long one takes: a test fails for what has changed.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def pytest_configure() -> None:
    # Ignored under nohup, and in the background of a script: also by commands that tests start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the first row of each test marked `full`; mark the others `long`.

    `full(rows="all")` keeps all rows.
    """
    tables = set()
    for item in items:
        mark = item.get_closest_marker("full")
        if mark is not None and not mark.kwargs and item.get_closest_marker("long") is None:
            table = item.nodeid.partition("[")[0]
            if table in tables:
                item.add_marker("long")
            tables.add(table)


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude objects that exist before a file's tests from garbage collection, for good.

    Torch and thousands of tests are a million objects, which each full collection would visit again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unseeded() -> Iterator[None]:
    """A test, or a fixture of a file, does not begin with the seed of another test.

    `shoal.init` would keep it.
    """
    unseed()
    yield
    unseed()


def unseed() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(2**62)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A test leaves no process group: other tests, and Accelerate in them, would adopt it."""
    yield
    if "torch" in sys.modules:
        assert not sys.modules["torch"].distributed.is_initialized()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are handled after a test as before it; a Run that was told to stop keeps some."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that tests submit are not in the user's own list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
        yield


@pytest.fixture
def world() -> Iterator[shoal.World]:
    """A world of one on the CPU."""
    import shoal

    with shoal.init(device="cpu") as alone:
        yield alone


@pytest.fixture
def running_commands() -> Iterator[list[Command]]:
    """Commands that the test adds; none of their processes is left after it."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.clean_up()


@pytest.fixture
def start_command(tmp_path: Path, running_commands: list[Command]) -> Callable[..., Command]:
    """Starts commands in the test's directory, or another; none of their processes is left after it."""
    from helpers.commands import Command

    def start(command: Sequence[str], folder: Path = tmp_path, **outputs: int) -> Command:
        running_commands.append(Command(command, folder, **outputs))
        return running_commands[-1]

    return start


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of a file: two with replicas, or as its `RANKS` and `LAYOUT` say."""
    from helpers.ranks import Ranks

    module = request.module
    layout = getattr(module, "LAYOUT", "replicate=-1")
    with Ranks(getattr(module, "RANKS", 2), layout=layout) as started:
        yield started


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number, started once for the tests of one file."""
    from helpers.ranks import Ranks

    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(Ranks(size)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster for the tests of one file."""
    from helpers.cluster.slurm import Cluster, missing

    if missing():
        pytest.skip(missing())
    # Slurm shall not be the first to notice what is cut.
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", silence=60) as running:
        yield running


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where CI is set, unless its reason is on the list."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if reason.removeprefix("Skipped: ").startswith(MAY_BE_MISSING):
        return
    report.outcome = "failed"
    report.longrepr = f"skipped in CI, where nothing may be missing: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report

"""A worker of a Loader that dies is named as such, wherever its rank is then."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import shoal
from helpers.commands import wait_for
from shoal.data.worker_failure import LoaderWorkers
from shoal.distributed.passing_faults import passing_cause

pytestmark = [pytest.mark.processes, pytest.mark.full]


class Dying(Dataset[torch.Tensor]):
    """Its worker ends at sample 5 in some way."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.end()
        return torch.ones(1)


def kill(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def test_a_worker_that_dies_is_named() -> None:
    for end, how, fix in (
        (kill(signal.SIGKILL), "signal 9, Killed", "num_workers=1"),
        (kill(signal.SIGSEGV), "signal 11, Segmentation fault", "use num_workers=0"),
        (lambda: os._exit(3), "exit code 3", "use num_workers=0"),
        (lambda: os._exit(0), "it ended by itself", "use num_workers=0"),
    ):
        with shoal.init() as world:
            data = shoal.Loader(Dying(end), world, batch_size=2, num_workers=2, shuffle=False)
            with pytest.raises(shoal.DataError) as caught:
                list(data.epochs(1))
        error = caught.value
        assert error.given == "shoal.Loader(…, num_workers=2)"
        assert error.found.startswith(f"a worker of rank 0's Loader died ({how}): process ")
        assert fix in error.fix


def test_workers_of_a_failed_pass_end_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    """The next workers would fail to end those that a kept error refers to, and print why."""
    kept = []
    for _ in range(2):
        with shoal.init() as world:
            data = shoal.Loader(
                Dying(kill(signal.SIGKILL)), world, batch_size=2, num_workers=2, shuffle=False
            )
            with pytest.raises(shoal.DataError) as caught:
                list(data.epochs(1))
            kept.append(caught.value)
            assert multiprocessing.active_children() == []
    assert "child process" not in capfd.readouterr().err


def refuse(error: Exception) -> Callable[[], object]:
    def end() -> object:
        raise error

    return end


def test_a_fault_that_may_pass_is_known_through_a_worker() -> None:
    """torch keeps only the text of its error."""
    refused = HTTPError("http://a", 503, "", Message(), None)
    rows = ((OSError(errno.EIO, "away"), "EIO"), (refused, "HTTP 503"), (ValueError("bad"), ""))
    for error, cause in rows:
        for workers in (0, 1):
            with shoal.init() as world:
                data = shoal.Loader(Dying(refuse(error)), world, batch_size=2, num_workers=workers)
                with pytest.raises(Exception, match=re.escape(str(error))) as caught:
                    list(data.epochs(1))
            assert passing_cause(caught.value) == cause


class TwoArgumentsError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_that_a_worker_cannot_send_is_told(workers: int) -> None:
    class LocalError(ValueError):
        pass

    rows = (LocalError("bad sample"), TwoArgumentsError(1, 2), ExceptionGroup("", [LocalError()]))
    for error in rows:
        with shoal.init() as world:
            data = shoal.Loader(Dying(refuse(error)), world, batch_size=2, num_workers=workers)
            with pytest.raises(RuntimeError, match=re.escape(str(error))) as caught:
                list(data.epochs(1))
        told = str(caught.value)
        assert type(error).__qualname__ in told
        assert "raise error" in told
        assert passing_cause(caught.value) == ""


def test_a_fault_that_may_pass_with_a_local_class() -> None:
    class LocalError(OSError):
        pass

    with shoal.init() as world:
        away = refuse(LocalError(errno.EIO, "away"))
        data = shoal.Loader(Dying(away), world, batch_size=2, num_workers=1)
        with pytest.raises(RuntimeError, match="away") as caught:
            list(data.epochs(1))
    assert passing_cause(caught.value) == "EIO"


def test_an_iterable_dataset_that_cannot_begin_is_told() -> None:
    class Starting(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            class LocalError(Exception):
                pass

            raise LocalError("no shards")

    with shoal.init() as world:
        data = shoal.Loader(Starting(), world, batch_size=2, num_workers=1, shuffle=False)
        with pytest.raises(RuntimeError, match="no shards"):
            list(data.epochs(1))


def test_a_batch_that_a_worker_cannot_send_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def collate(samples: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: samples

    with shoal.init() as world:
        data = shoal.Loader(
            Dying(lambda: None), world, batch_size=2, num_workers=1, shuffle=False, collate_fn=collate
        )
        with pytest.raises(shoal.DataError, match="it can't send a batch; the reason") as caught:
            list(data.epochs(1))
    assert "pickle.dumps accepts" in caught.value.fix
    assert "Can't pickle local object" in capfd.readouterr().err


def test_a_worker_that_torch_does_not_explain_is_explained_by_its_process() -> None:
    """torch may notice the death where it polls for batches, and then leaves the exit code out.

    A worker announces a batch by a queue; the rank then asks it for the memory.
    """
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    process.start()
    process.join()
    workers = LoaderWorkers(rank=1, count=4, processes=[process])
    for lost in (
        RuntimeError(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"),
        EOFError(),
        ConnectionRefusedError(111, "refused"),
        RuntimeError("Pin memory thread exited unexpectedly"),
    ):
        with pytest.raises(shoal.DataError) as caught, workers.explained():
            raise lost
        assert caught.value.found.startswith("a worker of rank 1's Loader died (exit code 3): process ")
    with pytest.raises(EOFError), workers.explained():
        raise EOFError("Caught EOFError in DataLoader worker process 0.")
    with pytest.raises(EOFError), LoaderWorkers(rank=1, count=0).explained():
        raise EOFError  # of a dataset that the rank itself reads


def test_a_worker_that_dies_while_the_rank_computes(tmp_path: Path) -> None:
    """torch's error comes in whatever the main thread is doing."""
    go = tmp_path / "go"

    def never() -> bool:
        go.touch()
        return False

    def end() -> None:
        wait_for(go.exists)
        os.kill(os.getpid(), signal.SIGKILL)

    with shoal.init() as world:
        data = shoal.Loader(Dying(end), world, batch_size=2, num_workers=1, shuffle=False)
        batches = data.epochs(1)
        next(batches)
        died = "a worker of rank 0's Loader died \\(signal 9"
        with pytest.raises(shoal.DataError, match=died):
            wait_for(never, 60.0)


def test_an_error_of_the_dataset_stays_what_it_is() -> None:
    def fail() -> None:
        raise RuntimeError("the file is broken")

    with shoal.init() as world:
        data = shoal.Loader(Dying(fail), world, batch_size=2, num_workers=1, shuffle=False)
        with pytest.raises(RuntimeError, match="the file is broken"):
            list(data.epochs(1))

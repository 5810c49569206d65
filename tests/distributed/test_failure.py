from __future__ import annotations

import errno
import signal
import socket
from dataclasses import replace
from email.message import Message
from types import SimpleNamespace
from typing import cast
from urllib.error import HTTPError

import pytest

from shoal.distributed import codec
from shoal.distributed.failure import (
    SAME_STEPS,
    DepartedRank,
    Failure,
    culprit,
    decode,
    encode,
    explain,
    first_to_leave,
    from_exception,
    from_exit,
    locate,
    report,
)
from shoal.distributed.passing_faults import note_cause
from shoal.util.errors import DataError

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET)
OWN = Failure(rank=0, code=1, when=2.0, where="a, train.py:7", text="ValueError: boom\n")
LATER = replace(OWN, rank=3, when=3.0)
BY_PEER = replace(OWN, rank=1, when=1.0, text="Connection closed by peer", by_peer=True)
KILLED = Failure(rank=2, code=137, when=4.0, where="a, pid 5", signal=signal.SIGKILL)
ABORTED = Failure(rank=4, code=134, when=5.0, where="a, pid 6", signal=signal.SIGABRT)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([OWN], OWN),
        ([LATER, OWN], OWN),
        # A rank that noticed the death of another one recorded its error before the cause did.
        ([BY_PEER, OWN], OWN),
        ([BY_PEER], BY_PEER),
        # A killed rank records nothing: the launcher sees it last, and it is still the cause.
        ([BY_PEER, OWN, LATER, KILLED], KILLED),
        ([KILLED, replace(KILLED, rank=5, when=3.5)], replace(KILLED, rank=5, when=3.5)),
        # Libraries abort over the error of another rank; but not over the loss of a connection.
        ([ABORTED, OWN], OWN),
        ([ABORTED, BY_PEER], ABORTED),
        ([replace(ABORTED, when=0.5), OWN], replace(ABORTED, when=0.5)),
    ],
)
def test_culprit(failures: list[Failure], expected: Failure) -> None:
    assert culprit(failures) == expected
    assert culprit(failures[::-1]) == expected


def test_reports() -> None:
    assert report(OWN, size=1) == "ValueError: boom\nwhere: rank 0 of 1 on a, train.py:7\n"
    assert report(OWN, size=2).endswith("train.py:7 (the other was stopped)\n")
    assert report(OWN, size=4).endswith("train.py:7 (the other 3 were stopped)\n")
    assert report(KILLED, size=1).startswith("rank 2 was killed by SIGKILL (signal 9), often because")
    assert report(replace(KILLED, signal=64), size=1).startswith("rank 2 was killed by ")
    assert report(replace(OWN, text="", code=3), size=1).startswith("ended with exit code 3\n")


def test_from_exit() -> None:
    assert from_exit(rank=2, host="a", pid=5, exitcode=-9, when=4.0) == KILLED
    ended = from_exit(rank=2, host="a", pid=5, exitcode=3, when=4.0)
    assert (ended.code, ended.signal, ended.where) == (3, 0, "a, pid 5")
    for failure in (OWN, BY_PEER, KILLED, ABORTED):
        assert decode(encode(failure)) == failure


def test_from_sys_exit() -> None:
    for argument, code, text in (
        *((None, 0, ""), (0, 0, ""), (3, 3, ""), (-1, 255, "")),
        ("no data", 1, "no data"),
    ):
        failure = from_exception(raised(SystemExit(argument)), rank=1, host="a", when=1.0)
        assert (failure.code, failure.text) == (code, text)


def test_from_an_error_keeps_the_traceback_and_the_place() -> None:
    failure = from_exception(raised(ValueError("boom")), rank=1, host="a", when=1.0)
    assert failure.text.startswith("Traceback (most recent call last):\n")
    assert failure.text.endswith("ValueError: boom\n")
    host, _, place = failure.where.partition(", ")
    assert host == "a"
    assert "test_failure.py:" in place
    assert not failure.by_peer


def test_a_shoal_error_tells_its_place_once() -> None:
    error = raised(DataError(given="g", found="f", fix="x"))
    assert isinstance(error, DataError)
    error.where = "somewhere"
    failure = from_exception(error, rank=1, host="a", when=1.0)
    assert failure.text.endswith("given: g\nfound: f\nfix:   x\n")
    assert report(failure, size=1).count("where:") == 1
    assert error.where == "somewhere"


@pytest.mark.parametrize(
    "message",
    [
        "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234",
        "[/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer",
        "ncclRemoteError: A call failed possibly due to a network error; remote process exited",
        "[Errno 32] Broken pipe",
        "found: ValueError: boom\nfix:   see that rank's own error; others only hear of it",
    ],
)
def test_consequences_are_recognised_also_as_causes_of_other_errors(message: str) -> None:
    error = RuntimeError("step 5 failed")
    error.__cause__ = RuntimeError(message)
    for seen in (error, RuntimeError(message)):
        assert from_exception(raised(seen), rank=1, host="a", when=1.0).by_peer


def response(error: Exception, **values: object) -> Exception:
    """Return an error as clients of HTTP raise it, with these attributes."""
    vars(error).update(values)
    return error


def named(name: str) -> Exception:
    """Return an error of a class derived from one of this name."""
    kind = type(name, (Exception,), {})
    return cast(Exception, type("Derived", (kind,), {})())


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


BOTO = {"ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        *((OSError(number, "", "/a"), errno.errorcode[number]) for number in PASSING),
        *((OSError(number, ""), "") for number in (errno.ENOENT, errno.EACCES, errno.ENOSPC, 0)),
        (TimeoutError(), "TimeoutError"),
        (socket.gaierror(socket.EAI_AGAIN, ""), "EAI_AGAIN"),
        (socket.gaierror(socket.EAI_NONAME, ""), ""),
        (OSError("image file is truncated"), ""),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, ""), ""),
        # urllib; requests, httpx and huggingface_hub; botocore; aiohttp; gcsfs.
        (HTTPError("http://a", 502, "", Message(), None), "HTTP 502"),
        (HTTPError("http://a", 404, "", Message(), None), ""),
        (response(OSError(), response=SimpleNamespace(status_code=500)), "HTTP 500"),
        (response(OSError(), response=SimpleNamespace(status_code=403)), ""),
        (response(RuntimeError(), response=BOTO), "HTTP 503"),
        (response(RuntimeError(), status=429), "HTTP 429"),
        (response(RuntimeError(), code=504), "HTTP 504"),
        (response(RuntimeError(), code="NoSuchKey", response=None), ""),
        # urllib3 after its retries, which holds the error of the last one.
        (caused(RuntimeError(), ValueError("", OSError(errno.ECONNRESET, ""))), "ECONNRESET"),
        (caused(RuntimeError(), ValueError("", FileNotFoundError(errno.ENOENT, ""))), ""),
        (OSError({}, TimeoutError()), "TimeoutError"),
        *(
            (named(name), name)
            for name in ("IncompleteRead", "ServerDisconnectedError", "ResponseError")
        ),
        (named("DecodeError"), ""),
        # The last fault of a system or a server counts.
        (caused(RuntimeError(), OSError(errno.ESTALE, "")), "ESTALE"),
        (caused(FileNotFoundError(errno.ENOENT, ""), OSError(errno.EIO, "")), ""),
        (caused(OSError(errno.EIO, ""), FileNotFoundError(errno.ENOENT, "")), "EIO"),
        (ExceptionGroup("", [TimeoutError(), OSError(errno.EIO, "")]), "TimeoutError"),
        (ExceptionGroup("", [TimeoutError(), ValueError()]), ""),
        # Errors of all ranks about one of them, which they get as messages.
        (codec.loads(codec.dumps(note_cause(DataError(given="", found="", fix=""), "EIO"))), "EIO"),
        (caused(note_cause(DataError(given="", found="", fix=""), ""), TimeoutError()), ""),
    ],
)
def test_faults_that_may_pass(error: BaseException, cause: str) -> None:
    for each in (error, caused(ValueError(), error)):
        failure = from_exception(raised(each), rank=1, host="a", when=1.0)
        assert (failure.passing, failure.by_peer) == (cause, False)
    assert report(replace(OWN, step=3, passing="EIO"), size=1).endswith(
        ", after step 3; EIO may pass\n"
    )


def test_the_place_is_the_users_innermost_line() -> None:
    # Raised inside the standard library, called from here.
    with pytest.raises(ValueError, match="Expecting value") as caught:
        decode(b"x")
    assert "test_failure.py:" in str(locate(caught.value))
    with pytest.raises(SyntaxError) as broken:
        compile("x = 1\nif x\n", "train.py", "exec")
    assert locate(broken.value) == "train.py:2"


LEFT = DepartedRank(rank=5, when=0.5, where="a, train.py:3", ended=True)
SILENT = replace(LEFT, rank=6, when=9.0, announced=False)


@pytest.mark.parametrize(
    ("failures", "left", "named"),
    [
        ([BY_PEER], [], None),
        ([BY_PEER], [LEFT], LEFT),
        ([BY_PEER, ABORTED], [replace(LEFT, rank=7, when=0.7), LEFT], LEFT),
        # Another rank's own error is the cause.
        ([BY_PEER, OWN], [LEFT], None),
        ([KILLED], [LEFT], None),
        # One that left later was not missing yet; when one that says nothing ended is not known.
        ([BY_PEER], [replace(LEFT, when=1.5)], None),
        ([BY_PEER], [SILENT], SILENT),
        # A rank that has left the others itself needs them no more.
        ([BY_PEER], [LEFT, replace(LEFT, rank=BY_PEER.rank, when=0.7)], None),
    ],
)
def test_the_first_rank_to_leave_is_the_cause(
    failures: list[Failure], left: list[DepartedRank], named: DepartedRank | None
) -> None:
    assert first_to_leave(failures, left) == named
    cause = explain(failures, left, size=9)
    assert cause.rank == (culprit(failures) if named is None else named).rank


def test_report_of_a_rank_that_left() -> None:
    told = report(explain([BY_PEER], [LEFT], size=2), size=2)
    assert told.splitlines() == [
        "Connection closed by peer",
        "given: rank 5 of 2, which ended with exit code 0 on a, train.py:3",
        "found: rank 1 still needed it, on a, train.py:7: Connection closed by peer",
        f"fix:   {SAME_STEPS}",
        "where: rank 5 of 2 on a, train.py:3 (the other was stopped)",
    ]
    hung = replace(OWN, rank=5, where="a", hung=True)
    assert explain([hung], [LEFT], size=2).where == "a, train.py:3"

"""Ranks that find each other: in threads of one process, which is all that sockets need."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.ranks import free_port
from shoal.distributed.cluster_env import Meeting
from shoal.distributed.rendezvous import meet
from shoal.util.errors import LaunchError

HERE = ("127.0.0.1",)

Join = Callable[..., "list[Future[Any]]"]


@pytest.fixture
def join() -> Iterator[Join]:
    """`join(meeting, size)` has all ranks, or those given, join; the stores as futures."""
    with ThreadPoolExecutor(16) as pool:

        def begin(
            meeting: Meeting, size: int, ranks: list[int] | None = None, timeout: float = 100
        ) -> list[Future[Any]]:
            return [
                pool.submit(meet, meeting, rank=rank, size=size, timeout=timeout)
                for rank in (ranks or range(size))
            ]

        yield begin


def job(name: str, *ports: int, hosts: tuple[str, ...] = HERE, directory: str = "") -> Meeting:
    return Meeting(job=name, hosts=hosts, ports=ports, directory=directory)


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def check_one_store(stores: list[Future[Any]], text: str) -> None:
    first, *others = [store.result(timeout=120) for store in stores]
    first.set("text", text)
    assert [other.get("text").decode() for other in others] == [text] * len(others)


def test_all_ranks_get_one_store_and_no_other_machine_can_connect(join: Join) -> None:
    """As all ranks are on this one."""
    ports = free_ports(2)
    stores = join(job("a", *ports), 3)
    check_one_store(stores, "hello")
    listening = [
        found.laddr.ip
        for found in psutil.Process().net_connections("inet")
        if found.status == psutil.CONN_LISTEN and found.laddr.port in ports
    ]
    assert listening == ["127.0.0.1"]  # of the store; the meeting is over


def test_two_jobs_with_the_same_ports_do_not_clash(join: Join) -> None:
    """FAILURES 16."""
    ports = free_ports(4)
    one, two = join(job("one", *ports), 3), join(job("two", *ports), 3)
    check_one_store(one, "of one")
    check_one_store(two, "of two")


@pytest.mark.full
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_port_that_something_else_listens_at_is_passed_over(taken: int, join: Join) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(taken)]
        silent = [server.getsockname()[1] for server in servers]  # they take calls and say nothing
        check_one_store(join(job("a", *silent, *free_ports(4 - taken)), 2), "hello")


def test_no_free_port_is_told_with_the_ports(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (failed,) = join(job("a", port), 2, [0])
        with pytest.raises(LaunchError, match=f"{port}.*\n.*in use"):
            failed.result(timeout=120)


@pytest.mark.full
def test_rank_0_names_the_ranks_that_did_not_come(join: Join) -> None:
    failed, came = join(job("a", *free_ports(2)), 4, [0, 2], timeout=8.0)
    with pytest.raises(LaunchError, match="rank 1, 3 did not join the rendezvous"):
        failed.result(timeout=120)
    assert came.result(timeout=120) is not None


def test_a_rank_without_a_first_one_says_where_it_looked(join: Join) -> None:
    port = free_port()
    (failed,) = join(job("a", port), 2, [1], timeout=0.3)
    with pytest.raises(LaunchError, match=f"(?s)127.0.0.1; ports {port}.*refused"):
        failed.result(timeout=120)


def test_a_host_from_which_nothing_comes_back_is_told_soon(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.distributed.rendezvous.SILENCE", 0.2)
    meeting = job("a", *free_ports(2), hosts=("no-such-host.invalid",))
    (failed,) = join(meeting, 2, [1], timeout=60.0)
    said = f"found: {socket.gethostname()} can't reach no-such-host.invalid: no reply"
    with pytest.raises(LaunchError, match=said):
        failed.result(timeout=120)


def test_rank_0_is_found_among_several_hosts(join: Join) -> None:
    """An address that answers nothing, and a name that nobody knows, come first."""
    hosts = ("127.0.0.77", "no-such-host.invalid", "localhost")
    check_one_store(join(job("a", *free_ports(2), hosts=hosts), 2), "hello")


def test_rank_0_publishes_where_it_is(join: Join, tmp_path: Path) -> None:
    meeting = job("a/b", *free_ports(2), hosts=(), directory=str(tmp_path / "shared"))
    first, *rest = join(meeting, 3, [0, 1])
    # The third has not come yet, so the file is still there.
    rest[0].result(timeout=120)
    (path,) = (tmp_path / "shared").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    check_one_store([first, *rest, *join(meeting, 3, [2])], "hello")
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_cannot_be_written(join: Join, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (failed,) = join(job("a", *free_ports(2), hosts=(), directory=str(tmp_path / "file/x")), 2, [0])
    with pytest.raises(LaunchError, match="SHOAL_MEETING"):
        failed.result(timeout=120)

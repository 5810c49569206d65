"""The interface by which ranks talk: decided from what each has reached, and tried over loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoal.distributed.env_vars import set_variables, write_defaults
from shoal.distributed.interfaces import (
    ChosenInterface,
    Interface,
    InterfaceReport,
    agree,
    check_given,
    decide,
    engine_variables,
    interfaces,
)
from shoal.util.errors import LaunchError

LO = Interface(name="lo", addresses=("127.0.0.1",))
SLOW = Interface(name="eth0", addresses=("10.0.0.1",), speed=1000)
FAST = Interface(name="eth1", addresses=("10.1.0.1",), speed=25000)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), speed=40000)
UNKNOWN = Interface(name="ens3", addresses=("10.2.0.1",))
TUNNEL = Interface(name="tun0", addresses=("10.8.0.1",), speed=10)
INFINIBAND = Interface(name="ib0", addresses=("10.3.0.1",), infiniband=True)


def reached(*names: str, host: str = "b", **failed: str) -> InterfaceReport:
    return InterfaceReport(host=host, reached=dict.fromkeys(names, "10.0.0.2"), failed=failed)


@pytest.mark.parametrize(
    ("offered", "by", "name"),
    [
        ([SLOW, FAST], ["eth0", "eth1"], "eth1"),
        ([DOCKER, SLOW], ["eth0"], "eth0"),  # each machine has such a one, and it leads to itself
        ([FAST, INFINIBAND], ["eth1", "ib0"], "ib0"),
        ([TUNNEL, UNKNOWN], ["tun0", "ens3"], "ens3"),  # virtual machines don't say their speed
        ([LO, SLOW], ["lo", "eth0"], "lo"),  # then all are on one machine
    ],
)
def test_the_fastest_by_which_all_have_come(offered: list[Interface], by: list[str], name: str) -> None:
    decided = decide(offered, [reached(*by), reached(*by, host="c")], host="a")
    assert decided["name"] == name


def test_a_decision_says_why_and_why_not() -> None:
    report = reached("eth0", "eth1", docker0="172.17.0.1, port 5: refused")
    assert decide([LO, SLOW, FAST, DOCKER], [report], host="a") == {
        "name": "eth1",
        "reason": "all 2 ranks have reached a (rank 0) through it, and it is the fastest",
        "rejected": {
            "eth0": "1000 Mbit/s, eth1 25000 Mbit/s",
            "docker0": "b (rank 1) did not reach a (rank 0) through it: 172.17.0.1, port 5: refused",
        },
    }


def test_where_nobody_can_connect_both_hosts_are_named() -> None:
    """Each by another interface is no network of all."""
    reports = [reached("eth0", eth1="timed out"), reached("eth1", host="c", eth0="timed out")]
    given, found, fix = decide([LO, SLOW, FAST], reports, host="a")["error"].values()
    assert given == "the network of a (rank 0): lo (127.0.0.1), eth0 (10.0.0.1), eth1 (10.1.0.1)"
    assert "eth0: c (rank 2) did not reach a (rank 0) through it: timed out" in found
    assert "eth1: b (rank 1) did not reach a (rank 0) through it: timed out" in found
    assert "ports" in fix


def together(size: int, given: Sequence[str] = ("",) * 4) -> list[Any]:
    """What `agree` returned or raised on each rank: all in this process, over its own interfaces."""
    store = HashStore()

    def join(rank: int) -> ChosenInterface:
        return agree(store, rank=rank, size=size, given=given[rank], timeout=100)

    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(join, rank) for rank in range(size)]
        return [call.exception(timeout=120) or call.result() for call in calls]


def loopback() -> Interface:
    return next(one for one in interfaces() if one.loopback)


def test_ranks_of_one_machine_talk_by_its_loopback_unless_they_are_told() -> None:
    name = loopback().name
    for way in together(3):
        assert way.choice.value == name
        assert "one machine" in way.choice.reason or len(interfaces()) == 1
        assert way.address == "127.0.0.1"
    for way in together(2, [name, name]):
        assert way.choice.reason == f"given: GLOO_SOCKET_IFNAME={name}"
    check_given(name)


@pytest.mark.parametrize("given", [("eth99", "eth99", ""), ("", "", "eth99"), ("", "eth99", "")])
def test_an_interface_that_is_not_there_is_told_on_all_ranks(given: tuple[str, ...]) -> None:
    for error in together(3, given):
        assert isinstance(error, LaunchError)
        assert error.given == f"GLOO_SOCKET_IFNAME=eth99 on {socket.gethostname()}"
        assert "127.0.0.1" in error.found
    with pytest.raises(LaunchError, match="has no interface eth99"):  # on one machine too
        check_given("lo,eth99")


def test_what_answers_but_is_not_rank_0_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real: Callable[..., socket.socket] = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as other:

        def elsewhere(address: tuple[str, int], **options: Any) -> socket.socket:
            call = real(("127.0.0.1", other.getsockname()[1]), **options)
            with other.accept()[0] as answer:
                answer.sendall(b"another job\n")
            return call

        monkeypatch.setattr(socket, "create_connection", elsewhere)
        first, second = together(2)
    assert str(first) == str(second)
    assert "another program answers at this address" in first.found


def test_variables_of_engines_are_set_where_the_user_has_not() -> None:
    assert engine_variables("ib0", "gloo") == {"GLOO_SOCKET_IFNAME": "ib0"}
    known = engine_variables("ib0", "cpu:gloo,cuda:nccl")
    with set_variables({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": None}):
        assert write_defaults(known) == {"NCCL_SOCKET_IFNAME": "=ib0"}

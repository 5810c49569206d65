"""The port at which a rank answers about hangs: other processes of the machine can't harm by it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import shoal
from helpers.commands import wait_for
from helpers.ranks import Ranks
from shoal.distributed.watchdog import side_channel
from shoal.distributed.watchdog.side_channel import PeerAddress, SideChannelServer

pytestmark = pytest.mark.processes

TOKEN = "0123456789abcdef" * 2


class Served:
    """A door on a thread of its own, with what asyncio has to complain of."""

    def __init__(self) -> None:
        self.complaints: list[dict[str, Any]] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.door = SideChannelServer(TOKEN, lambda question: {"heard": question})
        self.loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop.set_exception_handler(lambda _, complaint: self.complaints.append(complaint))
        server = await asyncio.start_server(
            self.door.answer, sock=self.socket, limit=side_channel.LONGEST
        )
        async with server:
            await self._over.wait()
            self.door.close()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._over.set)
            self.thread.join()

    def ask(self, token: str = TOKEN, **question: Any) -> dict[str, Any]:
        peer = PeerAddress(host="here", pid=1, born=0.0, address="127.0.0.1", port=self.port)
        return asyncio.run(side_channel.ask(peer, token, question))


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    try:
        yield found
    finally:
        found.stop()


def call(port: int, data: bytes = b"") -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(OSError):  # closed before all was sent
        caller.sendall(data)
    return caller


def said(caller: socket.socket) -> bytes:
    """What comes back until the other end hangs up."""
    with caller:
        try:
            return caller.recv(100)
        except ConnectionResetError:
            return b""


WRONG = [
    *(b"\n", b"[]\n", b"{}\n", b"null\n", b'"x"\n', b'{"token": 5}\n', b"\xff\xfe\n" * 20),
    *(b'{"token": null, "judge": 0}\n', b"x" * 31 + b"\n", b"x" * 33 + b"{}\n", b"[" * 100_000 + b"\n"),
    *(TOKEN[:-1].encode() + b'x{"judge": 1}\n', TOKEN.encode() + b"[" * 100_000 + b"\n"),
    *(TOKEN.encode() + b"\n", TOKEN.encode() + b"x" * (2 * side_channel.LONGEST + 1)),
]


def test_a_line_without_a_question_is_dropped_in_silence(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    for line in WRONG:
        caller = call(served.port, line)
        with suppress(OSError):  # the other end may have closed before the line was read whole
            caller.shutdown(socket.SHUT_WR)
        assert said(caller) == b"", line[:40]
        assert served.ask(judge=1) == {"heard": {"judge": 1}}
        assert served.complaints == []
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConnectionResetError):  # who has another token is told nothing
        served.ask(token="f" * len(TOKEN))
    # The report of a hang of thousands of ranks has a line for each.
    question = {"end": "x" * (side_channel.LONGEST // 2)}
    assert served.ask(**question) == {"heard": question}


def test_an_idle_connection_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "_PATIENCE", 0.05)
    assert said(call(served.port)) == b""
    assert said(call(served.port, TOKEN.encode())) == b""


def test_idle_connections_are_bounded_and_keep_no_question_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "_PATIENCE", 600.0)
    callers = [call(served.port) for _ in range(3 * side_channel._MOST_WAITING)]
    assert served.ask(judge=1) == {"heard": {"judge": 1}}
    for early in callers[: 2 * side_channel._MOST_WAITING]:
        assert said(early) == b""
    assert len(served.door._waiting) <= side_channel._MOST_WAITING
    for late in callers:
        late.close()


def test_connections_that_are_open_at_the_end_are_closed_in_silence(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    callers = [call(served.port, data) for data in (b"", b"GET", TOKEN.encode()) for _ in range(20)]
    assert served.ask(judge=1) == {"heard": {"judge": 1}}  # all of them have been accepted
    served.stop()
    assert served.complaints == []
    assert capfd.readouterr() == ("", "")
    for caller in callers:
        assert said(caller) == b""


def port_of(world: shoal.World) -> int:
    watch: Any = world.watchdog._watch
    return int(watch._socket.getsockname()[1])


def open_files(_: shoal.World) -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranks_keep_nothing_of_what_strangers_send(ranks: Ranks) -> None:
    ports, before = ranks.call(port_of), ranks.call(open_files)
    for port in ports:
        for line in WRONG * 5:
            call(port, line).close()
    wait_for(lambda: ranks.call(open_files) == before)
    assert ranks.call(shoal.World.gather, "all is well") == [["all is well"] * 2] * 2

"""A switch that keeps each frame for a while, for kernels without netem.

`delay.py SECONDS PORT…`, in the network namespace of the ports: joins them, and says `ready`. With
`--lose`, `--double` or `--reorder` and a probability, it loses frames, sends them twice, or keeps them
5 ms longer than those that come after them. Ports
are packet sockets (packet(7)), so the hosts' own devices stay as they are when it comes and goes.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import os
import random
import select
import socket
import struct
import time
from contextlib import suppress

# Of linux/if_packet.h, if_ether.h, prctl.h and asm-generic/socket.h; the size of a virtio_net_hdr.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 0x0003
_PR_SET_TIMERSLACK = 29
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_TIME = struct.Struct("ll")
_HEADER = 10

_LONGEST_FRAME = 1 << 17
_BUFFER = 1 << 25
_AT_ONCE = 64
_EARLY = 0.0003
"""Seconds for which it asks again and again before a frame is due: to be woken takes its time."""
_LATER = 0.005
"""Seconds by which a frame comes too late that is reordered."""
_NOTES = socket.CMSG_SPACE(_TIME.size)


def _open(name: str) -> socket.socket:
    """A socket that gets all that comes in at a port, and sends as it is told.

    With virtio's header, frames as long as TCP makes them pass whole, their checksums yet to be
    filled in, as between two devices of the kernel.
    """
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    # Of root alone; the usual limits hold less than what is under way.
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    port.bind((name, _ETH_P_ALL))
    port.setblocking(False)
    return port


def switch(
    seconds: float, names: list[str], *, lose: float, double: float, reorder: float, seed: int
) -> None:
    """Pass frames on, each `seconds` after the kernel had it, until this process is killed."""
    # A switch waits for no other process of this machine, where that can be had.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    # The kernel may otherwise wake a process 50 us later than it asked for.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    ports = [_open(name) for name in names]
    behind: dict[bytes, socket.socket] = {}
    kept: list[tuple[float, int, socket.socket, bytes]] = []
    draw, count = random.Random(seed), 0
    print("ready", flush=True)
    while True:
        patience = max(0.0, kept[0][0] - _EARLY - time.time()) if kept else None
        for port in select.select(ports, (), (), patience)[0]:
            with suppress(OSError):  # all is read, or the cable is cut
                for _ in range(_AT_ONCE):
                    frame, notes, _, _ = port.recvmsg(_LONGEST_FRAME, _NOTES)
                    behind[frame[_HEADER + 6 : _HEADER + 12]] = port
                    whole, parts = _TIME.unpack(notes[0][2])
                    if draw.random() < lose:
                        continue
                    due = whole + parts / 1e9 + seconds + _LATER * (draw.random() < reorder)
                    for _ in range(1 + (draw.random() < double)):
                        count += 1  # frames of the same time stay in order
                        heapq.heappush(kept, (due, count, port, frame))
        while kept and kept[0][0] <= time.time():
            _, _, source, frame = heapq.heappop(kept)
            known = behind.get(frame[_HEADER : _HEADER + 6])
            for port in [known] if known is not None else ports:
                if port is not source:
                    with suppress(OSError):  # a cut cable, or a full queue: lost, as on any network
                        port.send(frame)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("ports", nargs="+")
    for name in ("lose", "double", "reorder"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        switch(
            given.seconds,
            given.ports,
            lose=given.lose,
            double=given.double,
            reorder=given.reorder,
            seed=given.seed,
        )

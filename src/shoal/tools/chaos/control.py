"""The files by which ranks report faults and request those that only the storm can inject."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.util.clock import CLOCK

_PAUSE = 0.002


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One line of a rank: a `step` that it has taken, an operation of a `save`, or an `injected` fault.

    `when` is in seconds of `time.monotonic`. `value` is the step, the operation or the fault's number.
    """

    kind: str
    rank: int
    step: int
    when: float
    value: str = ""
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class ActionRequest:
    """A rank, by its process, asks for the action of a fault."""

    file: Path
    number: int
    action: str
    pid: int


class ControlDirectory:
    """A directory outside of the disk that faults fill. Each rank appends to a separate file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_notice(self, notice: Notice) -> None:
        """Append a notice, in one write, so that a killed process leaves no partial line."""
        file = self.path / f"rank-{notice.rank}.jsonl"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(notice)).encode() + b"\n")
        finally:
            os.close(descriptor)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices of all ranks."""
        for file in sorted(self.path.glob("rank-*.jsonl")):
            for line in file.read_text().splitlines():
                yield Notice(**json.loads(line))

    def injected(self) -> set[int]:
        """Return the numbers of the faults that have happened."""
        return {int(each.value) for each in self.notices() if each.kind == "injected"}

    def request_action(self, number: int, action: str, pid: int) -> None:
        """Ask the storm for an action, and wait until it is done."""
        name = f"{number}-{action}"
        content = {"number": number, "action": action, "pid": pid}
        (self.path / f"{name}.tmp").write_text(json.dumps(content))
        (self.path / f"{name}.tmp").rename(self.path / f"{name}.request")
        while not (self.path / f"{name}.done").exists():
            CLOCK.sleep(_PAUSE)

    def requests(self) -> list[ActionRequest]:
        """Return the requests that are not done."""
        files = sorted(self.path.glob("*.request"))
        return [ActionRequest(file=file, **json.loads(file.read_text())) for file in files]

    def finish_request(self, request: ActionRequest) -> None:
        """Let the rank continue."""
        request.file.rename(request.file.with_suffix(".done"))

"""One rank of a storm: counts steps and file operations of saves, and injects faults at them.

Ranks report faults by files, and request those that only the storm can inject.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.checkpoint import Checkpoints, Files
from shoal.distributed.env_vars import placement
from shoal.launcher.entry_point import Script
from shoal.launcher.local import run_job
from shoal.tools.chaos.faults import KINDS, PLACES, Fault
from shoal.training.run import Run
from shoal.util.clock import CLOCK, jump_clock

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


START = "from shoal.tools.chaos.rank import main; main()"
"""Not `-m`: ranks must find its classes under the module's name, not under `__main__`."""
OPERATIONS = (
    "make_directory",
    "create",
    "reserve",
    "write",
    "sync",
    "sync_directory",
    "rename",
    "unlink",
    "remove_directory",
)
ERRORS = {"io-error": errno.EIO, "read-only": errno.EROFS, "quota": errno.EDQUOT}
"""Kinds of faults that a file operation of a save raises."""
_LARGE = 1 << 40
_JUMP = 3600.0


@dataclass(frozen=True, kw_only=True)
class DisturbedScript(Script):
    """A script that a rank runs under faults. Those that have happened before are left out."""

    control: str
    faults: tuple[dict[str, Any], ...]
    lasting: int

    def run(self) -> None:
        """Install the hooks and run the script as `__main__`."""
        control = ControlDirectory(Path(self.control))
        happened = control.injected()  # also in earlier attempts of the same launcher
        faults = [
            fault for fault in (Fault(**each) for each in self.faults) if fault.number not in happened
        ]
        injector = FaultInjector(control, placement().rank, faults, self.lasting)
        injector.install()
        super().run()


class FaultInjector:
    """The faults of one rank, in the order of their steps.

    `lasting` is the number of steps for which a fault of the disk persists.
    """

    def __init__(self, control: ControlDirectory, rank: int, faults: list[Fault], lasting: int) -> None:
        self._control = control
        self._rank = rank
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._lasting = lasting
        self._active: list[tuple[int, Fault]] = []
        self._saving = -1
        self._counts: Counter[str] = Counter()
        self._nested = False

    def install(self) -> None:
        """Set the hooks on steps and on the files of checkpoints, and write a notice."""
        for name in OPERATIONS:
            setattr(Files, name, self._observed(name, getattr(Files, name)))
        start, tick = Checkpoints.start, Run.tick

        @wraps(start)
        def started(checkpoints: Checkpoints, step: int, *args: Any, **kwargs: Any) -> Any:
            checkpoints.background.wait()  # operations until now belong to the save before
            self._saving, self._counts = step, Counter()
            return start(checkpoints, step, *args, **kwargs)

        @wraps(tick)
        def ticked(run: Run, *args: Any, **kwargs: Any) -> None:
            self._after_step(run.step)
            tick(run, *args, **kwargs)

        setattr(Checkpoints, "start", started)  # noqa: B010
        setattr(Run, "tick", ticked)  # noqa: B010
        self._tell("start", 0, "")

    def _after_step(self, step: int) -> None:
        children = len(psutil.Process().children())
        self._tell("step", step, str(children))
        for until, fault in [each for each in self._active if each[0] <= step]:
            self._active.remove((until, fault))
            self._control.request_action(fault.number, f"end {fault.kind}", os.getpid())
        for fault in [each for each in self._faults if not each.operation and each.step <= step]:
            self._faults.remove(fault)
            place = fault.kind.removeprefix("kill-in-")
            if place in PLACES:
                self._arm(fault, step, place)
            else:
                self._inject(fault, step)

    def _arm(self, fault: Fault, step: int, place: str) -> None:
        """Inject a fault in the next forward pass, backward pass or optimizer step of this rank."""

        def inject(*_: object) -> None:
            self._inject(fault, step)

        def inject_in_backward(_: object, __: object, output: object) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(inject)

        if place == "forward":
            register_module_forward_pre_hook(inject)
        elif place == "backward":
            register_module_forward_hook(inject_in_backward)
        else:
            register_optimizer_step_pre_hook(inject)

    def _observed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def observed(files: Files, *args: Any) -> Any:
            if self._saving < 0 or self._nested:
                return operation(files, *args)
            label = self._next_label(name, args)
            self._tell("save", self._saving, label)
            due = [f for f in self._faults if (f.step, f.operation) == (self._saving, label)]
            if due and name == "write":
                half = len(args[1]) // 2
                operation(files, args[0], args[1][:half])
                args[0].flush()
                args = (args[0], args[1][half:])
            for fault in due:
                self._faults.remove(fault)
                self._inject(fault, self._saving)
            # Whether a directory exists depends on which rank was faster.
            self._nested = name == "make_directory"
            try:
                return operation(files, *args)
            finally:
                self._nested = False

        return observed

    def _next_label(self, name: str, args: tuple[Any, ...]) -> str:
        what = getattr(args[0], "name", "") if args else ""
        label = f"{name} {Path(str(what)).name}"
        self._counts[label] += 1
        return f"{label} #{self._counts[label]}"

    def _inject(self, fault: Fault, step: int) -> None:
        self._tell("injected", step, str(fault.number))
        match fault.kind:
            case "kill" | "kill-in-save" | "kill-in-forward" | "kill-in-backward" | "kill-in-update":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                ctypes.string_at(0)
            case "memory":
                used = psutil.Process().memory_info().vms
                resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
                bytearray(_LARGE)
            case "io-error" | "read-only" | "quota":
                raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]))
            case "clock-jump":
                jump_clock(_JUMP if fault.number % 2 else -_JUMP)
            case "kill-worker":
                for child in psutil.Process().children()[:1]:
                    child.kill()
            case _:
                self._control.request_action(fault.number, fault.kind, os.getpid())
                if KINDS[fault.kind].lasts:
                    self._active.append((step + self._lasting, fault))

    def _tell(self, kind: str, step: int, value: str) -> None:
        self._control.write_notice(
            Notice(
                kind=kind,
                rank=self._rank,
                step=step,
                when=CLOCK.now(),
                value=value,
                pid=os.getpid(),
            )
        )


def main() -> None:
    """Run the order, as `shoal run` does, and exit with the code of its ranks."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    processes, restarts = order.pop("processes"), order.pop("restarts")
    job = DisturbedScript(**{**order, "args": tuple(order["args"]), "faults": tuple(order["faults"])})
    sys.exit(run_job(job, processes=processes, restarts=restarts).code)

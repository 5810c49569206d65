"""One rank of a storm: counts steps and file operations of saves, and injects faults at them."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.checkpoint import Checkpoints, Files
from shoal.distributed.env_vars import placement
from shoal.tools.chaos.control import ControlDirectory, Notice
from shoal.tools.chaos.faults import KINDS, PLACES, Fault
from shoal.tools.verify.patches import call_around, call_before
from shoal.training.run import Run
from shoal.util.clock import CLOCK, jump_clock

HOOKS = "shoal.tools.chaos.rank:inject_faults"
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


def inject_faults(options: Mapping[str, Any]) -> None:
    """Inject the faults of this rank that have not happened yet into the script that it will run."""
    control = ControlDirectory(Path(options["control"]))
    happened = control.injected()  # also in earlier attempts of the same launcher
    faults = [
        fault for fault in (Fault(**each) for each in options["faults"]) if fault.number not in happened
    ]
    injector = FaultInjector(control, placement().rank, faults, options["lasting"])
    injector.install()
    injector.note_start()


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
        """Set the hooks. Files are those of checkpoints; other files are not observed."""
        for name in OPERATIONS:
            call_around(Files, name, partial(self._observed, name))
        call_before(Checkpoints, "start", self._begin_save)
        call_before(Run, "tick", lambda run, *_, **__: self._after_step(run.step))

    def _begin_save(self, checkpoints: Checkpoints, step: int, *_: Any, **__: Any) -> None:
        checkpoints.background.wait()  # operations until now belong to the save before
        self._saving, self._counts = step, Counter()

    def note_start(self) -> None:
        """Write a notice that this rank is about to run the script."""
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

    def _observed(self, name: str, operation: Callable[..., Any], files: Files, *args: Any) -> Any:
        """Run a file operation, after the faults that are due at it."""
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

    def _next_label(self, name: str, args: tuple[Any, ...]) -> str:
        what = getattr(args[0], "name", "") if args else ""
        label = f"{name} {Path(str(what)).name}"
        self._counts[label] += 1
        return f"{label} #{self._counts[label]}"

    def _inject(self, fault: Fault, step: int) -> None:
        self._tell("injected", step, str(fault.number))
        if fault.kind == "kill" or fault.kind.startswith("kill-in-"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "segfault":
            ctypes.string_at(0)
        elif fault.kind == "memory":
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
            bytearray(_LARGE)
        elif fault.kind in ERRORS:
            raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]))
        elif fault.kind == "clock-jump":
            jump_clock(_JUMP if fault.number % 2 else -_JUMP)
        elif fault.kind == "kill-worker":
            for child in psutil.Process().children()[:1]:
                child.kill()
        else:
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

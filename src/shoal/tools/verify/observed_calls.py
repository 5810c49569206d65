"""Observation of a process by hooks on functions: calls, files that are replaced, clipped gradients."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

Written = Callable[[str], None]
CACHES = ("__pycache__", ".lock")
"""Parts of the names of files that ranks may share."""
MAKER_OF_STATE = "torch/distributed/checkpoint/state_dict.py"
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
REDUCTIONS = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_reduce_coalesced"),
)
CALLS: tuple[tuple[Any, str, str], ...] = (
    (os, "listdir", "listdir"),
    (torch, "save", "save"),
    (torch, "load", "load"),
    (torch.autograd, "backward", "backward"),
    (Optimizer, "state_dict", "optimizer saved"),
    (Optimizer, "load_state_dict", "optimizer restored"),
    (LRScheduler, "__init__", "scheduler built"),
    (LRScheduler, "state_dict", "scheduler saved"),
    (LRScheduler, "load_state_dict", "scheduler restored"),
    (torch, "get_rng_state", "torch generator saved"),
    (torch, "set_rng_state", "torch generator restored"),
    (random, "getstate", "python generator saved"),
    (random, "setstate", "python generator restored"),
    (np.random, "get_state", "numpy generator saved"),
    (np.random, "set_state", "numpy generator restored"),
    (DistributedDataParallel, "no_sync", "no_sync"),
    *((dist, name, name) for name in REDUCTIONS if dist.is_available()),
)
"""Functions whose calls by the script are evidence of a cause: owner, name, and what a call does."""


def call_before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call` with the arguments of a function before each of its calls."""
    original = getattr(owner, name)

    @wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        call(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, function)


def call_after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call` with the positional arguments of a function after each of its calls."""
    original = getattr(owner, name)

    @wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        call(*arguments)
        return result

    setattr(owner, name, function)


def call_before_updates(call: Callable[[Optimizer], None]) -> None:
    """Call `call` before each update of an optimizer, which is after the first call of a closure."""

    def step_begins(optimizer: Optimizer, args: Any, named: Any) -> Any:
        closure = next(filter(callable, (*args, *named.values())), None)
        if closure is None:
            call(optimizer)
            return None
        calls = [call]

        def observed() -> Any:
            loss = closure()
            while calls:
                calls.pop()(optimizer)
            return loss

        values = {key: observed if each is closure else each for key, each in named.items()}
        return tuple(observed if each is closure else each for each in args), values

    register_optimizer_step_pre_hook(step_begins)


def observe_calls(called: Callable[[str], None]) -> None:
    """Call `called` with what a function of CALLS does before each of its calls."""
    for owner, name, what in CALLS:
        call_before(owner, name, lambda *_, what=what, **__: called(what))

    def trained(_module: nn.Module, mode: bool = True) -> None:
        if mode:
            called("train mode")

    call_before(nn.Module, "train", trained)
    call_before(torch, "manual_seed", lambda seed: called(f"seed {seed}"))


def observe_written_files(root: str, written: Written) -> None:
    """Call `written` with the path, relative to `root`, of each file that this process replaces.

    A file is replaced if it is opened with truncation, if another file is renamed to its name, or by
    torch's `save`, which writes in C++. Files that are appended to or created exclusively are not.
    """

    def note(path: Any) -> None:
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return  # a file descriptor, or a file that is open already
        if full.startswith(os.path.join(root, "")) and not any(part in full for part in CACHES):
            written(os.path.relpath(full, root))

    def audited(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & os.O_TRUNC and not values[2] & (os.O_APPEND | os.O_EXCL):
            note(values[0])
        elif event == "os.rename":  # os.replace raises it too
            note(values[1])

    sys.addaudithook(audited)
    call_before(torch, "save", lambda obj=None, f=None, *_, **__: note(f))


def observe_clipping(clipped: Callable[[list[Tensor]], None]) -> None:
    """Call `clipped` with the parameters before each call that clips their gradients."""
    for name in CLIPS:
        observed = _clipping(getattr(clip_grad, name), clipped)
        for module in (torch.nn.utils, clip_grad):
            setattr(module, name, observed)


def _clipping(
    original: Callable[..., Any], clipped: Callable[[list[Tensor]], None]
) -> Callable[..., Any]:
    @wraps(original)
    def function(parameters: Any, *arguments: Any, **named: Any) -> Any:
        # A list, since an iterator can be read only once.
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped(listed)
        return original(listed, *arguments, **named)

    return function


def keep_process_groups() -> None:
    """Keep each process group that the script destroys, to the end of the process.

    A DistributedDataParallel that is freed frees its group and waits for the threads of Gloo, which may
    wait for Python's lock at the same time.
    """
    kept: list[Any] = []
    if dist.is_available():
        call_before(
            dist, "destroy_process_group", lambda group=None: kept.append(group or dist.group.WORLD)
        )


def reverse_listings() -> None:
    """Reverse the result of `os.listdir`, on which `Path.iterdir` and `shutil` are built.

    Scripts must not depend on the order of the file system.
    """
    original = os.listdir

    @wraps(original)
    def listdir(*arguments: Any) -> Any:
        return original(*arguments)[::-1]

    os.listdir = listdir  # type: ignore[assignment]


class NoInput:
    """Standard input of an observed script. `read` is called when the script reads."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._called = read

    def _read(self, *_arguments: Any) -> NoReturn:
        self._called()
        raise EOFError("shoal verify gives the script no standard input")

    read = readline = readlines = __iter__ = __next__ = _read

    def fileno(self) -> int:
        """Return the descriptor, which is /dev/null."""
        return 0

    def isatty(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing: multiprocessing closes standard input in the processes that it starts."""


def makes_state() -> bool:
    """Return whether torch takes an empty step, to create optimizer state before it is loaded."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(MAKER_OF_STATE):
            return True
        frame = frame.f_back
    return False

"""Repeatable runs: seeds by purpose, the state of the global generators, and deterministic
algorithms.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shoal.distributed import env_vars
from shoal.util import accelerator
from shoal.util.decision import GIVEN, Decision


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """Return a 63-bit seed from a root seed, a purpose and an index: the head of a SHA-256."""
    digest = hashlib.sha256(f"shoal/{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators: Python's, NumPy's (by the last 32 bits) and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def script_seed() -> int | None:
    """Return the seed that the script has given to `torch.manual_seed`; None if it has not called it.

    Larger than seeds of scripts are the random one with which torch begins, and those of streams.
    """
    seed = torch.initial_seed()
    return seed if seed < 2**48 else None


def start_generators(seed: int | None, broadcast: Callable[[Any], Any]) -> int:
    """Seed the global generators equally on all ranks, or keep those of rank 0; return the root seed.

    Collective without a `seed`.
    """
    if seed is None:
        seed, state = broadcast((script_seed(), random_state()))
        if seed is not None:
            set_random_state(state)
            return seed
        seed_all(derive_seed(0, "weights", 0))
        return 0
    seed_all(seed)
    return seed


def random_state() -> dict[str, Any]:
    """Return the global random states of this process: Python's, NumPy's and torch's."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    kind, module = accelerator.current()
    if module is not None and module.is_initialized():
        state[kind] = module.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    kind, module = accelerator.current()
    if module is not None and kind in state:
        module.set_rng_state(state[kind])


class DeterministicMode:
    """torch's mode of deterministic algorithms, set if `enabled` or for `bits` until `restore`.

    With `bits`, for `exact="bits"`, `restore` sets the number of torch's threads to that of now.
    """

    def __init__(self, *, enabled: bool, bits: bool = False) -> None:
        self._enabled = enabled or bits
        self._reason = "the default: deterministic algorithms are slower"
        if self._enabled:
            self._reason = GIVEN if enabled else "exact='bits': algorithms must add up in a fixed order"
        self._threads = torch.get_num_threads() if bits else None
        self._former = torch.get_deterministic_debug_mode()
        if self._enabled:
            env_vars.write_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)

    @property
    def decision(self) -> Decision[bool]:
        """The decision about deterministic algorithms."""
        return Decision(what="deterministic", value=self._enabled, reason=self._reason)

    def restore(self) -> None:
        """Restore torch's previous mode."""
        if self._enabled:
            torch.set_deterministic_debug_mode(self._former)
        if self._threads is not None:
            torch.set_num_threads(self._threads)

"""Random streams: seeds by purpose, and the state of the global generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.util import accelerator


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """Return a 63-bit seed from a root seed, a purpose and an index: the head of a SHA-256."""
    digest = hashlib.sha256(f"shoal/{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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

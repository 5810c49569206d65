"""A model run on the side: in evaluation mode, with the random states as before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode that it was found in.

    `train` is called for it wherever the mode changes, parents first: a module may do more in it than
    set a flag, as LoRA layers do, which merge their weights in eval mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.train(training)
        for module, training in modes:  # of a module with two parents, or whose parent decides
            module.training = training


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """What is drawn inside, from the global generators, is not drawn afterwards."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

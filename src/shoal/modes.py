"""Evaluation mode, and back to what there was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

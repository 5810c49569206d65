"""A moving average of a model's parameters, to evaluate and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import foreach
from shoal.strategies.compiled import bare
from shoal.strategies.dtensor import share
from shoal.util.errors import CheckpointError, StepError


class EMA:
    """Exponential moving average of the parameters of `model` (Polyak and Juditsky 1992).

    `update()` after each optimizer step: average = decay * average + (1 - decay) * parameter. Inside
    `with ema.applied():` the model has the averaged parameters; buffers are always the model's own.
    Given to a Run as state, `Run(…, state={"ema": ema})`, it resumes with it. The same on all ranks,
    since parameters are.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        if not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise StepError(
                given=f"EMA(decay={decay!r})",
                found="decay is a number, at least 0 and below 1",
                fix="decay=0.999, which averages over about 1,000 steps",
            )
        if not isinstance(model, nn.Module):
            raise StepError(
                given=f"shoal.EMA({type(model).__name__})",
                found="it is not a torch.nn.Module",
                fix="shoal.EMA(model)",
            )
        self.decay = decay
        self.updates = 0
        model = bare(model)
        self._parameters = dict(model.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(parameter)] for name, parameter in every}
        self._averages = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters as they are now."""
        averages = [share(average) for average in self._averages.values()]
        current = [share(parameter.detach()) for parameter in self._parameters.values()]
        foreach.lerp_(averages, current, 1.0 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged parameters inside the block; restore the model's own at its end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name, and the number of updates.

        As in the model's state_dict, a tied parameter is present under each of its names.
        """
        averages = {name: self._averages[first] for name, first in self._names.items()}
        return {"updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; raises CheckpointError if it is of another model."""
        averages: Mapping[str, Tensor] = state["averages"]
        here = {name: tuple(self._averages[first].shape) for name, first in self._names.items()}
        there = {name: tuple(tensor.shape) for name, tensor in averages.items()}
        if here != there:
            odd = sorted(name for name in here.keys() | there if here.get(name) != there.get(name))
            raise CheckpointError(
                given=f"an EMA over {len(here)} parameters",
                found=f"a checkpoint of one over {len(there)} that differs in {odd[0]}",
                fix="build the same model as in that run, or start afresh: shoal.Run('runs/b', …)",
            )
        for name, average in self._averages.items():
            average.copy_(averages[name])
        self.updates = int(state["updates"])

    @torch.no_grad()
    def _swap(self) -> None:
        # Copy values and keep the tensors, so that views, buckets and optimizers stay valid.
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._averages[name])
            self._averages[name].copy_(kept)

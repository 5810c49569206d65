"""A moving average of a model's parameters, to evaluate and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import foreach
from shoal._torch.modules import bare
from shoal.strategies.dtensor import share
from shoal.util.errors import CheckpointError, StepError


class EMA:
    """Exponential moving average of a model's parameters (Polyak and Juditsky 1992).

    `update()` after each optimizer step: average = decay * average + (1 - decay) * parameter. Buffers
    are always the model's own. Passed to a Run as state, `Run(…, state={"ema": ema})`, it is saved and
    restored with the run. It is the same on all ranks, since the parameters are the same. If they
    are sharded, each rank keeps the averages of its shards.

    Args:
        model: Parallelized model whose parameters are averaged.
        decay: Weight of the previous average, at least 0 and below 1. Default: 0.999.

    Attributes:
        updates: Number of updates.

    Raises:
        StepError: If `decay` is out of range.

    Examples:
        >>> with shoal.init() as world:
        ...     model = shoal.parallelize(torch.nn.Linear(1, 1), world)
        ...     ema = shoal.EMA(model, decay=0.9)
        ...     _ = torch.nn.init.ones_(model.weight)
        ...     ema.update()
        ...     with ema.applied():
        ...         averaged = model.weight.item()
        ...     averaged < model.weight.item()
        True
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        if not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise StepError(
                given=f"EMA(decay={decay!r})",
                found="decay is a number, at least 0 and below 1",
                fix="pass decay=0.999, which averages over about 1,000 steps",
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
        """Move the average towards the current parameters. Call it after each optimizer step."""
        averages = [share(average) for average in self._averages.values()]
        current = [share(parameter.detach()) for parameter in self._parameters.values()]
        foreach.lerp_(averages, current, 1.0 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged parameters inside the block; restore the model's own at its end.

        Returns:
            A context manager: `with ema.applied(): shoal.evaluate(step, data)`.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name, and the number of updates.

        Returns:
            "updates" and "averages". As in the model's state_dict, a tied parameter is present under
            each of its names.
        """
        averages = {name: self._averages[first] for name, first in self._names.items()}
        return {"updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state: State of an EMA over the same model.

        Raises:
            CheckpointError: If the state is of another model.
        """
        averages: Mapping[str, Tensor] = state["averages"]
        here = {name: tuple(self._averages[first].shape) for name, first in self._names.items()}
        there = {name: tuple(tensor.shape) for name, tensor in averages.items()}
        if here != there:
            odd = sorted(name for name in here.keys() | there if here.get(name) != there.get(name))
            raise CheckpointError(
                given=f"an EMA over {len(here)} parameters",
                found=f"the checkpoint has an EMA over {len(there)}, which differs in {odd[0]}",
                fix="build the model that the checkpoint was saved from, or start a new run: "
                "shoal.Run('runs/b', …)",
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

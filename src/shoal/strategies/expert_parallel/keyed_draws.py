"""Random draws inside experts, such as dropout, keyed by sample, expert and place in the sample.

The rows that an expert computes are tokens of any samples, from any rank. If experts draw, they compute
one after the other, and the samples of their rows are declared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.micro import CURRENT_DRAWS, Drawing, Draws, MicroBatch
from shoal.distributed.objects import gather_numbers
from shoal.distributed.world import World
from shoal.strategies.random_draws.draws import draws_of_another_pass, first_time, layouts_of
from shoal.strategies.random_draws.layouts import declared_samples, samples
from shoal.strategies.random_draws.row_index import batch_rows

_SPLIT = ("tensor", "context")
"""Axes whose ranks have parts of a sample."""


class Keys(NamedTuple):
    """The keys of a call's draws: the position of each row's sample, and the name of the call."""

    positions: Tensor
    call: str
    draws: Draws


class KeyedDraws:
    """The draws of one module of experts: `name` is its name in the model.

    `used` says whether the experts draw in training; None as long as it is not known.
    """

    def __init__(self, name: str, world: World) -> None:
        self._name = name
        self._world = world
        possible = all(world.layout.degree(axis) == 1 for axis in _SPLIT)
        self.used = None if possible else False
        self._drawn = False

    def find(self, module: nn.Module, tokens: int, run: Callable[[Keys], object]) -> None:
        """Let the experts `run` to find whether they draw. Collective."""
        if self.used is not None or not module.training:
            return
        with draws_of_another_pass(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            keys = self._keys(module, tokens)
            if keys is None:  # outside a step, on all ranks
                return
            run(keys[0])
        group = self._world.data_group
        drawn, most = int(self._drawn), tokens
        if group is not None:
            drawn, most = max(gather_numbers(drawn, group)), max(gather_numbers(tokens, group))
        if drawn or most:  # experts without tokens draw nothing
            self.used = bool(drawn)

    def keys(self, module: nn.Module, tokens: int) -> Keys | None:
        """Return the keys of the draws for these tokens; None if the experts do not draw."""
        return (
            first_time(partial(self._keys, module, tokens)) if self.used and module.training else None
        )

    def _keys(self, module: nn.Module, tokens: int) -> tuple[Keys] | None:
        now = CURRENT_DRAWS.get()
        if now is None:
            return None
        calls = (id(self), "")
        number = now.made[calls] = now.made.get(calls, 0) + 1
        positions = now.micro.first + self._samples(module, tokens, now)
        return (Keys(positions, f"{now.scope}call {number} of {self._name}, expert ", now),)

    def _samples(self, module: nn.Module, tokens: int, now: Draws) -> Tensor:
        """Return the sample of each token in the micro-batch; 0 for all if it is not known."""
        each, rest = divmod(tokens, now.micro.samples)
        found = declared_samples(tokens)
        if found is None and not rest:
            found = torch.arange(now.micro.samples).repeat_interleave(each)
        elif found is None and (told := batch_rows(now).index(tokens)) is not None:
            found = told.samples
        elif found is None:
            found = torch.zeros(tokens, dtype=torch.int64)
            if self.used:
                layouts_of(module).unknown.add_rows(self._name)
        return found.to(self._world.device)

    def one_by_one(
        self,
        compute: Callable[[Tensor, Tensor], Tensor],
        rows: Tensor,
        experts: Tensor,
        keys: Keys,
        own: range,
    ) -> Tensor:
        """Return the output of one of this rank's `own` experts for each row."""
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(own)).tolist()
        last = int(keys.positions.max()) if len(rows) else 0
        outputs = []
        for expert, chosen in zip(own, order.split(counts), strict=True):
            micro = MicroBatch(None, 0, last + 1, 1.0, self._world)
            draws = Draws(micro, keys.draws.seed, f"{keys.call}{expert}: ", keys.draws.owner)
            draws.models = keys.draws.models
            with Drawing(draws), samples(index=keys.positions[chosen]):
                outputs.append(compute(rows[chosen], experts[chosen]))
            self._drawn |= bool(draws.made)
        found = torch.cat(outputs)
        return torch.empty_like(found).index_copy(0, order, found)

"""The stages of a model that one rank keeps, and the draws that it counts for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal._torch.modules import set_tables
from shoal.data.micro import CURRENT_DRAWS, Draws, MicroBatch
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.compiled import RepeatedBlocks, compile_parts, recomputed_refused
from shoal.strategies.coupling.notice import DROPOUTS
from shoal.strategies.partition.check import SplitCheck
from shoal.strategies.partition.inputs import Inputs, by_name
from shoal.strategies.partition.stages import OuterGraph, Stage, draws_itself, keep_only
from shoal.strategies.partition.unsplit import StageRanks, UnsplitModel
from shoal.strategies.random_draws.draws import name_of
from shoal.strategies.task import Task

_TORCHS = "torch.nn.modules."
_OTHERS = (
    nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | nn.MultiheadAttention | nn.RNNBase | nn.RReLU
)
"""The layers of torch that draw, apart from `DROPOUTS`."""


class DrawCounts:
    """The draws of modules that several stages run, such as one dropout layer for all blocks.

    A number belongs to a module and to how many draws that module has made before. So a stage sends
    these counts with its activations, as a last tensor. There is none if stages share no such module.
    """

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._device = device
        found: Counter[str] = Counter()
        for stage in stages:
            body, *modules = stage.body.modules()
            drawing = [*filter(_may_draw, modules), *([body] if draws_itself(stage) else [])]
            found.update({name for each in drawing if (name := name_of(each)) is not None})
        self._names = sorted(name for name, times in found.items() if times > 1)

    def taken_from(self, received: Sequence[Any]) -> Sequence[Any]:
        """Continue the counts of the stage before, and return what it has sent without them."""
        if not self._names or not received:  # the first stage receives nothing
            return received
        draws = CURRENT_DRAWS.get()
        if draws is not None and not torch.compiler.is_compiling():
            draws.set_counts(self._names, received[-1].tolist())
        return received[:-1]

    def added_to(self, sent: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a stage sends, with the counts."""
        if not self._names:
            return tuple(sent)
        draws = None if torch.compiler.is_compiling() else CURRENT_DRAWS.get()
        counts = [0] * len(self._names) if draws is None else draws.counts(self._names)
        return *sent, torch.tensor(counts, device=self._device)


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module may draw outside its submodules."""
    known = type(module).__module__.startswith(_TORCHS)
    return not known or isinstance(module, _OTHERS | DROPOUTS)


class OwnStages:
    """The stages with the numbers `mine`, and the comparison of all stages with the original model.

    Frees the memory of the other stages. `owners` are the ranks of all stages within the pipeline, of
    which each has all modules of its stage. `compute` calls a module of one of these stages, given the
    number of the stage and the name of the module.
    """

    def __init__(
        self,
        outer: OuterGraph,
        stages: Sequence[Stage],
        mine: Sequence[int],
        owners: Sequence[int],
        world: World,
        compute: Callable[[int, str, Any, Any], Any],
    ) -> None:
        self._model = model = outer.model
        self.signature = outer.signature
        self.kept = [stages[number] for number in mine]
        self.compiled = False
        place = world.layout.coordinate(world.rank, "pipeline")
        members = StageRanks(world.mesh["pipeline"].get_group(), place, owners, world.device)
        uncut = UnsplitModel(outer, stages, members, compute)
        self._proof = SplitCheck(uncut, model, world, outer.given)
        self._recomputed = runs_again(model)
        self._blocks = RepeatedBlocks(model)
        self._blocks.keep_in(stage.body for stage in self.kept)
        others = [stage for number, stage in enumerate(stages) if number not in mine]
        keep_only(model, self.kept, others)
        for stage in others:
            set_tables(stage.body, {}, {}, {})  # frees their memory

    def inputs(self, task: Task, micro: MicroBatch, seed: int) -> Inputs:
        """Return the inputs of the model for a micro-batch."""
        return by_name(self.signature, *task.arguments(micro, seed), type(self._model).__name__)

    def prove(
        self,
        micro: MicroBatch,
        seed: int,
        inputs: Callable[[], Inputs],
        flow: Callable[[], Any],
        autocast: torch.dtype | None,
        *,
        structure: object,
    ) -> None:
        """Compare the stages with the original model, for a new `structure` of the micro-batch.

        `flow` runs the stages. Collective.
        """
        if self.compiled and self._model.training:
            return  # compiled code draws other random numbers
        draws = partial(Draws, micro, seed)
        self._proof.check(structure, micro.value, inputs, flow, draws, autocast)

    def compile(self, how: str, parts: Iterable[nn.Module]) -> None:
        """Compile the `parts` that run the stages, or their blocks."""
        if how == "blocks":
            self._blocks.compile()
        elif self._recomputed:
            raise recomputed_refused(f"compile={how!r}")
        else:
            compile_parts(parts)
        self.compiled = True

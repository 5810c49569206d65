"""Comparison of a split model with the original model: both run on the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch.dispatch import tree_leaves, tree_map_only
from shoal.data.micro import Draws
from shoal.distributed.to_device import tensors_in as batch_tensors
from shoal.distributed.to_device import version
from shoal.distributed.world import World
from shoal.strategies.eval_mode import untouched
from shoal.strategies.local import mixed
from shoal.strategies.partition.inputs import Inputs
from shoal.strategies.partition.unsplit import (
    CannotTravelError,
    DiffersError,
    UnsplitModel,
    UnsplitModelError,
    tensors_in,
)
from shoal.strategies.tolerance import TOLERANCES, distance
from shoal.util.errors import ShoalError, StepError


class SplitCheck:
    """Comparison of stages and original model on the first batch of each structure, in each mode.

    Memory: the outputs, the copies of `untouched`, and, if the two differ, the inputs of each module
    of this rank.
    """

    def __init__(self, uncut: UnsplitModel, model: nn.Module, world: World, given: str) -> None:
        self._uncut = uncut
        self._model = model
        self._world = world
        self._given = given
        self._proved: set[object] = set()

    @torch.no_grad()
    def check(
        self,
        structure: object,
        batch: object,
        inputs: Callable[[], Inputs],
        flow: Callable[[], Any],
        draws: Callable[[], Draws],
        autocast: torch.dtype | None,
    ) -> None:
        """Raise StepError on all ranks if the two differ on a batch of a new structure. Collective.

        `structure` is that of the batch, the same on all ranks of the pipeline. `draws` returns new
        ones of the micro-batch, for the original model. Also raises StepError if the stages change a
        tensor of the user's `batch` in place.
        """
        key = (structure_of(structure), self._model.training, autocast)
        if key in self._proved:
            return
        # All ranks make the first comparison at the same time; later ones are per pipeline.
        later = self._proved and not self._world.simulated
        gather = self._uncut.members.gather if later else self._world.gather
        output = self._run(batch, inputs, flow, gather)
        if self._world.simulated:  # no other rank has its modules of the original model
            self._apart(output, tree_map_only(Tensor, Tensor.clone, output), autocast)
            self._proved.add(key)
            return
        expected = partial(self._expected, inputs, draws, autocast)
        found = self._found(output, expected, inputs, flow, autocast)
        found = next(filter(None, gather(found)), None)
        if found is not None:
            raise StepError(
                given=self._given,
                found=f"the split model differs from the original model: {found}",
                fix="move that code of the model's forward into a submodule, which is not split, or "
                "choose split points that are not inside this module",
            )
        self._proved.add(key)

    def _run(
        self,
        batch: object,
        inputs: Callable[[], Inputs],
        flow: Callable[[], Any],
        gather: Callable[[object], list[Any]],
    ) -> Any:
        """Return the output of the stages. Raise the error of one rank on all ranks."""
        output, error, shown = None, None, None
        try:
            with untouched(self._model, (batch, inputs())):
                noted = [(tensor, version(tensor)) for tensor in batch_tensors(batch)]
                output = flow()
                self._refuse_changes([tensor for tensor, before in noted if version(tensor) != before])
        except Exception as caught:
            error = caught
            shown = error if isinstance(error, ShoalError) else self._described(error)
        try:
            errors = [other for other in gather(shown) if other is not None]
        except RuntimeError:
            if error is not None:  # it explains more than the loss of a rank
                raise error from None
            raise
        if isinstance(error, ShoalError):
            raise error
        if shown is not None:
            raise shown from error
        if errors:
            raise errors[0]
        return output

    def _described(self, error: Exception) -> StepError:
        return StepError(
            given=f"{self._given}, on rank {self._world.rank}",
            found=f"{type(error).__name__}: {error}",
            fix="see the traceback on that rank; python train.py in one process may show more",
        )

    def _found(
        self,
        output: Any,
        original: Callable[[], Any],
        inputs: Callable[[], Inputs],
        flow: Callable[[], Any],
        autocast: torch.dtype | None,
    ) -> str | None:
        """Return the first difference, or None; the same on all ranks of the pipeline."""
        try:
            expected = original()
        except DiffersError as error:
            return str(error)
        except CannotTravelError as error:
            self._say(f"a module returns an object that cannot be sent to other ranks ({error})")
            return None
        except Exception as error:
            text = (
                str(error)
                if isinstance(error, UnsplitModelError)
                else f"{type(error).__name__}: {error}"
            )
            return f"it runs, but fails in one process: {text}"
        if not self._anywhere(self._apart(output, expected, autocast)):
            return None
        return self._place(original, inputs, flow, output, autocast)

    def _expected(
        self, inputs: Callable[[], Inputs], draws: Callable[[], Draws], autocast: torch.dtype | None
    ) -> Any:
        """Return the output of the original model."""
        with untouched(self._model, inputs()), mixed(self._world.device, autocast):
            return self._uncut(inputs(), draws())

    def _place(
        self,
        original: Callable[[], Any],
        inputs: Callable[[], Inputs],
        flow: Callable[[], Any],
        output: Any,
        autocast: torch.dtype | None,
    ) -> str | None:
        """Return the first difference: run both again and compare the inputs of each module."""
        found: dict[int, list[Tensor]] = {}
        with untouched(self._model, inputs()), _noting(self._uncut, found):
            again = flow()
        self._uncut.seen = []
        original()
        seen, self._uncut.seen = self._uncut.seen, None
        if self._anywhere(self._apart(again, output, autocast)):
            self._say("its stages return different results in each run")
            return None
        mine = [i for i, tensors in seen if self._apart(found.get(i), tensors, autocast)]
        everyone = self._uncut.members.gather(min(mine, default=None))
        places = [index for index in everyone if index is not None]
        if not places:
            return "its output differs from the output on one process, after the last module"
        name = self._uncut.name_of(min(places))
        return f"the input of {name} differs from that in one process"

    def _anywhere(self, apart: bool) -> bool:
        return any(self._uncut.members.gather(apart))

    def _apart(self, found: Any, expected: Any, autocast: torch.dtype | None) -> bool:
        """Return whether two trees differ by more than rounding; False on a rank without output."""
        if found is None:
            return False
        ours, theirs = _leaves(found), _leaves(expected)
        dtypes = {p.dtype for p in self._model.parameters()} | {autocast}
        if len(ours) != len(theirs):
            return True
        return any(_differ(*pair, dtypes) for pair in zip(ours, theirs, strict=True))

    def _refuse_changes(self, changed: Sequence[Tensor]) -> None:
        """Raise StepError for changes of the batch in place, which other ranks would not see."""
        if changed:
            raise StepError(
                given=self._given,
                found="one of its modules changes a tensor of the batch in place, of shape "
                f"{tuple(changed[0].shape)}; the loss and the other stages get the original on other "
                "ranks",
                fix="write x = x * 2 instead of x.mul_(2) or x *= 2 in that module",
            )

    def _say(self, why: str) -> None:
        self._world.print(f"shoal: {self._given} cannot be compared with the original model: {why}")


@contextmanager
def _noting(uncut: UnsplitModel, found: dict[int, list[Tensor]]) -> Iterator[None]:
    """Record the inputs of the modules of this rank's stages."""

    def hook(places: Iterator[int]) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            index = next(places, None)
            if index is not None:
                found[index] = tensors_in((args, kwargs))

        return note

    handles = [
        module.register_forward_pre_hook(hook(iter(places)), with_kwargs=True)
        for module, places in uncut.own_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def structure_of(tree: Any) -> object:
    """Return the properties on which a traced forward may branch: classes, dtypes, None, flags."""
    if isinstance(tree, Tensor):
        return tree.dtype, tree.dim()
    if isinstance(tree, dict):
        return tuple((str(key), structure_of(value)) for key, value in tree.items())
    if isinstance(tree, tuple):
        return type(tree), tuple(structure_of(value) for value in tree)
    if isinstance(tree, list):  # of any length, such as one item per sample
        return type(tree), frozenset(structure_of(value) for value in tree)
    return tree if tree is None or isinstance(tree, bool) else type(tree)


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, and of objects in it that torch does not know."""
    leaves: list[Any] = []
    for leaf in tree_leaves(tree):
        inside = None if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", None)
        leaves += [leaf] if inside is None else [type(leaf), *tree_leaves(inside)]
    return leaves


def _differ(found: Any, expected: Any, dtypes: Set[Any]) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return type(found) is not type(expected) or (_is_plain(found) and found != expected)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return True
    if not found.is_floating_point() and not found.is_complex():
        return not torch.equal(found, expected)
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in (found.dtype, *dtypes))
    return distance(found, expected) > tolerance


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | bytes | type)

"""The ranks that have the stages of one copy of a model, and how one tells the others what it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class CannotTravelError(Exception):
    """What a module returns can't be sent to the other ranks."""


class Members(NamedTuple):
    """The ranks of one copy of the model, by their places in a group."""

    group: dist.ProcessGroup
    place: int
    """This rank's own."""
    owners: Sequence[int]
    """Of the rank that runs each stage."""
    device: torch.device

    def tell(self, source: int, tree: Any) -> Any:
        """What the rank at `source` has, on all ranks: tensors and plain values in plain containers.

        Raises CannotTravelError on all ranks for anything else. Collective.
        """
        if self.place != source:
            form = json.loads(self._bytes(None, source))
            if "error" in form:
                raise CannotTravelError(form["error"])
            return self._read(form, source)
        tensors: list[Tensor] = []
        try:
            form = _form(tree, tensors)
        except CannotTravelError as error:
            self._bytes(json.dumps({"error": str(error)}).encode(), source)
            raise
        self._bytes(json.dumps(form).encode(), source)
        for tensor in tensors:
            self._tensor(tensor.detach().to(self.device), source)
        return tree

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by place."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _bytes(self, text: bytes | None, source: int) -> bytes:
        length = torch.tensor(0 if text is None else len(text), device=self.device)
        dist.broadcast(length, group=self.group, group_src=source)
        sent = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if text is not None:
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        dist.broadcast(sent, group=self.group, group_src=source)
        return bytes(sent.cpu().tolist())

    def _tensor(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast as bytes: not every backend sends every dtype."""
        sent = tensor.contiguous()
        if sent.numel():
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self.group, group_src=source)
        return sent

    def _read(self, form: Any, source: int) -> Any:
        ((kind, inside),) = form.items()
        if kind == "tensor":
            size, dtype = inside
            empty = torch.empty(size, dtype=getattr(torch, dtype), device=self.device)
            return self._tensor(empty, source)
        if kind == "float":
            return float.fromhex(inside)
        if kind == "plain":
            return inside
        if kind == "dict":
            return {key: self._read(value, source) for key, value in inside}
        values = [self._read(value, source) for value in inside]
        return values if kind == "list" else tuple(values)


def _form(tree: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """A tree as plain values, without its tensors, which are appended to `tensors`."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if kind is float:
        return {"float": tree.hex()}
    if tree is None or kind in (bool, int, str):
        return {"plain": tree}
    if kind in (list, tuple, torch.Size):
        return {"list" if kind is list else "tuple": [_form(value, tensors) for value in tree]}
    if isinstance(tree, dict) and kind is dict and all(type(key) in (str, int) for key in tree):
        return {"dict": [(key, _form(value, tensors)) for key, value in tree.items()]}
    raise CannotTravelError(f"a {kind.__module__}.{kind.__qualname__}")

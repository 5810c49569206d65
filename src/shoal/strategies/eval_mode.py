"""Evaluation mode, and forward passes that leave no trace in the state of a model."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal._torch.modules import TABLES, buffers
from shoal.distributed.to_device import values_kept
from shoal.strategies.dtensor import share
from shoal.util import accelerator


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode inside, and restore the mode of every module afterwards.

    Restores with `train` where the mode changes, parents first: a module may do more in `train` than
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
        for module, training in modes:  # for a module with two parents, or one that its parent sets
            module.training = training


@contextmanager
def each_in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch some modules to eval mode inside, without their submodules."""
    modes = [(module, module.training) for module in modules]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Restore the states of the global random generators afterwards."""
    devices = {
        p.device
        for p in model.parameters()
        if p.device.type != "cpu" and accelerator.streams(p.device) is not None
    }
    kind = next((device.type for device in devices), "cuda")
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device.index for device in devices], device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def untouched(model: nn.Module, values: Any = ()) -> Iterator[None]:
    """Restore afterwards everything that a forward pass of `model` inside may have changed.

    These are the global random states, the tensors in `values`, and in the modules the buffers, the
    trainable parameters and the attributes, such as counters. Random generators and other objects
    among the attributes are not copied. The copies of the tensors take about as much memory as the
    gradients.
    """
    held = [attributes for module in model.modules() for attributes in tables(module)]
    attributes = [value for table in held for value in table.values() if type(value) is Tensor]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    once = {id(each): each for each in (*attributes, *model.buffers(), *learning)}
    tensors = [share(each.detach()) for each in once.values()]
    kept = [(each, each.clone()) for each in tensors if not each.is_meta]
    try:
        with random_states_kept(model), values_kept(values), attributes_kept(held):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                # A copy of equal values would count as a change, and fail the backward of a forward
                # pass that a custom training loop has run before.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def tables(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a module and its buffers, by name; none for TorchScript, in C++."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [vars(module), buffers(module)]


@contextmanager
def attributes_kept(held: Sequence[dict[str, Any]]) -> Iterator[set[str]]:
    """Restore the tables `held` of modules afterwards. Yields a set for the names of changed entries.

    The names are in the set once the context has ended. The items of lists, dicts, sets and deques
    among the values are restored too.
    """
    changed: set[str] = set()
    before = [dict(table) for table in held]
    inside = [
        (name, value, copy.copy(value))
        for table in held
        for name, value in table.items()
        if type(value) in (list, dict, set, deque) and name not in TABLES
    ]
    try:
        yield changed
    finally:
        for now, was in zip(held, before, strict=True):
            names = {name for name, value in now.items() if was.get(name, was) is not value}
            names |= was.keys() - now.keys()
            changed |= names
            for name in names - was.keys():
                del now[name]
            now.update({name: was[name] for name in names & was.keys()})
        for name, value, content in inside:
            if [*map(id, _items(value))] != [*map(id, _items(content))]:
                changed.add(name)
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(content)


def _items(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*container]

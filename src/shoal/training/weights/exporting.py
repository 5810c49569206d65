"""A model as a directory of safetensors files, of which each rank writes some."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.checkpoint import Agreement
from shoal.checkpoint.state_tree import safetensors_header
from shoal.distributed.world import World
from shoal.strategies.dtensor import whole
from shoal.training.weights.hugging_face import (
    FileForms,
    is_pretrained,
    plain_twin,
    save_configuration,
)
from shoal.training.weights.loading import aliases_within
from shoal.training.weights.sources import INDEX, SINGLE
from shoal.training.weights.stored import KINDS, Form, bytes_of
from shoal.util.errors import CheckpointError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WRITTEN = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(INDEX)}|(generation_)?config\.json"
)
"""The names of files in a directory that an export writes, and may replace."""

Group = tuple[list[str], dict[str, Form]]
"""Tensors of the module that are stored together, and the names and forms of the stored ones."""


@dataclass(frozen=True)
class Shard:
    """One file of an export: its tensors, and the groups of names from which they are made."""

    file: str
    forms: dict[str, Form]
    groups: list[list[str]]


def bytes_in(given: int | str) -> int:
    """Return a size like "5GB" in bytes. Raises CheckpointError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(given).strip(), re.IGNORECASE)
    size = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if isinstance(given, bool) or size < 1:
        raise CheckpointError(
            given=f"shoal.export(…, max_shard_size={given!r})",
            found="it is neither a number of bytes nor a string such as '5GB' or '500MB'",
            fix="shoal.export(model, 'directory', max_shard_size='5GB')",
        )
    return size


def export_directory(model: nn.Module, folder: Path, world: World, largest: int) -> None:
    """Write the model into a new directory, which appears when it is complete. Collective."""
    given = f"shoal.export(…, {str(folder)!r})"
    folder = Path(os.path.realpath(folder))
    partial = folder.with_name(f".{folder.name}.partial")
    together = Agreement(world).together
    tensors = _Tensors(model, world)
    stored = FileForms(plain_twin(model), tensors.forms) if is_pretrained(model) else None
    groups = together(given, lambda: tensors.alone() if stored is None else stored.groups())
    # The model of another rank may lack parts by which transformers finds its conversions.
    shards = shards_of(world.broadcast(groups), largest)

    def begin() -> None:
        _check_dtypes(shards, given)
        if world.is_rank_zero:
            _check_replaceable(folder, given)
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir(parents=True)

    def end() -> None:
        if world.is_rank_zero:
            _complete(model, partial, shards, given)
            _replace(partial, folder)

    together(given, begin)
    files = []
    for first in range(0, len(shards), world.size):
        batch = shards[first : first + world.size]
        mine = batch[world.rank] if world.rank < len(batch) else None
        files.append(_ShardFile(partial, mine, stored))
        for row in zip_longest(*(shard.groups for shard in batch)):
            for writer, names in enumerate(row):
                if names is not None:
                    files[-1].take(tensors.gathered(names, writer), writer == world.rank)
            files[-1].write()

    def close() -> None:
        for file in files:
            file.close()

    together(given, close)
    together(given, end)
    tensors.say_left_out(folder)


class _Tensors:
    """The state of a model over all ranks, of which each has complete or sharded tensors."""

    def __init__(self, model: nn.Module, world: World) -> None:
        state = model.state_dict()
        self._world = world
        self._own = {name: one for name, one in state.items() if isinstance(one, Tensor)}
        self._others = [name for name in state if name not in self._own]
        held = world.gather({name: (tuple(t.shape), t.dtype) for name, t in self._own.items()})
        self.forms: dict[str, Form] = {name: form for part in held for name, form in part.items()}
        self._holders = {
            name: [r for r, part in enumerate(held) if name in part] for name in self.forms
        }
        same = world.gather(sorted(aliases_within(self._own)))
        self._tied = {name for names in same for name in names}

    def alone(self) -> list[Group]:
        """Return a group for each tensor; of tied ones, for the first name."""
        return [([name], {name: f}) for name, f in self.forms.items() if name not in self._tied]

    def gathered(self, names: Sequence[str], writer: int) -> dict[str, Tensor]:
        """Return full tensors on the rank `writer`. Collective."""
        found = {}
        for name in names:
            holders, rank = self._holders[name], self._world.rank
            tensor = whole(self._own[name].detach()) if name in self._own else None
            if writer not in holders and rank in (writer, holders[0]):  # a stage of another rank
                tensor = self._sent(name, tensor, writer)
            if rank == writer and tensor is not None:
                found[name] = tensor.cpu()
        return found

    def _sent(self, name: str, tensor: Tensor | None, writer: int) -> Tensor:
        shape, dtype = self.forms[name]
        if tensor is not None:
            dist.send(tensor.contiguous(), writer, group=self._world.group)
            return tensor
        received = torch.empty(shape, dtype=dtype, device=self._world.device)
        dist.recv(received, self._holders[name][0], group=self._world.group)
        return received

    def say_left_out(self, folder: Path) -> None:
        """Print the names of entries of the state that are not tensors."""
        if self._others:
            self._world.print(f"shoal: {folder} does not hold {', '.join(self._others)}, not tensors")


class _ShardFile:
    """The file that this rank writes. An error is raised at the end, so that no other rank waits."""

    def __init__(self, folder: Path, shard: Shard | None, stored: FileForms | None) -> None:
        self._stored = stored
        self._taken: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._descriptor = -1
        self._forms: dict[str, Form] = {} if shard is None else shard.forms
        sizes = {n: (dtype, shape, _size(shape, dtype)) for n, (shape, dtype) in self._forms.items()}
        header, self._places = safetensors_header(sizes, {"format": "pt"})
        self._data = len(header)
        if shard is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with self._kept():
                self._descriptor = os.open(folder / shard.file, flags, 0o644)
                self._put(memoryview(header), 0)

    def take(self, tensors: dict[str, Tensor], mine: bool) -> None:
        """Keep the tensors of one group, if they are for this file, until `write`."""
        if mine:
            self._taken = tensors

    def write(self) -> None:
        """Write the tensors that were taken, in the form of the file."""
        taken, self._taken = self._taken, {}
        with self._kept():
            if self._error is None and taken:
                found = taken if self._stored is None else self._stored.stored(taken)
                for name, tensor in found.items():
                    if name in self._forms and tensor.numel():
                        self._put(bytes_of(tensor.contiguous()), self._data + self._places[name].start)

    def close(self) -> None:
        """Wait until the file is on the disk. Raises the first error of this file."""
        try:
            if self._error is not None:
                raise self._error
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _put(self, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], at + done)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or error.with_traceback(None)


def shards_of(groups: Sequence[Group], largest: int) -> list[Shard]:
    """Return the files of an export, of at most `largest` bytes of tensors, except single tensors."""
    rows = [
        (number, name, form)
        for number, (_, stored) in enumerate(groups)
        for name, form in sorted(stored.items())
    ]
    parts: list[list[tuple[int, str, Form]]] = []
    filled = largest
    for row in rows:
        size = _size(*row[2])
        if not parts or filled + size > largest:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += size
    return [
        Shard(
            SINGLE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors",
            {name: form for _, name, form in part},
            [groups[group][0] for group in dict.fromkeys(group for group, _, _ in part)],
        )
        for number, part in enumerate(parts, start=1)
    ]


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _check_dtypes(shards: Sequence[Shard], given: str) -> None:
    for name, (_, dtype) in ((n, form) for shard in shards for n, form in shard.forms.items()):
        if dtype not in KINDS.values():
            raise CheckpointError(
                given=given,
                found=f"{name} is {dtype}, for which the safetensors format has no type".replace(
                    "torch.", ""
                ),
                fix="shoal.export(model, 'model.pt')",
            )


def _check_replaceable(folder: Path, given: str) -> None:
    """Raise CheckpointError if a directory has files that no export has written."""
    if not folder.exists():
        return
    others = [each.name for each in folder.iterdir() if not _WRITTEN.fullmatch(each.name)]
    if others:
        raise CheckpointError(
            given=given,
            found=f"the directory has other files, such as {min(others)}; an export replaces it",
            fix="choose a new directory, and copy other files, such as a tokenizer, into it afterwards",
        )


def _complete(model: nn.Module, partial: Path, shards: Sequence[Shard], given: str) -> None:
    """Write the index and the configuration, once all files are there."""
    absent = [shard.file for shard in shards if not (partial / shard.file).is_file()]
    if absent:
        raise CheckpointError(
            given=given,
            found=f"another rank has written {absent[0]}, and it is not in this directory here",
            fix="choose a directory on a file system that all nodes share",
        )
    forms = {name: form for shard in shards for name, form in shard.forms.items()}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_size(*form) for form in forms.values())},
            "weight_map": {n: shard.file for shard in shards for n in shard.forms},
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if is_pretrained(model):
        dtypes = [dtype for _, dtype in forms.values() if dtype.is_floating_point]
        save_configuration(model, dtypes[0], partial)


def _replace(partial: Path, folder: Path) -> None:
    """Give the complete directory its name; an earlier export of this name is removed."""
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)

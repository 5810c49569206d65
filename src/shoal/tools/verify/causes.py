"""Likely causes of refuted properties, each with a line of the script and the change to make."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shoal.tools.verify.observations import (
    ACCELERATE,
    GENERATORS,
    DrawRecord,
    LoaderRecord,
    RunRecord,
    StepRecord,
)
from shoal.tools.verify.operations import LikelyCause

KEYED = "derive a generator from the sample's index: `torch.Generator().manual_seed(seed + index)`"

BATCH_NORM = "BatchNorm over the local batch"
DROPOUT = "dropout drawn per rank"
CLIPPING = "gradients clipped before they are averaged"
MISSING = {
    "optimizer states": ("optimizer state", "save and load `optimizer.state_dict()`"),
    "learning rates": ("scheduler state", "save and load `scheduler.state_dict()`"),
    "samples": (
        "loader position",
        "save epoch and batch, and skip the batches that were trained with",
    ),
    "gradients": ("generator state", "save and restore the states of these generators: {}"),
    "buffers": (
        "buffers",
        "save `model.state_dict()`, which includes buffers, after synchronizing them",
    ),
}
"""By what differs after a restart: the state that the checkpoint lacks, and the change to make."""
GUESSED = (BATCH_NORM, DROPOUT, CLIPPING)
"""Causes that are reported because the model has such a layer, or the script makes such a call."""


@dataclass(frozen=True, kw_only=True)
class ScriptSource:
    """The script's name and text."""

    name: str
    text: str

    def line(self, *calls: str) -> str:
        """Return `file:line` of the first call of one of these names, or the file's name."""
        found = find_calls(self.text, calls)
        return f"{self.name}:{found[0]}" if found else self.name


def repeat_cause(first: RunRecord, second: RunRecord, source: ScriptSource) -> LikelyCause | None:
    """Return which global generator the script draws from and does not seed."""
    a, b = first.ranks[0].steps[0].generators, second.ranks[0].steps[0].generators
    for generator in GENERATORS:
        line = find_global_draw(source.text, generator, 1)
        if a[generator] != b[generator] and line is not None:
            return LikelyCause(
                name=f"unseeded {generator} generator",
                line=f"{source.name}:{line}",
                change="seed the generator with the same number in each run",
            )
    return None


def hash_order_cause(source: ScriptSource) -> LikelyCause:
    """Return the cause for runs that are equal with the same PYTHONHASHSEED only."""
    return LikelyCause(
        name="hash order",
        line=source.line("hash", "set", "frozenset"),
        change="sort the set before iterating over it; use hashlib in place of hash()",
    )


def file_order_cause(source: ScriptSource) -> LikelyCause:
    """Return the cause for runs that are equal with the same order of directory entries only."""
    return LikelyCause(
        name="file order",
        line=source.line("listdir", "iterdir", "scandir", "glob"),
        change="sort the names: `sorted(os.listdir(folder))`",
    )


def resume_cause(kind: str, generators: Sequence[str], source: ScriptSource) -> LikelyCause | None:
    """Return which state the checkpoint lacks."""
    if kind not in MISSING or (kind == "gradients" and not generators):
        return None
    state, change = MISSING[kind]
    return LikelyCause(
        name=f"{state} not in the checkpoint",
        line=source.line("save", "save_pretrained", "save_state"),
        change=change.format(", ".join(generators)),
    )


def sampler_cause(loader: LoaderRecord, repeated: int, size: int) -> LikelyCause | None:
    """Return why an epoch repeats or leaves out samples."""
    if repeated and "Distributed" in loader.sampler:
        return _distributed_cause(loader, repeated, size)
    if repeated and loader.sampler == ACCELERATE:
        return LikelyCause(
            name="padding of Accelerate's sampler",
            line=loader.line,
            change="use a number of samples that the ranks divide, or pass `even_batches=False`",
        )
    if repeated and size > 1:
        return LikelyCause(
            name="no distributed sampler",
            line=loader.line,
            change="pass `sampler=DistributedSampler(dataset)` to the DataLoader",
        )
    if loader.drop_last:
        return LikelyCause(
            name="drop_last", line=loader.line, change="set `drop_last=False`, or accept the loss"
        )
    return None


def _distributed_cause(loader: LoaderRecord, repeated: int, size: int) -> LikelyCause | None:
    """Return why DistributedSamplers repeat samples: padding repeats fewer than there are ranks."""
    if loader.size is not None and repeated <= -loader.size % size:
        return LikelyCause(
            name="DistributedSampler padding",
            line=loader.line,
            change="use a number of samples that the ranks divide, or a sampler without padding",
        )
    if loader.shuffle:
        return LikelyCause(
            name="different seed or epoch of the samplers on the ranks",
            line=loader.line,
            change="give the samplers of all ranks the same seed, and call `set_epoch(epoch)` on each",
        )
    return None


def order_cause(loader: LoaderRecord, set_epoch_calls: int) -> LikelyCause | None:
    """Return why two epochs have the same order."""
    if "Distributed" in loader.sampler and not set_epoch_calls:
        return LikelyCause(
            name="set_epoch forgotten",
            line=loader.line,
            change="call `sampler.set_epoch(epoch)` at the start of each epoch",
        )
    if loader.sampler == "RandomSampler":
        return LikelyCause(
            name="generator seeded again in each epoch",
            line=loader.line,
            change="seed the generator once, before the first epoch, or with the epoch's number",
        )
    return None


def draw_cause(draw: DrawRecord, source: ScriptSource) -> LikelyCause:
    """Return the line of a draw from a global generator."""
    file, _, first = draw.line.rpartition(":")
    line = None
    if file == source.name:
        line = find_global_draw(source.text, draw.generator, int(first))
    return LikelyCause(
        name=f"global {draw.generator} draw in Dataset.__getitem__",
        line=draw.line if line is None else f"{file}:{line}",
        change=KEYED,
    )


def replica_cause(steps: Sequence[StepRecord], source: ScriptSource) -> LikelyCause | None:
    """Return why ranks hold different parameters after this step, the first at which they do."""
    if any(step.parameters_before != steps[0].parameters_before for step in steps):
        return LikelyCause(
            name="initial parameters depend on the rank",
            line=source.line("torch.manual_seed", "seed_everything", "set_seed"),
            change="give all ranks the same seed before the model is built",
        )
    if any(step.gradients != steps[0].gradients for step in steps):
        return LikelyCause(
            name="gradients not averaged",
            line=steps[0].line or source.name,
            change="wrap the model in DistributedDataParallel",
        )
    return None


def batch_norm_cause(source: ScriptSource) -> LikelyCause:
    """Return the line of a BatchNorm layer."""
    return LikelyCause(
        name=BATCH_NORM,
        line=source.line("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
        change="convert with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
    )


def schedule_cause(line: str) -> LikelyCause:
    """Return the line that steps a scheduler more than once per optimizer step."""
    return LikelyCause(
        name="scheduler stepped per micro-batch or per rank",
        line=line,
        change="call `scheduler.step()` once after each `optimizer.step()`",
    )


def file_cause(line: str) -> LikelyCause:
    """Return the line that writes one file on several ranks."""
    return LikelyCause(
        name="each rank writes the same file",
        line=line,
        change="write it on one rank, `if dist.get_rank() == 0:`, or put the rank into its name",
    )


def world_size_cause(
    kind: str, a: RunRecord, b: RunRecord, position: int, source: ScriptSource
) -> LikelyCause | None:
    """Return why a run on another number of ranks differs in this step."""
    loaders = list(b.ranks[0].loaders.values())
    line = loaders[0].line if loaders else source.name
    first = [len(run.global_samples(0)) for run in (a, b)]
    if position == 0 and first[0] * b.size == first[1] * a.size and first[0] != first[1]:
        return LikelyCause(
            name="batch size per rank",
            line=line,
            change="divide the batch size by the world size",
        )
    if not kind.startswith(("gradients", "parameters")):
        return None
    layers = {**a.ranks[0].layers, **b.ranks[0].layers}
    if "batch norm" in layers:
        return batch_norm_cause(source)
    if "dropout" in layers:
        return LikelyCause(
            name=DROPOUT,
            line=source.line(layers["dropout"]),
            change="draw masks by sample, as Shoal does, or expect statistical equality only",
        )
    sizes = {len(rank.steps[position].samples) for rank in b.ranks}
    if len(sizes) > 1:
        return LikelyCause(
            name="mean of means",
            line=source.line("backward"),
            change="weight each rank's loss by its number of samples",
        )
    steps = [rank.steps[position] for rank in b.ranks]
    # Gradients that are averaged already are equal on all ranks, unless these hold parts of them.
    if len({step.clipped_gradients for step in steps}) > 1 and not steps[0].sharded:
        return LikelyCause(
            name=CLIPPING,
            line=steps[0].clip_line or source.name,
            change="clip after the gradients of all ranks have been averaged",
        )
    return None


GLOBAL_DRAWS = {
    "numpy": ("np.random.", "numpy.random."),
    "python": ("random.",),
    "torch": ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial"),
}


def find_calls(source: str, names: Collection[str]) -> list[int]:
    """Return the lines that call a function with one of these names, with or without a module."""
    found = []
    for node in _calls(source):
        called = ast.unparse(node.func)
        if called in names or called.split(".")[-1] in names:
            found.append(node.lineno)
    return sorted(found)


def find_global_draw(source: str, generator: str, after: int) -> int | None:
    """Return the first line from `after` that draws from a global generator, or None."""
    for node in sorted(_calls(source), key=lambda call: call.lineno):
        called = ast.unparse(node.func)
        explicit = any(word.arg == "generator" for word in node.keywords)
        if node.lineno >= after and not explicit and called.startswith(GLOBAL_DRAWS[generator]):
            return node.lineno
    return None


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))

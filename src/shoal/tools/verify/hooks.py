"""Observation of one rank: hooks that record and change nothing.

They are set before the script starts. Workers of a DataLoader inherit them by fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

from shoal._torch.dataloader import observe_batches
from shoal.data.feed import PositionedSource
from shoal.data.iterable_dataset import StreamSource
from shoal.data.map_dataset import MapStyleDataset
from shoal.data.sampler import LocalBatch
from shoal.tools.verify.loaders import (
    DatasetNumbers,
    LoaderPass,
    Source,
    consumed_samples,
    describe_loader,
    describe_torch_loader,
    innermost_index,
    multiply_micro_batches,
    subset_indices,
)
from shoal.tools.verify.observations import (
    DeliveredBatch,
    DrawRecord,
    LoaderKey,
    LoaderRecord,
    ObserverOptions,
    WrittenFile,
)
from shoal.tools.verify.observed_calls import (
    REDUCTIONS,
    NoInput,
    call_after,
    call_before_updates,
    makes_state,
    observe_calls,
    observe_clipping,
    observe_written_files,
)
from shoal.tools.verify.operation_trace import (
    OperationTrace,
    checksum_generators,
    checksum_state,
    plain_name,
    sketch,
    user_module,
)

LAYERS = {
    "dropout": ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "MultiheadAttention"),
    "batch norm": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
}
CALLERS_OF_BACKWARD = ("torch/autograd/graph.py", "torch/autograd/__init__.py")
READS_STDIN = "reads standard input"
STARTS = "starts processes itself"
LAUNCHERS = ("python", "torchrun", "accelerate")


class Observer:
    """The records of this process, appended to a file as they happen."""

    def __init__(self, options: ObserverOptions, rank: int) -> None:
        self.options = options
        self.rank = rank
        self.step = 0
        self.pending: list[DeliveredBatch] = []
        self.used: set[int] = set()
        self.passes: WeakKeyDictionary[Any, LoaderPass] = WeakKeyDictionary()
        self.loaders: WeakKeyDictionary[Any, LoaderKey] = WeakKeyDictionary()
        self.sources: WeakKeyDictionary[Source, LoaderRecord] = WeakKeyDictionary()
        self.built: Counter[str] = Counter()
        self.datasets = DatasetNumbers()
        self.roots: WeakSet[torch.nn.Module] = WeakSet()
        self.inner: WeakSet[torch.nn.Module] = WeakSet()
        self.depth = 0
        self.epochs: dict[LoaderKey, int] = {}
        self.schedulers: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
        self.clips: dict[str, Any] = {"unclipped": {}}
        self.wrappers: WeakSet[DistributedDataParallel] = WeakSet()
        self.wrapper_calls = self.backward_passes = 0
        self.reductions = {"reduce_line": "", "early_line": ""}
        self.forward_line = ""
        self.lines: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.called: set[tuple[str, str]] = set()
        self.before: dict[str, Any] = {}
        self.drawn: set[tuple[str, str]] = set()
        self.trace = OperationTrace(lambda inner: self.user_line(called_by_autograd=inner))

    def write_event(self, event: str, **values: Any) -> None:
        """Append one line; a worker has a separate file."""
        self.write_events(event, [values])

    def write_events(self, event: str, entries: list[dict[str, Any]]) -> None:
        """Append a line for each entry."""
        path = Path(self.options.folder) / f"rank-{self.rank}.{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"event": event, **values}) + "\n" for values in entries)

    def user_lines(self, *, called_by_autograd: bool = False) -> Iterator[str]:
        """Yield `file:line` of each frame of the user's code, the innermost first.

        `called_by_autograd` ignores the caller of the backward pass.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.options.root) and "site-packages" not in name:
                yield f"{os.path.relpath(name, self.options.root)}:{frame.f_lineno}"
            if called_by_autograd and name.endswith(CALLERS_OF_BACKWARD):
                return
            frame = frame.f_back

    def user_line(self, *, called_by_autograd: bool = False) -> str:
        """Return `file:line` of the innermost frame of the user's code, or ""."""
        return next(self.user_lines(called_by_autograd=called_by_autograd), "")

    def begin_trace(self) -> None:
        """Record the operations from here to the end of the process, if the next step is traced."""
        if self.options.trace_at == self.step + 1:
            self.trace.__enter__()

    # -- data -----------------------------------------------------------------------------------

    def new_key(self) -> LoaderKey:
        """Return the key of a new loader, equal on ranks that build it at the same place."""
        place = " < ".join(self.user_lines())
        self.built[place] += 1
        return LoaderKey(place, self.built[place])

    def loader_built(self, loader: Any) -> None:
        """Record a new DataLoader and observe the draws of its dataset."""
        if type(loader.dataset).__module__.startswith("shoal."):
            return  # indices of Shoal's loaders are positions of batches, not of samples
        key = self.new_key()
        self.loaders[loader] = key
        line = self.user_line()
        record = describe_torch_loader(loader, key=key, line=line, datasets=self.datasets)
        self.write_event("loader", **asdict(record))
        self.watch_dataset(type(loader.dataset))

    def source_built(self, source: Source) -> None:
        """Record a new shoal.Loader."""
        record = describe_loader(source, key=self.new_key(), line=self.user_line())
        self.sources[source] = record
        self.write_event("loader", **asdict(record))

    def local_batch_consumed(self, source: Source, batch: LocalBatch) -> None:
        """Record the samples of a local batch of a shoal.Loader."""
        record = self.sources.get(source)
        if record is None:
            return  # a copy that measures the time of loading
        epoch, indices, ends = consumed_samples(source, batch)
        self._record_batch(record.loader, epoch, indices)
        if ends:
            self.write_event("complete", loader=record.loader, epoch=epoch)
            if record.size is None:  # known only now
                self.write_event("loader", **asdict(replace(record, size=source.epoch_size)))

    def watch_dataset(self, kind: Any) -> None:
        """Observe the draws of a class of datasets."""
        original = kind.__dict__.get("__getitem__")
        code = getattr(original, "__code__", None)
        if code is None or not code.co_filename.startswith(self.options.root):
            return  # library datasets do not draw
        line = f"{os.path.relpath(code.co_filename, self.options.root)}:{code.co_firstlineno}"

        @wraps(original)
        def observed(dataset: Any, *index: Any, **named: Any) -> Any:
            with self.trace.paused():
                before = checksum_generators()
            value = original(dataset, *index, **named)
            with self.trace.paused():
                self._note_draws(before, line)
            return value

        kind.__getitem__ = observed

    def _note_draws(self, before: dict[str, str], line: str) -> None:
        info = get_worker_info()
        for name, state in checksum_generators().items():
            if state != before[name] and (name, line) not in self.drawn:
                self.drawn.add((name, line))
                worker = None if info is None else info.id
                self.write_event("draw", **asdict(DrawRecord(generator=name, line=line, worker=worker)))

    def pass_started(self, iterator: Any, loader: Any) -> None:
        """Record that a pass over a loader begins."""
        key = self.loaders.get(loader)
        if key is None:
            return
        epoch = self.epochs.get(key, -1) + 1
        self.epochs[key] = epoch
        started = LoaderPass(loader=key, epoch=epoch, subset=subset_indices(loader.dataset))
        with suppress(TypeError):  # an iterable dataset without a length
            started.batches = len(loader)
        self.passes[iterator] = started

    def batch_delivered(self, iterator: Any, indices: Any) -> None:
        """Record a batch; `training` is false without gradients or in eval mode."""
        current = self.passes.get(iterator)
        if current is None:
            return
        if not isinstance(indices, list | tuple):
            indices = [] if indices is None else [indices]
        plain = tuple(innermost_index(index, current.subset) for index in indices)
        self._record_batch(current.loader, current.epoch, plain)
        current.delivered += 1
        if current.delivered == current.batches:
            self.pass_ended(iterator)  # a loop that knows the length may not ask for another batch

    def _record_batch(self, loader: LoaderKey, epoch: int, indices: tuple[Any, ...]) -> None:
        modes = [module.training for module in list(self.roots)]
        training = torch.is_grad_enabled() and (not modes or any(modes))
        batch = DeliveredBatch(loader=loader, epoch=epoch, indices=indices, training=training)
        self.pending.append(batch)
        self.write_event("batch", **asdict(batch))

    def pass_ended(self, iterator: Any) -> None:
        """Record that a pass reached the end of its sampler."""
        current = self.passes.get(iterator)
        if current is not None:
            self.write_event("complete", loader=current.loader, epoch=current.epoch)

    def function_called(self, what: str) -> None:
        """Record a call that is evidence of a cause, once for each line."""
        if self.trace.is_paused:
            return
        # A function of the script may seed several times: its callers' lines distinguish them.
        line = " < ".join(self.user_lines()) if what.startswith("seed ") else self.user_line()
        if what in REDUCTIONS:
            self.reductions["reduce_line"] = line
        elif what == "backward":
            early = self.reductions["reduce_line"] or self.reductions["early_line"]
            self.reductions = {"reduce_line": "", "early_line": early if self.backward_passes else ""}
            self.backward_passes += 1
        if line and (what, line) not in self.called:
            self.called.add((what, line))
            self.write_event("call", what=what, line=line)

    def file_written(self, path: str) -> None:
        """Record a file that the script replaces."""
        self.write_event(
            "file", **asdict(WrittenFile(path=path, step=self.step, line=self.user_line()))
        )

    # -- model and optimizer ----------------------------------------------------------------------

    def forward_begins(self, module: Any, _inputs: Any) -> None:
        """Find the outermost module. A part of it that is called again, as in the backward pass of a
        checkpointed one, is none.
        """
        if self.depth == 0 and isinstance(module, torch.nn.Module) and module not in self.inner:
            self.inner.update(module.modules())
            if any(True for _ in module.parameters()):
                self.roots.add(user_module(module))
            for part in module.modules():
                for kind, names in LAYERS.items():
                    rate = getattr(part, "p", getattr(part, "dropout", 1.0))
                    if type(part).__name__ in names and rate:
                        self.write_event("layer", kind=kind, name=type(part).__name__)
        if self.depth == 0 and torch.is_grad_enabled() and self.pending:
            self.used.add(len(self.pending) - 1)
        if self.depth == 0 and torch.is_grad_enabled():
            self.lines[user_module(module)] = self.forward_line = self.user_line()
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            self.wrappers.add(module)
            self.wrapper_calls += 1
        self.trace.module_begins(module, outermost=self.depth == 0)
        self.depth += 1

    def forward_ends(self, _module: Any, _inputs: Any, _output: Any) -> None:
        """Leave a module."""
        self.trace.module_ends()
        self.depth = max(0, self.depth - 1)

    def _names(self, optimizer: Any) -> dict[str, Any]:
        names = {
            id(value): plain_name(name)
            for root in list(self.roots)
            for name, value in root.named_parameters()
        }
        found: dict[str, Any] = {}
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                found[names.get(id(parameter), f"group {g}, parameter {i}")] = parameter
        return found

    def _trained_buffers(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the buffers of the models of these parameters.

        A model may be called with and without its wrapper, and other modules run in evaluation only.
        """
        trained = {id(parameter) for parameter in parameters.values()}
        return {
            plain_name(name): buffer
            for root in list(self.roots)
            if any(id(parameter) in trained for parameter in root.parameters())
            for name, buffer in root.named_buffers()
        }

    def before_step(self, optimizer: Any) -> None:
        """Record the state before an update; end the process if this is the step of the kill."""
        if makes_state():
            return
        self.depth = 0  # hooks after an exception in a forward pass do not run
        if self.options.kill_at is not None and self.step + 1 >= self.options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.trace.phase = "update"
        with self.trace.paused():
            parameters = self._names(optimizer)
            buffers = self._trained_buffers(parameters)
            self.before = {
                "parameters_before": checksum_state(list(parameters.values())),
                "optimizer_before": checksum_state(optimizer.state_dict()["state"]),
                "buffers_before": checksum_state(sorted(buffers.items())),
                "generators": checksum_generators(),
                "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
                "gradients": {n: sketch(p.grad) for n, p in parameters.items() if p.grad is not None},
                **self._wrapper_state(parameters),
            }

    def _wrapper_state(self, parameters: dict[str, Any]) -> dict[str, Any]:
        wrapped = {id(p) for each in list(self.wrappers) for p in each.parameters()}
        return {
            "forward_line": self.forward_line,
            **self.reductions,
            "wrapped": [name for name, value in parameters.items() if id(value) in wrapped],
            "outside": {
                plain_name(name): line
                for root, line in list(self.lines.items())
                for name, value in root.named_parameters()
                if id(value) not in wrapped
            },
            "wrapper_calls": self.wrapper_calls,
            "synchronized": all(each.require_forward_param_sync for each in list(self.wrappers)),
        }

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Record the update; end the process after the last step to observe."""
        if makes_state():
            return
        self.step += 1
        self.trace.phase = ""
        with self.trace.paused():
            self._record_step(optimizer)
        if self.step >= self.options.stop_after and not self.options.losses:
            self.end_process()
        self.begin_trace()

    def end_process(self) -> NoReturn:
        """End the process successfully, after the last step to observe."""
        self.write_events("operation", self.trace.as_events())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _record_step(self, optimizer: Any) -> None:
        parameters = self._names(optimizer)
        scheduler_steps, scheduler_line = self._take_scheduler_steps(optimizer)
        self.write_event(
            "step",
            step=self.step,
            **self.before,
            parameters={name: sketch(p) for name, p in parameters.items()},
            # A script that resumes reads batches without a forward pass, to skip them.
            batches=[
                asdict(batch)
                for number, batch in enumerate(self.pending)
                if number in self.used or not self.used or self.backward_passes == len(self.pending)
            ],
            scheduler_steps=scheduler_steps,
            scheduler_line=scheduler_line,
            **self.clips,
            line=self.user_line(),
            distributed=dist.is_available() and dist.is_initialized(),
        )
        self.pending, self.clips = [], {"unclipped": {}}
        self.wrapper_calls = self.backward_passes = 0
        self.used.clear()

    def gradients_clipped(self, parameters: Any) -> None:
        """Record gradients before they are clipped for the first time."""
        roots = list(self.roots)
        names = {id(p): plain_name(name) for root in roots for name, p in root.named_parameters()}
        with self.trace.paused():
            for parameter in parameters:
                name = names.get(id(parameter))
                if name is not None and parameter.grad is not None:
                    self.clips["unclipped"].setdefault(name, sketch(parameter.grad))
        self.clips["clip_line"] = self.user_line()

    def scheduler_stepped(self, scheduler: Any) -> None:
        """Count a step of a scheduler by the user's code."""
        steps, _ = self.schedulers.get(scheduler, (0, ""))
        self.schedulers[scheduler] = steps + 1, self.user_line()
        self.write_event("scheduler")

    def _take_scheduler_steps(self, optimizer: Any) -> tuple[int, str]:
        """Return the most steps of one of its schedulers since the optimizer's last, and their line.

        Optimizers with common parameters are the same one, with and without a wrapper.
        """
        stepped = _parameters(optimizer)
        own = [each for each in self.schedulers if _parameters(each.optimizer) & stepped]
        return max((self.schedulers.pop(each) for each in own), default=(0, ""))


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def observe_loaders(observer: Observer) -> None:
    """Observe the samples of each shoal.Loader."""
    for kind in (PositionedSource, StreamSource):
        call_after(kind, "__init__", lambda source, *_: observer.source_built(source))
        call_after(kind, "consumed", observer.local_batch_consumed)


def install_hooks(options: ObserverOptions, rank: int) -> Observer:
    """Observe this process until it ends."""
    observer = Observer(options, rank)
    register_module_forward_pre_hook(observer.forward_begins)
    register_module_forward_hook(observer.forward_ends)
    call_before_updates(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    call_after(DataLoader, "__init__", lambda loader, *_: observer.loader_built(loader))
    observe_batches(observer.pass_started, observer.batch_delivered, observer.pass_ended)
    observe_loaders(observer)
    observe_clipping(observer.gradients_clipped)
    observe_calls(observer.function_called)
    observe_written_files(options.root, observer.file_written)
    if options.micro_batches > 1:
        multiply_micro_batches(options.micro_batches)

    def source_built(source: MapStyleDataset, dataset: Any, *_: Any) -> None:
        if not source.seed_transforms:  # else its draws belong to samples
            observer.watch_dataset(type(dataset))

    call_after(MapStyleDataset, "__init__", source_built)
    call_after(DistributedSampler, "set_epoch", lambda *_: observer.write_event("set_epoch"))

    def scheduled(scheduler: Any, *_: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename  # a scheduler's constructor also calls step
        if caller.startswith(options.root):
            observer.scheduler_stepped(scheduler)

    call_after(LRScheduler, "step", scheduled)

    def process_started(_process: Any) -> None:
        frame: FrameType | None = sys._getframe(2)
        if frame is not None and "dataloader" not in frame.f_code.co_filename:
            observer.write_event("note", text=f"{STARTS} ({observer.user_line()})")

    call_after(BaseProcess, "start", process_started)

    def program_started(process: Any, *_: Any) -> None:
        frame: FrameType | None = sys._getframe()
        between = (__file__, call_after.__code__.co_filename, subprocess.__file__)
        while frame is not None and frame.f_code.co_filename in between:
            frame = frame.f_back
        by_user = frame is not None and frame.f_code.co_filename.startswith(options.root)
        single = isinstance(process.args, str | bytes | os.PathLike)
        program = os.fsdecode(process.args if single else next(iter(process.args), ""))
        if by_user and any(name in program for name in LAUNCHERS):
            observer.write_event("note", text=f"{STARTS} ({observer.user_line()})")

    call_after(subprocess.Popen, "__init__", program_started)
    sys.stdin = NoInput(
        lambda: observer.write_event("note", text=f"{READS_STDIN} ({observer.user_line()})")
    )
    observer.begin_trace()
    return observer

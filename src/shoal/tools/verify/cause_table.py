"""The table of causes: each with the evidence that must have been observed, and the change to make."""

from __future__ import annotations

from typing import NamedTuple

from shoal.tools.verify.operations import LikelyCause


class Cause(NamedTuple):
    """A cause: its name, the evidence that it needs, and the change to make."""

    name: str
    evidence: str
    change: str


CAUSES = (
    Cause(
        "DistributedSampler padding",
        "it repeats fewer samples than there are ranks",
        "use a number of samples that the ranks divide, or a sampler without padding",
    ),
    Cause(
        "padding of Accelerate's sampler",
        "the same, with its sampler",
        "use a number of samples that the ranks divide, or pass `even_batches=False`",
    ),
    Cause(
        "different seed or epoch of the samplers on the ranks",
        "shuffling `DistributedSampler`s repeat more",
        "give the samplers of all ranks the same seed, and call `set_epoch(epoch)` on each",
    ),
    Cause(
        "no distributed sampler",
        "ranks repeat samples of another sampler",
        "pass `sampler=DistributedSampler(dataset)` to the DataLoader",
    ),
    Cause(
        "drop_last",
        "samples are missing, and the loader sets it",
        "set `drop_last=False`, or accept the loss",
    ),
    Cause(
        "not all ranks read their samples",
        "ranks without batches of this pass trained on",
        "run the pass on all ranks and combine its results, or give one rank the whole dataset",
    ),
    Cause(
        "set_epoch forgotten",
        "equal orders, no call of `set_epoch`",
        "call `sampler.set_epoch(epoch)` at the start of each epoch",
    ),
    Cause(
        "generator seeded again in each epoch",
        "equal orders of a `RandomSampler`",
        "seed the generator once, before the first epoch, or with the epoch's number",
    ),
    Cause(
        "global {} draw in Dataset.__getitem__",
        "its state changes in `__getitem__`",
        "derive a generator from the sample's index: `torch.Generator().manual_seed(seed + index)`",
    ),
    Cause(
        "unseeded {} generator",
        "two runs begin with other states, and the script draws",
        "seed the generator with the same number in each run",
    ),
    Cause(
        "generator of the loader seeded differently in each run",
        "its seeds differ between two runs",
        "seed it with the same number in each run",
    ),
    Cause(
        "hash order",
        "runs are equal with the same `PYTHONHASHSEED` only",
        "sort the set before iterating over it; use hashlib in place of hash()",
    ),
    Cause(
        "file order",
        "runs are equal with the same order of files only",
        "sort the names: `sorted(os.listdir(folder))`",
    ),
    Cause(
        "{} not in the checkpoint",
        "it differs first, and was never saved",
        "save and restore {}",
    ),
    Cause(
        "{} not restored",
        "it differs first, and was saved but not loaded",
        "load {} from the checkpoint, which has it",
    ),
    Cause(
        "scheduler built after the optimizer was restored",
        "the calls in this order, another learning rate",
        "build the scheduler first: its constructor sets the learning rate",
    ),
    Cause(
        "initial parameters depend on the rank",
        "they differ before step 1",
        "give all ranks the same seed before the model is built",
    ),
    Cause(
        "learning rates depend on the rank",
        "they differ between ranks at the same step",
        "compute the learning rate from values that all ranks share",
    ),
    Cause(
        "model called without its wrapper",
        "no call of `DistributedDataParallel` in the step",
        "call the wrapper, not its `module`",
    ),
    Cause(
        "last micro-batch in no_sync",
        "its last call was in `no_sync`",
        "use `no_sync()` for all micro-batches but the last",
    ),
    Cause(
        "parameters outside of DistributedDataParallel",
        "only gradients of others differ",
        "wrap the module of these parameters too, or average their gradients: {}",
    ),
    Cause(
        "not all gradients averaged",
        "some differ after the script's reduction",
        "average these gradients too: {}",
    ),
    Cause(
        "gradients averaged before the last micro-batch",
        "a reduction before, none after the last backward pass",
        "average once, after the last backward pass",
    ),
    Cause(
        "gradients not averaged",
        "all differ, without wrapper and reduction",
        "wrap the model in DistributedDataParallel",
    ),
    Cause(
        "gradients clipped before they are averaged",
        "they differ between ranks before clipping, not at the step",
        "clip after the gradients of all ranks have been averaged",
    ),
    Cause(
        "gradients summed over ranks",
        "larger by the ratio of ranks, before clipping",
        "divide by the number of ranks after the sum",
    ),
    Cause(
        "gradients divided by the number of ranks twice",
        "smaller by the ratio of ranks, before clipping",
        "divide once: DistributedDataParallel averages already",
    ),
    Cause(
        "batch size per rank",
        "samples of step 1 grow with the ranks",
        "divide the batch size by the world size",
    ),
    Cause(
        "mean of means",
        "operation `mean`, below",
        "divide the sum of the losses by the number of samples or tokens of all ranks",
    ),
    Cause(
        "BatchNorm over the local batch",
        "its outputs differ for equal inputs",
        "convert with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
    ),
    Cause(
        "dropout drawn per rank",
        "its masks are the first difference",
        "draw masks by sample, as Shoal does, or expect statistical equality only",
    ),
    Cause(
        "random numbers drawn per rank",
        "draws of this operation are the first difference",
        "draw by sample, as Shoal does, or expect statistical equality only",
    ),
    Cause(
        "value depends on the rank",
        "an argument differs between ranks",
        "compute it from the seed, the step or the sample: it is {}",
    ),
    Cause(
        "operation depends on the rank or on other samples",
        "outputs differ for equal inputs",
        "compute the output of each sample from this sample only",
    ),
    Cause(
        "operation is not deterministic",
        "the same in two runs of one command",
        "call `torch.use_deterministic_algorithms(True)`, or replace the operation",
    ),
    Cause(
        "value from outside of torch",
        "an argument differs, no generator drew",
        "compute it from the seed, the step or the sample: it is {}",
    ),
    Cause(
        "tensor from outside of torch's operations",
        "an input that no operation made differs",
        "seed or save the source of this tensor: {}",
    ),
    Cause(
        "other operations are called",
        "the operations of the step differ",
        "do not branch on the rank, the time, or the order of a set",
    ),
    Cause(
        "scheduler stepped per micro-batch or per rank",
        "two steps in one optimizer step",
        "call `scheduler.step()` once after each `optimizer.step()`",
    ),
    Cause(
        "each rank writes the same file",
        "two ranks write it between two steps",
        "write it on one rank, `if dist.get_rank() == 0:`, or put the rank into its name",
    ),
)
CHANGES = {cause.name: cause.change for cause in CAUSES}

STATES = {
    "optimizer states": ("optimizer state", "`optimizer.state_dict()`", "optimizer"),
    "learning rates": ("scheduler state", "`scheduler.state_dict()`", "scheduler"),
    "samples": ("loader position", "epoch and batch, and skip the batches that were trained with", ""),
    "buffers": ("buffers", "`model.state_dict()`, which includes buffers", ""),
    "torch": ("generator state", "`torch.get_rng_state()`", "torch generator"),
    "python": ("generator state", "`random.getstate()`", "python generator"),
    "numpy": ("generator state", "`np.random.get_state()`", "numpy generator"),
    "rate": ("source of the learning rate", "the values that it is computed from", ""),
    "argument": ("value", "the value of this argument: {}", ""),
    "input": ("tensor", "this tensor: {}", ""),
}
"""What may be missing after a restart: its name, what to save, and the calls that save and restore."""


def because(name: str, line: str, change: str = "", *, of: str = "") -> LikelyCause:
    """Return a cause of the table at a line."""
    return LikelyCause(name=name.format(of), line=line, change=CHANGES[name].format(change))

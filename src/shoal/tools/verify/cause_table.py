"""The table of causes: each with the evidence that must have been observed, and the change to make."""

from __future__ import annotations

from typing import NamedTuple

from shoal.tools.verify.operations import LikelyCause


class CauseEvidence(NamedTuple):
    """A cause: its name, the evidence that it needs, and the change to make."""

    name: str
    evidence: str
    change: str


SCHEDULER = "scheduler stepped per micro-batch or per rank"
CAUSES = (
    CauseEvidence(
        "DistributedSampler padding",
        "fewer samples repeated than ranks",
        "use a number of samples that the ranks divide, or a sampler without padding",
    ),
    CauseEvidence(
        "padding of Accelerate's sampler",
        "samples repeated",
        "use a number of samples that the ranks divide, or pass `even_batches=False`",
    ),
    CauseEvidence(
        "different seed or epoch of the samplers on the ranks",
        "more samples repeated than ranks",
        "give the samplers of all ranks the same seed, and call `set_epoch(epoch)` on each",
    ),
    CauseEvidence(
        "no distributed sampler",
        "samples repeated by another sampler",
        "pass `sampler=DistributedSampler(dataset)` to the DataLoader",
    ),
    CauseEvidence(
        "drop_last",
        "samples missing",
        "set `drop_last=False`, or accept the loss",
    ),
    CauseEvidence(
        "not all ranks read their samples",
        "a rank without batches trained on",
        "run the pass on all ranks and combine its results, or give one rank the whole dataset",
    ),
    CauseEvidence(
        "set_epoch forgotten",
        "equal orders, no call",
        "call `sampler.set_epoch(epoch)` at the start of each epoch",
    ),
    CauseEvidence(
        "generator seeded again in each epoch",
        "equal orders, `RandomSampler`",
        "seed the generator once, before the first epoch, or with the epoch's number",
    ),
    CauseEvidence(
        "global {} draw in Dataset.__getitem__",
        "its state changed",
        "derive a generator from the sample's index: `torch.Generator().manual_seed(seed + index)`",
    ),
    CauseEvidence(
        "unseeded {} generator",
        "another state, and a draw",
        "seed the generator with the same number in each run",
    ),
    CauseEvidence(
        "generator of the loader seeded differently in each run",
        "another seed",
        "seed it with the same number in each run",
    ),
    CauseEvidence(
        "hash order",
        "equal with the same `PYTHONHASHSEED`",
        "sort the set before iterating over it; use hashlib in place of hash()",
    ),
    CauseEvidence(
        "file order",
        "equal with the same order",
        "sort the names: `sorted(os.listdir(folder))`",
    ),
    CauseEvidence(
        "{} not in the checkpoint",
        "differs first, not saved",
        "save and restore {}",
    ),
    CauseEvidence(
        "{} not restored",
        "differs first, saved, not loaded",
        "load {} from the checkpoint, which has it",
    ),
    CauseEvidence(
        "generator state of rank 0 restored on all ranks",
        "equal to that of rank 0",
        "save the states of all ranks, and restore the one of this rank",
    ),
    CauseEvidence(
        "scheduler built after the optimizer was restored",
        "calls in this order",
        "build the scheduler first: its constructor sets the learning rate",
    ),
    CauseEvidence(
        "initial parameters depend on the rank",
        "differ before step 1",
        "give all ranks the same seed before the model is built",
    ),
    CauseEvidence(
        "learning rates depend on the rank",
        "differ between ranks",
        "compute the learning rate from values that all ranks share",
    ),
    CauseEvidence(
        "model called without its wrapper",
        "no call of `DistributedDataParallel`",
        "call the wrapper, not its `module`",
    ),
    CauseEvidence(
        "last micro-batch in no_sync",
        "the last call was",
        "use `no_sync()` for all micro-batches but the last",
    ),
    CauseEvidence(
        "parameters outside of DistributedDataParallel",
        "only their gradients differ",
        "wrap the module of these parameters too, or average their gradients: {}",
    ),
    CauseEvidence(
        "not all gradients averaged",
        "some differ after `all_reduce`",
        "average these gradients too: {}",
    ),
    CauseEvidence(
        "gradients averaged before the last micro-batch",
        "`all_reduce` before it, not after",
        "average once, after the last backward pass",
    ),
    CauseEvidence(
        "gradients not averaged",
        "neither wrapper nor `all_reduce`",
        "wrap the model in DistributedDataParallel",
    ),
    CauseEvidence(
        "gradients clipped before they are averaged",
        "differ between ranks before clipping only",
        "clip after the gradients of all ranks have been averaged",
    ),
    CauseEvidence(
        "gradients clipped by the norm of a shard",
        "all ranks' shards have one norm",
        "use `torch.nn.utils.clip_grad_norm_`, or sum the squares of the norms over the ranks",
    ),
    CauseEvidence(
        "gradients summed over ranks",
        "larger by the ratio of ranks",
        "divide by the number of ranks after the sum",
    ),
    CauseEvidence(
        "gradients divided by the number of ranks twice",
        "smaller by this ratio",
        "divide once: DistributedDataParallel averages already",
    ),
    CauseEvidence(
        "batch size per rank",
        "samples grow with the ranks",
        "divide the batch size by the world size",
    ),
    CauseEvidence(
        "mean of means",
        "another mean over ranks, or first uneven batches",
        "divide the sum of the losses by the number of samples or tokens of all ranks",
    ),
    CauseEvidence(
        "metric computed per rank",
        "another sum and mean, equal outputs",
        "sum its numerator and denominator over the ranks, or gather the outputs, and compute it then",
    ),
    CauseEvidence(
        "BatchNorm over the local batch",
        "equal inputs, different output",
        "convert with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
    ),
    CauseEvidence(
        "BatchNorm no longer frozen",
        "the same, but not in the step before",
        "call `eval()` of its BatchNorm modules after each `train()` of the model",
    ),
    CauseEvidence(
        "dropout drawn per rank",
        "its masks differ first",
        "draw masks by sample, as Shoal does, or expect statistical equality only",
    ),
    CauseEvidence(
        "random numbers drawn per rank",
        "the draw differs first",
        "draw by sample, as Shoal does, or expect statistical equality only",
    ),
    CauseEvidence(
        "value depends on the rank",
        "the argument differs between ranks",
        "compute it from the seed, the step or the sample: it is {}",
    ),
    CauseEvidence(
        "operation depends on the rank or on other samples",
        "equal inputs, different output",
        "compute the output of each sample from this sample only",
    ),
    CauseEvidence(
        "operation is not deterministic",
        "the same in two equal runs",
        "call `torch.use_deterministic_algorithms(True)`, or replace the operation",
    ),
    CauseEvidence(
        "value from outside of torch",
        "the argument differs, without a draw",
        "compute it from the seed, the step or the sample: it is {}",
    ),
    CauseEvidence(
        "tensor from outside of torch's operations",
        "the input differs, made by no operation",
        "seed or save the source of this tensor: {}",
    ),
    CauseEvidence(
        "other operations are called",
        "the operations differ",
        "do not branch on the rank, the time, or the order of a set",
    ),
    CauseEvidence(
        SCHEDULER,
        "two scheduler steps, or later rates",
        "call `scheduler.step()` once after each `optimizer.step()`{}",
    ),
    CauseEvidence(
        "each rank writes the same file",
        "two ranks between two steps",
        "write it on one rank, `if dist.get_rank() == 0:`, or put the rank into its name",
    ),
)
CHANGES = {cause.name: cause.change for cause in CAUSES}

STATES = {
    "optimizer states": ("optimizer state", "`optimizer.state_dict()`", "optimizer"),
    "learning rates": ("scheduler state", "`scheduler.state_dict()`", "scheduler"),
    "samples": ("loader position", "epoch and batch, and skip the batches that were trained with", ""),
    "buffers": ("buffers", "`model.state_dict()`, which includes buffers", ""),
    "loader": ("generator state", "`get_state()` of the loader's generator", ""),
    "torch": ("generator state", "`torch.get_rng_state()`", "torch generator"),
    "python": ("generator state", "`random.getstate()`", "python generator"),
    "numpy": ("generator state", "`np.random.get_state()`", "numpy generator"),
    "rate": ("source of the learning rate", "the values that it is computed from", ""),
    "argument": ("value", "the value of this argument: {}", ""),
    "input": ("tensor", "this tensor: {}", ""),
}
"""States that a restart may lack: the name, the object to save, and its calls."""


def because(name: str, line: str, change: str = "", *, of: str = "") -> LikelyCause:
    """Return a cause of the table at a line."""
    return LikelyCause(name=name.format(of), line=line, change=CHANGES[name].format(change))

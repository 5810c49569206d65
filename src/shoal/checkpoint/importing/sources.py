"""The tools whose training states can be imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.checkpoint.importing.accelerate import is_accelerate, read_accelerate
from shoal.checkpoint.importing.dcp import is_dcp, read_dcp
from shoal.checkpoint.importing.deepspeed import is_deepspeed, read_deepspeed
from shoal.checkpoint.importing.foreign_state import ForeignState, bare_names, unreadable
from shoal.checkpoint.importing.hf_trainer import is_hf_trainer, read_hf_trainer
from shoal.checkpoint.importing.lightning import is_lightning, read_lightning

SOURCES: Sequence[tuple[Callable[[Path], bool], Callable[[Path], ForeignState]]] = (
    (is_lightning, read_lightning),
    (is_hf_trainer, read_hf_trainer),
    (is_accelerate, read_accelerate),
    (is_deepspeed, read_deepspeed),
    (is_dcp, read_dcp),
)
"""How to recognise the checkpoint of each tool, and how to read it."""


def read_foreign(path: Path) -> ForeignState:
    """Return the training state that another tool saved at `path`, by the user's names.

    Raises CheckpointError if no tool's checkpoint is there, or if it can't be read.
    """
    for recognised, read in SOURCES:
        if recognised(path):
            found = read(path)
            break
    else:
        what = "no such file or directory" if not path.exists() else "no checkpoint that Shoal knows"
        raise unreadable(
            path,
            f"there is {what}",
            "pass a directory of Accelerate's save_state, checkpoint-N of the Trainer, a directory of "
            "DeepSpeed or torch.distributed.checkpoint, or a .ckpt file of Lightning",
        )
    found.model = bare_names(found.model)
    if found.optimizer is not None:
        found.optimizer = {
            "state": bare_names(found.optimizer["state"]),
            "param_groups": [
                {**group, "params": [*bare_names(dict.fromkeys(group["params"]))]}
                for group in found.optimizer["param_groups"]
            ],
        }
    return found

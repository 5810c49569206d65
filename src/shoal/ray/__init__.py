"""`from shoal.ray import report`: saves of a Run as checkpoints of Ray Train.

Ray is imported by the call only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.training.run import Run


def report(run: Run, metrics: Mapping[str, Any]) -> None:
    """Save the run, and report the checkpoint and metrics to Ray Train. Collective.

    Ray copies the checkpoint into its `storage_path`, under the same name. So `Result.checkpoint` has
    it, and neither Ray nor Shoal removes a checkpoint of the other. A checkpoint that was reported last
    is not reported again, only the metrics.

    Args:
        run: Open Run in the training function of a `TorchTrainer`, on all workers.
        metrics: Values for `ray.train.report`; those of rank 0 count.

    Raises:
        CheckpointError: As `Run.save` does.
        StepError: If the Run is closed.
    """
    from ray import train

    path = run.save()
    checkpoint = None
    if run.world.is_rank_zero:
        last = train.get_checkpoint()
        if last is None or last.path.rpartition("/")[2] != path.name:
            place = path.absolute() if isinstance(path, Path) else path
            checkpoint = train.Checkpoint(str(place))
    train.report(dict(metrics), checkpoint=checkpoint, checkpoint_dir_name=path.name)

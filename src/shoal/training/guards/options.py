"""The options of guards."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.training.bad_steps import BadSteps
from shoal.util.arguments import check_number
from shoal.util.errors import StepError


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Checks for silent data corruption and bad losses in a Run.

    Corruption is found by checksums of model, optimizer and gradients. A check adds the bits of each
    tensor as integers, which detects any single flipped bit. Shoal measures the time of its checks and
    chooses the steps on which they run, so that they stay below `budget`. The first check is on the
    second step. A tensor that an operation of PyTorch has changed in between is not compared.

    Args:
        continuity: Compare the tensors after an update with the same tensors before the next update.
            They must be equal, since nothing changes them in the forward and backward pass. Also
            covers buffers that never change. Each rank compares its own memory. Default: True.
        replicas: Compare the tensors between the ranks that hold the same ones, on the layout's
            `replicate` axis. Finds ranks that drift apart and code that depends on the rank.
            Default: True.
        gradients: With `exact="bits"` and a Step, compute the gradients of each rank on a second rank
            too, and compare both before they are summed, so that a difference is found in the same
            step. A check takes as long as the forward and backward passes of a step. Default: True.
        budget: Largest fraction of the time of the run that checks take, above 0 and at most 1.
            Default: 0.001.
        bad_steps: Skip the steps of each Step whose loss is not finite or a spike, and roll back after
            several in a row. `None` does not: a loss that is not finite raises StepError.
            Default: None.
        find_nonfinite: If the loss or the gradient norm of a Step is not finite, repeat the step once
            and report the first module, and the rank, in which a value is not finite. Default: False.

    Raises:
        StepError: If `budget` is out of range, or `bad_steps` is not a BadSteps.

    Examples:
        >>> shoal.Guards(budget=0.01).replicas
        True
    """

    continuity: bool = True
    replicas: bool = True
    gradients: bool = True
    budget: float = 0.001
    bad_steps: BadSteps | None = None
    find_nonfinite: bool = False

    def __post_init__(self) -> None:
        check_number(StepError, "shoal.Guards", "budget", self.budget, above=True, most=1, usual=0.001)
        if not isinstance(self.bad_steps, BadSteps | None):
            raise StepError(
                given=f"shoal.Guards(bad_steps={self.bad_steps!r})",
                found="it is not a shoal.BadSteps",
                fix="shoal.Guards(bad_steps=shoal.BadSteps())",
            )

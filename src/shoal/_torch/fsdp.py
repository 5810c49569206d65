"""Private names of FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal._torch.versions import required

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def parameter_groups(part: FSDPModule) -> list[Any]:
    """Return the groups in which FSDP2 gathers and reduces the parameters of `part`."""
    state: Any = required(part, "_get_fsdp_state", "FSDP")()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has a single group
    found = [required(state, "_fsdp_param_group", "FSDP")] if groups is None else groups
    return [group for group in found if group is not None]


def drop_accumulated(part: FSDPModule) -> None:
    """Drop gradients that wait for the last micro-batch. FSDP2 has no public method for this."""
    for group in parameter_groups(part):
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # a view of `.grad` since torch 2.15
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

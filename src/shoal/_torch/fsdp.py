"""Private names of FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal._torch.versions import required

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def parameter_groups(part: FSDPModule) -> list[Any]:
    """Return the groups in which FSDP2 gathers and reduces the parameters of `part`."""
    state: Any = required(part, "_get_fsdp_state", "FSDP")()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has a single group
    found = [required(state, "_fsdp_param_group", "FSDP")] if groups is None else groups
    return [group for group in found if group is not None]


def gathered_parameter(of: Any) -> torch.Tensor | None:
    """Return the parameter that FSDP2 has gathered; None before the first time."""
    return getattr(of, "_unsharded_param", None)


def replaced_parameters(part: FSDPModule) -> list[str]:
    """Return the names of parameters of `part` in whose place their modules have other tensors."""
    found = []
    for group in parameter_groups(part):
        for each in group.fsdp_params:
            info = required(each, "_module_info", "FSDP")
            current = info.module._parameters.get(info.param_name)
            if current is not each.sharded_param and current is not gathered_parameter(each):
                found.append(info.param_name)
    return found


def find_root(part: FSDPModule) -> None:
    """Make `part` the root of the modules in it that FSDP2 has sharded.

    FSDP2 takes the first one that runs, even if it is called outside the forward pass of the model.
    """
    required(required(part, "_get_fsdp_state", "FSDP")(), "_lazy_init", "FSDP")()


def sum_after(loss: torch.Tensor, root: FSDPModule) -> None:
    """Let FSDP2 sum gradients and free parameters at the end of the backward pass of `loss`.

    FSDP2 does so by itself only if the loss uses the output of a module that it has sharded.
    """
    state = required(root, "_get_fsdp_state", "FSDP")()
    queue = required(state, "_register_root_post_backward_final_callback", "FSDP")
    if loss.requires_grad:
        loss.register_hook(lambda _: queue())


def waiting_for_sums(group: Any) -> Callable[[object], None]:
    """Return a hook that lets the device wait until FSDP2 has added a gradient that it sums now."""
    found = weakref.ref(group)

    def wait(_: object) -> None:
        group: Any = found()
        context = getattr(group, "comm_ctx", None)
        for name in ("reduce_scatter_stream", "all_reduce_stream"):
            if hasattr(context, name):  # after the first forward pass
                group.device_handle.current_stream().wait_stream(getattr(context, name))

    return wait


def drop_accumulated(part: FSDPModule) -> None:
    """Drop gradients that wait for the last micro-batch. FSDP2 has no public method for this."""
    for group in parameter_groups(part):
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # a view of `.grad` since torch 2.15
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def parameter_dtypes(part: FSDPModule) -> set[torch.dtype]:
    """Return the dtypes of the sharded parameters of `part`."""
    return {each.sharded_param.dtype for group in parameter_groups(part) for each in group.fsdp_params}


def use_policy(part: FSDPModule, policy: MixedPrecisionPolicy) -> None:
    """Let the next forward pass of `part` use `policy`. FSDP2 takes a policy only when it shards a
    module.

    Gathered parameters are freed, and the tensors that FSDP2 keeps for them are made again in the
    dtype of the policy. No backward pass of an earlier forward pass may follow.
    """
    required(part, "_get_fsdp_state", "FSDP")()._mp_policy = policy
    for group in parameter_groups(part):
        if group.mp_policy == policy:
            continue
        part.reshard()
        group.mp_policy = policy
        group._init_mp_dtypes()
        for parameter in group.fsdp_params:
            parameter.all_gather_outputs = []
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param

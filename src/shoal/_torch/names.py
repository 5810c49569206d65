"""The private names behind this package, by module, and the effect if a torch lacks one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import reduce
from importlib import import_module

from shoal._torch.versions import TESTED, is_newer_than_tested
from shoal.util.decision import Decision

_AGENT = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent"
_BACKEND = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend:C10dRendezvousBackend"
_C10D = "torch.distributed.distributed_c10d:"
_MEETING = "torch.distributed.elastic.rendezvous.dynamic_rendezvous:"
_HANDLER = f"{_MEETING}DynamicRendezvousHandler"
_DISPATCH = "torch.utils._python_dispatch:"
_FSDP_MODULES = "torch.distributed.fsdp._fully_shard."

NAMES: dict[str, tuple[str, ...]] = {
    "DataParallel stops with an error when it is set up": (
        "torch.autograd:Variable._execution_engine",
        "torch.distributed:Reducer.prepare_for_forward",
        "torch.distributed:Reducer.prepare_for_backward",
        "torch.distributed:Reducer._rebuild_buckets",
        "torch.distributed:Reducer._delay_all_reduce",
    ),
    "compiled models under DDP send their gradients after backward": (
        "torch.nn.parallel:DistributedDataParallel._inside_ddp_forward",
        "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES",
    ),
    "FSDP stops with an error when it is set up": (
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        f"{_FSDP_MODULES}_fsdp_state:FSDPState()._fsdp_param_group",
        f"{_FSDP_MODULES}_fsdp_param:FSDPParam._unsharded_param",
        f"{_FSDP_MODULES}_fsdp_param:FSDPParam()._module_info",
        f"{_FSDP_MODULES}_fsdp_param_group:FSDPParamGroup._init_mp_dtypes",
        f"{_FSDP_MODULES}_fsdp_state:FSDPState()._mp_policy",
        f"{_FSDP_MODULES}_fsdp_state:FSDPState._lazy_init",
        f"{_FSDP_MODULES}_fsdp_state:FSDPState._register_root_post_backward_final_callback",
        "torch.distributed.device_mesh:DeviceMesh._concatenate",
    ),
    "a layout of several axes stops with an error when it is set up": (
        "torch.distributed.device_mesh:DeviceMesh._flatten",
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    ),
    "layers that are recomputed in backward stop the first step with an error": (
        "torch:_C._current_autograd_node",
    ),
    "shared experts compute after the others": (
        "torch._C:_autograd._top_saved_tensors_default_hooks",
        "torch.nn.modules.module:_has_any_global_hook",
    ),
    "ActivationCheckpointing stops with an error when it is set up": (
        "torch.distributed._composable.checkpoint_activation:checkpoint",
        "torch.distributed._composable.contract:_get_registry",
    ),
    "Pipeline stops with an error in its first step": (
        "torch:Tensor._is_view",
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle._step_microbatches",
        "torch.distributed.pipelining.schedules:PipelineScheduleMulti._step_microbatches",
    ),
    "TensorParallel stops with an error in its first step": (
        "torch.autograd.graph:Node()._saved_result",
    ),
    "ContextParallel does not sum the gradients of a sequence that is gathered": (
        "torch.autograd:Function()._forward_cls",
    ),
    "a loss that is a sum is not recognized": (
        "torch.autograd.graph:Node()._saved_reduction",
        "torch.autograd.graph:Node()._saved_self_sym_numel",
    ),
    "a loop stops with an error in its first step": (
        "torch.autograd.graph:Node()._input_metadata",
        "torch.autograd.graph:Node()._saved_self_sym_sizes",
    ),
    "a step stops with an error before anything is computed": (
        "torch:Tensor._version",
        "torch.nn:Module._parameters",
        "torch.nn:Module._buffers",
        "torch.nn:Module._modules",
        "torch.nn:Module._forward_hooks",
        "torch.nn:Module._forward_pre_hooks",
        "torch.nn:Module._backward_hooks",
        "torch.nn:Module._backward_pre_hooks",
        "torch.nn:Module._forward_hooks_always_called",
        "torch.nn:Module._forward_pre_hooks_with_kwargs",
        "torch.nn:Module._call_impl",
        "torch.nn:Module._compiled_call_impl",
        "torch.nn:Module._apply",
        "torch.nn:Module._load_from_state_dict",
    ),
    "models wrapped by torch.compile are not unwrapped": (
        "torch._dynamo.eval_frame:OptimizedModule()._orig_mod",
    ),
    "models with compile=… stop with an error in their first step": (
        "torch._dynamo:lookup_backend",
        "torch._guards:detect_fake_mode",
        "torch.fx.experimental.symbolic_shapes:ShapeEnv.ignore_fresh_unbacked_symbols",
    ),
    "random numbers in compiled models are computed outside of fused loops": (
        "torch._inductor.ir:Pointwise",
        "torch._inductor.lowering:register_lowering",
        "torch._inductor.virtualized:ops",
    ),
    "strategies can't be imported": (
        f"{_DISPATCH}TorchDispatchMode",
        "torch.utils:_pytree",
    ),
    "deferred models stop with an error when they are built": (
        "torch:UntypedStorage._cdata",
        "torch:ops.aten.add.Tensor._schema",
    ),
    "`shoal plan` can't trace a module": (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "torch:ops.aten._local_scalar_dense.default",
        "torch:ops.mkldnn._is_mkldnn_bf16_supported",
        "torch:ops.aten._grouped_mm",
        "torch._C._distributed_c10d:_create_work_from_future",
    ),
    "no floating-point operations are counted": ("torch:ops.aten.add.Tensor._overloadpacket",),
    "counting floating-point operations imports torch's compiler": (
        f"{_DISPATCH}TorchDispatchMode._should_skip_dynamo",
    ),
    "collectives are not compared before they begin": (
        "torch:_C._dispatch_keyset_full_after",
        "torch.library:Library._destroy",
    ),
    "random draws are repeated in backward only if torch's generators repeat them": (
        "torch:_C._current_graph_task_id",
    ),
    "torch's dispatch modes see how collectives are compared": (f"{_DISPATCH}_disable_current_modes",),
    "a process group that exists can't be adopted": (f"{_C10D}_get_default_store",),
    "the time limit of an adopted process group stays changed": (
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroupGloo._Options._timeout",
    ),
    "a script under `shoal run` that sets a port of its own waits for its store": (
        "torch.distributed.rendezvous:_create_c10d_store",
    ),
    "a report of a hang names no process groups": (f"{_C10D}_world.pg_names",),
    "process groups are destroyed after a failure, which may wait": (f"{_C10D}_abort_process_group",),
    "process groups keep torch's own time limit": (f"{_C10D}_set_pg_timeout",),
    "`import shoal.mpi` has no effect": (f"{_C10D}_MPI_AVAILABLE",),
    "a report of a hang counts no operations": (
        "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    ),
    "objects are exchanged from the host's memory, which NCCL can't": (
        "torch.distributed:ProcessGroup._device_types",
    ),
    "the group's name is set by another call": ("torch.distributed:ProcessGroup._set_group_name",),
    "no collective is recorded": ("torch._C:_distributed_c10d._dump_fr_trace_json",),
    "a second RPC agent is found by torch alone": ("torch.distributed.rpc:_is_current_rpc_agent_set",),
    "time spent waiting for other ranks counts as computing": (
        "torch.distributed._functional_collectives:wait_tensor",
        "torch.distributed.pipelining.schedules:_wait_batch_p2p",
    ),
    "a pipeline of sharded layers is not compared with the original model": (
        "torch.distributed._functional_collectives:AsyncCollectiveTensor.trigger_wait",
    ),
    "iterable datasets see that they are read by a worker": (
        "torch.utils.data:_utils.worker._worker_info",
    ),
    "how a worker died is not said": (
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter()._workers",
    ),
    "the workers of a failed pass end when its error is forgotten": (
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter()._shutdown_workers",
    ),
    "a Loader can't be imported": ("torch._utils:ExceptionWrapper.reraise",),
    "`shoal verify` ends with an error": (
        "torch.utils.data.dataloader:_BaseDataLoaderIter._next_index",
        "torch.utils.data.dataloader:_BaseDataLoaderIter._reset",
        "torch.autograd:_get_sequence_nr",
        "torch.autograd.graph:Node()._sequence_nr",
    ),
    "metrics of torchmetrics can't be evaluated": ("torchmetrics:Metric()._reductions",),
    "torchmetrics warns of metrics without an update": ("torchmetrics:Metric()._update_count",),
    "`shoal run` can't start": (
        f"{_AGENT}._start_workers",
        f"{_AGENT}._stop_workers",
        f"{_AGENT}._monitor_workers",
        f"{_AGENT}._shutdown",
        f"{_AGENT}()._remaining_restarts",
        f"{_AGENT}()._worker_group",
    ),
    "elastic looks up the host's name for each event": (f"{_AGENT}._construct_event",),
    "`shoal run` on several nodes can't start": (
        f"{_AGENT}._assign_worker_ranks",
        f"{_AGENT}._exit_barrier",
        f"{_MEETING}_BackendRendezvousStateHolder._sanitize",
        f"{_MEETING}_NodeDesc",
        f"{_MEETING}_RendezvousExitOp",
        f"{_MEETING}_RendezvousState",
        f"{_HANDLER}._heartbeat_lock",
        f"{_HANDLER}._op_executor",
        f"{_HANDLER}._state_holder",
        f"{_HANDLER}._stop_heartbeats",
        f"{_HANDLER}._this_node",
    ),
    "the state that other nodes wrote is not checked": (f"{_BACKEND}._decode_state",),
    "each step waits for its result": ("torch.optim:AdamW()._step_supports_amp_scaling",),
    "a schedule in another one needs no interval": (
        "torch.optim.lr_scheduler:SequentialLR()._schedulers",
    ),
    "lists of tensors are computed tensor by tensor": tuple(
        f"torch:_foreach_{name}" for name in ("add_", "copy_", "lerp_", "mul_", "neg_", "norm", "sub_")
    ),
}
"""The effect of missing private names -> these names, as "module:attributes".

For an attribute that only instances have, after "()", `missing` examines only the class.
"""


def missing() -> Iterator[tuple[str, str]]:
    """Yield each name that this torch lacks, with the effect.

    Examines only imported modules. A feature that imports more reports its missing names itself.
    """
    for without, symbols in NAMES.items():
        for symbol in symbols:
            if symbol.partition(":")[0] in sys.modules and not is_present(symbol):
                yield symbol, without


def is_present(symbol: str) -> bool:
    """Return whether this torch has `symbol`, one of `NAMES`."""
    place, _, path = symbol.partition(":")
    *owners, name = path.partition("()")[0].split(".")
    try:
        owner = reduce(getattr, owners, import_module(place))
    except (ImportError, AttributeError):
        return False
    declared = getattr(owner, "__annotations__", {})  # attributes of instances, declared in their class
    return hasattr(owner, name) or name in declared


def note_untested(version: str) -> Decision[object] | None:
    """Return the entry of `World.decisions` for a torch `version` newer than all tested ones."""
    if not is_newer_than_tested(version):
        return None
    lacking = [f"it has no {symbol.replace(':', '.')}: {without}" for symbol, without in missing()]
    return Decision(
        what="torch",
        value=version,
        reason="; ".join([f"newer than those tested, {' to '.join(TESTED)}", *lacking]),
    )

"""FSDP2's states and groups of parameters: recovery after failures, exchanges on the host, and taking a unit apart.

``FSDPModule`` has ``unshard``, ``reshard`` and setters, but answers nothing. All of this would be replaced by a public
way to abandon a step, to list a unit's groups, and to undo ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import torch

ATTRIBUTES_OF = (
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "transformers.integrations.fsdp",
    "torchao.float8.fsdp_utils",
)

# A unit's groups of parameters: torch 2.11 knows one, later versions list them.
GROUP, GROUPS = "_fsdp_param_group", "_fsdp_param_groups"

# The state that all units of a root share, which tells whether a backward pass is under way.
shared_context_of = attrgetter("_state_ctx")

# None before the first forward, which sets up what is fixed from then on; then whether the unit is the root.
is_root = attrgetter("_is_root")

# The dtypes of a group's gradients, which the first forward sets by the parameters that train then.
set_gradient_dtypes = methodcaller("_init_mp_dtypes")

# Set up as the first forward does, for the root of which only parts will be called.
lazy_init = methodcaller("_lazy_init")

# Let the gathers that are started ahead run in gloo's threads instead of a stream.
set_async_unshard = methodcaller("_set_unshard_async_op", True)

# transformers asks modules for it, and then generates as long on every rank, as all gather weights.
MANAGED = "_is_fsdp_managed_module"

# The ranks that a group gathers and reduces over, and whether it reshards to fewer of them after forward: host
# memory is shared by them.
gathering_ranks_of = attrgetter("_all_gather_process_group")
reducing_ranks_of = attrgetter("_reduce_scatter_process_group")
reshards_to_fewer = attrgetter("_use_post_forward_mesh")

# The shape of a parameter before sharding.
whole_size_of = attrgetter("_orig_size")

# The parameter with gathered weights: hooks on the shard are shared with it, and its gradient is dropped after a
# failure. It exists from the first gather on.
UNSHARDED = "_unsharded_param"
unsharded_of = attrgetter(UNSHARDED)

# HSDP: the shards of gradients that earlier micro-batches have left for the all-reduce of the last one, in one flat
# tensor that lives on a stream of its own. None: nothing is left.
DEFERRED = "_partial_reduce_output"
deferred_of = attrgetter(DEFERRED)
reduce_scatter_stream_of = attrgetter("comm_ctx.reduce_scatter_stream")

# torchao's scale of a weight that is gathered in 8 bits, computed ahead after every step. Loading other weights has to
# forget it, which torchao does not notice.
PRECOMPUTED_SCALE = "_precomputed_scale"

_RESET = "_reset_iter_state"
_comm_context_of = attrgetter("_comm_ctx")
_training_state_of = attrgetter("_training_state")
_modules_to_run_of = attrgetter("_modules_to_run_forward")
_gathering_of = attrgetter("_all_gather_result")
_wait_for_backward = methodcaller("_wait_for_post_backward")
_post_forward_order_of = attrgetter("_post_forward_indices")
_device_handle_of = attrgetter("_device_handle")


def abandon_step(root: Any, groups_of: Callable[[Any], Iterable[Any]]) -> None:
    """Wait for what a root and its units have under way, and forget it; they are sharded and idle then.

    ``FSDPState._reset_iter_state`` does it since torch 2.13, and the lines below for those before.

    Args:
        root: ``FSDPState`` of the root.
        groups_of: Returns the groups of a state.
    """
    if hasattr(root, _RESET):
        getattr(root, _RESET)()
        return
    context, comm, idle = shared_context_of(root), _comm_context_of(root), type(_training_state_of(root)).IDLE
    for under_way in (comm.all_gather_state, comm.reduce_scatter_state):
        _wait_for(root, under_way.event if under_way is not None else None)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for state in context.all_states:
        _modules_to_run_of(state).clear()
        state._training_state = idle
        for group in groups_of(state):
            gathering, group._all_gather_result = _gathering_of(group), None
            if gathering is not None:
                _wait_for(root, gathering.all_gather_event)
                if gathering.all_gather_work is not None:
                    gathering.all_gather_work.wait()
            _wait_for_backward(group)
            setattr(group, DEFERRED, None)
            _post_forward_order_of(group).clear()
            group._training_state = idle
            group.reshard()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _wait_for(root: Any, event: Any) -> None:
    if event is not None:
        _device_handle_of(root).current_stream().wait_event(event)


def keep_nearby(group: Any, mesh: Any) -> None:
    """Let a group that reshards after forward keep its weights sharded over the last dim of a mesh of two until then.

    ``reshard_after_forward=n`` does the same with a mesh of the group's own. Replaced by a mesh as its argument.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    if group.post_forward_mesh_info is None:
        return
    group.post_forward_mesh_info = info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(whole_size_of(parameter), device="meta"))


def undo_fully_shard(unit: Any, groups: Iterable[Any]) -> None:
    """Undo ``fully_shard`` of one module, whose parameters stay the DTensors that they are."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in groups:
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    del _module_state_mapping[unit]
    unit.__dict__[STATE_KEY] = {key: kept for key, kept in unit.__dict__[STATE_KEY].items() if kept is not state}
    unit.__dict__[REGISTRY_KEY].pop("fully_shard", None)
    unit.__class__ = type(unit).__bases__[1]  # behind FSDPModule

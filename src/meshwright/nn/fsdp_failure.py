"""What FSDP2 leaves behind when forward or backward fails, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.nn.fsdp_groups import groups_of


def abandon_units(model: nn.Module) -> None:
    """After a failure: units are sharded and idle, and nothing is left of gradients that were not reduced yet."""
    trees = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            context = fully_shard.state(module)._state_ctx  # type: ignore[attr-defined]
            trees[id(context)] = context
    for context in trees.values():
        _abandon(context)


def recover_in_forward(unit: nn.Module) -> None:
    """Lets the first forward after a backward that failed begin as if it had not, for loops that catch the error.

    FSDP2 ends a backward pass in a callback, and believes for ever that one is under way where it was not called: no
    later pass would be ended, and gradients of the failed one would be added to those of the next.
    """
    # Before FSDP2's own hook, which gathers.
    unit.register_forward_pre_hook(_recover, prepend=True)


def _recover(unit: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(unit, FSDPModule):  # taken apart since
        return
    context = fully_shard.state(unit)._state_ctx  # type: ignore[attr-defined]
    # In backward itself, recomputation runs forwards.
    if context.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
        _abandon(context)


def _abandon(context: Any) -> None:
    roots = [state for state in context.all_states if state._is_root]  # none before the first forward
    parameters = [each for state in context.all_states for group in groups_of(state) for each in group.fsdp_params]
    # Those of earlier passes, which loops by hand add to; torch 2.15 takes them, too.
    reduced = [(each.sharded_param, each.sharded_param.grad) for each in parameters]
    for root in roots:
        if hasattr(root, "_reset_iter_state"):  # since torch 2.13
            root._reset_iter_state()
        else:
            _reset(root)
    for parameter, gradient in reduced:
        parameter.grad = gradient
    for each in parameters:
        if "unsharded_accumulated_grad" in vars(each):  # later torch keeps all in the gradient below
            each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def _reset(root: Any) -> None:
    """``FSDPState._reset_iter_state`` for the torch before it: waits for what is under way, and forgets it."""
    context, comm, idle = root._state_ctx, root._comm_ctx, type(root._training_state).IDLE
    for under_way in (comm.all_gather_state, comm.reduce_scatter_state):
        _wait_for(root, under_way.event if under_way is not None else None)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in groups_of(state):
            gathering, group._all_gather_result = group._all_gather_result, None
            if gathering is not None:
                _wait_for(root, gathering.all_gather_event)
                if gathering.all_gather_work is not None:
                    gathering.all_gather_work.wait()
            group._wait_for_post_backward()
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group.reshard()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _wait_for(root: Any, event: Any) -> None:
    if event is not None:
        root._device_handle.current_stream().wait_event(event)

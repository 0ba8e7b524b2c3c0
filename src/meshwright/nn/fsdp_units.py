"""Additions to FSDP2's units: reshard at updates, recover after failures, average plain gradients, log collectives.

A unit is a module that ``fully_shard`` was called on; its parameters are gathered and their gradients reduced together.
"""

from __future__ import annotations

import array
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.comm.transport import members_of, reduced
from meshwright.nn.module_structure import outside_compiled
from meshwright.optim import local_tensor
from meshwright.optim.dtensors import by_kind
from meshwright.optim.guarded_step import MAY_BE_SKIPPED
from meshwright.runtime import tensor_mesh
from meshwright.runtime.torch_internals.autograd import current_graph_task_id, queue_callback
from meshwright.runtime.torch_internals.fsdp import (
    DEFERRED,
    GROUP,
    GROUPS,
    UNSHARDED,
    abandon_step,
    deferred_of,
    is_root,
    lazy_init,
    reduce_scatter_stream_of,
    set_gradient_dtypes,
    shared_context_of,
    unsharded_of,
)
from meshwright.runtime.torch_internals.modules import parameters_of


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of parameters that a unit communicates together; empty if it has no parameters."""
    return groups_of(fully_shard.state(unit))  # type: ignore[attr-defined]


def groups_of(state: Any) -> list[Any]:
    """Return FSDP2's groups of parameters, by a unit's ``FSDPState``."""
    groups = getattr(state, GROUPS, None) or [getattr(state, GROUP)]
    return [group for group in groups if group is not None]


def follow_thawing(model: nn.Module) -> None:
    """Let units in which nothing trained at first have gradients of the right dtype once something does.

    FSDP2 sets a unit up in the first forward. Without trainable parameters it finds no dtypes to reduce gradients in
    and to cast them to; in half precision gradients then do not fit their weights.

    Args:
        model: Root of the units.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    frozen = [group for unit in units for group in parameter_groups(unit)]

    def follow(module: nn.Module, args: Any) -> None:
        for group in [each for each in frozen if any(p.sharded_param.requires_grad for p in each.fsdp_params)]:
            set_gradient_dtypes(group)
            frozen.remove(group)

    model.register_forward_pre_hook(follow)


# --- [Note: reshard at updates] Gathered weights must not outlive an update of their shards.
#
# Backward frees gathered weights. But a forward after it, say for a metric, gathers them again, and no backward frees
# them. FSDP2 would compute the next forward with these weights, from before the update. So they are freed after every
# optimizer step, whoever gathered them and whichever optimizer updates.

_units: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooked = False


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of a sharded model, so that the next forward gathers the current shards.

    Does not communicate. See [Note: reshard at updates].
    """
    reshard_units(model.modules())


def reshard_units(modules: Iterable[nn.Module]) -> None:
    """Free the gathered weights of those modules that are FSDP2 units."""
    for module in modules:
        if isinstance(module, FSDPModule):  # a Block that was released is no unit any more
            module.reshard()


def reshard_at_updates(units: Iterable[nn.Module]) -> None:
    """Free the gathered weights of FSDP2 units after every step of an optimizer of their parameters, from now on.

    See [Note: reshard at updates].
    """
    global _hooked
    _units.update(units)
    if not _hooked:
        # A hook of all optimizers: which one will be built over these parameters is not known here.
        register_optimizer_step_post_hook(_reshard_updated)
        _hooked = True


def _reshard_updated(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    units = [unit for unit in list(_units) if isinstance(unit, FSDPModule)]
    gathered = [unit for unit in units if any(not group.is_sharded for group in parameter_groups(unit))]
    if not gathered:
        return
    # Only those that this optimizer updates: it may step on a few ranks only, and gathering again takes all of them.
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for unit in gathered:
        if any(id(each.sharded_param) in updated for group in parameter_groups(unit) for each in group.fsdp_params):
            unit.reshard()


setattr(_reshard_updated, MAY_BE_SKIPPED, True)


@contextlib.contextmanager
def gathered_root(model: nn.Module) -> Iterator[None]:
    """Gather the root's weights while parts of a model are called by themselves; reshard everything on exit."""
    assert isinstance(model, FSDPModule)
    # Otherwise the part that is called first would become the root.
    lazy_init(fully_shard.state(model))  # type: ignore[attr-defined]
    model.unshard()
    try:
        yield
    finally:
        reshard(model)


# --- [Note: recovery after a failed pass]
#
# FSDP2 ends a backward pass in a callback. Where backward fails, the callback is not called, and FSDP2 believes for
# ever that the pass is under way: no later pass would be ended, and gradients of the failed one would be added to those
# of the next. A loop that catches the error (out of memory, say) goes on with wrong gradients.


def abandon_units(model: nn.Module) -> None:
    """Reset all units after a failed pass: sharded, idle, and without gradients that were not reduced yet.

    See [Note: recovery after a failed pass].
    """
    contexts = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            context = shared_context_of(fully_shard.state(module))  # type: ignore[attr-defined]
            contexts[id(context)] = context
    for context in contexts.values():
        _abandon(context)


def recover_in_forward(unit: nn.Module) -> None:
    """Reset a unit's tree at the first forward after a failed backward.

    See [Note: recovery after a failed pass].
    """
    # Before FSDP2's own hook, which gathers.
    unit.register_forward_pre_hook(_recover, prepend=True)


def _recover(unit: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(unit, FSDPModule):
        return
    context = shared_context_of(fully_shard.state(unit))  # type: ignore[attr-defined]
    # A forward inside backward is a recomputation.
    if context.post_backward_final_callback_queued and current_graph_task_id() == -1:
        _abandon(context)


def _abandon(context: Any) -> None:
    roots = [state for state in context.all_states if is_root(state)]  # none before the first forward
    parameters = [each for state in context.all_states for group in groups_of(state) for each in group.fsdp_params]
    # Gradients of earlier passes, to which a loop may add; torch 2.15's reset clears them, too.
    reduced_before = [(each.sharded_param, each.sharded_param.grad) for each in parameters]
    for root in roots:
        abandon_step(root, groups_of)
    for parameter, gradient in reduced_before:
        parameter.grad = gradient
    for each in parameters:
        if "unsharded_accumulated_grad" in vars(each):  # later torch accumulates in the gradient below
            each.unsharded_accumulated_grad = None
        if hasattr(each, UNSHARDED):
            unsharded_of(each).grad = None


# --- [Note: deferred all-reduce] Micro-batches under HSDP that use different parameters of one unit.
#
# Every micro-batch but the last only reduce-scatters, and FSDP2 adds up what this gives: flat tensors of the gradients
# that the micro-batch has, one behind the other. Where the next one has those of other parameters (another head, a
# branch, a block that is left out), numbers of different parameters would be added, and what a unit has that does not
# run in the last micro-batch would be added to the next step. So both are brought to one layout first, with zeros for
# what one of them lacks. A parameter that no micro-batch uses still gets no gradient.


def align_deferred_gradients(units: Iterable[nn.Module]) -> None:
    """Let micro-batches that defer the all-reduce of HSDP use different parameters of a unit, from now on.

    See [Note: deferred all-reduce].
    """
    for unit in units:
        for group in parameter_groups(unit) if isinstance(unit, FSDPModule) else ():
            group.post_backward = torch.compiler.disable(_AlignedReduction(group))


class _AlignedReduction:
    """FSDP2's reduction of a group, behind which nothing is added up in two layouts."""

    def __init__(self, group: Any) -> None:
        self._group, self._reduce = group, group.post_backward
        self._earlier: list[Any] = []  # parameters with gradients in what is deferred, in the order of the group

    def __call__(self, *unused: Any) -> None:
        deferred = deferred_of(self._group)
        if deferred is None:  # nothing is, or a failed pass was abandoned
            self._earlier = []
        present = [each for each in self._group.fsdp_params if each in self._earlier or _has_gradient(each)]
        for each in self._earlier:
            if not _has_gradient(each):
                # Before the reduction: also of a unit that has not run, whose storage is freed but not its shape.
                unsharded_of(each).grad = _zero_gradient(unsharded_of(each))
        if deferred is not None and present != self._earlier:
            with torch.get_device_module(self._group.device).stream(reduce_scatter_stream_of(self._group)):
                setattr(self._group, DEFERRED, _laid_out(deferred, self._earlier, present))
        self._earlier = present
        self._reduce(*unused)


def _has_gradient(parameter: Any) -> bool:
    return hasattr(parameter, UNSHARDED) and unsharded_of(parameter).grad is not None


def _zero_gradient(whole: torch.Tensor) -> torch.Tensor:
    # Weights gathered in 8 bits have plain gradients, those under tensor parallelism DTensors.
    if isinstance(whole, DTensor):
        return torch.zeros_like(whole)
    return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)


def _laid_out(flat: torch.Tensor, parameters: list[Any], wanted: list[Any]) -> torch.Tensor:
    """Return a flat tensor of the shards of parameters as one of all wanted parameters, with zeros for the others."""
    parts = dict(zip(parameters, flat.split([_shard_numel(each) for each in parameters]), strict=True))
    return torch.cat([parts[each] if each in parts else flat.new_zeros(_shard_numel(each)) for each in wanted])


def _shard_numel(parameter: Any) -> int:
    size: int = parameter.padded_sharded_param_size.numel()
    return size


# --- Gradients of unsharded parameters, averaged over ranks without a wrapper.

_AVERAGED = "_meshwright_averaged"


class _TensorAverager:
    """Averages gradients over the tensor group, all at the end of a backward pass.

    FSDP2 has reduced them over the other axis. They are those of many small parameters, norms and biases: a collective
    for each would cost more than the data.
    """

    def __init__(self) -> None:
        self._backward = -1  # the pass that the parameters below belong to: a failed one leaves some behind
        self._waiting: dict[int, torch.Tensor] = {}  # parameters by ``id``

    def take(self, parameter: torch.Tensor) -> None:
        """Add a parameter whose gradient has been accumulated."""
        backward = current_graph_task_id()
        if self._backward != backward:
            self._backward, self._waiting = backward, {}
            # Behind FSDP2's own callback, which waits for its streams.
            queue_callback(self._average)
        self._waiting[id(parameter)] = parameter

    @torch.no_grad()
    def _average(self) -> None:
        waiting, self._waiting, self._backward = list(self._waiting.values()), {}, -1
        for gradients in by_kind(local_tensor(each.grad) for each in waiting if each.grad is not None):
            flat = reduced(torch.cat([gradient.flatten() for gradient in gradients]), "avg", members_of(tensor_mesh()))
            for gradient, average in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(average.view_as(gradient))


_at_end_of_backward = _TensorAverager()


def average_gradients(
    parameters: Iterable[nn.Parameter], num_ranks: int, group: dist.ProcessGroup | None = None
) -> list[nn.Parameter]:
    """Average gradients over ranks as backward accumulates them, from now on; each parameter once.

    Args:
        parameters: Equal on all ranks, and used by all of them. Plain, or sharded over the ``zero`` axis and replicated
            over the tensor group: these are averaged over the latter.
        num_ranks: Ranks in the group; with 1 there is nothing to average.
        group: None for the world.

    Returns:
        The frozen ones, which cannot have a hook: call again when they may train.
    """

    def average(parameter: torch.Tensor) -> None:
        # The average of averages is the same average, so accumulated gradients stay right.
        assert parameter.grad is not None
        parameter.grad /= num_ranks
        dist.all_reduce(parameter.grad, group=group)

    if num_ranks == 1:
        return []
    frozen = []
    for parameter in parameters:
        if not parameter.requires_grad:
            frozen.append(parameter)
        elif not hasattr(parameter, _AVERAGED):
            is_replicated = is_replicated_over_tensor_group(parameter)
            parameter.register_post_accumulate_grad_hook(_at_end_of_backward.take if is_replicated else average)
            setattr(parameter, _AVERAGED, True)
    return frozen


def is_replicated_over_tensor_group(parameter: torch.Tensor) -> bool:
    """Return whether every tensor rank has all of a sharded parameter; FSDP2 reduces over the other axis only."""
    return isinstance(parameter, DTensor) and parameter.placements[1:] == (Replicate(),)


# --- [Note: collective log] The order in which a rank gathers units and reduces gradients.
#
# Ranks pair their collectives by order alone. A rank that runs other layers than the others exchanges wrong tensors, or
# waits for ever. The gather-order check compares the logs of all ranks.


class CollectiveLog:
    """Log of FSDP2's collectives on this rank: units that a forward gathers, and gradients that a backward reduces.

    See [Note: collective log]. Not logged are forwards of units that are gathered already and gradients that only
    accumulate: they communicate nothing.

    Args:
        model: Sharded, with the same names on every rank.
        apart: Parameters that are not exchanged, or not between the ranks whose logs will be compared.
        offloaded: Parameters whose gradients FSDP2 moves to the host: with a hook, it would wait for them.
        gathers: Whether to log gathers of units; False where one rank has all of each.
    """

    def __init__(
        self,
        model: nn.Module,
        apart: Collection[nn.Parameter],
        offloaded: Collection[nn.Parameter] = (),
        *,
        gathers: bool = True,
    ) -> None:
        self._names: list[str] = []  # of units and parameters
        self._order = array.array("I")  # indices of ``_names``
        exchanged = {name: parameter for name, parameter in model.named_parameters() if parameter not in apart}
        for unit, name in _first_parameters(model, exchanged).items() if gathers else ():
            self._log_gathers(model, unit, name)
        for name, parameter in exchanged.items():
            if parameter.requires_grad and parameter not in offloaded:
                log = self._logger(f"the gradient of {name}")
                # FSDP2 calls it where it has sent the gradient, in compiled models too.
                parameter.register_post_accumulate_grad_hook(lambda _, log=log: log())

    def _logger(self, name: str) -> Callable[[], None]:
        place, append = len(self._names), self._order.append
        self._names.append(name)
        return lambda: append(place)

    def _log_gathers(self, model: nn.Module, unit: str, name: str) -> None:
        path, _, attribute = name.rpartition(".")
        parameters, log = parameters_of(model.get_submodule(path)), self._logger(unit or "the rest of the model")
        shard = parameters[attribute]

        def before_forward(module: nn.Module, args: Any) -> None:
            is_sharded = parameters[attribute] is shard
            # Without gradients nothing is compared: a rank may validate alone.
            if is_sharded and torch.is_grad_enabled():
                log()

        # Before FSDP2's own hook. Not traced: where compiling fails on one rank, only that rank would run it.
        model.get_submodule(unit).register_forward_pre_hook(torch.compiler.disable(before_forward), prepend=True)

    def is_any(self) -> bool:
        """Return whether anything was logged since the last :meth:`take`."""
        return bool(self._order)

    def take(self) -> bytes:
        """Return the log since the last call, and clear it; equal bytes are equal orders."""
        taken = self._order.tobytes()
        del self._order[:]
        return taken

    def names(self, order: bytes) -> list[str]:
        """Decode a log, of this rank or another, into names."""
        return [self._names[place] for place in array.array("I", order)]


def _first_parameters(model: nn.Module, exchanged: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return one parameter that a unit gathers itself, by the unit's path, for all units that can have hooks."""
    can_hook = set(outside_compiled(model))
    units = dict(each for each in model.named_modules() if isinstance(each[1], FSDPModule))
    found: dict[str, str] = {}
    for name in exchanged:
        paths = [path for path in units if not path or name.startswith(f"{path}.")]
        innermost = max(paths, key=len, default=None)
        if innermost is not None and units[innermost] in can_hook:
            found.setdefault(innermost, name)
    return found

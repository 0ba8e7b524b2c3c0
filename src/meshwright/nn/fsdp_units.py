"""FSDP2 units: their groups, resharding at updates, recovery after failures, and the collective log."""

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
from meshwright.runtime import tensor_mesh
from meshwright.runtime.torch_internals.autograd import current_graph_task_id, queue_callback
from meshwright.runtime.torch_internals.fsdp import (
    GROUP,
    GROUPS,
    UNSHARDED,
    abandon_step,
    is_root,
    lazy_init,
    shared_context_of,
    unsharded_of,
)
from meshwright.runtime.torch_internals.modules import parameters_of


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of the parameters that it communicates together; none where the unit has none of its own."""
    return groups_of(fully_shard.state(unit))  # type: ignore[attr-defined]


def groups_of(state: Any) -> list[Any]:
    """Return FSDP2's groups of parameters, by a unit's ``FSDPState``."""
    groups = getattr(state, GROUPS, None) or [getattr(state, GROUP)]
    return [group for group in groups if group is not None]


# --- Gathered weights do not outlive an update of their shards, whoever gathered them and whoever updates.

_units: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooked = False


def reshard(model: nn.Module) -> None:
    """Free what is gathered of a sharded model, else it would be taken for its weights after the shards have changed.

    Nothing is communicated, and nothing done where nothing is gathered.
    """
    reshard_units(model.modules())


def reshard_units(modules: Iterable[nn.Module]) -> None:
    """The same for those of these modules that are FSDP2 units; without a walk where they are known."""
    for module in modules:
        if isinstance(module, FSDPModule):  # what has been taken apart is no unit any more
            module.reshard()


def reshard_at_updates(units: Iterable[nn.Module]) -> None:
    """Free what is gathered of FSDP2 units after every step of an optimizer of their parameters, from now on.

    Backward frees it; but a forward after that, for a metric say, gathers it again, and leaves it so where no backward
    is to gather it twice. FSDP2 would compute the next forward with these weights, of before the update.
    """
    global _hooked
    _units.update(units)
    if not _hooked:
        # torch's for all optimizers: nobody tells here which one will be built over these parameters.
        register_optimizer_step_post_hook(_reshard_updated)
        _hooked = True


def _reshard_updated(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # What has been taken apart since is no unit any more.
    gathered = [unit for unit in list(_units) if isinstance(unit, FSDPModule) and _is_gathered(unit)]
    if not gathered:
        return
    # Only those that this optimizer updates: it may be one of few ranks, and to gather again takes all of them.
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for unit in gathered:
        if any(id(each.sharded_param) in updated for group in parameter_groups(unit) for each in group.fsdp_params):
            unit.reshard()


def _is_gathered(unit: FSDPModule) -> bool:
    return any(not group.is_sharded for group in parameter_groups(unit))


@contextlib.contextmanager
def gathered_root(model: nn.Module) -> Iterator[None]:
    """Whole weights outside of units while parts of a model are called by themselves; all are shards afterwards."""
    assert isinstance(model, FSDPModule)
    lazy_init(fully_shard.state(model))  # type: ignore[attr-defined]  # else the part that is called becomes a root
    model.unshard()
    try:
        yield
    finally:
        reshard(model)


# --- What FSDP2 leaves behind when forward or backward fails, and the way back.


def abandon_units(model: nn.Module) -> None:
    """After a failure: units are sharded and idle, and nothing is left of gradients that were not reduced yet."""
    trees = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            context = shared_context_of(fully_shard.state(module))  # type: ignore[attr-defined]
            trees[id(context)] = context
    for context in trees.values():
        _abandon(context)


def recover_in_forward(unit: nn.Module) -> None:
    """Let the first forward after a backward that failed begin as if it had not, for loops that catch the error.

    FSDP2 ends a backward pass in a callback, and believes for ever that one is under way where it was not called: no
    later pass would be ended, and gradients of the failed one would be added to those of the next.
    """
    # Before FSDP2's own hook, which gathers.
    unit.register_forward_pre_hook(_recover, prepend=True)


def _recover(unit: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(unit, FSDPModule):  # taken apart since
        return
    context = shared_context_of(fully_shard.state(unit))  # type: ignore[attr-defined]
    # In backward itself, recomputation runs forwards.
    if context.post_backward_final_callback_queued and current_graph_task_id() == -1:
        _abandon(context)


def _abandon(context: Any) -> None:
    roots = [state for state in context.all_states if is_root(state)]  # none before the first forward
    parameters = [each for state in context.all_states for group in groups_of(state) for each in group.fsdp_params]
    # Those of earlier passes, which loops by hand add to; torch 2.15 takes them, too.
    reduced = [(each.sharded_param, each.sharded_param.grad) for each in parameters]
    for root in roots:
        abandon_step(root, groups_of)
    for parameter, gradient in reduced:
        parameter.grad = gradient
    for each in parameters:
        if "unsharded_accumulated_grad" in vars(each):  # later torch keeps all in the gradient below
            each.unsharded_accumulated_grad = None
        if hasattr(each, UNSHARDED):
            unsharded_of(each).grad = None


# --- Averaged gradients of parameters that every rank holds whole, where no wrapper averages them.

_AVERAGED = "_meshwright_averaged"


class _TensorAverager:
    """Averages over the tensor group what a backward pass has reduced over the other axis: all of it at its end.

    These are the many small parameters, norms and biases, that a collective each would hardly be worth.
    """

    def __init__(self) -> None:
        self._backward = -1  # the pass that the parameters below belong to: one that failed leaves some behind
        self._waiting: dict[int, torch.Tensor] = {}  # parameters by identity

    def take(self, parameter: torch.Tensor) -> None:
        """Note a parameter whose gradient is there; a hook after accumulation."""
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
    """Averages gradients over ranks as backward accumulates them, from now on; twice for none.

    Args:
        parameters: Equal on all ranks, and used by all of them: plain, or sharded and alike on all tensor ranks, over
            which they are averaged then.
        num_ranks: Ranks in the group; 1 averages nothing.
        group: None for the world.

    Returns:
        The frozen ones among them: a hook needs a parameter that trains.
    """

    def average(parameter: torch.Tensor) -> None:
        # Averaging what is already an average changes nothing, so accumulated gradients stay right.
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
            alike = is_alike_on_tensor_ranks(parameter)
            parameter.register_post_accumulate_grad_hook(_at_end_of_backward.take if alike else average)
            setattr(parameter, _AVERAGED, True)
    return frozen


def is_alike_on_tensor_ranks(parameter: torch.Tensor) -> bool:
    """Return whether a sharded parameter exists once per tensor rank.

    FSDP2 reduces its gradient along the other axis only.
    """
    return isinstance(parameter, DTensor) and parameter.placements[1:] == (Replicate(),)


# --- What a rank of a sharded model has gathered and reduced, and in which order: others may have run other layers.


class CollectiveLog:
    """Notes what FSDP2 exchanges on this rank: units that a forward gathers, and gradients that a backward reduces.

    Ranks pair what they exchange by order alone. Units that are gathered already are not noted, nor gradients that only
    accumulate: ranks may run what they like there.

    Args:
        model: Sharded, by the same names on every rank.
        apart: Parameters that are not exchanged, or not between the ranks that will be compared.
        hosted: Parameters whose gradients FSDP2 moves to the host: it would wait for them, if a hook were to see them.
        gathers: Whether units are noted; not where one rank has all of each.
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
        self._order = array.array("I")  # places in them
        exchanged = {name: parameter for name, parameter in model.named_parameters() if parameter not in apart}
        for unit, name in _first_parameters(model, exchanged).items() if gathers else ():
            self._note_gathers(model, unit, name)
        for name, parameter in exchanged.items():
            if parameter.requires_grad and parameter not in offloaded:
                note = self._note(f"the gradient of {name}")
                # FSDP2 calls it where it has sent the gradient, in compiled models too.
                parameter.register_post_accumulate_grad_hook(lambda _, note=note: note())

    def _note(self, name: str) -> Callable[[], None]:
        place, append = len(self._names), self._order.append
        self._names.append(name)
        return lambda: append(place)

    def _note_gathers(self, model: nn.Module, unit: str, name: str) -> None:
        path, _, attribute = name.rpartition(".")
        held, note = parameters_of(model.get_submodule(path)), self._note(unit or "the rest of the model")
        shard = held[attribute]

        def about_to_run(module: nn.Module, args: Any) -> None:
            if held[attribute] is shard and torch.is_grad_enabled():  # ranks may look at their validation data alone
                note()

        # Before FSDP2's own. Where compiling fails on one rank alone, traced hooks would run there alone.
        model.get_submodule(unit).register_forward_pre_hook(torch.compiler.disable(about_to_run), prepend=True)

    def is_any(self) -> bool:
        """Return whether anything was exchanged since the last :meth:`take`."""
        return bool(self._order)

    def take(self) -> bytes:
        """Return the order since the last call; equal bytes are equal orders."""
        taken = self._order.tobytes()
        del self._order[:]
        return taken

    def names(self, order: bytes) -> list[str]:
        """Return what was exchanged in an order, that of any rank."""
        return [self._names[place] for place in array.array("I", order)]


def _first_parameters(model: nn.Module, exchanged: dict[str, nn.Parameter]) -> dict[str, str]:
    """By the paths of units that hooks can be put on: a parameter that each gathers itself."""
    can_hook = set(outside_compiled(model))
    units = dict(each for each in model.named_modules() if isinstance(each[1], FSDPModule))
    found: dict[str, str] = {}
    for name in exchanged:
        paths = [path for path in units if not path or name.startswith(f"{path}.")]
        innermost = max(paths, key=len, default=None)
        if innermost is not None and units[innermost] in can_hook:
            found.setdefault(innermost, name)
    return found

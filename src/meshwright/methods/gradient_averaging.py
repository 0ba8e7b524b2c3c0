"""Make replicas equal and keep them so: weights, gradients during backward, buffers, and the hooks on gradients.

``GradientAverager`` does for DTensors, experts and pipeline stages what DDP does for plain replicas: it all-reduces
buckets of gradients while backward goes on.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import ModelError, join_names
from meshwright.optim import local_tensor
from meshwright.runtime import bit_sums, flat_bytes, world_size
from meshwright.runtime.torch_internals.autograd import (
    BACKWARD_HOOKS,
    accumulation_hooks_of,
    backward_hooks_of,
    current_graph_task_id,
    queue_callback,
)
from meshwright.runtime.torch_internals.c10d import check_reducer_finalized, rebuild_buckets
from meshwright.runtime.torch_internals.modules import buffers_of, non_persistent_of
from meshwright.runtime.torch_internals.pytree import tree_leaves
from meshwright.store.entries import stored_name, unwrapped

_NONE = -1  # torch's id of a backward pass where none runs
_BUCKET_BYTES = 25 * 2**20  # DDP's: large enough for bandwidth, small enough to start early
_MESSAGE_BYTES = 64 * 2**20  # of weights: what a rank holds beside the model meanwhile, on its device


@torch.no_grad()
def broadcast_states(model: nn.Module, device: torch.device) -> None:
    """Send rank 0's parameters and buffers to all ranks; see :func:`broadcast_tensors`.

    Args:
        model: On ``device`` or the CPU, where it stays.
        device: Device whose links carry the values: those between hosts are slow, or have no process group.
    """
    broadcast_tensors((*model.parameters(), *model.buffers()), device)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrite tensors by those of a group's first rank, in messages of 64 MiB; none if some are on ``meta``.

    Args:
        tensors: Dense, in one order, of the same shapes and types on all ranks.
        device: Device whose links carry the values.
        group: The ranks; None for the world.
    """
    plain = [tensor.detach() for tensor in tensors]
    if world_size() == 1 or any(tensor.is_meta for tensor in plain):
        return
    parts: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in plain:
        values = flat_bytes(tensor)
        for part in values.split(_MESSAGE_BYTES):
            if parts and (parts[0].device != part.device or sum(map(len, parts)) + len(part) > _MESSAGE_BYTES):
                _broadcast_together(parts, copies, device, group)
            parts.append(part)
        if values.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            copies.append((tensor, values))
    _broadcast_together(parts, copies, device, group)


def _broadcast_together(
    parts: list[torch.Tensor],
    copies: list[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Overwrite flat bytes that lie on one device by the first rank's, in one message; empties both lists.

    Args:
        parts: The bytes.
        copies: Tensors that are not contiguous, and the copies of their bytes that end with these parts.
        device: Device whose links carry the message.
        group: The ranks; None for the world.
    """
    if sum(map(len, parts)):
        message = torch.cat(parts).to(device) if len(parts) > 1 else parts[0].to(device)
        dist.broadcast(message, group=group, group_src=0)
        if message is not parts[0] and dist.get_rank(group) != 0:
            for part, values in zip(parts, message.split([len(part) for part in parts]), strict=True):
                part.copy_(values)
    for tensor, values in copies:
        # What ``expand`` repeats lies in memory once, and can be written once.
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor[once].copy_(values.view(tensor.dtype).view(tensor.shape)[once])
    parts.clear()
    copies.clear()


_COMPARED_EVERY = 64  # updates: comparing makes the host wait for the device, and buffers begin to differ once


class SharedBuffers:
    """Overwrites, before every update, the buffers that follow a rank's own samples by those of the first replica.

    Such are the statistics of ``BatchNorm`` and codebooks. DDP sends all buffers of its first rank before a forward;
    sent with the update, they are also equal where a model is evaluated or saved.

    The ranks find out which ones differ: they compare checksums in the updates 1, 2, 4 and so on, and in every 64th.
    Nothing is sent for others, such as the packed weights of a quantised model. A buffer that begins to differ between
    two comparisons is each rank's own until the next one.

    Args:
        model: Its persistent buffers are looked at; others are caches, and stay each rank's own.
        group: The ranks that are to have the same ones.
        device: Device whose links carry the values.
        skip: Whether to leave out a buffer: called with its module and its name in it.

    Attributes:
        places: The module and the name in it of every buffer that is looked at; the same on all ranks of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        skip: Callable[[nn.Module, str], bool],
    ) -> None:
        self._group, self._device = group, device
        self.places = [
            (module, name)
            for module in model.modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in non_persistent_of(module) and not skip(module, name)
        ]
        self._apart: set[int] = set()  # places; one that has differed is sent from then on
        self._num_updates = 0

    @torch.no_grad()
    def share(self) -> None:
        """Make the buffers equal; collective."""
        self._num_updates += 1
        count = self._num_updates % _COMPARED_EVERY
        if count & (count - 1) == 0:  # 0 or a power of two
            self._apart |= self._compare()
        broadcast_tensors([self._buffer(at) for at in sorted(self._apart)], self._device, self._group)

    def _compare(self) -> set[int]:
        """Return the places of buffers that have one size on all ranks, and not one value."""
        buffers = [self._buffer(at) for at in range(len(self.places))]
        sums = bit_sums(buffers).to(self._device)
        sizes = torch.tensor([buffer.numel() * buffer.element_size() for buffer in buffers]).to(self._device)
        extremes = torch.stack([sums, ~sums, sizes, ~sizes])  # the largest of ~x is ~ the smallest of x
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        rows = enumerate(extremes.T.tolist())
        return {at for at, (most, least, long, short) in rows if most != ~least and long == ~short}

    def _buffer(self, place: int) -> torch.Tensor:
        module, name = self.places[place]
        buffer = buffers_of(module)[name]
        return torch.empty(0) if buffer is None else local_tensor(buffer.detach())


class GradientAverager:
    """All-reduces buckets of local gradients as backward completes them, in one order on all ranks.

    Args:
        model: Its trainable parameters must be equal along ``group``, shard by shard. Only a forward of this module
            starts averaging; its output must lead to the loss.
        group: The ranks to average over.
        allow_unused: Whether parameters may get no gradient in a step; such a parameter keeps none if no rank has one.
        in_backward: False averages only when :meth:`average` is called.
        only: The parameters to average; None: all of the model's.
        compressed: Averages flat gradients of one type over the group, in place; None: in full precision.
        at_end: Whether all is sent at the end of backward: for gradients that come in another order on each rank, as
            those of experts without tokens do. Other exchanges over the same ranks would be paired with them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        allow_unused: bool,
        in_backward: bool = True,
        only: Collection[nn.Parameter] | None = None,
        compressed: Callable[[Sequence[torch.Tensor]], None] | None = None,
        at_end: bool = False,
    ) -> None:
        self._group, self._allow_unused, self._in_backward = group, allow_unused, in_backward
        self._compressed, self._at_end = compressed, at_end or compressed is not None
        self._names = {p: name for name, p in model.named_parameters() if only is None or p in only}
        self._hooked: set[nn.Parameter] = set()
        self._trains: list[bool] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._renew()
        self._enabled = True  # False: micro-batches whose gradients only accumulate
        self._running = _NONE  # the backward pass that has begun; it stays where one fails
        self._missing: list[int] = []  # how many parameters of each bucket have no gradient yet in this pass
        # Sent, in order of the buckets; without work what has been averaged already.
        self._works: list[tuple[dist.Work | None, torch.Tensor, list[nn.Parameter]]] = []
        if in_backward:
            model.register_forward_hook(self._after_forward)

    def _renew(self) -> None:
        """Renew the buckets: parameters may have been frozen or unfrozen since the last pass."""
        trains = [parameter.requires_grad for parameter in self._names]
        if trains == self._trains:
            return
        self._trains = trains
        trainable = [parameter for parameter in self._names if parameter.requires_grad]
        self._buckets = _cut(trainable)
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        for parameter in trainable if self._in_backward else ():
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._ready)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes over: its parameters, copies themselves, have no hooks yet."""
        return {**vars(self), "_hooked": set(), "_trains": [], "_works": [], "_running": _NONE}

    def average(self) -> None:
        """Average the gradients now, outside of backward."""
        self._renew()
        self._works = []
        self._end()

    @contextlib.contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Enter the forward and backward of a micro-batch: only the last one's backward averages."""
        before, self._enabled = self._enabled, is_last
        try:
            yield
        finally:
            self._enabled = before

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._renew()
        for leaf in tree_leaves(output) if self._buckets else ():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        """Begin a backward pass, and ask the autograd engine for a callback at its end."""
        backward = current_graph_task_id()
        if self._enabled and self._running != backward:
            self._running, self._works = backward, []
            self._missing = [len(bucket) for bucket in self._buckets]
            queue_callback(self._end)

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self._at_end and self._running == current_graph_task_id() and parameter in self._bucket_of:
            self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
            while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
                self._send()

    def _send(self) -> None:
        """Start averaging the next bucket; parameters without a gradient send zeros, so that all ranks send alike."""
        bucket = self._buckets[len(self._works)]
        parts = [
            (torch.zeros_like(local_tensor(p)) if p.grad is None else local_tensor(p.grad)).flatten() for p in bucket
        ]
        has_gradient = [parts[0].new_tensor(float(p.grad is not None)) for p in bucket if self._allow_unused]
        if self._compressed is not None:
            self._compressed(parts)
            if has_gradient:
                parts.append(torch.stack(has_gradient))
                dist.all_reduce(parts[-1], group=self._group)
            self._works.append((None, torch.cat(parts), bucket))
            return
        flat = torch.cat([*parts, torch.stack(has_gradient)] if has_gradient else parts)
        flat /= self._group.size()
        self._works.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, bucket))

    @torch.no_grad()
    def _end(self) -> None:
        self._running = _NONE
        while len(self._works) < len(self._buckets):
            self._send()
        unused: list[str] = []
        for work, flat, bucket in self._works:
            if work is not None:
                work.wait()
            unused += self._take(flat, bucket)
        self._works = []
        if unused:
            raise ModelError(
                "Parameters took no part in a step, and their gradients are to be averaged",
                expected="a gradient for every parameter that trains",
                got=join_names(unused),
                fix="pass find_unused_parameters=True, or freeze them with requires_grad_(False)",
            )

    def _take(self, flat: torch.Tensor, bucket: list[nn.Parameter]) -> list[str]:
        """Copy averages into the gradients; return the parameters that have none and must have one."""
        sizes = [local_tensor(parameter).numel() for parameter in bucket]
        averages = flat.split([*sizes, len(bucket)] if self._allow_unused else sizes)
        unused = []
        for index, (parameter, average) in enumerate(zip(bucket, averages, strict=False)):
            if parameter.grad is None:
                if not self._allow_unused:
                    unused.append(self._names[parameter])
                    continue
                if not averages[-1][index]:
                    continue  # no rank has one; only ranks without a gradient wait for this flag
                parameter.grad = torch.zeros_like(parameter)
            local = local_tensor(parameter.grad)
            local.copy_(average.view_as(local))
        return unused


def average_every_backward(replicas: DistributedDataParallel) -> None:
    """Let DDP average after each of several backwards through one forward (``retain_graph``), not only the first.

    Averaging gradients that are averaged already changes nothing. Where parameters may be unused DDP would need the
    output again, which is gone: there only the first backward is averaged, as in DDP itself.
    """
    if not (replicas.find_unused_parameters or replicas.static_graph):
        replicas.register_forward_hook(_prepare_each_backward)


def _prepare_each_backward(replicas: nn.Module, args: Any, output: Any) -> None:
    assert isinstance(replicas, DistributedDataParallel)
    if not torch.is_grad_enabled() or not replicas.require_backward_grad_sync or torch.compiler.is_compiling():
        return
    passes: set[int] = set()

    def begin(gradient: torch.Tensor) -> None:
        backward = current_graph_task_id()
        if passes and backward not in passes and _is_at_rest(replicas):
            rebuild_buckets(replicas.reducer)  # as before a forward: in the order of one pass, not of two
            replicas.reducer.prepare_for_backward([])
        passes.add(backward)

    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(begin)


def _is_at_rest(replicas: DistributedDataParallel) -> bool:
    """Return whether DDP waits for no parameter: of several backwards, each may run through a part of the graph."""
    try:
        check_reducer_finalized(replicas)
    except RuntimeError:
        return False
    return True


def refuse_frozen(model: nn.Module) -> None:
    """Make the next training forward fail if a parameter is frozen that DDP waits for in every step.

    The error is a :class:`ModelError` that names the parameters.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # No closure, since a deep copy of the model must watch its own parameters.
    model.register_forward_pre_hook(functools.partial(_check_frozen, trained))


def _check_frozen(trained: dict[str, nn.Parameter], *_: object) -> None:
    frozen = [name for name, parameter in trained.items() if not parameter.requires_grad]
    if frozen and torch.is_grad_enabled():
        raise ModelError(
            "Parameters were frozen after their gradients had been promised to all replicas",
            expected="the parameters that trained when the strategy was applied",
            got=join_names(frozen),
            fix="pass find_unused_parameters=True, freeze them before, or set their learning rate to 0",
        )


def _cut(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut parameters into buckets of one dtype, last first: about the order in which backward completes them."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        bucket, size = open_buckets.get(parameter.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        size += local_tensor(parameter).nbytes
        open_buckets[parameter.dtype] = (bucket, size) if size < _BUCKET_BYTES else ([], 0)
    return buckets


# --- Hooks on gradients
#
# Methods put new parameters in the place of old ones, and torch would silently drop the hooks that users have
# registered on the old ones. Hooks on FSDP2's shards are the affair of ``share_hooks`` in methods/zero.py.

_Registered = OrderedDict[int, Callable[[torch.Tensor], Any]]
"""torch's own dict of hooks: a handle removes its hook from it, on whatever parameter it is by then."""


class GradientHooks:
    """The hooks on gradients that a model's parameters have, by name.

    Args:
        model: The model before methods change it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooked = {
            name: parameter
            for name, parameter in _named(model).items()
            if backward_hooks_of(parameter) or accumulation_hooks_of(parameter)
        }

    def carry_over(self, model: nn.Module) -> None:
        """Put the hooks on the parameters that now have the same names."""
        present = _named(model) if self._hooked else {}
        for name, before in self._hooked.items():
            now = present.get(name)  # None: on another rank of a pipeline
            if now is None or now is before:
                continue
            if hooks := backward_hooks_of(before):
                setattr(now, BACKWARD_HOOKS, hooks)
            accumulated = accumulation_hooks_of(before)
            if accumulated:
                now.register_post_accumulate_grad_hook(functools.partial(_call_all, accumulated))


def _call_all(hooks: _Registered, parameter: torch.Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(parameter)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {stored_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}

"""Step any torch optimizer bucket by bucket, with states and master weights in host memory or on disk."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.checks import check_dense
from meshwright.optim.dtensors import CUTTABLE, HALF_TYPES, local_tensor, wrapped_like
from meshwright.optim.guarded_step import WrappedOptimizer
from meshwright.optim.mixed_precision import MasterWeights
from meshwright.optim.offload_storage import Copies, Disk, DiskFile, Event, HostRoom
from meshwright.optim.sharded.sharded_optimizer import local_gradient
from meshwright.optim.visiting_states import Visits, fused_kernels
from meshwright.runtime import same_on_every_rank
from meshwright.runtime.torch_internals.optim import (
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
    step_post_hooks_of,
    step_pre_hooks_of,
)


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated together."""

    parameters: list[torch.Tensor]
    """The model's parameters."""
    updated: list[torch.Tensor]
    """The optimizer's parameters: copies on the host, or the parameters themselves if they live there."""
    files: list[DiskFile]
    """The files of their copies and states."""

    def without(self, visiting: Mapping[torch.Tensor, torch.Tensor]) -> Bucket:
        """Return the bucket without parameters that are updated on the device."""
        stays = [parameter not in visiting for parameter in self.parameters]
        return Bucket([*compress(self.parameters, stays)], [*compress(self.updated, stays)], self.files)


class OffloadedOptimizer(WrappedOptimizer):
    """Wrapper that steps an optimizer over host copies of parameters bucket by bucket.

    torch's optimizers treat every parameter by itself, so steps over parts are equal to one over all. Each bucket is
    updated alone, with torch's fused kernel where there is one and the group does not choose otherwise, while the
    weights of the bucket before travel to the device and the states of the next are read. Parameters on the device are
    updated first, then those whose states visit it. Any other optimizer takes one step over everything.

    Args:
        inner: The optimizer.
        buckets: The parameters on the host.
        disk: Where states move after the step that made them; None: they stay in memory.
        send: Begins to copy the new weights of some of the model's parameters to the device.
        visits: The parameters whose states visit the device; None where none do.
    """

    def __init__(
        self,
        inner: Optimizer,
        buckets: Sequence[Bucket],
        disk: Disk | None,
        send: Callable[[Sequence[torch.Tensor]], None],
        visits: Visits | None = None,
    ) -> None:
        super().__init__(inner)
        if isinstance(inner, LBFGS):
            raise ConfigError(
                "offload cannot work with LBFGS, which flattens all parameters into one vector",
                expected="an optimizer that keeps its states per parameter",
                got="LBFGS",
                fix="leave offload out, or use another optimizer",
            )
        self._buckets, self._disk, self._send, self._visits = buckets, disk, send, visits
        self._on_host = {parameter: bucket for bucket in buckets for parameter in bucket.updated}
        self._stored: dict[tuple[torch.Tensor, str], torch.Tensor] = {}  # states on disk, by parameter and name
        self._offered: dict[tuple[torch.Tensor, str], torch.Tensor] = {}  # room for states about to be loaded
        self._full: ConfigError | None = None  # the reason why states of this step stay in memory
        self._agreed = False  # whether all ranks know that their first states have found room
        if disk is not None:  # checkpoints then load states straight into their files
            inner.state_like = self.state_like  # type: ignore[attr-defined]

    def place_of(self, parameter: torch.Tensor, key: str) -> Literal["device", "host", "disk"]:
        """Return where a state of one of the optimizer's parameters lives between steps."""
        if self._visits is not None and parameter in self._visits.parameters:
            value = self.inner.state[parameter][key]
            return "host" if isinstance(value, torch.Tensor) and value.dim() else "device"  # counters stay there
        if parameter not in self._on_host:
            return "device"
        return "disk" if self.is_stored(parameter, key) else "host"

    def gradient_holders(self) -> list[torch.Tensor]:
        """Return the tensor that holds the gradient of each parameter: itself, or the model's where states visit."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        if self._visits is None:
            return every
        return [self._visits.parameters.get(parameter, parameter) for parameter in every]

    def is_stored(self, parameter: torch.Tensor, key: str) -> bool:
        """Return whether a state is on disk."""
        return self._stored.get((parameter, key)) is self.inner.state[parameter][key]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters on the device and those whose states visit it, then bucket after bucket on the host.

        Raises:
            ConfigError: When a disk has no room for new states, on every rank; the step is done then, with them in
                memory.
        """
        if closure is not None:
            raise ValueError("An offloaded optimizer takes no closure. What to do: call backward before step.")
        if self._visits is not None:
            with _hooks_once(self.inner):
                self._step(self._visits)
        else:
            self._step()
        if self._disk is not None:
            self._raise_if_full()

    def _step(self, visits: Visits | None = None) -> None:
        if self._in_parts:
            others = {p for group in self.param_groups for p in group["params"]} - self._on_host.keys()
            others -= visits.parameters.keys() if visits is not None else set()
            if others:
                with _only(self.inner, others):
                    self.inner.step()
        else:
            self.inner.step()
        if visits is not None:
            visits.step()
        for bucket, following in zip_longest(self._buckets, self._buckets[1:]):
            if self._disk is not None and following is not None:
                self._disk.read_ahead(following.files)
            if self._in_parts:
                with _only(self.inner, set(bucket.updated)), fused_kernels(self.inner):
                    self.inner.step()
            self._store(bucket)
            self._send(bucket.parameters)
            if self._disk is not None:
                self._disk.write_behind(bucket.files)

    @property
    def _in_parts(self) -> bool:
        ours_or_theirs = type(self.inner).__module__.startswith("torch.optim.")
        hooks = step_pre_hooks_of(self.inner) or step_post_hooks_of(self.inner)
        return ours_or_theirs and not hooks  # a hook is promised one call per step

    def _states(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield the states that belong on disk: all but counters."""
        for parameter in bucket.updated:
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield parameter, key, value

    def _store(self, bucket: Bucket) -> None:
        """Move states that are new or were loaded from memory to disk."""
        if self._disk is None or self._full is not None:
            return
        missing = []
        for parameter, key, value in list(self._states(bucket)):
            place = self._stored.get((parameter, key))
            if place is value:
                continue
            if place is not None and _alike(place, value):
                self._put(parameter, key, value, local_tensor(place))
            else:
                missing.append((parameter, key, value))
        if not missing:
            return
        try:
            file, places = self._disk.make([local_tensor(value) for _, _, value in missing])
        except ConfigError as error:
            self._full = error
            return
        bucket.files += [file] if file is not None else []
        for (parameter, key, value), place in zip(missing, places, strict=True):
            self._put(parameter, key, value, place)

    @torch.no_grad()
    def _put(self, parameter: torch.Tensor, key: str, value: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(local_tensor(value))
        self.inner.state[parameter][key] = self._stored[parameter, key] = wrapped_like(value, place)

    def _raise_if_full(self) -> None:
        error, self._full = self._full, None
        if not self._agreed:  # the first step, which makes states on all ranks
            self._agreed = True
            with same_on_every_rank():
                if error is not None:
                    raise error
        elif error is not None:
            raise error

    def state_like(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised state laid out like a parameter of the optimizer, where it is to live.

        Raises:
            ConfigError: When the disk has no room.
        """
        bucket = self._on_host.get(parameter)
        if self._disk is None or bucket is None:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        place = self._offered.pop((parameter, key), None)
        if place is None or place.dtype != dtype:
            likes = [torch.empty_like(local_tensor(p), dtype=dtype, device="meta") for p in bucket.updated]
            file, places = self._disk.make(likes)
            bucket.files += [file] if file is not None else []
            self._offered |= {(p, key): each for p, each in zip(bucket.updated, places, strict=True)}
            place = self._offered.pop((parameter, key))
        self._stored[parameter, key] = wrapped_like(parameter, place)
        return self._stored[parameter, key]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, with or without offload; states go to disk with the next step."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        visiting = f"{len(self._visits.parameters)} visiting the device, " if self._visits is not None else ""
        return f"OffloadedOptimizer({len(self._on_host)} parameters on the host, {visiting}{self.inner!r})"


def _alike(place: torch.Tensor, value: torch.Tensor) -> bool:
    one, other = local_tensor(place), local_tensor(value)
    return one.shape == other.shape and one.dtype == other.dtype and type(place) is type(value)


@contextlib.contextmanager
def _only(optimizer: Optimizer, parameters: set[torch.Tensor]) -> Iterator[None]:
    """Restrict an optimizer to some of its parameters inside the block."""
    listed = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in parameters]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, listed, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _hooks_once(optimizer: Optimizer) -> Iterator[None]:
    """Call an optimizer's own hooks around all of its steps inside the block, and not around each."""
    before, after = step_pre_hooks_of(optimizer), step_post_hooks_of(optimizer)
    for hook in before.values():
        hook(optimizer, (), {})
    setattr(optimizer, STEP_PRE_HOOKS, OrderedDict())
    setattr(optimizer, STEP_POST_HOOKS, OrderedDict())
    try:
        yield
    finally:
        setattr(optimizer, STEP_PRE_HOOKS, before)
        setattr(optimizer, STEP_POST_HOOKS, after)
    for hook in after.values():
        hook(optimizer, (), {})


# --- Copies of parameters in host memory, which the optimizer updates in their place


class HostWeights(MasterWeights):
    """Master weights of which some are on the host, with their gradients and states (ZeRO-Offload, Ren et al. 2021).

    A gradient is copied to the host in its own type and becomes the copy's gradient there; new weights travel back in
    the parameter's type; or the copy and its states visit the device, and the gradient stays (``on_device``). On CUDA
    copies run on two streams of their own, from and to page-locked memory.

    Args:
        parameters: All parameters that train.
        offloaded: The parameters with a copy on the host.
        in_backward: Those of them whose gradients leave, and are freed, as soon as backward has accumulated them;
            several backward passes add up on the host. Other gradients stay on the device, too.
        resident: Parameters that live in host memory themselves, which are updated without a copy.
        fp32: Whether copies of half-precision parameters, on host or device, are fp32 instead of the parameter's type.
        copies: Copies between host and device.
        pin_memory: Whether host copies are page-locked.
        disk: Where host copies and states live; None: in memory.
        bucket_bytes: Bytes of copies that are updated at a time, while the next ones are read.
        on_device: The parameters to update on the device, if the optimizer updates every element by itself. Otherwise
            they are updated on the host, and ``in_backward`` says which gradients leave before.
        note_host: Called with the optimizer when it is built, if it updates some of them on the host.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        offloaded: set[torch.Tensor],
        in_backward: set[torch.Tensor],
        resident: set[torch.Tensor],
        fp32: bool,
        copies: Copies,
        pin_memory: bool,
        disk: Disk | None,
        bucket_bytes: int,
        on_device: Set[torch.Tensor] = frozenset(),
        note_host: Callable[[Optimizer], None] | None = None,
    ) -> None:
        super().__init__([p for p in parameters if p not in offloaded and p not in resident] if fp32 else [])
        self.resident, self.disk = resident, disk
        self.offloaded: dict[torch.Tensor, torch.Tensor] = {}
        """The copies on the host, by parameter."""
        self.visits: Visits | None = None
        """Updates on the device, once the optimizer is built; None where it updates on the host."""
        self._in_backward, self._copies, self._pin, self._fp32 = in_backward, copies, pin_memory, fp32
        self._note_host = note_host
        self._on_device, self._bucket_bytes, self._room = on_device, bucket_bytes, HostRoom(pin=pin_memory)
        self._arriving: dict[torch.Tensor, tuple[torch.Tensor, Event]] = {}  # gradients on their way
        self._leaving: deque[tuple[torch.Tensor, Event]] = deque()  # gradients that the device may still copy from
        self._window = bucket_bytes  # most bytes of these
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # gradients that have arrived
        self._rooms: dict[torch.Tensor, torch.Tensor] = {}  # where they are widened, step after step
        self._sent: set[torch.Tensor] = set()  # parameters whose new weights were sent since the last step began
        self.buckets = [self._bucket(each) for each in _cut([p for p in parameters if p in offloaded], bucket_bytes)]
        own = [p for p in parameters if p in resident]
        self.buckets += [Bucket(each, each, []) for each in _cut(own, bucket_bytes)]
        self.of.update(self.offloaded)
        self._mark()
        self._let_leave(in_backward - on_device)

    def _let_leave(self, parameters: Set[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._leave)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _bucket(self, parameters: list[torch.Tensor]) -> Bucket:
        likes = [torch.empty_like(local_tensor(p), dtype=self._type_of(p), device="meta") for p in parameters]
        files: list[DiskFile] = []
        if self.disk is None:
            host = [self._room.take(like) for like in likes]
        else:
            file, host = self.disk.make(likes)
            files += [file] if file is not None else []
        for parameter, local in zip(parameters, host, strict=True):
            local.copy_(local_tensor(parameter))
            self.offloaded[parameter] = wrapped_like(parameter, local).requires_grad_()
        return Bucket(parameters, [self.offloaded[parameter] for parameter in parameters], files)

    def _type_of(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self._fp32 and parameter.dtype in HALF_TYPES else parameter.dtype

    def optimizer(self, optim_func: Callable[[Any], Optimizer], params: Iterable[Any]) -> Optimizer:
        """Build ``optim_func(params)`` over the copies, to be stepped bucket by bucket."""
        inner = super().optimizer(optim_func, params)
        if type(inner) not in CUTTABLE:
            self._let_leave(self._in_backward & self._on_device)
        elif self._on_device:
            copy_of = {p: copy for p, copy in self.offloaded.items() if p in self._on_device}
            self.visits = Visits(inner, copy_of, self._copies, self._room, self._bucket_bytes)
            self._in_backward = self._in_backward - copy_of.keys()
            kept = (bucket.without(copy_of) for bucket in self.buckets)
            self.buckets = [bucket for bucket in kept if bucket.parameters]
            for parameter in copy_of:
                parameter.grad_dtype = None  # type: ignore[attr-defined]  # it may be fp32 beside a half parameter
        if self.buckets and self._note_host is not None:
            self._note_host(inner)
        return OffloadedOptimizer(inner, self.buckets, self.disk, send=self.send, visits=self.visits)

    @torch.no_grad()
    def _leave(self, parameter: torch.Tensor) -> None:
        """Begin to copy a gradient to the host, and free it; called by autograd after accumulation."""
        self._depart(parameter)
        parameter.grad = None

    def _depart(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        check_dense(parameter)
        self._land(parameter)  # at most one gradient of each parameter is under way
        local = local_tensor(gradient)
        host = _empty(local, self._pin)
        event = self._copies.to_host([host], [local], self._copies.mark(), held=True)
        self._arriving[parameter] = host, event
        if self._copies.queued:
            # The gradient must live while it is copied. The device waits for the oldest copies, and their memory is
            # free for its next work, however far ahead the host is.
            self._leaving.append((local, event))
            while sum(each.nbytes for each, _ in self._leaving) > self._window and len(self._leaving) > 1:
                self._leaving[0][1].wait()
                self._leaving.popleft()

    def _land(self, parameter: torch.Tensor) -> None:
        """Wait for a gradient under way, and add it to those that arrived before."""
        if parameter not in self._arriving:
            return
        host, event = self._arriving.pop(parameter)
        event.synchronize()
        if parameter in self._sums:
            self._sums[parameter] += host
        elif host.dtype == self._type_of(parameter):
            self._sums[parameter] = host
        else:  # fresh memory takes the system longer to hand out than the whole update takes
            room = self._rooms.get(parameter)
            room = torch.empty_like(host, dtype=self._type_of(parameter)) if room is None else room
            self._sums[parameter] = self._rooms[parameter] = room.copy_(host)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Set every copy's gradient; those that did not leave in backward are copied now.

        Where states visit the device, the parameter's own gradient is made fp32, and the first states set out.
        """
        self._sent.clear()
        visiting = self.visits.parameters if self.visits is not None else {}
        for parameter, master in self.of.items():
            if master in visiting:
                self._widen(parameter)
                continue
            if parameter not in self.offloaded:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            elif parameter.grad is not None:
                if parameter in self._in_backward:
                    self._leave(parameter)  # it was set by hand
                else:
                    self._sums.pop(parameter, None)  # the gradient on the device is the sum
                    self._depart(parameter)
        if self.visits is not None:
            self.visits.begin()
            self._sent.update(visiting.values())
        for parameter, copy in self.offloaded.items():
            self._land(parameter)
            found = self._sums.get(parameter)
            copy.grad = None if found is None else wrapped_like(copy, found)
        self._leaving.clear()  # the host has waited for all of them

    def _widen(self, parameter: torch.Tensor) -> None:
        gradient = local_gradient(parameter)
        if gradient is not None and self._type_of(parameter) != gradient.dtype:
            parameter.grad = wrapped_like(parameter, gradient.to(self._type_of(parameter)))

    def _lacks(self, updated: torch.Tensor) -> bool:
        return self._fp32 and updated not in self.resident and super()._lacks(updated)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round all copies into the model's parameters, except host copies that the step has sent bucket by bucket."""
        for parameter, master in self.of.items():
            if parameter not in self.offloaded:
                parameter.copy_(master)
        self.send([parameter for parameter in self.offloaded if parameter not in self._sent])
        self._sent.clear()
        self._copies.join()
        self._mark()

    @torch.no_grad()
    def send(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin to copy new weights to the device; resident parameters need no copy."""
        targets, sources = [], []
        for parameter in parameters:
            if parameter in self.offloaded:
                target, source = local_tensor(parameter.detach()), local_tensor(self.offloaded[parameter].detach())
                if source.dtype != target.dtype:
                    rounded = _empty(torch.empty_like(source, dtype=target.dtype, device="meta"), self._pin)
                    source = rounded.copy_(source)
                targets.append(target)
                sources.append(source)
                self._sent.add(parameter)
        if targets:
            self._copies.to_device(targets, sources, self._copies.mark())

    def zero_grad(self) -> None:
        """Free the gradients of the model and of the copies, those under way included."""
        super().zero_grad()
        for _, event in self._leaving:
            event.synchronize()
        self._leaving.clear()
        self._arriving.clear()
        self._sums.clear()


def _cut(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * 4  # of the whole tensor: every rank must cut alike, whatever its shards
    return buckets


def _empty(like: torch.Tensor, pin: bool) -> torch.Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=pin)

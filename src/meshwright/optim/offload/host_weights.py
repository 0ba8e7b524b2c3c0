"""Copies of parameters in host memory, which the optimizer updates in place of the parameters on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ModelError
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import HALF_TYPES, wrapped_like
from meshwright.optim.master import MasterWeights
from meshwright.optim.offload.copies import Copies, Event
from meshwright.optim.offload.disk import Disk, DiskFile
from meshwright.optim.offload.optimizer import Bucket, OffloadedOptimizer


class HostWeights(MasterWeights):
    """Master weights of which some are on the host (ZeRO-Offload, Ren et al. 2021, §4): so are gradients and states.

    A gradient is copied to the host in its own type and becomes the copy's gradient there; new weights travel back in
    the parameter's type. On CUDA copies run on two streams of their own, from and to page-locked memory.

    Args:
        parameters: All that train.
        hosted: Those with a copy on the host.
        in_backward: Those of them whose gradient leaves, and is freed, as soon as backward has accumulated it; several
            backward passes add up on the host. The others keep their gradient on the device, too.
        resident: Parameters that are in host memory themselves: they have no copy and are updated as they are.
        fp32: Whether copies of half-precision parameters are fp32, on the device too; otherwise they have their type.
        copies: The way between host and device.
        pin_memory: Whether copies are page-locked.
        disk: Where copies and states live instead; None: in memory.
        bucket_bytes: Bytes of copies that are updated at a time, while the next ones are read.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        hosted: set[torch.Tensor],
        in_backward: set[torch.Tensor],
        resident: set[torch.Tensor],
        fp32: bool,
        copies: Copies,
        pin_memory: bool,
        disk: Disk | None,
        bucket_bytes: int,
    ) -> None:
        super().__init__([p for p in parameters if p not in hosted and p not in resident] if fp32 else [])
        self.resident, self.disk = resident, disk
        self.hosted: dict[torch.Tensor, torch.Tensor] = {}
        """The copy on the host of each parameter that has one."""
        self._in_backward, self._copies, self._pin, self._fp32 = in_backward, copies, pin_memory, fp32
        self._arriving: dict[torch.Tensor, tuple[torch.Tensor, Event]] = {}  # gradients on their way
        self._leaving: deque[tuple[torch.Tensor, Event]] = deque()  # what the device may still copy from
        self._window = bucket_bytes  # of them at most
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # gradients that have arrived
        self._sent: set[torch.Tensor] = set()  # whose weights are on their way since the last step began
        self.buckets = [self._bucket(each) for each in _cut([p for p in parameters if p in hosted], bucket_bytes)]
        own = [p for p in parameters if p in resident]
        self.buckets += [Bucket(each, each, []) for each in _cut(own, bucket_bytes)]
        self.of.update(self.hosted)
        self._mark()
        for parameter in in_backward:
            parameter.register_post_accumulate_grad_hook(self._leave)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _bucket(self, parameters: list[torch.Tensor]) -> Bucket:
        likes = [torch.empty_like(local_tensor(p), dtype=self._type_of(p), device="meta") for p in parameters]
        files: list[DiskFile] = []
        if self.disk is None:
            host = [_empty(like, self._pin) for like in likes]
        else:
            file, host = self.disk.make(likes)
            files += [file] if file is not None else []
        for parameter, local in zip(parameters, host, strict=True):
            local.copy_(local_tensor(parameter))
            self.hosted[parameter] = wrapped_like(parameter, local).requires_grad_()
        return Bucket(parameters, [self.hosted[parameter] for parameter in parameters], files)

    def _type_of(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self._fp32 and parameter.dtype in HALF_TYPES else parameter.dtype

    def optimizer(self, optim_func: Callable[[Any], Optimizer], params: Iterable[Any]) -> Optimizer:
        """Builds ``optim_func(params)`` over the copies, to be stepped bucket by bucket."""
        inner = super().optimizer(optim_func, params)
        return OffloadedOptimizer(inner, self.buckets, self.disk, send=self.send)

    @torch.no_grad()
    def _leave(self, parameter: torch.Tensor) -> None:
        """Sends a gradient off and frees it; a hook after accumulation."""
        self._depart(parameter)
        parameter.grad = None

    def _depart(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ModelError(
                "offload does not take sparse gradients",
                expected="dense gradients",
                got=f"{gradient.layout} for a parameter of shape {tuple(parameter.shape)}",
                fix="build the embedding with sparse=False",
            )
        self._land(parameter)  # at most one of each is under way
        local = local_tensor(gradient)
        host = _empty(local, self._pin)
        event = self._copies.to_host([host], [local], self._copies.mark(), held=True)
        self._arriving[parameter] = host, event
        if self._copies.queued:
            self._keep(local, event)

    def _keep(self, gradient: torch.Tensor, event: Event) -> None:
        """Keeps a gradient while it is copied; of the oldest the device waits for the end, however far the host is."""
        self._leaving.append((gradient, event))
        while sum(each.nbytes for each, _ in self._leaving) > self._window and len(self._leaving) > 1:
            self._leaving[0][1].wait()
            self._leaving.popleft()  # freed behind the wait

    def _land(self, parameter: torch.Tensor) -> None:
        """Waits for a gradient under way, and adds it to what has arrived before."""
        if parameter not in self._arriving:
            return
        host, event = self._arriving.pop(parameter)
        event.synchronize()
        gradient = host.to(self._type_of(parameter))
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Gives every copy its gradient: those that left in backward, and the others now."""
        self._sent.clear()
        for parameter, master in self.of.items():
            if parameter not in self.hosted:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            elif parameter.grad is not None:
                if parameter in self._in_backward:
                    self._leave(parameter)  # somebody has set it by hand
                else:
                    self._sums.pop(parameter, None)  # the device's is the sum
                    self._depart(parameter)
        for parameter, copy in self.hosted.items():
            self._land(parameter)
            found = self._sums.get(parameter)
            copy.grad = None if found is None else wrapped_like(copy, found)
        self._leaving.clear()  # the host has waited for all of them

    def _lacks(self, updated: torch.Tensor) -> bool:
        return self._fp32 and updated not in self.resident and super()._lacks(updated)

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the copies on the device into the model's parameters, and those on the host where they have not been.

        After a step the latter have been sent bucket by bucket; after loading, all are sent.
        """
        for parameter, master in self.of.items():
            if parameter not in self.hosted:
                parameter.copy_(master)
        self.send([parameter for parameter in self.hosted if parameter not in self._sent])
        self._sent.clear()
        self._copies.join()
        self._mark()

    @torch.no_grad()
    def send(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begins to bring new weights to the device; resident parameters are where they belong."""
        targets, sources = [], []
        for parameter in parameters:
            if parameter in self.hosted:
                target, source = local_tensor(parameter.detach()), local_tensor(self.hosted[parameter].detach())
                if source.dtype != target.dtype:
                    rounded = _empty(torch.empty_like(source, dtype=target.dtype, device="meta"), self._pin)
                    source = rounded.copy_(source)
                targets.append(target)
                sources.append(source)
                self._sent.add(parameter)
        if targets:
            self._copies.to_device(targets, sources, self._copies.mark())

    def zero_grad(self) -> None:
        """Frees the gradients of the model and of the copies, also those that left before."""
        super().zero_grad()
        for _, event in self._leaving:
            event.synchronize()
        self._leaving.clear()
        self._arriving.clear()
        self._sums.clear()


def _cut(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """Whole parameters in their order, so many at a time; on every rank alike where shards are about equal."""
    buckets: list[list[torch.Tensor]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * 4  # of the whole: equal on every rank, whatever its shard
    return buckets


def _empty(like: torch.Tensor, pin: bool) -> torch.Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=pin)

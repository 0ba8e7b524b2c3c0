"""Any torch optimizer, stepped bucket by bucket, with states in host memory or on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import wrapped_like
from meshwright.optim.offload.disk import Disk, DiskFile
from meshwright.optim.wrapped import WrappedOptimizer
from meshwright.runtime import same_on_every_rank


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated together, and the files that hold their copies and states."""

    parameters: list[torch.Tensor]
    """As the model has them."""
    updated: list[torch.Tensor]
    """As the optimizer has them: copies on the host, or the parameters themselves where they are there."""
    files: list[DiskFile]


class OffloadedOptimizer(WrappedOptimizer):
    """Wraps an optimizer over copies of parameters on the host (and parameters on the device, updated first).

    An optimizer of torch keeps everything per parameter, so its step over some of them is its step: each bucket is
    updated by itself, with torch's fused kernel where it has one and the group does not choose otherwise, while the
    weights of the one before travel to the device and the states of the next are read. Any other takes one step over
    everything.

    Args:
        inner: The optimizer.
        buckets: What is on the host.
        disk: Where states go after the step that made them; None: they stay in memory.
        send: Begins to bring the weights of some of the model's parameters to the device.
    """

    def __init__(
        self,
        inner: Optimizer,
        buckets: Sequence[Bucket],
        disk: Disk | None,
        send: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        super().__init__(inner)
        if isinstance(inner, LBFGS):
            raise ConfigError(
                "offload cannot work with LBFGS, which flattens all parameters into one vector",
                expected="an optimizer that keeps its states per parameter",
                got="LBFGS",
                fix="leave offload out, or use another optimizer",
            )
        self._buckets, self._disk, self._send = buckets, disk, send
        self._on_host = {parameter: bucket for bucket in buckets for parameter in bucket.updated}
        self._stored: dict[tuple[torch.Tensor, str], torch.Tensor] = {}  # states on disk, by parameter and name
        self._offered: dict[tuple[torch.Tensor, str], torch.Tensor] = {}  # room for states about to be loaded
        self._full: ConfigError | None = None  # why states of this step stay in memory
        self._agreed = False  # whether all ranks know that their first states have found room
        if disk is not None:
            inner.state_like = self.state_like  # type: ignore[attr-defined]  # states are loaded into their files

    @property
    def hosted(self) -> set[torch.Tensor]:
        """The optimizer's parameters that are on the host."""
        return set(self._on_host)

    def is_stored(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether a state is on disk."""
        return self._stored.get((parameter, key)) is self.inner.state[parameter][key]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters on the device, then bucket after bucket on the host.

        Raises:
            ConfigError: When a disk has no room for new states, on every rank; the step is done then, with them in
                memory.
        """
        if closure is not None:
            raise ValueError("An offloaded optimizer takes no closure. What to do: call backward before step.")
        if self._in_parts:
            others = {p for group in self.param_groups for p in group["params"]} - self._on_host.keys()
            if others:
                with _only(self.inner, others):
                    self.inner.step()
        else:
            self.inner.step()
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            if self._disk is not None and following is not None:
                self._disk.read_ahead(following.files)
            if self._in_parts:
                with _only(self.inner, set(bucket.updated)), _fused(self.inner):
                    self.inner.step()
            self._store(bucket)
            self._send(bucket.parameters)
            if self._disk is not None:
                self._disk.write_behind(bucket.files)
        if self._disk is not None:
            self._tell_of_full_disk()

    @property
    def _in_parts(self) -> bool:
        ours_or_theirs = type(self.inner).__module__.startswith("torch.optim.")
        hooks = self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks
        return ours_or_theirs and not hooks  # a hook is promised one call per step

    def _states(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """The states that belong on disk: all but counters."""
        for parameter in bucket.updated:
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield parameter, key, value

    def _store(self, bucket: Bucket) -> None:
        """Moves states that are in memory, because they are new or were loaded, to disk; values and layouts stay."""
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

    def _tell_of_full_disk(self) -> None:
        error, self._full = self._full, None
        if not self._agreed:  # the step that makes states; ranks take it together
            self._agreed = True
            with same_on_every_rank():
                if error is not None:
                    raise error
        elif error is not None:
            raise error

    def state_like(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised state laid out like a parameter of the optimizer, where it is to live.

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
        """The inner optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned, also without offload; states go to disk with the next step."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"OffloadedOptimizer({len(self._on_host)} parameters on the host, {self.inner!r})"


def _alike(place: torch.Tensor, value: torch.Tensor) -> bool:
    one, other = local_tensor(place), local_tensor(value)
    return one.shape == other.shape and one.dtype == other.dtype and type(place) is type(value)


@contextlib.contextmanager
def _only(optimizer: Optimizer, parameters: set[torch.Tensor]) -> Iterator[None]:
    """Lets an optimizer know some of its parameters only."""
    listed = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in parameters]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, listed, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Lets groups without a choice use torch's fused kernels for the host, several times faster than its loop."""
    chosen = [group for group in optimizer.param_groups if _can_fuse(optimizer, group)]
    before = [group["fused"] for group in chosen]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group, fused in zip(chosen, before, strict=True):
            group["fused"] = fused


def _can_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    # Half-precision states keep torch's loop; its fused SGD has no rule for DTensors.
    kinds = (
        (Adam, AdamW) if any(isinstance(parameter, DTensor) for parameter in group["params"]) else (Adam, AdamW, SGD)
    )
    undecided = group.get("fused") is None and group.get("foreach") is None and "fused" in group
    plain = not group.get("differentiable") and not group.get("capturable")
    wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in group["params"])
    return type(optimizer) in kinds and undecided and plain and wide

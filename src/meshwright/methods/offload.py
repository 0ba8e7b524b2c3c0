"""``offload``: optimizer states, gradients, parameters and activations in host memory, states on disk. Seed: ATorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from meshwright.cost import Activations, Hosted, Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.hosting.activations import ActivationOffload
from meshwright.methods.hosting.checks import (
    check_activations,
    check_disk,
    check_gradients,
    check_parameter_units,
    check_parameters,
)
from meshwright.methods.hosting.choice import choose, completed_in_backward, hosted_units
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict
from meshwright.nn import find_blocks, require_blocks
from meshwright.optim import Disk, HostWeights, copies_for

Fraction = Annotated[float, Field(ge=0, le=1)]

_NAMES: dict[str, dict[str, float]] = {
    "optimizer": {"optimizer": 1.0},
    "activation": {"activations": 1.0},
    "all": {"optimizer": 1.0, "gradients": 1.0, "parameters": 1.0, "activations": 1.0},
}


class Offload(Method):
    """Keeps a part of what training needs in host memory, or optimizer states on disk, and moves it in time.

    Config: None or ``"optimizer"``, ``"activation"``, ``"all"``, or keys. ``optimizer``, ``gradients`` and
    ``parameters`` are fractions of elements, the largest tensors first; each includes the one after it: a parameter on
    the host has its gradient and states there. ``optimizer`` offloads states and master weights (ZeRO-Offload, Ren et
    al. 2021), ``parameters`` uses FSDP2's offload, block by block (so does a ``fsdp`` over one rank).
    """

    method_name: ClassVar[str] = "offload"
    phase: ClassVar[Phase] = Phase.OFFLOAD
    summary: ClassVar[str] = "states, gradients, parameters, activations in host memory; states on disk"
    effect: ClassVar[str] = (
        "memory: what is chosen leaves the device. Time: copies, beside the computation where they can hide, and the "
        "update on the host. Communication: none"
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="outer",
            reason="its replicas read and write weights and states, which the host holds",
            fix='use outer\'s own offload, and offload activations only: ("offload", "activation")',
            when=lambda own, _: bool(own.optimizer),
            own_keys="optimizer",
        ),
    )

    optimizer: Fraction | None = None
    """Of the elements that train. None: as much as ``gradients`` or ``parameters`` need; all if no key is given."""
    gradients: Fraction | None = None
    """Of the same: gradients that leave while backward runs. None: as ``optimizer``, where backward completes them."""
    parameters: Fraction = 0.0
    """Of the sharded elements."""
    activations: Fraction = 0.0
    """Of the model's blocks, the first ones: backward needs theirs last."""
    disk: str | None = None
    """A folder on a disk of each node for master weights and states, instead of host memory."""
    keep_files: bool = False
    """Whether these files keep their names when the process ends. Nothing reads them."""
    pin_memory: bool = True
    """Whether host memory is page-locked, where there is a CUDA device; copies are slow otherwise."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose activations come back ahead of their backward."""
    bucket_bytes: PositiveInt = 2**28
    """Of parameters in fp32 that are updated at a time, while the states of the next are read."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads one of the three names."""
        if isinstance(raw, str) and raw in _NAMES:
            return _NAMES[raw]
        if isinstance(raw, str):
            raise StrategyError(
                f"offload: unknown choice {raw!r}",
                expected=f"one of {', '.join(_NAMES)}, or fractions by key",
                got=repr(raw),
                fix='write it as ("offload", {"optimizer": 1.0})',
            )
        return super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Fills in ``optimizer``."""
        if keys.get("optimizer") is None:
            given = [keys.get(key) for key in ("gradients", "parameters", "activations")]
            states = [value for value in given[:2] if isinstance(value, int | float)]
            nothing = all(value is None for value in given)
            keys = {**keys, "optimizer": 1.0 if nothing else max(states, default=0.0)}
        if isinstance(keys.get("disk"), Path):
            keys = {**keys, "disk": str(keys["disk"])}
        return keys

    def model_post_init(self, _: Any) -> None:
        """Refuses fractions that do not include each other."""
        for smaller, larger in (("parameters", "gradients"), ("gradients", "optimizer"), ("parameters", "optimizer")):
            low, high = getattr(self, smaller), getattr(self, larger)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{smaller} at most {larger}: what is updated on the host has its states there")

    @property
    def of_state(self) -> bool:
        """Unless activations leave, too."""
        return not self.activations

    def check_mesh(self, sizes: Mapping[str, int], shard_axis: str | None) -> None:
        """Refuses what cannot leave the device on such a mesh."""
        check_gradients(self.gradients or 0.0, sizes, shard_axis)
        check_parameters(self._hosted(sizes, shard_axis).parameters, sizes, shard_axis)
        check_activations(self.activations, sizes)

    def check(self, job: Job) -> None:
        """Refuses what cannot leave the device in this job, and a disk that cannot be written to."""
        self.check_mesh(dict(job.axes), job.shard_axis)
        hosted = self._hosted(dict(job.axes), job.shard_axis)
        check_parameter_units(hosted.parameters, job.strategy)
        if self.activations:
            require_blocks(job.model, method="offload", option="activations")
        if hosted.optimizer and job.optim_func is None:
            raise StrategyError(
                "offload has no optimizer whose states it could keep",
                expected="optim_func",
                got="None",
                fix='pass the class of the optimizer, or offload activations only: ("offload", "activation")',
            )
        check_disk(self.disk)

    def apply(self, job: Job) -> None:
        """Hooks the blocks, tells the sharding method which units live on the host, and changes the master weights."""
        hosted = self._hosted(dict(job.axes), job.shard_axis)
        pin = self.pin_memory and job.device.type == "cuda"
        copies = copies_for(job.device)
        count = self._num_blocks(len(find_blocks(job.model)))
        if count:
            blocks = [module for _, module in find_blocks(job.model)][:count]
            offload = ActivationOffload(blocks, copies, pin_memory=pin, prefetch=self.prefetch)
            job.model.register_forward_pre_hook(offload.forget)
            job.activations = offload
        job.hosted_units, job.pin_memory = hosted_units(job, hosted.parameters), pin
        if not hosted.optimizer:
            return

        def host_weights() -> HostWeights:
            chosen = choose(job, hosted)
            return HostWeights(
                [parameter for parameter in job.model.parameters() if parameter.requires_grad],
                hosted=chosen.hosted,
                in_backward=chosen.in_backward,
                resident=chosen.resident,
                fp32=job.master_weights,
                copies=copies,
                pin_memory=pin,
                disk=Disk(Path(self.disk), keep=self.keep_files) if self.disk is not None else None,
                bucket_bytes=self.bucket_bytes,
            )

        job.make_host_weights = host_weights

    def cost(self, step: Step) -> Step:
        """Moves bytes from the device to the host or to disk."""
        hosted = self._hosted(dict(step.axes), step.shard_axis)
        known = step.activations
        if known is not None and (count := self._num_blocks(len(known.blocks))):
            step = step.replace(activations=_hosted_activations(known, count, self.prefetch))
        return step.replace(hosted=hosted if hosted.optimizer else None)

    def _num_blocks(self, every: int) -> int:
        return round(self.activations * every)

    def _hosted(self, sizes: Mapping[str, int], shard_axis: str | None) -> Hosted:
        """The fractions, with the default of ``gradients`` for these axes."""
        assert self.optimizer is not None, "normalised"
        gradients = self.gradients
        if gradients is None:
            gradients = self.optimizer if completed_in_backward(sizes, shard_axis) else self.parameters
        return Hosted(self.optimizer, gradients, self.parameters, on_disk=self.disk is not None)


def _hosted_activations(known: Activations, count: int, prefetch: int) -> Activations:
    first = known.first_blocks()[:count]
    copied = [0, *(each.copied_bytes for each in first)]
    window = range(max(count - prefetch, 1))
    returned = max(copied[min(start + prefetch + 1, count)] - copied[start] for start in window)
    return dataclasses.replace(
        known,
        saved_bytes=known.saved_bytes - first[-1].freed_bytes,
        hosted_bytes=first[-1].copied_bytes,
        returned_bytes=returned,
    )

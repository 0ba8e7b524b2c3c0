"""Keep optimizer states, gradients and parameters in host memory or on disk (`offload`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, PositiveInt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.cost import Offloaded, Step, pick_largest, tie_key
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import AVERAGED, Job
from meshwright.methods.offload_activations import ActivationOffload
from meshwright.methods.planner_hooks import Role, SearchScope
from meshwright.methods.zero_config import ZeroMethod, unit_of, units_of
from meshwright.nn import find_blocks, require_blocks
from meshwright.optim import (
    BUCKETS_UNDER_WAY,
    CUTTABLE,
    VISITING_BUCKET_BYTES,
    Copies,
    Disk,
    HostWeights,
    copies_for,
    inner_optimizer,
)
from meshwright.runtime import settings, use_share_of_cores
from meshwright.strategy import Strategy


class Chosen(NamedTuple):
    """Trainable parameters on the host by placement, and the offloaded ones whose gradients leave in backward."""

    resident: set[torch.Tensor]  # their weights live on the host, in FSDP2's care
    offloaded: set[torch.Tensor]  # only their states and masters do
    in_backward: set[torch.Tensor]  # of ``offloaded``: their gradients leave while backward runs


def completed_in_backward(sizes: Mapping[str, int], shard_axis: str | None) -> bool:
    """Return whether a gradient is final when backward accumulates it, and not averaged afterwards."""
    if sizes.get("pipeline", 1) > 1 or sizes.get("expert", 1) > 1:  # stages reduce once, experts apart from the rest
        return False
    alone = all(sizes.get(axis, 1) == 1 for axis in AVERAGED)
    return alone if shard_axis is None else sizes.get("tensor", 1) == 1


def offloaded_units(job: Job, fraction: float) -> frozenset[str]:
    """Return the paths of blocks whose sharded parameters live on the host; ``""`` is the model outside of blocks."""
    if job.shard_axis is None or not fraction:
        return frozenset()
    config = next(method for method in job.strategy.methods if isinstance(method, ZeroMethod))
    ignored = units_of(config, job.model, job.strategy, dict(job.axes)).ignored
    sizes: dict[str, int] = {}
    seen: set[nn.Parameter] = set(ignored)
    for path, module in [*find_blocks(job.model), ("", job.model)]:
        sizes[path] = sum(parameter.numel() for parameter in module.parameters() if parameter not in seen)
        seen |= set(module.parameters())
    paths = list(sizes)
    picked = pick_largest([()] * len(paths), list(sizes.values()), fraction * sum(sizes.values()))
    return frozenset(paths[place] for place in picked)


def choose(job: Job, offloaded: Offloaded) -> Chosen:
    """Choose the parameters to offload in the model as it is now, sharded or not; equal on every rank."""
    blocks = [path for path, _ in find_blocks(job.model)]
    trainable = {name: parameter for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    resident: set[torch.Tensor] = {
        parameter
        for name, parameter in trainable.items()
        if isinstance(parameter, DTensor) and unit_of(name, blocks) in job.sharding.offloaded_units
    }
    total = sum(parameter.numel() for parameter in trainable.values())
    taken = sum(parameter.numel() for parameter in resident)
    others: list[torch.Tensor] = [parameter for parameter in trainable.values() if parameter not in resident]
    listed = _largest(others, offloaded.optimizer * total - taken, job.shard_axis)
    complete = [p for p in listed if isinstance(p, DTensor) or job.shard_axis is None]
    in_backward = _largest(complete, offloaded.gradients * total - taken, job.shard_axis)
    return Chosen(resident, set(listed), set(in_backward))


def _largest(parameters: list[torch.Tensor], budget: float, shard_axis: str | None) -> list[torch.Tensor]:
    keys = [tie_key(tuple(p.shape), *_divided(p, shard_axis)) for p in parameters]
    picked = pick_largest(keys, [parameter.numel() for parameter in parameters], budget)
    return [parameters[place] for place in sorted(picked)]


def _divided(parameter: torch.Tensor, shard_axis: str | None) -> tuple[int | None, bool]:
    """Return the dim that a tensor axis divides, and whether the axis of sharding divides the parameter, too."""
    if not isinstance(parameter, DTensor):
        return None, shard_axis is None
    axes = parameter.device_mesh.mesh_dim_names or ()
    dims = (
        getattr(each, "dim", None) for axis, each in zip(axes, parameter.placements, strict=True) if axis == "tensor"
    )
    return next(dims, None), shard_axis is None or shard_axis in axes


# --- Checks


def _check_gradients(fraction: float, sizes: Mapping[str, int], shard_axis: str | None) -> None:
    """Refuse gradients that would leave before they are final."""
    if fraction and not completed_in_backward(sizes, shard_axis):
        raise StrategyError(
            "offload: gradients cannot leave the device in backward here, they are averaged or reduced after it",
            expected="a single replica, or zero1, zero2 or fsdp, without tensor, expert and pipeline axes",
            got=f"gradients={fraction} over the axes {dict(sizes)}",
            fix="set gradients to 0, also in place of 'all': they then travel when they are final; or add zero2",
        )


def _check_own_recomputation(model: nn.Module) -> None:
    """Refuse transformers' own recomputation, which goes around the blocks whose activations would leave.

    Without reentrant autograd all that they save would travel and nothing be recomputed; with it, nothing would travel.
    """
    own = [path for path, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True]
    if own:
        raise StrategyError(
            "offload: activations cannot leave blocks that the model recomputes by itself",
            expected="a model without gradient checkpointing of its own",
            got=f"gradient_checkpointing in {own[0] or 'the model'}",
            fix="call model.gradient_checkpointing_disable() and add the method checkpoint, or leave activations out",
        )


def _check_parameters(fraction: float, sizes: Mapping[str, int], shard_axis: str | None) -> None:
    """Refuse parameters on the host where FSDP2 does not bring them to the device."""
    if fraction and (shard_axis is None or sizes.get("pipeline", 1) > 1):
        raise StrategyError(
            "offload: parameters come to the device block by block as FSDP2 gathers them, which it does not do here",
            expected="fsdp or zero2 without a pipeline axis",
            got=f"parameters={fraction} over the axes {dict(sizes)}",
            fix="add fsdp, which works on one rank, too; or leave parameters at 0",
        )


def _check_parameter_units(fraction: float, strategy: Strategy) -> None:
    """Refuse a fraction of the parameters where FSDP2 gathers other units than blocks."""
    if not fraction:
        return
    config = next(method for method in strategy.methods if isinstance(method, ZeroMethod))
    own_units = config.atorch_wrap_cls or config.atorch_size_based_min_num_params or config.wrap_trainable_outmost
    if fraction < 1 and own_units:
        raise StrategyError(
            f"offload: a part of the parameters is chosen by block, and {config.method_name} gathers other units",
            expected="parameters of 0 or 1, or the model's blocks as units",
            got=f"parameters={fraction} and {config}",
            fix="set parameters to 1, or leave the keys that choose units out",
        )


def _check_activations(fraction: float, sizes: Mapping[str, int]) -> None:
    """Refuse activations under a pipeline, whose schedule decides when they are needed."""
    if fraction and sizes.get("pipeline", 1) > 1:
        raise StrategyError(
            "offload: activations stay on the device under a pipeline in this version",
            expected="activations of 0",
            got=f"activations={fraction} and pipeline={sizes['pipeline']}",
            fix="use checkpoint, or a schedule that holds fewer micro-batches such as 1f1b",
        )


# --- The method

Fraction = Annotated[float, Field(ge=0, le=1)]

_NAMES: dict[str, dict[str, float]] = {
    "optimizer": {"optimizer": 1.0},
    "activation": {"activations": 1.0},
    "all": {"optimizer": 1.0, "parameters": 1.0, "activations": 1.0},  # and gradients, as soon as they are final
}


_SEARCHED_PARTS = (0.25, 0.5, 0.75)
_MOST_IN_PART = 1024  # devices
_LITTLE = 0.05  # of the parameters; what they need beside them is then less than the rest is


class Offload(Method):
    """Keeps a part of the training state in host memory, or optimizer states on disk, and moves it in time.

    Config: None or ``"optimizer"``, ``"activation"``, ``"all"``, or keys. ``optimizer``, ``gradients`` and
    ``parameters`` are fractions of elements, the largest tensors first; each includes the next one: a parameter on the
    host has its gradient and states there. ``optimizer`` offloads states and master weights (ZeRO-Offload, Ren et
    al. 2021), ``parameters`` uses FSDP2's offload, block by block (so does a ``fsdp`` over one rank).
    """

    method_name: ClassVar[str] = "offload"
    phase: ClassVar[Phase] = Phase.OFFLOAD
    role: ClassVar[Role | None] = Role.OFFLOADING
    summary: ClassVar[str] = "states, gradients, parameters, activations in host memory; states on disk"
    effect: ClassVar[str] = (
        "memory: what is chosen leaves the device. Time: copies, beside the computation where they can hide, and the "
        "update, for which states visit the device, or on the host. Communication: none"
    )
    optimizer: Fraction | None = None
    """Fraction of the trainable elements. None: as ``gradients`` or ``parameters`` need; all if no key is given."""
    gradients: Fraction | None = None
    """Fraction whose gradients leave while backward runs, and that is updated on the host. None: as ``optimizer``,
    where backward completes them and the host updates; as ``parameters``, where the device does."""
    parameters: Fraction = 0.0
    """Fraction of the sharded elements."""
    activations: Fraction = 0.0
    """Fraction of the blocks, from the first, whose activations backward needs last."""
    update_on: Literal["device", "host"] | None = None
    """Where offloaded states meet the gradients: they visit the device in buckets, or the host updates. None: on a GPU
    the device, many times faster; on a CPU, and with ``disk``, the host. Optimizers that do not update every element by
    itself, and gradients or parameters that leave, are always updated on the host."""
    disk: str | None = None
    """A folder on a disk of each node for master weights and states, instead of host memory."""
    keep_files: bool = False
    """Whether these files stay when the process ends, for inspection: nothing reads them."""
    pin_memory: bool = True
    """Whether host memory is page-locked, where there is a CUDA device; copies are slow otherwise."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose activations come back ahead of their backward."""
    bucket_bytes: PositiveInt = 2**28
    """Size of the fp32 parameters that are updated at a time, while the states of the next are read; those that visit
    the device take at most a quarter of the usual size."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read one of the three names."""
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
        """Fill in ``optimizer`` where it is left out."""
        if keys.get("optimizer") is None:
            given = [keys.get(key) for key in ("gradients", "parameters", "activations")]
            states = [value for value in given[:2] if isinstance(value, int | float)]
            nothing = all(value is None for value in given)
            keys = {**keys, "optimizer": 1.0 if nothing else max(states, default=0.0)}
        if isinstance(keys.get("disk"), Path):
            keys = {**keys, "disk": str(keys["disk"])}
        return keys

    def model_post_init(self, _: Any) -> None:
        """Refuse fractions that do not include each other."""
        for smaller, larger in (("parameters", "gradients"), ("gradients", "optimizer"), ("parameters", "optimizer")):
            low, high = getattr(self, smaller), getattr(self, larger)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{smaller} at most {larger}: what is updated on the host has its states there")
        if self.update_on == "device" and self.disk is not None:
            raise ValueError("update_on 'host' beside disk: states in files do not visit the device")

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try states, also in part, the least first: their update waits for copies. Then activations, then all.

        On very many devices, where sharded states are small beside all else, states leave whole or not at all; where
        little is trained (adapters around a frozen base), only with parameters. Gradients leave with all of them if the
        host updates.
        """
        parts = [cls.parse({"optimizer": each}) for each in _SEARCHED_PARTS if scope.world <= _MOST_IN_PART]
        # Of gradients what can leave before the update: on some meshes backward does not complete them.
        every = cls.parse({"optimizer": 1.0, "parameters": 1.0, "activations": 1.0})
        on_host = cls.parse({"optimizer": 1.0, "update_on": "host"})
        if scope.trained < _LITTLE:
            return cls.parse("activation"), cls.parse({"optimizer": 1.0, "parameters": 1.0}), every
        return *parts, cls.parse("optimizer"), on_host, cls.parse("activation"), every

    @property
    def moves_parameters(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.parameters > 0

    @property
    def surcharge(self) -> float:
        """Ask much: copies share links and host memory with all else on a node, and no published table has such runs.

        Copies of activations, and of parameters, must hide in every layer, where those of states have a whole step.
        """
        return 0.05 + (0.07 if self.activations or self.parameters else 0.0)

    @property
    def of_state(self) -> bool:
        """Return whether only states leave the device, and no activations."""
        return not self.activations

    def check_mesh(self, sizes: Mapping[str, int], shard_axis: str | None) -> None:
        """Refuse fractions of what cannot leave the device on such a mesh."""
        _check_gradients(self.gradients or 0.0, sizes, shard_axis)
        _check_parameters(self._offloaded(sizes, shard_axis).parameters, sizes, shard_axis)
        _check_activations(self.activations, sizes)

    def check(self, job: Job) -> None:
        """Refuse fractions of what cannot leave the device in this job, and a disk that cannot be written to."""
        self.check_mesh(dict(job.axes), job.shard_axis)
        offloaded = self._offloaded(dict(job.axes), job.shard_axis)
        _check_parameter_units(offloaded.parameters, job.strategy)
        if self.activations:
            require_blocks(job.model, method="offload", fix="leave activations out")
            _check_own_recomputation(job.model)
        if offloaded.optimizer:
            fix = 'pass the class of the optimizer, or offload activations only: ("offload", "activation")'
            job.require_optimizer(self.method_name, "whose states it could keep", fix)
        if self.disk is not None:
            Disk(Path(self.disk))  # tries to write a file in the folder

    def apply(self, job: Job) -> None:
        """Put hooks on blocks, choose the sharded units that live on the host, and have master weights built there."""
        offloaded = self._offloaded(dict(job.axes), job.shard_axis)
        pin = self.pin_memory and job.device.type == "cuda"
        copies = copies_for(job.device)
        count = self._num_blocks(len(find_blocks(job.model)))
        if count:
            blocks = [module for _, module in find_blocks(job.model)][:count]
            offload = ActivationOffload(blocks, copies, pin_memory=pin, prefetch=self.prefetch)
            job.model.register_forward_pre_hook(offload.forget)
            job.activations = offload
        job.sharding.offloaded_units, job.sharding.pin_memory = offloaded_units(job, offloaded.parameters), pin
        if offloaded.optimizer:
            job.optimizer.make_host_weights = functools.partial(self._host_weights, job, copies, pin=pin)

    def _host_weights(self, job: Job, copies: Copies, *, pin: bool) -> HostWeights:
        """Build copies of the model's parameters as they are now."""
        axes, on_device = dict(job.axes), self._updates_on_device(on_cpu=job.device.type == "cpu")
        offloaded = self._offloaded(axes, job.shard_axis)
        chosen, visiting = choose(job, offloaded), frozenset[torch.Tensor]()
        if on_device:
            kept = choose(job, self._offloaded(axes, job.shard_axis, on_device=True))
            visiting = frozenset(kept.offloaded - kept.in_backward)
        return HostWeights(
            [parameter for parameter in job.model.parameters() if parameter.requires_grad],
            offloaded=chosen.offloaded,
            in_backward=chosen.in_backward,
            resident=chosen.resident,
            fp32=job.optimizer.master_weights,
            copies=copies,
            pin_memory=pin,
            disk=Disk(Path(self.disk), keep=self.keep_files) if self.disk is not None else None,
            bucket_bytes=self.bucket_bytes,
            on_device=visiting,
            note_host=functools.partial(self._note_host, job, offloaded, bool(visiting)),
        )

    def _note_host(self, job: Job, offloaded: Offloaded, was_to_visit: bool, optimizer: Optimizer) -> None:
        """Tell what the host updates, and with how many threads."""
        refused = was_to_visit and type(inner_optimizer(optimizer)) not in CUTTABLE
        if refused:
            kind = type(inner_optimizer(optimizer)).__name__
            job.notices.append(f"offload: the host updates, since {kind} is not known to update elements one by one")
        if (refused or not was_to_visit) and self.gradients is None and offloaded.gradients < offloaded.optimizer:
            job.notices.append(
                "offload: gradients stay on the device until the update, since ranks average them after backward"
            )
        if job.device.type == "cuda" and (threads := use_share_of_cores(settings().local_world_size)):
            job.notices.append(f"offload: the host updates with {threads} threads a rank, where torchrun had left one")

    def _updates_on_device(self, *, on_cpu: bool) -> bool:
        if self.update_on is not None or self.disk is not None:
            return self.update_on == "device"
        return not on_cpu

    def cost(self, step: Step) -> Step:
        """Move bytes from the device to the host or to disk."""
        on_device = self._updates_on_device(on_cpu=step.on_cpu) and step.updates_elements
        offloaded = self._offloaded(dict(step.axes), step.shard_axis, on_device=on_device)
        known = step.activations
        if known is not None and (count := self._num_blocks(len(known.blocks))):
            step = step.replace(activations=known.offload(count, self.prefetch))
        return step.replace(offloaded=offloaded if offloaded.optimizer else None)

    def _num_blocks(self, every: int) -> int:
        return round(self.activations * every)

    def _offloaded(self, sizes: Mapping[str, int], shard_axis: str | None, *, on_device: bool = False) -> Offloaded:
        """Return the fractions, with the default of ``gradients`` for these axes filled in."""
        assert self.optimizer is not None, "normalised"
        gradients = self.gradients
        if gradients is None:
            leave = completed_in_backward(sizes, shard_axis) and not on_device
            gradients = self.optimizer if leave else self.parameters
        at_once = BUCKETS_UNDER_WAY * min(self.bucket_bytes, VISITING_BUCKET_BYTES) if on_device else 0
        return Offloaded(
            self.optimizer, gradients, self.parameters, on_disk=self.disk is not None, visiting_bytes=at_once
        )

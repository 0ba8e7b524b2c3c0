"""``half``: the whole model in half precision, with fp32 master weights for the optimizer. Seed: ATorch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from meshwright.cost import Placement, Step
from meshwright.methods.dtypes import itemsize, torch_dtype
from meshwright.methods.half_precision import HalfPrecisionMethod
from meshwright.methods.job import Job, Precision
from meshwright.utils.trees import map_tree


class Half(HalfPrecisionMethod):
    """Parameters, buffers, floating inputs and arithmetic in ``dtype``; the loss is computed in fp32.

    The optimizer updates fp32 master weights, without which most updates round to nothing. Under zero1, zero2 and fsdp
    the fp32 shard is the master: parameters are gathered and gradients reduced in ``dtype``; what these leave whole has
    masters. fp16 adds dynamic loss scaling.

    Config: ``"fp16"`` or ``"bf16"``, or keys. ``master_weights=False`` updates half-precision weights directly.
    """

    method_name: ClassVar[str] = "half"
    summary: ClassVar[str] = "half-precision parameters and arithmetic, fp32 master weights"
    effect: ClassVar[str] = (
        "memory: weights, activations / 2, and a master. Time: half-precision products. Communication: / 2"
    )
    seed_name: ClassVar[str | None] = "ATorch: half"

    master_weights: bool = True

    def apply(self, job: Job) -> None:
        """Casts the model where it is replicated, or asks the sharding method to gather in half."""
        dtype = torch_dtype(self.dtype)
        prepare_input, loss_func = job.prepare_input, job.loss_func
        job.prepare_input = lambda data, device: _cast(prepare_input(data, device), dtype)
        job.loss_func = lambda inputs, outputs: loss_func(inputs, _cast(outputs, torch.float32))
        self.widen(job)
        self.scale_loss(job)
        if job.shard_axis is not None and self.master_weights:
            job.precision = Precision(compute=self.dtype, reduce=self.dtype, casts_whole=True)
            _cast_buffers(job.model, dtype)
        else:
            job.model.to(dtype)
            job.master_weights = self.master_weights

    def cost(self, step: Step) -> Step:
        """Half the bytes of weights and gradients, plus a master; or gathers and reductions in half."""
        size = itemsize(self.dtype)
        step = self.scale_cost(step).replace(buffers_itemsize=size)
        if step.shard_axis is not None and self.master_weights:
            return step.replace(compute_itemsize=size, reduce_itemsize=size, whole_itemsize=size)
        halved = step.replace(
            parameters=Placement(itemsize=size),
            gradients=Placement(itemsize=size),
            compute_itemsize=size,
            reduce_itemsize=size,
        )
        if self.master_weights:
            # The half gradient is freed when its fp32 copy is made: what lives through the update is fp32.
            # The states, too: those of a model that is in half precision already were found out in its own.
            return halved.replace(gradients=Placement(itemsize=4), optimizer=Placement(itemsize=4), master=Placement())
        return halved.replace(optimizer=Placement(itemsize=size))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts every floating tensor in nested containers; a ModelOutput stays one."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_tree(cast, value)


def _cast_buffers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))

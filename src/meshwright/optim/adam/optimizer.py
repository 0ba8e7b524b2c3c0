"""Adam with its states beside the parameters."""

from __future__ import annotations

from meshwright.optim.adam.base import AdamBase


class AdamOptimizer(AdamBase):
    """Adam and AdamW for fp32, fp16 and bf16 parameters, plain or sharded (BMTrain's ``AdamOptimizer``).

    Moments are fp32 and never scaled; half parameters get an fp32 master weight, kept in ``optimizer.state`` so that
    checkpoints carry it, and are the master rounded to nearest. The arithmetic is torch's fused kernel on local shards:
    an fp32 step is that of ``torch.optim.AdamW(fused=True)``, bit for bit. Bytes per parameter element: 8 of states for
    fp32, 12 for half, and one bucket of fp32 gradients.

    Weight decay follows one rule for all types, by default AdamW's. BMTrain's own, which decays half parameters
    decoupled and fp32 ones coupled, is ``weight_decay_rule="bmtrain"``.

    After weights were changed by other means than a step or a whole checkpoint, call :meth:`refresh_master`, unless
    ``accelerate`` was given the optimizer and they were loaded.

    Args:
        params: Parameters or groups of them; groups may set all values below down to ``maximize``.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay; decoupled decay multiplies weights by 1 - lr · weight_decay.
        hold_steps: For each parameter's first ``hold_steps`` steps lr is 0 while the moments accumulate.
        record_delta: Measure the update's direction, see :meth:`get_avg_delta`; one small all-reduce per step.
        weight_decay_rule: ``"decoupled"`` (Loshchilov and Hutter 2019), ``"coupled"`` (L2, Kingma and Ba 2015), or
            ``"bmtrain"``.
        maximize: Ascend instead of descend.
        bucket_elements: Elements of half gradients converted at a time.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: When a parameter is not fp32, fp16 or bf16.
    """

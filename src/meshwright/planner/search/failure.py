"""What is said when a search finds nothing: what would be smallest, what binds, and what would do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields

from meshwright.cost import Memory, Step, moments, peak
from meshwright.errors import StrategyError, join_names
from meshwright.planner.plan import Plan, Subject
from meshwright.planner.sizes import readable_bytes

_MOMENTS = {
    "gather": "as weights or buffers arrive for forward",
    "loss": "as the loss runs backward",
    "recomputation": "as the last block runs backward",
    "reduction": "as the last gradients are reduced",
    "update": "at the update",
}
_REMEDIES = {
    "activations": "shorter samples",
    "logits": "shorter samples, or a loss that makes no logits (module_replace with loss=True, predicted for modules)",
    "recomputation": "shorter samples",
    "gathered": "smaller blocks",
    "optimizer": "an optimizer with less state",
    "updating": "fused=True in optim_args, where the optimizer has such a kernel",
    "host": "states on disk (offload's disk)",
}

_OF_SAMPLES = ("activations", "logits")


def nothing_fits(subject: Subject, smallest: Plan, devices: int | None) -> StrategyError:
    """The error for a cluster that is too small."""
    name, said, limits = _binding(smallest)
    enough = f"take {devices} of these devices" if devices is not None else "take more devices"
    remedies = [f"{enough}, or devices with more memory", *([_REMEDIES[name]] if name in _REMEDIES else [])]
    if name in _OF_SAMPLES and (subject.batch_size or 0) > 1:
        remedies.append("a smaller batch")
    devices_here = "1 device" if subject.world == 1 else f"{subject.world} devices"
    return StrategyError(
        "No strategy fits into the memory of a rank",
        expected=f"at most {limits} on each of {devices_here}",
        got=f"{readable_bytes(smallest.needed_bytes)} for the smallest, {_named(smallest)}; {said}",
        fix="; or ".join(remedies) + "; or name a strategy yourself to try it all the same",
    )


def no_such_batch(subject: Subject, batches: Sequence[int]) -> StrategyError:
    """The error for a batch that is cut so that it does not fit, where others about as large are not."""
    numbers = " or ".join(map(str, batches))
    return StrategyError(
        "No strategy cuts the batch so that it fits into the memory of a rank",
        expected=f"a global_batch that {subject.world} devices share equally",
        got=f"{subject.batch_size} samples",
        fix=f"take a global_batch of {numbers}, which fits; or name a strategy yourself to try it all the same",
    )


def _binding(smallest: Plan) -> tuple[str, str, str]:
    """The class of memory that is too much, a sentence on it, and the limits."""
    limits = readable_bytes(smallest.limit_bytes or 0)
    if smallest.fits_device:
        limits += f", and {readable_bytes(smallest.host_limit_bytes or 0)} of host memory,"
        return "host", f"offloaded, it needs {readable_bytes(smallest.host_bytes)} of host memory", limits
    most = smallest.forecast.peak if smallest.forecast is not None else peak(smallest.step)
    name, size = _largest_class(most.memory)
    said = f"{_MOMENTS[most.moment]} it holds {readable_bytes(size)} of {name.replace('_', ' ')}"
    behind = _behind_blocks(smallest.step) if (name, most.moment) == ("activations", "loss") else 0
    if 2 * behind > size:
        return "logits", f"{said}, {readable_bytes(behind)} of it logits and what the loss makes of them", limits
    return name, said, limits


def _behind_blocks(step: Step) -> int:
    """What is free once the blocks run backward: logits, and what the loss makes of them."""
    held = moments(step)
    return (held["loss"].activations or 0) - (held["recomputation"].activations or 0)


def nothing_works(world: int, refused: Mapping[str, str], included: Collection[str]) -> StrategyError:
    """The error for wishes and models that leave nothing that could train: first why what was wished cannot."""
    # That methods exclude each other is no news to one who gets nothing: what the model or the devices lack is.
    telling = [reason for reason in refused if "does not go together" not in reason] or list(refused)
    telling.sort(key=lambda reason: not reason.startswith(tuple(included)))
    reasons = "; ".join(telling[:3]) or "no mesh was left"
    return StrategyError(
        "No strategy can train this model" + (f" with {join_names(included)}" if included else ""),
        expected=f"a strategy for {world} devices",
        got=reasons,
        fix="include fewer methods, or change what the reasons name",
    )


def ended_early(max_predictions: int) -> StrategyError:
    """The error for a search that had too few predictions to find anything."""
    return StrategyError(
        "The search ended before it found a strategy that fits",
        expected=f"a strategy within {max_predictions} predictions",
        got="none",
        fix="allow more with max_predictions, or include methods that are known to be needed",
    )


def _largest_class(held: Memory) -> tuple[str, int]:
    on_device = (each.name for each in fields(held) if not each.name.startswith(("disk_", "host_")))
    sizes = {name: getattr(held, name) or 0 for name in on_device}
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name]


def _named(plan: Plan) -> str:
    return "+".join(name for name in plan.strategy.names if name != "parallel_mode") or "data"

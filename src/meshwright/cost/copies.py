"""Bytes that an offloading step moves between device, host and disk: what its copy streams and its disk must carry."""

from __future__ import annotations

from meshwright.cost.homes import homes_of
from meshwright.cost.memory import copy_bytes, held_bytes, state_bytes
from meshwright.cost.step import Copy, Step


def copies(step: Step) -> tuple[Copy, ...]:
    """Every copy of a step on the rank that holds most; nothing where nothing is offloaded.

    Parameters and gradients travel in the type they are held in. On a CPU the same bytes move within its memory.
    """
    found = (*_activations(step), *_parameters(step), *_updates(step), *_disk(step))
    return tuple(copy for copy in found if copy.bytes_per_step > 0)


def _activations(step: Step) -> tuple[Copy, ...]:
    size = step.activations.hosted_bytes * step.num_micro_batches if step.activations is not None else 0
    return Copy("device", "host", size, "forward"), Copy("host", "device", size, "backward")


def _parameters(step: Step) -> tuple[Copy, ...]:
    """Shards come for every gather, and their gradients leave after every reduction."""
    inside = outside = trained = 0
    names = [block.name for block in step.blocks for _ in block.parameters]
    for name, home, (_, parameter) in zip(names, homes_of(step), step.every_parameter(), strict=True):
        size = home.parameters * held_bytes(step, parameter)
        inside, outside = (inside, outside + size) if name == "outside" else (inside + size, outside)
        trained += size if parameter.trainable else 0
    repeats = step.num_micro_batches if step.gathered == "unit" else 1
    reductions = 1 if step.whole_gradients else step.num_micro_batches
    return (
        Copy("host", "device", (inside + outside) * repeats, "forward"),
        Copy("host", "device", inside * repeats if step.gathered == "unit" else 0, "backward"),
        Copy("device", "host", trained * reductions, "backward"),
    )


def _updates(step: Step) -> tuple[Copy, ...]:
    early = late = 0
    for home, (_, parameter) in zip(homes_of(step), step.every_parameter(), strict=True):
        early += home.gradients * held_bytes(step, parameter)
        late += home.optimizer * held_bytes(step, parameter)
    reductions = 1 if step.whole_gradients else step.num_micro_batches
    return (
        Copy("device", "host", early * reductions, "backward"),
        Copy("device", "host", late, "update"),
        Copy("host", "device", early + late, "update"),
    )


def _disk(step: Step) -> tuple[Copy, ...]:
    if step.hosted is None or not step.hosted.on_disk:
        return ()
    size = sum(
        home.copied * copy_bytes(step, parameter) + (home.count - home.on_device) * state_bytes(step, parameter)
        for home, (_, parameter) in zip(homes_of(step), step.every_parameter(), strict=True)
    )
    return Copy("disk", "host", size, "update"), Copy("host", "disk", size, "update")

"""Everything replicas hold together beside inner and outer optimizer, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.errors import CheckpointError
from meshwright.optim.clip import local_tensor
from meshwright.optim.outer.exchange import Landed
from meshwright.optim.outer.synchronizer import Synchronizer


def flags_of(shared: Synchronizer) -> dict[str, Any]:
    """What is no tensor: equal in all replicas. Waits for what is under way.

    ``under_way`` lists fragments whose averaged pseudo-gradients are to be kept, with the number of replicas in them.
    """
    return {
        "num_syncs": shared.num_syncs,
        "replicas_are_equal": shared.replicas_are_equal,
        "num_fragments": shared.policy.fragments,
        "under_way": {str(fragment): count for fragment, (_, count, _) in shared.settle().items()},
    }


def own_flags_of(shared: Synchronizer) -> dict[str, Any]:
    """What is no tensor, of this replica alone: its norms, and the fragments under way that it has a part in."""
    took_part = [str(fragment) for fragment, (_, _, took) in shared.settle().items() if took]
    return {"norms": [watch.state_dict() for watch in shared.watches], "took_part": took_part}


def load_flags(
    shared: Synchronizer, saved: Mapping[str, Any], own: Mapping[str, Any], landed: Mapping[int, list[torch.Tensor]]
) -> None:
    """Takes over what the two functions returned.

    Args:
        shared: Started.
        saved: Of :func:`flags_of`.
        own: Of :func:`own_flags_of`.
        landed: The averaged pseudo-gradients of every fragment under way, as this rank's parts.

    Raises:
        CheckpointError: See :func:`check_flags`.
    """
    check_flags(shared, saved)
    shared.num_syncs, shared.replicas_are_equal = int(saved["num_syncs"]), bool(saved["replicas_are_equal"])
    flights = {key: Landed(landed[int(key)], int(count)) for key, count in saved["under_way"].items()}
    shared.take_under_way({int(key): (flight, key in own["took_part"]) for key, flight in flights.items()})
    if len(own["norms"]) == len(shared.watches):
        for watch, state in zip(shared.watches, own["norms"], strict=True):
            watch.load_state_dict(state)


def check_flags(shared: Synchronizer, saved: Mapping[str, Any]) -> None:
    """Refuses fragments under way that this run cuts otherwise.

    Raises:
        CheckpointError: Saying how many there were.
    """
    if saved["under_way"] and saved["num_fragments"] != shared.policy.fragments:
        raise CheckpointError(
            "The checkpoint was written while fragments were under way, and this run cuts the model otherwise",
            expected=f"{saved['num_fragments']} fragments",
            got=str(shared.policy.fragments),
            fix="resume with as many fragments as before",
        )


def state_of(shared: Synchronizer) -> dict[str, Any]:
    """This rank's part of global weights and of what is under way, and all flags."""
    landed = {str(fragment): list(views) for fragment, (views, *_) in shared.settle().items()}
    return {"global": _copies(shared), "landed": landed, "flags": flags_of(shared), "own_flags": own_flags_of(shared)}


@torch.no_grad()
def load_state(shared: Synchronizer, saved: Mapping[str, Any]) -> None:
    """Takes over what :func:`state_of` returned, with as many replicas.

    Raises:
        CheckpointError: When it is no such state, or of other parameters; nothing is changed then.
    """
    shared.start(from_checkpoint=True)
    copies = _copies(shared)
    missing = {"inner", "outer", "num_updates", "global", "landed", "flags", "own_flags"} - saved.keys()
    given = {} if missing else {key: tuple(value.shape) for key, value in saved["global"].items()}
    if missing or given != {key: tuple(copy.shape) for key, copy in copies.items()}:
        raise CheckpointError(
            "The saved state is not one of this outer optimizer",
            expected=f"inner and outer states and the global weights of {len(copies)} parameters",
            got=f"entries missing: {sorted(missing)}" if missing else f"{len(given)} global weights, or other shapes",
            fix="build model, optimizer and replicas as when it was saved; a CheckpointStore loads into other numbers",
        )
    check_flags(shared, saved["flags"])
    for key, copy in copies.items():
        local_tensor(copy).copy_(local_tensor(saved["global"][key]))
    landed = {int(key): [view.clone() for view in views] for key, views in saved["landed"].items()}
    load_flags(shared, saved["flags"], saved["own_flags"], landed)


def _copies(shared: Synchronizer) -> dict[str, torch.Tensor]:
    """Global weights by the place of their parameter."""
    places = {parameter: str(place) for place, parameter in enumerate(shared.weights.parameters)}
    return {places[parameter]: copy.detach() for parameter, copy in shared.copy.of.items()}

"""Everything replicas hold together beside inner and outer optimizer, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.errors import CheckpointError, ConfigError
from meshwright.optim.clip import local_tensor
from meshwright.optim.outer.exchange import Landed
from meshwright.optim.outer.synchronizer import Synchronizer
from meshwright.optim.whole_state import gathered, laid_out_like


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
    return {
        "global": _copies_as_state(shared),
        "landed": landed,
        "flags": flags_of(shared),
        "own_flags": own_flags_of(shared),
    }


def whole_state_of(shared: Synchronizer) -> dict[str, Any]:
    """The same with whole tensors on rank 0; collective.

    Raises:
        ConfigError: On every rank, where rank 0's replica does not have everything.
    """
    if shared.policy.split or shared.settle():
        raise ConfigError(
            "The outer optimizer's state cannot be gathered on rank 0 now",
            expected="global weights in every replica, and no fragment under way",
            got="split=True" if shared.policy.split else f"{len(shared.settle())} fragments under way",
            fix="save with a CheckpointStore, or every rank's own state_dict()",
        )
    return state_of(shared) | {"global": gathered(_copies_as_state(shared))}


def laid_out_state(shared: Synchronizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state of either kind with global weights laid out as they are here; collective.

    Raises:
        CheckpointError: On every rank, when it is no such state, or of other parameters.
    """
    shared.start(from_checkpoint=True)
    missing = {"inner", "outer", "num_updates", "global", "landed", "flags", "own_flags"} - saved.keys()
    if missing:
        raise CheckpointError(
            "The saved state is not one of this outer optimizer",
            expected="inner and outer states, global weights and counts",
            got=f"entries missing: {sorted(missing)}",
            fix="build the optimizer as when it was saved; a plain optimizer's state goes into the inner one",
        )
    check_flags(shared, saved["flags"])
    return {**saved, "global": laid_out_like(shared.copy.outer, saved["global"])}


@torch.no_grad()
def load_state(shared: Synchronizer, saved: Mapping[str, Any]) -> None:
    """Takes over what :func:`laid_out_state` returned; the model's weights may have been loaded before or follow."""
    for key, copy in _copies(shared).items():
        local_tensor(copy).copy_(local_tensor(saved["global"]["state"][key]["weight"]))
    landed = {int(key): [view.clone() for view in views] for key, views in saved["landed"].items()}
    load_flags(shared, saved["flags"], saved["own_flags"], landed)
    shared.awaits_weights = True


def _copies_as_state(shared: Synchronizer) -> dict[str, Any]:
    """Global weights in the form of an optimizer's state dict, which whole tensors and other layouts can be made of."""
    groups = shared.copy.outer.state_dict()["param_groups"]
    return {"state": {key: {"weight": copy} for key, copy in _copies(shared).items()}, "param_groups": groups}


def _copies(shared: Synchronizer) -> dict[Any, torch.Tensor]:
    """Global weights by what the outer optimizer's state dict calls them."""
    outer = shared.copy.outer
    copies = [copy.detach() for group in outer.param_groups for copy in group["params"]]
    names = [name for group in outer.state_dict()["param_groups"] for name in group["params"]]
    return dict(zip(names, copies, strict=True))

"""Parts of a model that are synchronised in turn."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch

from meshwright.errors import ConfigError


def divided(
    parameters: Sequence[torch.Tensor], num_fragments: int, given: Sequence[Sequence[torch.Tensor]] | None = None
) -> list[list[torch.Tensor]]:
    """Cuts parameters into runs of about equal size, in their order, or takes the cut that is given.

    Raises:
        ConfigError: When a fragment would be empty, or those given are not all parameters once.
    """
    if given is not None:
        _check_given(parameters, num_fragments, given)
        return [list(fragment) for fragment in given]
    if len(parameters) < num_fragments:
        raise ConfigError(
            "There are more fragments than parameters",
            expected=f"at most {len(parameters)}",
            got=str(num_fragments),
            fix="use fewer fragments; as many as the model has layers is plenty",
        )
    middles, done = [], 0.0
    for parameter in parameters:
        middles.append(done + parameter.numel() / 2)
        done += parameter.numel()
    starts = [0]
    for fragment in range(1, num_fragments):
        place = bisect.bisect_left(middles, done * fragment / num_fragments)
        # Every fragment gets something, also beside one huge parameter.
        starts.append(min(max(place, starts[-1] + 1), len(parameters) - (num_fragments - fragment)))
    return [list(parameters[start:end]) for start, end in itertools.pairwise([*starts, len(parameters)])]


def _check_given(
    parameters: Sequence[torch.Tensor], num_fragments: int, given: Sequence[Sequence[torch.Tensor]]
) -> None:
    listed = [id(parameter) for fragment in given for parameter in fragment]
    if len(given) != num_fragments or not all(given) or sorted(listed) != sorted(map(id, parameters)):
        raise ConfigError(
            "The fragments are not the optimizer's parameters, each once",
            expected=f"{num_fragments} lists with {len(parameters)} parameters in all (those that train)",
            got=f"{len(given)} lists with {len(listed)} entries, of which {len(set(listed) & set(map(id, parameters)))}"
            " are such parameters",
            fix="list every trainable parameter of the optimizer in one fragment",
        )

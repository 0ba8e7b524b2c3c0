"""What a rank of a sharded model has gathered and reduced, and in which order: others may have run other layers."""

from __future__ import annotations

import array
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.nn.compiled import outside_compiled


class Exchanges:
    """Notes what FSDP2 exchanges on this rank: units that a forward gathers, and gradients that a backward reduces.

    Ranks pair what they exchange by order alone. Units that are gathered already are not noted, nor gradients that only
    accumulate: ranks may run what they like there.

    Args:
        model: Sharded, by the same names on every rank.
        apart: Parameters that are not exchanged, or not between the ranks that will be compared.
        hosted: Parameters whose gradients FSDP2 moves to the host: it would wait for them, if a hook were to see them.
        gathers: Whether units are noted; not where one rank has all of each.
    """

    def __init__(
        self,
        model: nn.Module,
        apart: Collection[nn.Parameter],
        hosted: Collection[nn.Parameter] = (),
        *,
        gathers: bool = True,
    ) -> None:
        self._names: list[str] = []  # of units and parameters
        self._order = array.array("I")  # places in them
        exchanged = {name: parameter for name, parameter in model.named_parameters() if parameter not in apart}
        for unit, name in _first_parameters(model, exchanged).items() if gathers else ():
            self._note_gathers(model, unit, name)
        for name, parameter in exchanged.items():
            if parameter.requires_grad and parameter not in hosted:
                note = self._note(f"the gradient of {name}")
                # FSDP2 calls it where it has sent the gradient, in compiled models too.
                parameter.register_post_accumulate_grad_hook(lambda _, note=note: note())

    def _note(self, name: str) -> Callable[[], None]:
        place, append = len(self._names), self._order.append
        self._names.append(name)
        return lambda: append(place)

    def _note_gathers(self, model: nn.Module, unit: str, name: str) -> None:
        path, _, attribute = name.rpartition(".")
        held, note = model.get_submodule(path)._parameters, self._note(unit or "the rest of the model")
        shard = held[attribute]

        def about_to_run(module: nn.Module, args: Any) -> None:
            if held[attribute] is shard and torch.is_grad_enabled():  # ranks may look at their validation data alone
                note()

        # Before FSDP2's own. Where compiling fails on one rank alone, traced hooks would run there alone.
        model.get_submodule(unit).register_forward_pre_hook(torch.compiler.disable(about_to_run), prepend=True)

    def is_any(self) -> bool:
        """Whether anything was exchanged since the last :meth:`take`."""
        return bool(self._order)

    def take(self) -> bytes:
        """The order since the last call; equal bytes are equal orders."""
        taken = self._order.tobytes()
        del self._order[:]
        return taken

    def names(self, order: bytes) -> list[str]:
        """What was exchanged in an order, that of any rank."""
        return [self._names[place] for place in array.array("I", order)]


def _first_parameters(model: nn.Module, exchanged: dict[str, nn.Parameter]) -> dict[str, str]:
    """By the paths of units that hooks can be put on: a parameter that each gathers itself."""
    can_hook = set(outside_compiled(model))
    units = dict(each for each in model.named_modules() if isinstance(each[1], FSDPModule))
    found: dict[str, str] = {}
    for name in exchanged:
        paths = [path for path in units if not path or name.startswith(f"{path}.")]
        innermost = max(paths, key=len, default=None)
        if innermost is not None and units[innermost] in can_hook:
            found.setdefault(innermost, name)
    return found

"""Modules whose distributed parameters gather on use. Seed: BMTrain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.nn.classes import subclass_like
from meshwright.nn.layout import gather_parameter, gathered_piece
from meshwright.nn.parameter import keeping_records, record_of
from meshwright.nn.roots import prepare_root
from meshwright.nn.sharding import accept_full_tensors, is_piece


class DistributedModule(nn.Module):
    """A module in which ``self.weight`` is the full tensor, whichever rank holds which part of the parameter.

    Outside a :class:`Block`, every access of a ``DistributedParameter`` gathers it (one all-gather; its backward
    averages the gradient over the ranks and splits it), so read it once per forward. Inside a Block the parameters are
    gathered together when the Block runs. Gradients of ordinary parameters are averaged over the ranks. Of a parameter
    that is split over tensor ranks (``tp_split_dim``) it is the rank's piece.

    ``state_dict()`` holds the shards (DTensors, under ordinary names) without communication; ``load_state_dict`` takes
    these and full tensors. :func:`meshwright.save` writes full tensors.
    """

    takes_pieces = True
    """In a Block, FSDP2 leaves a DTensor where tensor ranks have pieces: this class takes the piece out of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; the outermost one prepares what is below it on its first call."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Gathers parameters that gather on use; all else as ``nn.Module``."""
        value = super().__getattr__(name)
        if isinstance(value, DTensor):
            record = record_of(value)
            if record is not None and record.gather_on_use:
                return gather_parameter(value)
            if record is None and is_piece(self, name):
                return gathered_piece(value)
        return value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        accept_full_tensors(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with keeping_records(self.parameters(recurse=False)):
            return super()._apply(fn, recurse)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter itself, as ``named_parameters`` has it; ``nn.Module`` would gather it first."""
        path, _, name = target.rpartition(".")
        parameter = self.get_submodule(path)._parameters.get(name)
        return parameter if parameter is not None else super().get_parameter(target)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``, without gathering to find out whether the name is taken."""
        if name in self._parameters:
            self._parameters[name] = param
        else:
            super().register_parameter(name, param)


def distributed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` that is a DistributedModule, with the same name."""
    return cls if issubclass(cls, DistributedModule) else subclass_like(cls, DistributedModule)

"""State dicts of an optimizer over shards: local, or whole tensors on rank 0; loaded onto any layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from meshwright.optim.part_state import gathered_state_dict, laid_out_like
from meshwright.optim.whole_state import parameters_by_key
from meshwright.runtime import same_on_every_rank


class ShardedStateDict(Optimizer):
    """Base of optimizers whose states follow their parameters' layout when they are saved and loaded."""

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses a state dict that this optimizer could not go on with; of the states only names and shapes count.

        Raises:
            CheckpointError: Naming the states.
        """

    @abstractmethod
    def forget(self) -> None:
        """Lets go of states that are about to be replaced."""

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The torch state dict, with this rank's shards as DTensors.

        Args:
            gather: Whole tensors on the CPU of rank 0 instead, collective; see
                :func:`meshwright.optim.whole_state.gathered_state_dict`.
        """
        return gathered_state_dict(self) if gather else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of any world size, whole or sharded. Collective.

        Raises:
            CheckpointError: On every rank, when it is of other parameters or of another kind of optimizer.
        """
        self.take_laid_out(laid_out_like(self, state_dict))

    def take_laid_out(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict with states laid out like the parameters; they belong to the optimizer from then on.

        Torch's own way would round the fp32 states of half parameters to half.

        Raises:
            CheckpointError: On every rank, when :meth:`check_saved` refuses it on one; nothing is changed then.
        """
        with same_on_every_rank():
            self.check_saved(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.forget()
        parameters = parameters_by_key(self, state_dict)
        for name, state in state_dict["state"].items():
            self.state[parameters.get(name, name)] = state

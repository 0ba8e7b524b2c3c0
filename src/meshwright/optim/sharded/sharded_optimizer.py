"""Base class of optimizers whose update may sum over whole parameters, on any layout."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError
from meshwright.optim.checks import bad_value, check_dense, check_types
from meshwright.optim.dtensors import local_tensor
from meshwright.optim.pipeline_state_dict import ShardedStateDict
from meshwright.optim.sharded.chunk import (
    Chunk,
    Member,
    Place,
    Slot,
    absent_slot,
    check_states,
    cut,
    forms,
    fresh_states,
    made_chunk,
    made_slot,
)
from meshwright.optim.sharded.tensor_layout import Kept, Layout, make_groups_of
from meshwright.optim.sharded.whole_tensors import Presence, Update, WholeAnswers, run_updates
from meshwright.runtime.torch_internals.dtensor import spec_of


class ShardedOptimizer(ShardedStateDict):
    """Base class of optimizers with statistics over whole parameters, plain or sharded over any axes of any meshes.

    A subclass names the states of a parameter (:meth:`kept_states`) and writes its update once (:meth:`update`), as
    mathematics on whole tensors that asks for sums, or for work that one rank does on a whole tensor. Chunks of
    parameters are updated on local shards, and the requests of all are answered at once: see [Note: sharded statistics]
    in :mod:`meshwright.optim.sharded.whole_tensors`. States are DTensors with the placements that follow from the
    parameter's.

    Half-precision parameters are updated through an fp32 ``master`` in the state (``half_update="master"``), or by
    stochastic rounding without one (``"stochastic"``, bfloat16 only).

    Args:
        params: Parameters or groups of them, plain or DTensors.
        defaults: Default hyperparameters of groups.
    """

    host_chunk_elements: ClassVar[int] = 1 << 17
    """Elements of weights in a chunk on a CPU, which stay in the cache with states and temporaries. An update that goes
    through its chunk in blocks uses more."""
    states_can_be_averaged: ClassVar[bool] = True
    """Whether states of replicas can be averaged: not if quantised, or each in a basis of its own."""
    takes_whole_tensors: ClassVar[bool] = False
    """Whether :meth:`update` asks for work on whole tensors, for which the ranks that share one need a group."""
    takes_half_gradients: ClassVar[bool] = False
    """Whether :meth:`update` gets gradients in the parameters' types, so that no fp32 copies exist while it waits."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._begin()
        super().__init__(params, {"half_update": "master", **defaults})

    def _begin(self) -> None:
        self._slots: dict[int, Slot] = {}  # by the parameter's identity: a tensor's own hash is slow
        self._unchecked: list[Presence] = []  # counts of gradients on a device, read in the next step
        self._whole_answers = WholeAnswers()
        self._replicas: dist.ProcessGroup | None = None
        self._visited: set[torch.device] = set()  # devices that states from host memory were copied to

    @abstractmethod
    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the form of every state of a parameter."""

    @abstractmethod
    def update(self, chunk: Chunk) -> Update:
        """Update the weights and states of a chunk, asking for whole sums on the way."""

    def variant(self, layout: Layout, group: dict[str, Any]) -> Hashable:
        """Return a key, beside group, axes and step, that parameters of one chunk must share."""
        return layout.ndim

    def asks(self, chunk: Chunk) -> bool:
        """Return whether the update of a split chunk yields requests before it moves weights.

        Where it does not, it begins only when all ranks are known to have the gradients.
        """
        return True

    def lives_on_host(self, group: dict[str, Any]) -> bool:
        """Return whether states, the master excepted, live in host memory and are copied to the device in each step."""
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse invalid hyperparameters; called for every group that is added.

        Raises:
            ConfigError: Naming the hyperparameter.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check a group and add it."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            self.check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def setup_distributed(self, tp_group: Any = None, dp_group: Any = None, *groups: Any, **options: Any) -> None:
        """Accept the arguments of ColossalAI's plugins. DTensors need none of them.

        Args:
            tp_group: Not needed.
            dp_group: Ranks that hold the same plain parameters, with equal gradients on all of them or on none, as
                under DDP. Work on whole matrices is divided among them; without it each does all of it.
            groups: Not needed.
            options: Not needed.
        """
        self._replicas = dp_group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights; collective over the axes that split parameters, in a fixed number of all-reduces.

        Args:
            closure: Recomputes the loss, as in torch.

        Returns:
            The result of the closure.

        Raises:
            ModelError: For gradients that are sparse, laid out otherwise than their parameters, or missing on some of
                the ranks that share a parameter. On a CPU weights are unchanged then. On an accelerator, which would
                have to be waited for, missing gradients are found at the next step.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for presence in self._unchecked:
            presence.check()
        self._unchecked = run_updates(((chunk, self._updated(chunk)) for chunk in self._chunks()), self._whole_answers)
        for device in self._visited:
            torch.cuda.current_stream(device).synchronize()  # so that states in host memory are complete
        self._visited.clear()
        return loss

    def state_forms(self, parameter: torch.Tensor) -> dict[str, Kept]:
        """Return the forms of a parameter's states, the fp32 master included, without making them."""
        return forms(Layout.of(parameter), self._group_of(parameter), parameter, self.kept_states)

    def empty_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make fresh states of a parameter, on this optimizer's layout."""
        return self.empty_state_under(parameter, self._group_of(parameter))

    def empty_state_under(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make fresh states under the hyperparameters of another group, such as one that is about to be loaded."""
        group = {**self.defaults, **group}
        place = Place(local_tensor(parameter).device, self.lives_on_host(group))
        return fresh_states(Layout.of(parameter), group, parameter, self.kept_states, place)

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse states that do not fit the hyperparameters saved with them."""
        check_states(self.param_groups, self.defaults, state_dict, self.kept_states)

    def make_groups(self, mesh: DeviceMesh) -> None:
        """Make the process groups that steps need beside those of the mesh's axes; collective over the world."""
        if self.takes_whole_tensors:
            make_groups_of((parameter for group in self.param_groups for parameter in group["params"]), mesh)

    def forget(self) -> None:
        """Release states that are about to be replaced."""
        self._slots.clear()

    def _chunks(self) -> Iterator[Chunk]:
        """Yield chunks of parameters with gradients and of sharded ones without; each is made when it is needed."""
        batches: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
        position = -1
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                position += 1
                gradient = local_gradient(parameter)
                slot = self._slot(parameter, group, gradient is not None)
                if slot is None:
                    continue
                step = slot.state["step"] + 1 if slot.stored else 1
                key = (number, step, gradient is None, *slot.kind, self.variant(slot.layout, group))
                batches[key].append(Member(position, slot, gradient))
        for (number, step, *_), members in batches.items():
            for part in cut(members, self.host_chunk_elements):
                yield made_chunk(self.param_groups[number], step, part)

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(parameter is one for one in group["params"]))

    def _slot(self, parameter: torch.Tensor, group: dict[str, Any], has_gradient: bool) -> Slot | None:
        """Return a parameter's slot; None where there is nothing to do."""
        found = self._slots.get(id(parameter))  # the slot keeps its parameter alive, so that ids stay unique
        if found is None and parameter.numel() == 0:  # means over no elements do not exist
            return None
        if not has_gradient and not (parameter.requires_grad and _is_split(parameter, found)):
            return None
        state = self.state.get(parameter) or {}
        if found is None or not state or not found.is_current(state, local_tensor(parameter)):
            if not has_gradient and not state:
                return absent_slot(parameter, group, self.kept_states)
            found = self._slots[id(parameter)] = made_slot(
                parameter, group, self.state[parameter], self.kept_states, self.lives_on_host(group)
            )
        return found

    def _updated(self, chunk: Chunk) -> Update:
        """Run the update in fp32, write half-precision weights, and count the step."""
        if not (chunk.is_local or self.asks(chunk)):
            yield []
        if not chunk.has_gradients:
            yield from self.update(chunk.without_values())
            return
        wide = chunk.in_fp32(gradients=not self.takes_half_gradients)
        here = wide.with_states_here()
        yield from self.update(here)
        if here is not wide:
            wide.send_back_states(here)
            self._visited.add(chunk.device)
        chunk.write_back(wide.weights)
        for member in chunk.members:
            member.slot.state["step"] = chunk.step

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_slots" not in self.__dict__:  # of a copy, or a pickle
            self._begin()
        for group in self.param_groups:  # saved, perhaps, before a hyperparameter existed
            for key, value in self.defaults.items():
                group.setdefault(key, value)


def _is_split(parameter: torch.Tensor, slot: Slot | None) -> bool:
    return not (Layout.of(parameter) if slot is None else slot.layout).is_whole()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the shard of the gradient that belongs to the shard of the parameter; None without a gradient.

    Raises:
        ModelError: When the gradient is sparse, or plain where the parameter is sharded.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    check_dense(parameter)
    if not isinstance(parameter, DTensor):
        return gradient
    if not isinstance(gradient, DTensor):
        raise ModelError(
            "A sharded parameter has a plain gradient",
            expected=f"a DTensor placed as {parameter.placements}",
            got=f"a tensor of shape {tuple(gradient.shape)}",
            fix="let backward make the gradients, or distribute them like their parameters",
        )
    if spec_of(gradient) is not spec_of(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient.to_local()


# --- Checks of hyperparameters and parameters

_HALF_UPDATES = ("master", "stochastic")


def check_group(group: dict[str, Any]) -> None:
    """Refuse an unknown ``half_update``, and parameters of other types than fp32, fp16 and bf16.

    Raises:
        ConfigError: For ``half_update``.
        ModelError: For parameters.
    """
    if group["half_update"] not in _HALF_UPDATES:
        raise bad_value("half_update", group["half_update"], "'master' or 'stochastic'")
    check_types(group)
    for parameter in group["params"]:
        if parameter.dtype == torch.float16 and group["half_update"] == "stochastic":
            raise ModelError(
                "A float16 parameter cannot be rounded at random: its range would clip what bfloat16 keeps",
                expected="torch.bfloat16 parameters with half_update='stochastic'",
                got=f"float16, of shape {tuple(parameter.shape)}",
                fix="use half_update='master'",
            )

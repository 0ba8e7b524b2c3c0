"""Optimizer of replicas that take local steps and synchronise every H of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.errors import ConfigError, join_names
from meshwright.optim.full_state_dict import load_laid_out
from meshwright.optim.guarded_step import GuardedOptimizer, ReplicatedOptimizer, average_of
from meshwright.optim.outer.global_weights import OuterFactory
from meshwright.optim.outer.replica_group import Replicas
from meshwright.optim.outer.sync_policy import OuterPolicy
from meshwright.optim.outer.synchronizer import Synchronizer, laid_out_state, load_state, state_of, whole_state_of
from meshwright.optim.pipeline_state_dict import gathered_state_dict, laid_out_like


class OuterOptimizer(ReplicatedOptimizer):
    """Outer optimizer over replicas that train on their own: the engine of BMUF, SlowMo and DiLoCo.

    After H inner steps the outer optimizer moves the global weights by the pseudo-gradient, global - mean(local), and
    every replica continues from them (Chen & Huo 2016; Wang et al. 2019; Douillard et al. 2023). A replica may be one
    rank or many, with its parameters sharded in any way over axes other than ``group``::

        inner = torch.optim.AdamW(model.parameters())
        optimizer = OuterOptimizer(inner, lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True))

    It is used in place of the inner optimizer: every ``step`` is an inner step, and those that end a block synchronise.
    Gradients must not be averaged over replicas (no DDP over ``group``). Every rank must call ``step`` equally often.
    The first step compares the replicas and makes the global copy, so weights may be loaded before it.

    Args:
        inner: Any torch optimizer, or a GuardedOptimizer.
        outer: Builds the outer optimizer from the global weights.
        policy: When and how to synchronise.
        group: The ranks that hold the same part of the model in every replica, or a mesh of one axis; None: every rank
            of the world is a replica.
        model: The model whose floating-point buffers are averaged; None leaves buffers alone.
        fragments: The parameters of each of ``policy.fragments`` parts; None divides them in their order.

    Raises:
        ConfigError: When arguments do not fit together.
    """

    def __init__(
        self,
        inner: Optimizer,
        outer: OuterFactory,
        policy: OuterPolicy | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        model: nn.Module | None = None,
        fragments: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        _check_inner(inner)
        super().__init__(inner)
        self.policy = policy or OuterPolicy()
        self._schedule = self.policy.schedule
        self.synchronizer = Synchronizer(inner, outer, self.policy, group, model, fragments)
        """The state that replicas share, and their communication."""
        self.num_updates = 0
        """Inner steps, skipped ones included."""
        self._gradients_are_averaged = False  # already, in this step of a synchronous warm-up

    @property
    def replicas(self) -> Replicas:
        """Return the ranks this one synchronises with."""
        return self.synchronizer.replicas

    @property
    def outer(self) -> Optimizer:
        """Return the outer optimizer, for instance to change its learning rate; the first access is collective."""
        return self.synchronizer.copy.outer

    @property
    def guard(self) -> GuardedOptimizer | None:
        """Return the inner optimizer if it is a GuardedOptimizer, else None."""
        return self.inner if isinstance(self.inner, GuardedOptimizer) else None

    @property
    def step_takes_scale(self) -> bool:
        """Return whether the inner optimizer divides gradients by ``scale`` itself."""
        return bool(getattr(self.inner, "step_takes_scale", False))

    @property
    def in_warmup(self) -> bool:
        """Return whether the next step belongs to warm-up."""
        return self._schedule.in_warmup(self.num_updates)

    @property
    def num_syncs(self) -> int:
        """Number of outer steps (of fragments) so far."""
        return self.synchronizer.num_syncs

    @property
    def _averages_gradients(self) -> bool:
        return self.in_warmup and self.policy.warmup == "synchronous"

    def prepare_gradients(self) -> None:
        """Average gradients over replicas in a synchronous warm-up; ``step`` does so, too. Call it before clipping."""
        self._begin()
        if self.guard is not None:
            self.guard.prepare_gradients()
        if self._averages_gradients and not self._gradients_are_averaged:
            self.synchronizer.average_gradients()
            self._gradients_are_averaged = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)
        self._gradients_are_averaged = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Take one inner step, and the synchronisation that is due after it.

        Args:
            closure: Recomputes the loss, for the inner optimizer.
            options: Passed to the inner optimizer, such as ``scale``.

        Returns:
            The result of the inner optimizer's step.

        Raises:
            LaunchError: When another replica does not join a synchronisation, naming its rank.
        """
        self._begin()
        if closure is None:
            self.prepare_gradients()
            result = self.inner.step(**options)
        else:
            result = self.inner.step(self._averaging(closure), **options)
        self.count_step()
        return result

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def computed() -> Any:
            self._gradients_are_averaged = False
            with torch.enable_grad():
                loss = closure()
            self.prepare_gradients()
            return loss

        return computed

    def _begin(self) -> None:
        self.synchronizer.weights.check_frozen()
        self.synchronizer.start()
        if not self._averages_gradients:
            self.synchronizer.separate_loss_scales()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups: the replicas have agreed on the parameters that they synchronise.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "A parameter group is added to an outer optimizer, which would not synchronise it",
            expected="all groups in the inner optimizer from the beginning",
            got=f"another group with {join_names(param_group)}",
            fix="add groups to the inner optimizer, and build the outer one after that",
        )

    def count_step(self) -> None:
        """Count a step that was taken, or skipped by a guard outside, and synchronise if that is due."""
        self._count_step()
        average = average_of(self)
        if average is not None:
            alone = self.replicas.size == 1 and self.policy.skip_when_alone
            average.count_step(is_synchronised=alone or self.synchronizer.replicas_are_equal)

    def _count_step(self) -> None:
        shared = self.synchronizer
        shared.start()
        shared.awaits_weights = False
        shared.replicas_are_equal = shared.replicas_are_equal and self._averages_gradients
        self.num_updates += 1
        self._gradients_are_averaged = False
        if self.replicas.size == 1 and self.policy.skip_when_alone:
            return
        if self._schedule.ends_warmup(self.num_updates):
            shared.end_warmup()
        due = list(self._schedule.due(self.num_updates))
        if due:
            shared.run(due)

    def synchronize(self) -> None:
        """Synchronise at once, for instance after the last step, so that all replicas hold the global weights.

        Collective. Fragments under way are applied first. The schedule of blocks stays as it is. During warm-up nothing
        happens.
        """
        self.synchronizer.start()
        if not self.in_warmup:
            self.synchronizer.synchronize()

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """Swap the global weights into the model inside the block, for instance to evaluate or export them; collective.

        Floating-point buffers are then the mean of the replicas', unless the policy keeps them apart. During warm-up,
        when there are no global weights yet, weights and buffers are those of replica 0.
        """
        self.synchronizer.start()
        return self.synchronizer.global_weights(in_warmup=self.in_warmup)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of inner and outer states, global weights, counters and fragments under way.

        Every rank saves and loads its own. A ``CheckpointStore`` saves one copy of what is equal, and loads into other
        numbers of replicas.
        """
        own = {"inner": self.inner.state_dict(), "outer": self.outer.state_dict(), "num_updates": self.num_updates}
        return own | state_of(self.synchronizer)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the state dict with whole tensors on the CPU of rank 0 (its replica's inner states); collective.

        Raises:
            ConfigError: On every rank, with ``split``, and while fragments are under way.
        """
        inner, outer = gathered_state_dict(self.inner), gathered_state_dict(self.outer)
        return {"inner": inner, "outer": outer, "num_updates": self.num_updates} | whole_state_of(self.synchronizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what either of the two returned; collective. The model's weights are loaded separately.

        Raises:
            CheckpointError: On every rank, when parameters or fragments do not fit; nothing is changed then.
        """
        self.take_laid_out(self.laid_out(state_dict))

    def laid_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of any layout to this one; collective."""
        laid_out = laid_out_state(self.synchronizer, state_dict)
        inner, outer = laid_out_like(self.inner, state_dict["inner"]), laid_out_like(self.outer, state_dict["outer"])
        return {**laid_out, "inner": inner, "outer": outer}

    def take_laid_out(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`laid_out` returned."""
        load_state(self.synchronizer, state_dict)
        load_laid_out(self.inner, state_dict["inner"])
        load_laid_out(self.outer, state_dict["outer"])
        self.num_updates = int(state_dict["num_updates"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy}, {self.replicas.size} replicas, {self.inner!r})"


def _check_inner(inner: Optimizer) -> None:
    if isinstance(inner, OuterOptimizer):
        raise ConfigError(
            "An outer optimizer cannot be another's inner one",
            expected="an optimizer of one replica",
            got=type(inner).__name__,
            fix="give both the same replicas in one optimizer",
        )

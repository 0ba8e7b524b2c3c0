"""What replicas do together: compare, average, step, and take the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.optim.clip import local_tensor, total_norm
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.layouts import wrapped_like
from meshwright.optim.loss_scaler import LossScaler
from meshwright.optim.outer.anomalies import AnomalyWatch, tell_left_out
from meshwright.optim.outer.exchange import Flight, Landed, average_gradients, average_in_place
from meshwright.optim.outer.fragments import divided
from meshwright.optim.outer.global_copy import GlobalCopy, OuterFactory
from meshwright.optim.outer.inner_state import InnerState
from meshwright.optim.outer.policy import OuterPolicy
from meshwright.optim.outer.replicas import Replicas
from meshwright.optim.outer.rhythm import Action
from meshwright.optim.outer.split_copy import SplitCopy
from meshwright.optim.outer.start import made_equal, take_first
from meshwright.optim.outer.weights import InnerWeights


class Synchronizer:
    """The replicas of a model, their global weights, and what is under way between them. Counts nothing.

    Args: see :class:`~meshwright.optim.outer.OuterOptimizer`.
    """

    def __init__(
        self,
        inner: Optimizer,
        make_outer: OuterFactory,
        policy: OuterPolicy,
        group: dist.ProcessGroup | DeviceMesh | None,
        model: nn.Module | None,
        fragments: Sequence[Sequence[torch.Tensor]] | None,
    ) -> None:
        self.policy = policy
        self._make_outer, self._given_fragments, self._model = make_outer, fragments, model
        self._guard = inner if isinstance(inner, GuardedOptimizer) else None
        self.weights = InnerWeights(inner)
        divided(self.weights.parameters, policy.fragments, fragments)  # checks them
        self.replicas = Replicas(group)
        self.inner_state = InnerState(inner, self.replicas, policy.bucket_bytes)
        if policy.inner_state == "average":
            self.inner_state.check_average()
        self.num_syncs = 0
        """Outer steps (of fragments)."""
        self.replicas_are_equal = True
        """Whether all replicas hold the same weights, which are the global ones, at present."""
        self.watches = [
            AnomalyWatch(policy.anomaly_threshold, policy.anomaly_warmup_syncs) for _ in range(policy.fragments)
        ]
        """Of every fragment, the norms of this replica's pseudo-gradients."""
        self.awaits_weights = False
        """Whether global weights were loaded by hand and the model's may follow: these then begin no new block."""
        self._copy: GlobalCopy | None = None  # made by ``start``
        self._is_superseded = False  # the global copy, by weights that were loaded into the model
        self._fragments: list[list[torch.Tensor]] = []
        self._flights: dict[int, tuple[Flight, bool]] = {}  # fragments under way; whether this replica takes part

    @property
    def copy(self) -> GlobalCopy:
        """The global weights and their optimizer."""
        self.start()
        assert self._copy is not None
        return self._copy

    def start(self, *, from_checkpoint: bool = False) -> None:
        """Compares the replicas and makes the global copy; collective over the world, once.

        Args:
            from_checkpoint: Replicas may hold weights of their own, and global ones will be loaded.

        Raises:
            ConfigError: On every rank, when replicas hold other parameters.
        """
        if self._copy is not None:
            superseded, self._is_superseded = self._is_superseded, False
            if superseded and not from_checkpoint:
                self._begin_anew(self._copy)
            return
        parameters = self.weights.parameters
        self.replicas.check_alike(parameters)
        if not from_checkpoint:
            self._make_equal()
        kind = SplitCopy if self.policy.split else GlobalCopy
        self._copy = kind(self.weights, self.replicas, self._make_outer, self.policy)
        self.weights.note_frozen(parameters)
        every = divided(parameters, self.policy.fragments, self._given_fragments)
        self._fragments = [self._copy.ordered(fragment) for fragment in every]

    def _make_equal(self) -> None:
        # Buffers may differ already: the first forward has moved them.
        made_equal(list(map(self.weights.read, self.weights.parameters)), self.replicas, self._bucket_bytes)
        self.weights.finish()

    def weights_were_loaded(self) -> None:
        """Weights were loaded into the model: they are the global ones when replicas meet next."""
        self._is_superseded = self._copy is not None and not self.awaits_weights

    def _begin_anew(self, copy: GlobalCopy) -> None:
        """Weights were loaded in the middle of a block: it is over, with all that is under way."""
        self.settle()
        self._flights = {}
        self._make_equal()  # where only some were loaded, the others differ
        copy.fill()
        self.replicas_are_equal = True

    @property
    def _bucket_bytes(self) -> int:
        return self.policy.bucket_bytes

    def part_loss_scales(self) -> None:
        """From now on an overflow concerns its own replica."""
        scaler = self._guard.scaler if self._guard is not None else None
        if isinstance(scaler, LossScaler):
            scaler.meet_in(self.replicas.inside, self.replicas.num_inside)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replaces gradients by their means over replicas."""
        if self.replicas.size == 1:
            return
        parameters = self.weights.parameters
        local = [None if p.grad is None else local_tensor(p.grad) for p in parameters]
        like = [local_tensor(parameter) for parameter in parameters]
        with self.replicas.meeting():
            means = average_gradients(local, like, self.replicas, self._bucket_bytes)
        for parameter, gradient, mean in zip(parameters, local, means, strict=True):
            if gradient is not None and mean is not None:
                gradient.copy_(mean)
            elif mean is not None:
                parameter.grad = wrapped_like(parameter, mean.to(parameter.dtype))

    @torch.no_grad()
    def end_warmup(self) -> None:
        """Makes all replicas equal, and their weights the global ones."""
        parameters = self.weights.parameters
        if self.policy.warmup != "synchronous":
            with self.replicas.meeting():
                self._take_first()
                self._settle_inner_state_after_warmup(parameters)
        self.copy.fill()
        self.replicas_are_equal = True
        self.part_loss_scales()

    def _take_first(self) -> None:
        held = self._held()
        take_first(held, self.replicas, self._bucket_bytes)
        self._put(held)

    def _held(self) -> list[torch.Tensor]:
        """Copies of weights and buffers."""
        return [each.clone() for each in (*map(self.weights.read, self.weights.parameters), *self._float_buffers())]

    @torch.no_grad()
    def _put(self, held: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.weights.parameters, held, strict=False):
            self.weights.write(parameter, weight)
        self.weights.finish()
        for buffer, value in zip(self._float_buffers(), held[len(self.weights.parameters) :], strict=True):
            buffer.copy_(value)

    def _settle_inner_state_after_warmup(self, parameters: list[torch.Tensor]) -> None:
        if self.policy.warmup == "single":
            self.inner_state.copy_from_first(parameters)
        elif self.policy.inner_state == "average":
            self.inner_state.average(parameters)
        else:
            self.inner_state.reset(parameters)

    def run(self, due: Sequence[tuple[Action, int]]) -> None:
        """Does what is due after a step, in order; collective."""
        with self.replicas.meeting():
            for action, fragment in due:
                if action == "send":
                    self._send(fragment)
                elif action == "apply":
                    self._apply(fragment)
                elif fragment in self._flights:
                    self._flights[fragment][0].advance()
        policy = self.policy
        self.replicas_are_equal = policy.fragments == 1 and policy.delay == 0 and policy.merge_alpha == 0

    def _send(self, fragment: int) -> None:
        parameters = self._fragments[fragment]
        self.weights.note_frozen(parameters)
        message = self.copy.message(parameters)
        self.copy.write(parameters, message)
        norm = total_norm([wrapped_like(p, view) for p, view in zip(parameters, message.views, strict=True)])
        takes_part = self._agreed_inside(self.watches[fragment].passes(float(norm)))
        flight = self.copy.send(parameters, message, takes_part=takes_part)
        self._flights[fragment] = (flight, takes_part)

    def _agreed_inside(self, passes: bool) -> bool:
        """Whether no rank of this replica objects."""
        if self.replicas.num_inside == 1:
            return passes
        objects = torch.full((), float(not passes), device=self.replicas.device)
        dist.all_reduce(objects, dist.ReduceOp.MAX, group=self.replicas.inside)
        return not objects

    @torch.no_grad()
    def _apply(self, fragment: int, alpha: float | None = None) -> None:
        if fragment not in self._flights:  # somebody called synchronize meanwhile
            return
        flight, took_part = self._flights.pop(fragment)
        parameters = self._fragments[fragment]
        tell_left_out(self.copy.step(parameters, flight), self.replicas.size)
        own_share = self.policy.merge_alpha if alpha is None else alpha
        self._take_global(parameters, own_share if took_part else 0.0)
        if not took_part or self.policy.inner_state == "reset":
            self.inner_state.reset(parameters)
        if self.policy.inner_state == "average":
            self.inner_state.average(parameters)
        if fragment == self.policy.fragments - 1 and self.policy.buffers == "average":
            average_in_place(self._float_buffers(), self.replicas, self._bucket_bytes)
        self.num_syncs += 1

    def _take_global(self, parameters: list[torch.Tensor], alpha: float) -> None:
        for parameter, value in zip(parameters, self.copy.values(parameters), strict=True):
            if alpha:
                local = self.weights.read(parameter).to(value.device, value.dtype)
                value = torch.lerp(value, local, alpha)
            self.weights.write(parameter, value)
        self.weights.finish()

    def synchronize(self) -> None:
        """Takes what is under way, and then a whole outer step at once; collective."""
        if self.replicas_are_equal:
            return
        with self.replicas.meeting():
            for fragment in list(self._flights):
                self._apply(fragment)
            for fragment in range(self.policy.fragments):
                self._send(fragment)
                self._apply(fragment, alpha=0.0)
        self.replicas_are_equal = True

    @torch.no_grad()
    def take_global(self) -> None:
        """Goes on from the global weights; collective."""
        self._take_global(self.copy.ordered(self.weights.parameters), 0.0)

    @contextlib.contextmanager
    def global_weights(self, *, in_warmup: bool) -> Iterator[None]:
        """Lends the model the global weights, with buffers as all replicas would get them; collective.

        Args:
            in_warmup: There are none yet; those of replica 0 will be.
        """
        held = self._held()
        if in_warmup:
            self._take_first()
        else:
            self.take_global()
            if self.policy.buffers == "average":
                average_in_place(self._float_buffers(), self.replicas, self._bucket_bytes)
        try:
            yield
        finally:
            self._put(held)

    def settle(self) -> dict[int, tuple[list[torch.Tensor], int, bool]]:
        """Waits for what is under way without taking it, and returns it, by fragment.

        Returns:
            Averaged pseudo-gradients of the fragment's parameters, how many replicas took part, and whether this one.
        """
        landed = {}
        for fragment, (flight, took_part) in self._flights.items():
            count = flight.finish()
            self._flights[fragment] = (Landed(flight.views, count), took_part)
            landed[fragment] = (flight.views, count, took_part)
        return landed

    def take_under_way(self, flights: dict[int, tuple[Flight, bool]]) -> None:
        """Replaces what is under way by what a checkpoint holds."""
        self._flights = flights

    def parameters_of(self, fragment: int) -> list[torch.Tensor]:
        """The parameters of a fragment, in the order in which they travel."""
        return self._fragments[fragment]

    def _float_buffers(self) -> list[torch.Tensor]:
        buffers = self._model.buffers() if self._model is not None else ()
        return [local_tensor(buffer) for buffer in buffers if buffer.is_floating_point()]

"""Synchronise replicas: compare, reject anomalies, average, take the outer step; save and load the shared state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, ConfigError
from meshwright.optim.dtensors import Stages, local_tensor, wrapped_like
from meshwright.optim.full_state_dict import gathered, laid_out_like
from meshwright.optim.guarded_step import GuardedOptimizer
from meshwright.optim.mixed_precision import LossScaler
from meshwright.optim.outer.global_weights import GlobalCopy, OuterFactory, SplitCopy
from meshwright.optim.outer.replica_averaging import Flight, InnerState, Landed, average_gradients, average_in_place
from meshwright.optim.outer.replica_group import Replicas, make_equal, take_first
from meshwright.optim.outer.sync_policy import Action, OuterPolicy, divided
from meshwright.optim.weight_average import InnerWeights
from meshwright.runtime import print_rank


class Synchronizer:
    """The replicas of a model, their global weights, and the fragments under way between them.

    It counts no steps: :class:`~meshwright.optim.outer.OuterOptimizer` says when to do what, and has the same
    arguments.
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
        """Number of outer steps (of fragments)."""
        self.replicas_are_equal = True
        """Whether all replicas hold the global weights at present."""
        self.watches = [
            AnomalyWatch(policy.anomaly_threshold, policy.anomaly_warmup_syncs) for _ in range(policy.fragments)
        ]
        """Statistics of this replica's pseudo-gradient norms, for every fragment."""
        self.awaits_weights = False
        """Whether global weights were loaded and the model's may follow, which then begin no new block."""
        self.stages: Stages | None = None
        """The pipeline that these parameters are one rank's part of; norms are of the whole model."""
        self._copy: GlobalCopy | None = None  # made by ``start``
        self._is_superseded = False  # the global copy, by weights that were loaded into the model
        self._fragments: list[list[torch.Tensor]] = []
        self._flights: dict[int, tuple[Flight, bool]] = {}  # fragments under way; whether this replica takes part

    @property
    def copy(self) -> GlobalCopy:
        """Return the global weights and their optimizer."""
        self.start()
        assert self._copy is not None
        return self._copy

    def start(self, *, from_checkpoint: bool = False) -> None:
        """Compare the replicas and make the global copy; collective over the world, once.

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
        self._copy = kind(self.weights, self.replicas, self._make_outer, self.policy, self.stages)
        self.weights.note_frozen(parameters)
        every = divided(parameters, self.policy.fragments, self._given_fragments)
        self._fragments = [self._copy.ordered(fragment) for fragment in every]

    def _make_equal(self) -> None:
        # Buffers may differ already: the first forward has moved them.
        make_equal(list(map(self.weights.read, self.weights.parameters)), self.replicas, self._bucket_bytes)
        self.weights.finish()

    def weights_were_loaded(self) -> None:
        """Make weights that were loaded into the model the global ones at the next step."""
        self._is_superseded = self._copy is not None and not self.awaits_weights

    def _begin_anew(self, copy: GlobalCopy) -> None:
        # Weights were loaded in the middle of a block: it ends, and fragments under way are dropped.
        self.settle()
        self._flights = {}
        self._make_equal()  # where only some were loaded, the others differ
        copy.fill()
        self.replicas_are_equal = True

    @property
    def _bucket_bytes(self) -> int:
        return self.policy.bucket_bytes

    def separate_loss_scales(self) -> None:
        """Let every replica skip its own overflows from now on."""
        scaler = self._guard.scaler if self._guard is not None else None
        if isinstance(scaler, LossScaler):
            scaler.agree_within(self.replicas.inside, self.replicas.num_inside)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace gradients by their means over replicas."""
        if self.replicas.size == 1:
            return
        parameters = self.weights.parameters
        local = [None if p.grad is None else local_tensor(p.grad) for p in parameters]
        like = [local_tensor(parameter) for parameter in parameters]
        with self.replicas.synchronizing():
            means = average_gradients(local, like, self.replicas, self._bucket_bytes)
        for parameter, gradient, mean in zip(parameters, local, means, strict=True):
            if gradient is not None and mean is not None:
                gradient.copy_(mean)
            elif mean is not None:
                parameter.grad = wrapped_like(parameter, mean.to(parameter.dtype))

    @torch.no_grad()
    def end_warmup(self) -> None:
        """Make all replicas equal, and their weights the global ones."""
        parameters = self.weights.parameters
        if self.policy.warmup != "synchronous":
            with self.replicas.synchronizing():
                self._take_first()
                self._settle_inner_state_after_warmup(parameters)
        self.copy.fill()
        self.replicas_are_equal = True
        self.separate_loss_scales()

    def _take_first(self) -> None:
        first = self._cloned()
        take_first(first, self.replicas, self._bucket_bytes)
        self._put(first)

    def _cloned(self) -> list[torch.Tensor]:
        return [each.clone() for each in (*map(self.weights.read, self.weights.parameters), *self._float_buffers())]

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.weights.parameters, values, strict=False):
            self.weights.write(parameter, weight)
        self.weights.finish()
        for buffer, value in zip(self._float_buffers(), values[len(self.weights.parameters) :], strict=True):
            buffer.copy_(value)

    def _settle_inner_state_after_warmup(self, parameters: list[torch.Tensor]) -> None:
        if self.policy.warmup == "single":
            self.inner_state.copy_from_first(parameters)
        elif self.policy.inner_state == "average":
            self.inner_state.average(parameters)
        else:
            self.inner_state.reset(parameters)

    def run(self, due: Sequence[tuple[Action, int]]) -> None:
        """Run the actions due after a step, in order; collective."""
        with self.replicas.synchronizing():
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
        norm = self.copy.norm({p: wrapped_like(p, view) for p, view in zip(parameters, message.views, strict=True)})
        takes_part = self._agreed_inside(self.watches[fragment].passes(float(norm)))
        flight = self.copy.send(parameters, message, takes_part=takes_part)
        self._flights[fragment] = (flight, takes_part)

    def _agreed_inside(self, passes: bool) -> bool:
        """Return whether no rank of this replica objects."""
        if self.replicas.num_inside == 1:
            return passes
        objects = torch.full((), float(not passes), device=self.replicas.device)
        dist.all_reduce(objects, dist.ReduceOp.MAX, group=self.replicas.inside)
        return not objects

    @torch.no_grad()
    def _apply(self, fragment: int, alpha: float | None = None) -> None:
        if fragment not in self._flights:  # synchronize() was called meanwhile
            return
        flight, took_part = self._flights.pop(fragment)
        parameters = self._fragments[fragment]
        print_left_out(self.copy.step(parameters, flight), self.replicas.size)
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
        """Apply fragments under way, and then take a whole outer step at once; collective."""
        if self.replicas_are_equal:
            return
        with self.replicas.synchronizing():
            for fragment in list(self._flights):
                self._apply(fragment)
            for fragment in range(self.policy.fragments):
                self._send(fragment)
                self._apply(fragment, alpha=0.0)
        self.replicas_are_equal = True

    @torch.no_grad()
    def take_global(self) -> None:
        """Replace the replica's weights by the global ones; collective."""
        self._take_global(self.copy.ordered(self.weights.parameters), 0.0)

    @contextlib.contextmanager
    def global_weights(self, *, in_warmup: bool) -> Iterator[None]:
        """Swap the global weights into the model inside the block, with averaged buffers; collective.

        Args:
            in_warmup: Swap in replica 0's weights, as there are no global ones yet.
        """
        own = self._cloned()
        if in_warmup:
            self._take_first()
        else:
            self.take_global()
            if self.policy.buffers == "average":
                average_in_place(self._float_buffers(), self.replicas, self._bucket_bytes)
        try:
            yield
        finally:
            self._put(own)

    def settle(self) -> dict[int, tuple[list[torch.Tensor], int, bool]]:
        """Wait for fragments under way without applying them.

        Returns:
            For each fragment its averaged pseudo-gradients, how many replicas took part, and whether this one did.
        """
        landed = {}
        for fragment, (flight, took_part) in self._flights.items():
            count = flight.finish()
            self._flights[fragment] = (Landed(flight.views, count), took_part)
            landed[fragment] = (flight.views, count, took_part)
        return landed

    def take_under_way(self, flights: dict[int, tuple[Flight, bool]]) -> None:
        """Replace the fragments under way by those of a checkpoint."""
        self._flights = flights

    def parameters_of(self, fragment: int) -> list[torch.Tensor]:
        """Return the parameters of a fragment, in the order in which they are sent."""
        return self._fragments[fragment]

    def _float_buffers(self) -> list[torch.Tensor]:
        buffers = self._model.buffers() if self._model is not None else ()
        return [local_tensor(buffer) for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]


# --- Anomalies: pseudo-gradients that are left out of the average

_EWMA = 0.02  # weight of the newest norm in mean and variance, from EDiT (Cheng et al. 2024, appendix)


class AnomalyWatch:
    """Running mean and variance of the norms of one fragment's pseudo-gradients in this replica.

    Args:
        threshold: Standard deviations above the mean that make an anomaly; None accepts every finite norm.
        warmup_syncs: Number of norms to see first.
    """

    def __init__(self, threshold: float | None, warmup_syncs: int) -> None:
        self._threshold, self._warmup_syncs = threshold, warmup_syncs
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def passes(self, norm: float) -> bool:
        """Return whether a pseudo-gradient of this norm takes part; an anomaly does not move the running mean."""
        if not math.isfinite(norm):
            return False
        deviation = norm - self._mean
        spread = self._threshold * math.sqrt(self._variance) if self._threshold is not None else math.inf
        if self._seen >= self._warmup_syncs and deviation > spread:
            return False
        weight = max(_EWMA, 1 / (self._seen + 1))  # a plain mean at first
        self._mean += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation * deviation)
        self._seen += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and variance."""
        return {"seen": self._seen, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._seen, self._mean, self._variance = int(state["seen"]), float(state["mean"]), float(state["variance"])


def print_left_out(num_replicas: int, size: int) -> None:
    """Print a line if fewer than all replicas have taken part in a synchronisation."""
    if num_replicas < size:
        left = "the global weights stay as they were" if num_replicas == 0 else "they go on from the others' mean"
        print_rank(
            f"meshwright: {size - num_replicas} of {size} replicas were left out, their weights had moved out of all "
            f"proportion; {left}",
            flush=True,
        )


# --- The shared state beside inner and outer optimizer, as plain values and tensors


def flags_of(shared: Synchronizer) -> dict[str, Any]:
    """Return the plain values that are equal in all replicas; wait for fragments under way.

    ``under_way`` lists fragments whose averaged pseudo-gradients must be saved, with the number of replicas in them.
    """
    return {
        "num_syncs": shared.num_syncs,
        "replicas_are_equal": shared.replicas_are_equal,
        "num_fragments": shared.policy.fragments,
        "under_way": {str(fragment): count for fragment, (_, count, _) in shared.settle().items()},
    }


def own_flags_of(shared: Synchronizer) -> dict[str, Any]:
    """Return the plain values of this replica alone: its norms, and the fragments under way that it took part in."""
    took_part = [str(fragment) for fragment, (_, _, took) in shared.settle().items() if took]
    return {"norms": [watch.state_dict() for watch in shared.watches], "took_part": took_part}


def load_flags(
    shared: Synchronizer, saved: Mapping[str, Any], own: Mapping[str, Any], landed: Mapping[int, list[torch.Tensor]]
) -> None:
    """Load what the two functions returned.

    Args:
        shared: Must have started.
        saved: Result of :func:`flags_of`.
        own: Result of :func:`own_flags_of`.
        landed: This rank's parts of the averaged pseudo-gradients of every fragment under way.

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
    """Refuse fragments under way if this run cuts the model otherwise.

    Raises:
        CheckpointError: With the number that there were.
    """
    if saved["under_way"] and saved["num_fragments"] != shared.policy.fragments:
        raise CheckpointError(
            "The checkpoint was written while fragments were under way, and this run cuts the model otherwise",
            expected=f"{saved['num_fragments']} fragments",
            got=str(shared.policy.fragments),
            fix="resume with as many fragments as before",
        )


def state_of(shared: Synchronizer) -> dict[str, Any]:
    """Return this rank's part of global weights and fragments under way, and all plain values."""
    landed = {str(fragment): list(views) for fragment, (views, *_) in shared.settle().items()}
    return {
        "global": _copies_as_state(shared),
        "landed": landed,
        "flags": flags_of(shared),
        "own_flags": own_flags_of(shared),
    }


def whole_state_of(shared: Synchronizer) -> dict[str, Any]:
    """Return the state with whole tensors on rank 0; collective.

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
    """Convert a state of either kind to the layout of the global weights here; collective.

    Raises:
        CheckpointError: On every rank, when it is no such state, or its parameters do not fit.
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
    """Load what :func:`laid_out_state` returned; the model's weights may be loaded before or after."""
    for key, copy in _copies(shared).items():
        local_tensor(copy).copy_(local_tensor(saved["global"]["state"][key]["weight"]))
    landed = {int(key): [view.clone() for view in views] for key, views in saved["landed"].items()}
    load_flags(shared, saved["flags"], saved["own_flags"], landed)
    shared.awaits_weights = True


def _copies_as_state(shared: Synchronizer) -> dict[str, Any]:
    """Return global weights in the form of an optimizer's state dict, which can be gathered and laid out anew."""
    groups = shared.copy.outer.state_dict()["param_groups"]
    return {"state": {key: {"weight": copy} for key, copy in _copies(shared).items()}, "param_groups": groups}


def _copies(shared: Synchronizer) -> dict[Any, torch.Tensor]:
    """Return global weights by their keys in the outer optimizer's state dict."""
    outer = shared.copy.outer
    copies = [copy.detach() for group in outer.param_groups for copy in group["params"]]
    names = [name for group in outer.state_dict()["param_groups"] for name in group["params"]]
    return dict(zip(names, copies, strict=True))

"""Adam over shards and half precision: `AdamOptimizer` on the device, `AdamOffloadOptimizer` in host memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from meshwright.errors import ConfigError, ModelError, did_you_mean
from meshwright.optim.adam.adam_rule import (
    WEIGHT_DECAY_RULES,
    AdamRule,
    AdamStates,
    WeightDecayRule,
    check_saved_states,
)
from meshwright.optim.adam.bucket_update import (
    Bucket,
    BucketUpdate,
    DeltaMoments,
    Flight,
    Link,
    StagedLink,
    cut,
)
from meshwright.optim.checks import bad_value, check_at_least_zero, check_betas, check_dense, check_types
from meshwright.optim.dtensors import HALF_TYPES, local_tensor
from meshwright.optim.offload_storage import CudaCopies
from meshwright.optim.pipeline_state_dict import ShardedStateDict
from meshwright.runtime.torch_internals.optim import step_post_hooks_of, step_pre_hooks_of

_BUCKET_ELEMENTS = 2**24


class AdamBase(ShardedStateDict):
    """Base class of :class:`AdamOptimizer` and :class:`AdamOffloadOptimizer`."""

    state_kind = "AdamW"
    """States have the names and meaning of those of ``torch.optim.AdamW``: checkpoints load into either."""
    step_takes_scale = True
    """``step(scale=…)`` divides the gradients itself."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        weight_decay_rule: WeightDecayRule = "decoupled",
        maximize: bool = False,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ) -> None:
        if bucket_elements < 1:
            raise bad_value("bucket_elements", bucket_elements, "1 or more elements")
        self.bucket_elements = bucket_elements
        self.record_delta = record_delta
        self._begin()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hold_steps": hold_steps,
            "weight_decay_rule": weight_decay_rule,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._links: dict[torch.device, Link] = {}  # made when the first parameter of a device is updated
        self._states = AdamStates(lambda parameter: self.state[parameter], self.home)
        self._delta = DeltaMoments()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the constructor's values for what it lacks.

        Raises:
            ConfigError: When a hyperparameter is out of range.
            ModelError: When a parameter is not fp32, fp16 or bf16.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        It may leave the gradients of fp32 parameters divided by ``scale``; others stay as they were.

        Args:
            closure: Computes the loss again, with gradients; its result is returned.
            scale: The factor by which the loss was multiplied.

        Raises:
            ModelError: When a gradient is sparse; nothing is updated then.
            ConfigError: When a loaded group asks for ``amsgrad``, or ``scale`` is not above 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step(scale)
        with torch.no_grad(), fresh_links_after_error(self._links):
            self._delta.restart()
            for update in self._updates(with_gradient=True):
                update.run(scale)
            if self.record_delta:
                self._delta.reduce()
        return loss

    def _updates(self, *, with_gradient: bool) -> list[BucketUpdate]:
        """Return one update per group, type and device, of parameters with a gradient or of all that train."""
        updates = []
        for group in self.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None if with_gradient else parameter.requires_grad:
                    kinds.setdefault((parameter.dtype, local_tensor(parameter).device), []).append(parameter)
            for (dtype, device), parameters in kinds.items():
                link = self._link(device)
                limit = self.bucket_elements if link.remote or dtype in HALF_TYPES else None
                rule = AdamRule.of(group, dtype)
                delta = self._delta if self.record_delta else None
                updates.append(BucketUpdate(parameters, cut(parameters, limit), rule, link, self._states, delta))
        return updates

    def _link(self, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = self._make_link(device)
        return self._links[device]

    def _make_link(self, device: torch.device) -> Link:
        return Link()

    def home(self, parameter: torch.Tensor) -> tuple[torch.device, bool]:
        """Return the device of a parameter's states, and whether that is another device than its own."""
        local = local_tensor(parameter)
        link = self._link(local.device)
        return link.home(local), link.remote

    @property
    def staging_bytes(self) -> int:
        """Return the bytes this rank holds for moving and converting gradients and weights, beside the states."""
        return sum(link.staging_bytes for link in self._links.values())

    def _check_step(self, scale: float) -> None:
        if not 0 < scale < float("inf"):
            raise bad_value("scale", scale, "a finite number above 0")
        for group in self.param_groups:
            if group.get("amsgrad"):
                raise ConfigError(
                    f"{type(self).__name__} has no amsgrad, which a loaded checkpoint asks for",
                    expected="amsgrad=False",
                    got="amsgrad=True",
                    fix="train on with torch.optim.AdamW(amsgrad=True), or set the group's amsgrad to False",
                )
            for parameter in group["params"]:
                check_dense(parameter)

    @torch.no_grad()
    def empty_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's states before its first step: step, exp_avg, exp_avg_sq and perhaps master."""
        return self._states.made_for(parameter)

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse states of another kind of optimizer."""
        check_saved_states(state_dict)

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Copy the parameters into their fp32 masters; call it after weights were changed by other means than a step.

        The next step rounds the masters into the parameters: a change of the parameters alone would be lost.
        """
        for parameter, state in self.state.items():
            if "master" in state:
                local_tensor(state["master"]).copy_(local_tensor(parameter))

    def get_avg_delta(self) -> float:
        """Return the mean of the last step's m̂ / (√v̂ + eps) + weight_decay · w over all parameters of all ranks.

        Raises:
            ConfigError: Without ``record_delta=True``.
        """
        self._check_recorded()
        return self._delta.mean

    def get_var_delta(self) -> float:
        """Return the population variance of what :meth:`get_avg_delta` averages.

        Raises:
            ConfigError: Without ``record_delta=True``.
        """
        self._check_recorded()
        return self._delta.variance

    def _check_recorded(self) -> None:
        if not self.record_delta:
            raise ConfigError(
                "The deltas of the last step were not recorded",
                expected="record_delta=True",
                got="record_delta=False",
                fix="build the optimizer with record_delta=True",
            )

    def forget(self) -> None:
        """Release states that are about to be replaced."""
        self._states.forget()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles make streams, queues and staging buffers anew.
        own = {"bucket_elements": self.bucket_elements, "record_delta": self.record_delta}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_links" not in self.__dict__:
            self._begin()
        for group in self.param_groups:  # torch's AdamW saves groups without our own values
            for key, value in self.defaults.items():
                group.setdefault(key, value)


@contextlib.contextmanager
def fresh_links_after_error(links: dict[torch.device, Link]) -> Iterator[None]:
    """Discard all links when a step fails: a bucket under way would block its staging buffers for ever."""
    try:
        yield
    except BaseException:
        links.clear()
        raise


def _check_group(group: dict[str, Any]) -> None:
    rule = group["weight_decay_rule"]
    if rule not in WEIGHT_DECAY_RULES:
        raise ConfigError(
            f"Unknown weight_decay_rule {rule!r}{did_you_mean(str(rule), WEIGHT_DECAY_RULES)}",
            expected=f"one of {', '.join(WEIGHT_DECAY_RULES)}",
            got=repr(rule),
            fix="use decoupled for AdamW's rule",
        )
    check_at_least_zero(group, "lr", "eps", "weight_decay")
    check_betas(group, 2)
    if not isinstance(group["hold_steps"], int) or group["hold_steps"] < 0:
        raise bad_value("hold_steps", group["hold_steps"], "a number of steps, 0 or more")
    check_types(group)


class AdamOptimizer(AdamBase):
    """Adam and AdamW for fp32, fp16 and bf16 parameters, plain or sharded (BMTrain's ``AdamOptimizer``).

    Moments are fp32 and never scaled. Half-precision parameters have an fp32 master weight in ``optimizer.state``,
    which checkpoints include, and equal the master rounded to nearest. The arithmetic is torch's fused kernel on local
    shards: an fp32 step is that of ``torch.optim.AdamW(fused=True)``, bit for bit. Memory per parameter element: 8
    bytes of states for fp32, 12 for half precision, and one bucket of fp32 gradients.

    Weight decay follows one rule for all types, by default AdamW's. BMTrain's own, decoupled for half precision and
    coupled for fp32, is ``weight_decay_rule="bmtrain"``.

    Call :meth:`refresh_master` after weights were changed by other means than a step or a whole checkpoint. Loading
    weights into a model whose optimizer ``accelerate`` has built needs no such call.

    Args:
        params: Parameters or groups of them; groups may set all values below down to ``maximize``.
        lr: Learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay; decoupled decay multiplies weights by 1 - lr · weight_decay.
        hold_steps: Number of first steps of each parameter with lr 0, in which only the moments accumulate.
        record_delta: Measure the update's direction, see :meth:`get_avg_delta`; one small all-reduce per step.
        weight_decay_rule: ``"decoupled"`` (Loshchilov and Hutter 2019), ``"coupled"`` (L2, Kingma and Ba 2015), or
            ``"bmtrain"``.
        maximize: Ascend instead of descend.
        bucket_elements: Elements of half-precision gradients that are converted at a time.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: When a parameter is not fp32, fp16 or bf16.
    """


# --- Adam with states in host memory, updated after backward or by a thread behind it


class BackwardUpdate:
    """Context in which every bucket is updated as soon as backward has completed all its gradients.

    Hooks of the parameters count gradients down and queue complete buckets; a thread computes them.

    Args:
        updates: The whole step, over all trainable parameters.
        scale: The factor by which gradients are multiplied.
    """

    def __init__(self, updates: Sequence[BucketUpdate], scale: float) -> None:
        self._updates = updates
        self._scale = scale
        self._owner = {id(parameter): update for update in updates for parameter in update.parameters}
        self._buckets: dict[int, list[Bucket]] = {key: [] for key in self._owner}  # of each parameter, until begun
        self._awaited: dict[int, set[int]] = {}  # the parameters without a gradient, of each bucket not begun
        for update in updates:
            for bucket in update.buckets:
                self._awaited[id(bucket)] = {id(piece.parameter) for piece in bucket}
                for key in self._awaited[id(bucket)]:
                    self._buckets[key].append(bucket)
        self._done: set[int] = set()  # parameters whose step has been counted
        self._flights: queue.SimpleQueue[tuple[BucketUpdate, Flight] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="update-behind-backward", daemon=True)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for update in self._updates:
            for parameter in update.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        self._thread.start()

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None and self._error is None:
                self._begin_the_rest()
        finally:
            self._flights.put(None)
            self._thread.join()
            for update in self._updates:
                update.link.join()
        if kind is None and self._error is not None:
            raise self._error

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._done:
            raise ModelError(
                "A parameter got a second gradient after it was updated",
                expected="one backward in the block, in which every gradient is complete when it arrives",
                got=f"two gradients for a parameter of shape {tuple(parameter.shape)}",
                fix="run earlier micro-batches before the block, or use step() for modules that run twice under FSDP2",
            )
        self._count(parameter)
        for bucket in list(self._buckets[id(parameter)]):
            awaited = self._awaited[id(bucket)]
            awaited.discard(id(parameter))
            if not awaited:
                self._begin(self._owner[id(parameter)], bucket)
        if not self._buckets[id(parameter)]:
            parameter.grad = None  # an empty shard is in no bucket

    def _count(self, parameter: torch.Tensor) -> None:
        check_dense(parameter)
        self._done.add(id(parameter))
        self._owner[id(parameter)].advance(parameter)

    def _begin(self, update: BucketUpdate, bucket: Bucket) -> None:
        """Begin a bucket, and free the gradients that no other bucket needs."""
        flight = update.start([piece for piece in bucket if piece.parameter.grad is not None])
        self._flights.put((update, flight))
        del self._awaited[id(bucket)]
        for piece in bucket:
            waiting = self._buckets[id(piece.parameter)]
            waiting[:] = [other for other in waiting if other is not bucket]
            if not waiting:
                piece.parameter.grad = None

    def _begin_the_rest(self) -> None:
        for update in self._updates:
            for parameter in update.parameters:
                if parameter.grad is not None and id(parameter) not in self._done:
                    self._count(parameter)
            for bucket in update.buckets:
                if id(bucket) in self._awaited:
                    self._begin(update, bucket)

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._flights.get()) is not None:
            update, flight = job
            try:
                if self._error is None:
                    update.finish(flight, self._scale)
                    continue
            except BaseException as error:
                self._error = error
            update.link.drop(flight.ticket)  # backward may be waiting for the slot


class AdamOffloadOptimizer(AdamBase):
    """:class:`~meshwright.optim.AdamOptimizer` whose states live in host memory (ZeRO-Offload, Ren et al. 2021, §4-5).

    The device holds parameters and gradients. The host holds 12 bytes per element (fp32 master, two fp32 moments) and
    staging buffers for two buckets of ``bucket_elements``, page-locked on CUDA. States are not page-locked, since only
    staging buffers are copied. A step is a pipeline over buckets: gradients of the next bucket travel to the host in
    their own type, torch's fused kernel updates the present one, and the weights of the last one travel back in theirs,
    on two streams. The host does not wait for the last weights; the device does, before its next work.

    Clipping and loss scaling need the norm or the overflow flag of all gradients, so an update with them cannot begin
    before the end of backward. Without them, :meth:`step_in_backward` updates behind backward.

    Parameters in host memory are updated there as AdamOptimizer does, with no copies. Arguments, states, errors and
    results are those of AdamOptimizer; either loads the checkpoints of the other.
    """

    def _make_link(self, device: torch.device) -> Link:
        return Link() if device.type == "cpu" else StagedLink(CudaCopies(device))

    @contextlib.contextmanager
    def step_in_backward(self, scale: float = 1.0) -> Iterator[None]:
        """Take one ``step`` behind the backward pass inside the block; collective as ``step`` is.

        A bucket's gradients leave as soon as backward has completed them, and are freed; a thread updates the bucket on
        the host, and its weights return, while backward goes on. The step is complete when the block ends. Parameters
        that got a gradient only before the block are updated, too::

            loss(first_half).backward()  # accumulates
            with optimizer.step_in_backward():
                loss(second_half).backward()

        Clipping, loss scaling and the skipping of non-finite steps need ``step``: they look at all gradients before
        any weight changes. An error inside the block leaves some parameters updated and others not. It does not work
        with ``DistributedDataParallel``, which averages gradients after they were taken here; FSDP2 averages before.
        Hooks of ``step`` (averaged weights, votes) are called when the block ends.

        Args:
            scale: The factor by which the loss was multiplied.

        Raises:
            ModelError: When a parameter gets a second gradient in the block, or a sparse one.
        """
        self._check_step(scale)
        with fresh_links_after_error(self._links):
            with torch.no_grad():
                self._delta.restart()
                update = BackwardUpdate(self._updates(with_gradient=False), scale)
            with update:
                yield
            if self.record_delta:
                self._delta.reduce()
        for hook in (*step_pre_hooks_of(self).values(), *step_post_hooks_of(self).values()):
            hook(self, (), {})

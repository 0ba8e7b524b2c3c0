"""Train replicas on their own and synchronise them every few steps (`outer`, after BMUF and DiLoCo)."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, NamedTuple

from torch.optim import Optimizer

from meshwright.cost import Encoding, OuterState, Step, Traffic, shape_on
from meshwright.errors import StrategyError
from meshwright.methods.base import Job, Method, Phase
from meshwright.optim import (
    BlockMomentum,
    DiLoCo,
    LocalSGD,
    OuterOptimizer,
    OuterPolicy,
    PostLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from meshwright.optim.outer.replica_averaging import BLOCK
from meshwright.optim.outer.sync_policy import Buffers, InnerState, Quantise, Warmup
from meshwright.runtime import same_on_every_rank


class _Rule(NamedTuple):
    """A preset class, and its names for the keys of the method; None: it does not take that key."""

    build: type[OuterOptimizer]
    lr: str | None
    momentum: str | None
    nesterov: str | None = None


_RULES = {
    "bmuf": _Rule(BlockMomentum, "block_lr", "block_momentum", "nesterov"),
    "local_sgd": _Rule(LocalSGD, None, None),
    "post_local_sgd": _Rule(PostLocalSGD, None, None),
    "slowmo": _Rule(SlowMo, "slowmo_lr", "slowmo_momentum"),
    "diloco": _Rule(DiLoCo, "outer_lr", "outer_momentum", "nesterov"),
    "streaming_diloco": _Rule(StreamingDiLoCo, "outer_lr", "outer_momentum", "nesterov"),
}
_WIDE_BYTES = 4  # pseudo-gradients travel in fp32 at least
_RENAMED = ("lr", "momentum", "nesterov")


class Outer(Method):
    """Makes every index along the ``replica`` axis a replica with its own weights, inside which other methods work.

    Config: ``{"rule": "diloco", "sync_every": 50}``, or the rule alone. A key left out has the default of the rule's
    class (see :mod:`meshwright.optim.outer`); all others are fields of ``OuterPolicy``.
    """

    method_name: ClassVar[str] = "outer"
    short_forms: ClassVar[Mapping[type, str]] = {str: "rule"}
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "replicas synchronise every H steps: BMUF, local SGD, SlowMo, DiLoCo"
    effect: ClassVar[str] = (
        "memory: global weights, and momentum. Communication: one all-reduce of all weights every sync_every steps"
    )
    seed_name: ClassVar[str | None] = "fairseq: BMUF"
    axis: ClassVar[str | None] = "replica"
    rule: Literal["bmuf", "local_sgd", "post_local_sgd", "slowmo", "diloco", "streaming_diloco"] = "diloco"
    sync_every: int | None = None
    lr: float | None = None
    """Learning rate of the outer step."""
    momentum: float | None = None
    """Momentum of the outer step."""
    nesterov: bool | None = None
    warmup_steps: int | None = None
    warmup: Warmup | None = None
    inner_state: InnerState | None = None
    buffers: Buffers | None = None
    fragments: int | None = None
    delay: int | None = None
    merge_alpha: float | None = None
    quantise: Quantise | Literal["none"] | None = None
    """``none`` switches off what the rule does by default."""
    clip_pseudo_grad: float | None = None
    anomaly_threshold: float | None = None
    offload: bool | None = None
    split: bool | None = None

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys that the rule does not take."""
        rule = _RULES.get(keys.get("rule", "diloco"))
        for key in ("lr", "momentum", "nesterov"):
            if rule is not None and keys.get(key) is not None and getattr(rule, key) is None:
                raise StrategyError(
                    f"outer: the rule {keys['rule']!r} has no {key!r}",
                    expected=f"a rule with one, such as diloco, or no {key}",
                    got=f"{key}={keys[key]!r}",
                    fix="leave the key out",
                )
        if rule is _RULES["post_local_sgd"] and keys.get("warmup_steps") is None:
            raise StrategyError(
                "outer: post_local_sgd needs the number of its synchronous steps",
                expected="warmup_steps",
                got="none",
                fix='give it, or use the rule "local_sgd"',
            )
        return keys

    def is_active(self, sizes: Mapping[str, int]) -> bool:
        """Return True: a single replica takes outer steps, too."""
        return True

    def check(self, job: Job) -> None:
        """Refuse numbers that do not fit together, and a job without an optimizer."""
        assert self._policy is not None  # building it checks the numbers
        fix = "pass the class of the inner optimizer, such as torch.optim.AdamW"
        job.require_optimizer(self.method_name, "to work with", fix)

    def apply(self, job: Job) -> None:
        """Wrap the built optimizer, which becomes the inner one."""
        if self._policy.offload and job.device.type == "cpu":
            job.notices.append("outer: offload changes nothing, the model is in host memory already")
        job.optimizer.wrappers.append(lambda inner: self._built(inner, job))

    def _built(self, inner: Optimizer, job: Job) -> OuterOptimizer:
        # A stage of a pipeline may have too few parameters for its fragments where others have enough.
        with same_on_every_rank():
            built = _RULES[self.rule].build(
                inner, **self._arguments, model=job.model, group=job.require_mesh().get_group("replica")
            )
        built.synchronizer.stages = job.stages
        return built

    @property
    def makes_equal(self) -> bool:
        """Return whether replicas hold the global weights, and nothing else, behind each synchronisation."""
        policy = self._policy
        return policy.fragments == 1 and policy.delay == 0 and policy.merge_alpha == 0

    @property
    def _arguments(self) -> dict[str, Any]:
        """The keys that are set, under the names of the rule's class."""
        rule, given = _RULES[self.rule], self.model_dump(exclude={"rule"}, exclude_none=True)
        if given.get("quantise") == "none":
            given["quantise"] = None
        return {(getattr(rule, key) if key in _RENAMED else key): value for key, value in given.items()}

    @property
    def _policy(self) -> OuterPolicy:
        """The policy that the rule's class makes of the keys."""
        values = {field.name: self._value(field.name, field.default) for field in fields(OuterPolicy)}
        return OuterPolicy(**values)

    def _value(self, key: str, otherwise: Any) -> Any:
        """Return a key as it was given, else the default of the rule's class, else ``otherwise``."""
        name = getattr(_RULES[self.rule], key) if key in _RENAMED else key
        if name in self._arguments:
            return self._arguments[name]
        presets = itertools.takewhile(lambda kind: kind is not OuterOptimizer, _RULES[self.rule].build.__mro__)
        for kind in presets:
            own = inspect.signature(kind).parameters.get(name)
            if own is not None and own.default is not own.empty:
                return own.default
        return otherwise

    def cost(self, step: Step) -> Step:
        """Add global weights, momentum, and a reduction every ``sync_every`` steps."""
        policy = self._policy
        keeps_momentum = self.rule == "slowmo" or float(self._value("momentum", 0.0)) > 0
        step = step.replace(
            outer=OuterState(
                num_tensors=2 if keeps_momentum else 1,
                split_axis="replica" if policy.split else None,
                on_host=policy.offload and not step.on_cpu,
            )
        )
        return step.send(*_traffic(step, policy))


def _traffic(step: Step, policy: OuterPolicy) -> list[Traffic]:
    """Return what a rank sends per synchronisation, after the warm-up."""
    sizes = [
        (count * math.prod(shape_on(step, parameter, step.parameters.axis)), max(parameter.itemsize, _WIDE_BYTES))
        for count, parameter in step.every_parameter()
        if parameter.trainable
    ]

    def traffic(kind: Literal["all_reduce", "all_to_all", "all_gather", "broadcast"], num_bytes: int) -> Traffic:
        return Traffic(kind, "replica", num_bytes, "update", every=policy.sync_every)

    if policy.quantise is not None:
        num_bytes = Encoding(policy.quantise, BLOCK).num_bytes(sum(size for size, _ in sizes) // BLOCK * BLOCK)
        return [traffic("all_to_all", num_bytes), traffic("all_gather", num_bytes)]
    num_bytes = sum(size * itemsize for size, itemsize in sizes)
    if policy.split:
        return [traffic("all_to_all", num_bytes), traffic("broadcast", num_bytes)]
    return [traffic("all_reduce", num_bytes)]

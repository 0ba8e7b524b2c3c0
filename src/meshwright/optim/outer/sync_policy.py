"""Policy, schedule and fragments: the choices of how and when replicas synchronise."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

import torch

from meshwright.errors import ConfigError, did_you_mean

Action = Literal["send", "advance", "apply"]


@dataclass(frozen=True)
class SyncSchedule:
    """Schedule of the actions that are due after each step.

    Blocks of ``sync_every`` steps are counted from the end of warm-up (fairseq counts from step 0, so that its first
    block is short). Each of ``num_fragments`` parts of the model is synchronised once per block, one after the other at
    equal distances, the last at the block's end. A fragment arrives ``delay`` steps after it was sent.

    Raises:
        ConfigError: When the numbers do not make a schedule.
    """

    sync_every: int
    warmup_steps: int = 0
    num_fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise _error("sync_every is not a number of steps", "1 or more", self.sync_every, "use 1 for every step")
        if self.warmup_steps < 0:
            raise _error("warmup_steps is not a number of steps", "0 or more", self.warmup_steps, "use 0 for none")
        if self.num_fragments < 1 or self.sync_every % self.num_fragments:
            raise _error(
                "The fragments do not divide the steps of a block",
                f"a number of fragments that divides sync_every={self.sync_every}",
                self.num_fragments,
                "change one of the two: one fragment is sent every sync_every / fragments steps",
            )
        if not 0 <= self.delay < self.distance:
            raise _error(
                "A fragment would arrive after the next one is sent",
                f"a delay from 0 to {self.distance - 1} steps (below sync_every / fragments)",
                self.delay,
                "lower the delay, or use fewer fragments",
            )

    @property
    def distance(self) -> int:
        """Number of steps between one fragment and the next."""
        return self.sync_every // self.num_fragments

    def in_warmup(self, num_updates: int) -> bool:
        """Return whether the step that follows ``num_updates`` others belongs to warm-up."""
        return num_updates < self.warmup_steps

    def ends_warmup(self, num_updates: int) -> bool:
        """Return whether warm-up ends after exactly ``num_updates`` steps."""
        return self.warmup_steps > 0 and num_updates == self.warmup_steps

    def due(self, num_updates: int) -> Iterator[tuple[Action, int]]:
        """Yield the actions due after ``num_updates`` steps, each with its fragment: arrivals before departures."""
        steps = num_updates - self.warmup_steps
        if self.delay:
            yield from self._at("apply", steps - self.delay)
            if self.delay > 1:  # a quantised exchange begins its second leg half way
                yield from self._at("advance", steps - self.delay // 2)
        yield from self._at("send", steps)
        if not self.delay:
            yield from self._at("apply", steps)

    def _at(self, action: Action, sent_after: int) -> Iterator[tuple[Action, int]]:
        if sent_after > 0 and sent_after % self.distance == 0:
            yield action, (sent_after // self.distance - 1) % self.num_fragments


def _error(what: str, expected: str, got: object, fix: str) -> ConfigError:
    return ConfigError(what, expected=expected, got=got if isinstance(got, str) else repr(got), fix=fix)


# --- The policy: every choice that the presets make

Warmup = Literal["synchronous", "single", "broadcast"]
InnerState = Literal["keep", "reset", "average"]
Buffers = Literal["average", "keep"]
Quantise = Literal["int8", "int4"]


@dataclass(frozen=True)
class OuterPolicy:
    """Frequency and details of the synchronisation of replicas.

    Raises:
        ConfigError: When values are out of range or exclude each other.
    """

    sync_every: int = 50
    """Steps of a block, H; every block ends with an outer step."""
    warmup_steps: int = 0
    """Steps before the first block."""
    warmup: Warmup = "synchronous"
    """``synchronous``: gradients are averaged over replicas in every step of warm-up. ``single``: after it all replicas
    continue with replica 0's weights and optimizer states, as if it had trained alone. ``broadcast``: they continue
    with its weights and with optimizer states reset (averaged under ``inner_state="average"``), as in fairseq."""
    inner_state: InnerState = "keep"
    """Treatment of the inner optimizer's states when new weights arrive."""
    buffers: Buffers = "average"
    """Treatment of floating-point buffers of the model, such as running means, at the end of a block."""
    fragments: int = 1
    """Parts of the model that are synchronised in turn."""
    delay: int = 0
    """Steps between sending a fragment and applying the result; training goes on meanwhile."""
    merge_alpha: float = 0.0
    """Share of a replica's own weights when global ones arrive: w ← α w + (1 - α) global."""
    quantise: Quantise | None = None
    """Pseudo-gradients travel in 8 or 4 bits, and are summed in fp32."""
    clip_pseudo_grad: float | None = None
    """Largest norm of the averaged pseudo-gradient (of a fragment)."""
    anomaly_threshold: float | None = None
    """Standard deviations above its running mean from which on a pseudo-gradient's norm excludes the replica from the
    average (3 in EDiT, Cheng et al. 2024, §3.2). One that is not finite is always excluded."""
    anomaly_warmup_syncs: int = 10
    """Synchronisations before the search for anomalies begins."""
    offload: bool = False
    """Whether global weights and outer state live in host memory."""
    split: bool = False
    """Whether global weights and outer state are divided among the replicas, parameter by parameter."""
    skip_when_alone: bool = False
    """Whether a single replica takes no outer steps; with them it is Lookahead (Zhang et al. 2019)."""
    bucket_mb: float = 64.0
    """Size of flat communication buffers, in MB (10^6 bytes)."""

    def __post_init__(self) -> None:
        self._check_words()
        assert self.schedule is not None  # checks the counts
        for name, low, high in (("merge_alpha", 0, 1), ("bucket_mb", 1e-6, float("inf"))):
            value = getattr(self, name)
            if not low <= value < high:
                raise _error(f"{name} is out of range", f"from {low} to below {high}", value, f"choose another {name}")
        for name in ("clip_pseudo_grad", "anomaly_threshold"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _error(f"{name} is out of range", "a number above 0, or None", value, "None switches it off")
        if self.split and (self.quantise is not None or self.anomaly_threshold is not None):
            other = "quantise" if self.quantise is not None else "anomaly_threshold"
            raise _error(
                f"split and {other} exclude each other: a replica without the global weights cannot form its own "
                "pseudo-gradient",
                "one of the two",
                f"split=True and {other}={getattr(self, other)!r}",
                "leave one out; offload lowers device memory, too",
            )

    def _check_words(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            words = [word for part in (hints[field.name], *get_args(hints[field.name])) for word in get_args(part)]
            words = [word for word in words if isinstance(word, str)]
            value = getattr(self, field.name)
            if words and isinstance(value, str) and value not in words:
                raise _error(
                    f"Unknown {field.name} {value!r}{did_you_mean(value, words)}",
                    f"one of {', '.join(words)}",
                    value,
                    "correct the word",
                )

    @property
    def schedule(self) -> SyncSchedule:
        """Return the schedule of synchronisations."""
        return SyncSchedule(self.sync_every, self.warmup_steps, self.fragments, self.delay)

    @property
    def bucket_bytes(self) -> int:
        """Return the size of flat communication buffers in bytes."""
        return int(self.bucket_mb * 1e6)


# --- Fragments: parts of a model that are synchronised in turn


def divided(
    parameters: Sequence[torch.Tensor], num_fragments: int, given: Sequence[Sequence[torch.Tensor]] | None = None
) -> list[list[torch.Tensor]]:
    """Cut parameters into runs of about equal size, in their order, or return the given fragments.

    Raises:
        ConfigError: When a fragment would be empty, or the given ones do not contain every parameter once.
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
        # Every fragment gets a parameter, also beside one huge one.
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

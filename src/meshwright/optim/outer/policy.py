"""How replicas synchronise: every choice that the presets make."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from meshwright.errors import ConfigError, did_you_mean
from meshwright.optim.outer.rhythm import Rhythm

Warmup = Literal["synchronous", "single", "broadcast"]
InnerState = Literal["keep", "reset", "average"]
Buffers = Literal["average", "keep"]
Quantise = Literal["int8", "int4"]


@dataclass(frozen=True)
class OuterPolicy:
    """How often replicas synchronise, and what happens then.

    Raises:
        ConfigError: When values are out of range or exclude each other.
    """

    sync_every: int = 50
    """Steps of a block, H; every block ends with an outer step."""
    warmup_steps: int = 0
    """Steps before the first block."""
    warmup: Warmup = "synchronous"
    """``synchronous``: gradients are averaged over replicas in every step of warm-up. ``single``: after it all go on
    with replica 0's weights and optimizer state, as if it had trained alone. ``broadcast``: with its weights, and
    optimizer states reset (averaged under ``inner_state="average"``), as fairseq has it."""
    inner_state: InnerState = "keep"
    """The inner optimizer's states when new weights arrive."""
    buffers: Buffers = "average"
    """Floating-point buffers of the model, such as running means, at the end of a block."""
    fragments: int = 1
    """Parts of the model that are synchronised in turn."""
    delay: int = 0
    """Steps between sending a fragment and taking the result; training goes on meanwhile."""
    merge_alpha: float = 0.0
    """Share of a replica's own weights when global ones arrive: w ← α w + (1 - α) global."""
    quantise: Quantise | None = None
    """Pseudo-gradients travel in 8 or 4 bits, and are summed in fp32."""
    clip_pseudo_grad: float | None = None
    """Largest norm of the averaged pseudo-gradient (of a fragment)."""
    anomaly_threshold: float | None = None
    """A replica whose pseudo-gradient norm lies so many standard deviations above its running mean is left out of the
    average (3 in EDiT, Cheng et al. 2024, §3.2). One that is not finite always is."""
    anomaly_warmup_syncs: int = 10
    """Synchronisations before anomalies are looked for."""
    offload: bool = False
    """Global weights and outer state wait in host memory."""
    split: bool = False
    """Global weights and outer state are divided among the replicas, parameter by parameter."""
    skip_when_alone: bool = False
    """Whether a single replica takes no outer steps; else they make it Lookahead (Zhang et al. 2019)."""
    bucket_mb: float = 64.0
    """Size of flat communication buffers, in MB (10^6 bytes)."""

    def __post_init__(self) -> None:
        self._check_words()
        assert self.rhythm is not None  # checks the counts
        for name, low, high in (("merge_alpha", 0, 1), ("bucket_mb", 1e-6, float("inf"))):
            value = getattr(self, name)
            if not low <= value < high:
                raise _error(f"{name} is out of range", f"from {low} to below {high}", value, f"choose another {name}")
        for name in ("clip_pseudo_grad", "anomaly_threshold"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _error(f"{name} is out of range", "a number above 0, or None", value, "use None to switch it off")
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
    def rhythm(self) -> Rhythm:
        """When what is due."""
        return Rhythm(self.sync_every, self.warmup_steps, self.fragments, self.delay)

    @property
    def bucket_bytes(self) -> int:
        """Size of flat communication buffers."""
        return int(self.bucket_mb * 1e6)


def _error(what: str, expected: str, got: object, fix: str) -> ConfigError:
    return ConfigError(what, expected=expected, got=got if isinstance(got, str) else repr(got), fix=fix)

"""When replicas synchronise: exact counting of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import ConfigError

Action = Literal["send", "advance", "apply"]


@dataclass(frozen=True)
class Rhythm:
    """What is due after how many steps.

    Blocks of ``sync_every`` steps are counted from the end of warm-up (fairseq counts from step 0, so that its first
    block is short). Each of ``num_fragments`` parts of the model is synchronised once per block, one after the other at
    equal distances, the last at the block's end; what was sent arrives ``delay`` steps later.

    Raises:
        ConfigError: When the numbers make no rhythm.
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
        """Steps between one fragment and the next."""
        return self.sync_every // self.num_fragments

    def in_warmup(self, num_updates: int) -> bool:
        """Whether the step after so many belongs to warm-up."""
        return num_updates < self.warmup_steps

    def ends_warmup(self, num_updates: int) -> bool:
        """Whether warm-up is over after exactly so many steps."""
        return self.warmup_steps > 0 and num_updates == self.warmup_steps

    def due(self, num_updates: int) -> Iterator[tuple[Action, int]]:
        """Actions, each with its fragment, after so many steps; what arrives comes before what is sent."""
        steps = num_updates - self.warmup_steps
        if self.delay:
            yield from self._at("apply", steps - self.delay)
            if self.delay > 1:  # an exchange of two legs begins its second one half way
                yield from self._at("advance", steps - self.delay // 2)
        yield from self._at("send", steps)
        if not self.delay:
            yield from self._at("apply", steps)

    def _at(self, action: Action, sent_after: int) -> Iterator[tuple[Action, int]]:
        if sent_after > 0 and sent_after % self.distance == 0:
            yield action, (sent_after // self.distance - 1) % self.num_fragments


def _error(what: str, expected: str, got: int, fix: str) -> ConfigError:
    return ConfigError(what, expected=expected, got=repr(got), fix=fix)

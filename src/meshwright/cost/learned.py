"""What training runs on a machine have taught about its calibration: a few factors beside what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.cost.efficiency import Calibration, Constants, Efficiency

LEAST, MOST = 0.1, 10.0  # what is further off is no matter of a few factors
MOST_CALL_S = 1.0


@dataclass(frozen=True)
class Learned:
    """By how much longer things take in training steps than a calibration says.

    Args:
        computing: Kernels of blocks and of the update.
        collectives: Their bytes.
        call_s: Seconds that each collective takes beside what it was measured to.
        num_runs: Candidates that it was learned from.
    """

    computing: float = 1.0
    collectives: float = 1.0
    call_s: float = 0.0
    num_runs: int = 0

    def applied(self, known: Calibration) -> Calibration:
        """The calibration with everything as long as it is."""
        devices = {name: self._efficiency(each) for name, each in known.devices.items()}
        return dataclasses.replace(
            known, devices=devices, constants=self._constants(known.constants), num_runs=self.num_runs
        )

    def _efficiency(self, known: Efficiency) -> Efficiency:
        return dataclasses.replace(
            known,
            update=known.update / self.computing,
            intra=known.intra / self.collectives,
            inter=known.inter / self.collectives,
        )

    def _constants(self, known: Constants) -> Constants:
        # Those of shards have seconds of their own where they were measured, and else those of all.
        of_shards = known.shard_s + self.call_s if known.shard_s else 0.0
        return dataclasses.replace(
            known, in_step=known.in_step * self.computing, call_s=known.call_s + self.call_s, shard_s=of_shards
        )


def learned_from(data: Mapping[str, Any]) -> Learned:
    """Reads what ``dataclasses.asdict`` made of it.

    Raises:
        TypeError, ValueError: When it is something else.
    """
    found = Learned(**data)
    bounds = {"computing": (LEAST, MOST), "collectives": (LEAST, MOST), "call_s": (0.0, MOST_CALL_S)}
    for name, (least, most) in bounds.items():
        value = getattr(found, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"learned.{name} must be a number from {least:g} to {most:g}, and is {value!r}")
    if isinstance(found.num_runs, bool) or not isinstance(found.num_runs, int) or found.num_runs < 0:
        raise ValueError(f"learned.num_runs must be a count, and is {found.num_runs!r}")
    return found

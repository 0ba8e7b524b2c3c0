"""Random draws of a pipeline: outside the blocks every stage draws alike, inside them each draws for itself.

What a model draws before its blocks (which tokens are hidden, how much noise is added) is drawn on every stage, and may
be needed again behind them: stages that drew apart would predict one thing and be told another. So between two steps
the generators of all ranks of a pipeline are alike, and a run of a stage begins where a seed says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshwright.runtime import GeneratorState, preserved_rng, seed_in_use, spread_seed

_EVALUATION = torch.Generator()  # so that evaluating changes no draw of training


def draw_seeds(count: int) -> list[int]:
    """Seeds of so many runs, alike on all ranks of a pipeline, which ask together."""
    generator = None if torch.is_grad_enabled() else _EVALUATION
    seeds: list[int] = torch.randint(2**62, (count,), generator=generator, device="cpu").tolist()
    return seeds


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Generators that begin at a seed, and are afterwards as they were."""
    with preserved_rng():
        seed_in_use(seed)
        yield


class BlockDraws:
    """Lets the blocks of a stage draw for themselves: equal dropout masks in all stages would not be independent.

    Args:
        stage: Its number.
        seed: Of the run.
    """

    def __init__(self, stage: int, seed: int) -> None:
        self._stage, self._seed = stage, seed
        self._outside: GeneratorState | None = None

    def enter(self) -> None:
        """Before the first of them."""
        self._outside = GeneratorState.now()
        seed_in_use(spread_seed(self._seed, self._stage))

    def leave(self) -> None:
        """Behind the last of them: goes on with what was drawn outside."""
        assert self._outside is not None, "the first block has run"
        self._outside.restore()

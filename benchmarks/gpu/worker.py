"""One process of a case: it runs the items that are not done, and writes a line before and after each of them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu.cases import CASES
from meshwright.errors import MeshwrightError


class Wrong(AssertionError):
    """What was found is not what it should be."""


@dataclass
class Session:
    """What a case's function works with.

    Args:
        lines: The file to which rank 0 reports.
        tiny: Tiny sizes; the stand-in plays the GPU.
        done: Items that need not run again.
    """

    lines: Path
    tiny: bool
    done: frozenset[str] = frozenset()
    is_first_rank: bool = field(default_factory=lambda: os.environ.get("RANK", "0") == "0")

    @property
    def device(self) -> torch.device:
        """The GPU of this process."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    def gpu(self) -> contextlib.AbstractContextManager[None]:
        """Use the GPU inside; with tiny sizes the tests' stand-in plays it, and what is outside is a CPU's."""
        if not self.tiny:
            return contextlib.nullcontext()
        from tests.stand_in_cuda import stand_in_cuda

        return stand_in_cuda(int(os.environ.get("LOCAL_RANK", "0")))

    def each(self, items: Iterable[str], run: Callable[[str], dict[str, Any] | None]) -> None:
        """Run every item that is not done; one that fails is told, and the others go on.

        Of several ranks new processes go on: connections are no good where a rank has left a collective.
        """
        for name in items:
            if name in self.done:
                continue
            self._tell(item=name)
            try:
                figures = run(name)
            except Exception as error:
                traceback.print_exc()
                self._tell(item=name, ok=False, why=_first_line(error))
                if os.environ.get("WORLD_SIZE", "1") != "1":
                    os._exit(1)
            else:
                self._tell(item=name, ok=True, figures=figures or {})
            gc.collect()  # jobs are cycles of references
            torch.cuda.empty_cache()

    def _tell(self, **told: Any) -> None:
        if self.is_first_rank:
            with self.lines.open("a") as file:
                file.write(json.dumps(told) + "\n")


def _first_line(error: Exception) -> str:
    text = error.what if isinstance(error, MeshwrightError) else str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory is too small for it"
    return f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0][:300]}"


def main() -> None:
    told = json.loads(sys.argv[1])
    case = next(case for case in CASES if case.name == told["case"])
    module, _, name = case.run.partition(":")
    session = Session(Path(told["lines"]), told["tiny"], frozenset(told["done"]))
    function = getattr(importlib.import_module(f"gpu.{module}"), name)
    function(session, *case.args)


if __name__ == "__main__":
    main()

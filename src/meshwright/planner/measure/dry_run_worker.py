"""Run one candidate in its own processes: ``python -m meshwright.planner.measure.dry_run_worker FOLDER``.

Outside of a launcher it starts the ranks; as a rank it builds the caller's training step and times it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.planner.measure.dry_runs import step_times
from meshwright.runtime import init_distributed, rank, settings, shutdown_distributed
from meshwright.runtime.launch import inside_launcher, launch
from meshwright.strategy import Strategy


def main(folder: Path) -> int:
    """Run what ``request.json`` asks for, and write the result, or the error of a rank, beside it."""
    request = json.loads((folder / "request.json").read_text())
    if not inside_launcher():
        # What this module imports, not itself: Python warns of a module that is imported before it is run.
        command = ["-m", "meshwright.planner.measure.dry_run_worker", str(folder)]
        return launch(command, request["nproc"], preload=["meshwright.planner.measure.dry_runs"])
    init_distributed()
    try:
        strategy = Strategy(str(folder / "strategy.json"))
        step = _function(request["entry"])(strategy, request["num_micro_batches"])
        times_s = step_times(step, request["num_steps"], settings().device, request["end_s"] - time.time())
    except Exception as error:
        lines = str(error).splitlines() or [""]
        (folder / f"error.{rank()}").write_text(f"{type(error).__name__}: {lines[0][:300]}")
        raise
    if rank() == 0:
        (folder / "result.json").write_text(json.dumps({"times_s": times_s}))
    shutdown_distributed()
    return 0


def _function(entry: str) -> Callable[..., Callable[[], Any]]:
    place, _, name = entry.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)  # type: ignore[no-any-return]
    spec = importlib.util.spec_from_file_location("candidate_entry", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

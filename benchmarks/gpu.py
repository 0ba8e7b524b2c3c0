"""One command for a machine with GPUs: whether everything is right there, and how fast it is.

    make gpu GPU_MINUTES=10
    python benchmarks/gpu.py [--minutes N] [--out FOLDER] [--case NAME …] [--fresh]
    python benchmarks/gpu.py --tiny      all of it with tiny sizes on a CPU, where a stand-in plays the GPU

Cases run one after the other, the most worth knowing first, each in a process of its own with a limit of its own. What
they find is written as it is found: ``gpu.json``, and ``gpu.md`` as a table. A run that was cut off goes on where it
stood. What cannot run here is told in one line each: no GPU, one that is too old or too small, no NCCL, a package that
is not installed. No network is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu.cases import CASES
from gpu.conductor import Conductor
from gpu.machine import machine_here

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no case after so many (default 10)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder (default runs/gpu)")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and a stand-in for CUDA, on a CPU")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has found")
    given = parser.parse_args()
    machine = machine_here(tiny=given.tiny)
    cases = [case for case in CASES if not given.case or case.name in given.case]
    conductor = Conductor(machine, given.out, 60.0 * given.minutes, tiny=given.tiny, fresh=given.fresh)
    return conductor.run(cases)


if __name__ == "__main__":
    sys.exit(main())

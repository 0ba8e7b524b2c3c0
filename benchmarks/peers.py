"""Other systems and Meshwright, side by side: step time, peak memory, start-up and lines of a user's code.

    python benchmarks/peers.py [--quick] [--case NAME] [--system NAME …] [--json FILE] [--plot FILE]
    python benchmarks/peers.py --device cuda      Llamas of 1 to 8 B in bf16 on every GPU that is visible

A GPT-2 of 4.8 M parameters trains on 2 ranks in fp32 and under bf16 autocast: the same weights, data, fused AdamW,
clipping and threads for all. Every system runs in processes of its own, which are started one after the other
(start-up: from the start of a process to the end of its first step), then all live and take turns of a few steps, so
that a machine whose speed drifts slows all alike. Ratios are medians over turns. Bytes of tensors are counted in other
processes, which are not timed. On GPUs, which hold one model at a time, every turn has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from peers.case import Case, cpu_cases, cuda_cases
from peers.conductor import Schedule, measure
from peers.report import deviations, entry, plot, ratios, show
from peers.systems import ACCELERATE, AUTO, DDP, FSDP, FSDP2, SYSTEMS

QUICK = (DDP, FSDP2, "DeepSpeed ZeRO-2", ACCELERATE, FSDP, AUTO)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"fp32 alone, {', '.join(QUICK)}, three turns")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", action="append", help="only the case of this name; may be repeated")
    parser.add_argument("--system", action="append", choices=tuple(SYSTEMS), help="only this one; may be repeated")
    parser.add_argument("--turns", type=int, help="of each system (default 5, quick and CUDA 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    return parser.parse_args()


def chosen_cases(options: argparse.Namespace, world: int) -> list[Case]:
    cases = cuda_cases(world) if options.device == "cuda" else cpu_cases()
    if options.quick:
        cases = cases[:1]
    if options.case:
        unknown = set(options.case) - {case.name for case in cases}
        if unknown:
            raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {[c.name for c in cases]}")
        cases = [case for case in cases if case.name in options.case]
    return cases


def installed(names: list[str]) -> list[str]:
    """Those whose package is there; the others are named."""
    for package in dict.fromkeys(SYSTEMS[name].package for name in names if SYSTEMS[name].missing):
        print(f"{package} is not installed: its rows are left out", file=sys.stderr)
    return [name for name in names if not SYSTEMS[name].missing]


def machine(names: list[str], world: int) -> dict[str, Any]:
    versions = {SYSTEMS[name].package: SYSTEMS[name].version for name in names}
    return {"ranks": world, "cores": os.cpu_count(), "processor": _processor(), "load": os.getloadavg()[0],
            "python": platform.python_version(), "versions": versions}  # fmt: skip


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def devices(kind: str) -> int:
    if kind == "cpu":
        return 2
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU")
    return torch.cuda.device_count()


def main() -> int:
    options = parsed()
    world, on_cpu = devices(options.device), options.device == "cpu"
    names = installed(options.system or list(QUICK if options.quick else SYSTEMS))
    schedule = Schedule(turns=options.turns or (5 if on_cpu and not options.quick else 3),
                        steps=4 if on_cpu else 10, alive=on_cpu)  # fmt: skip
    cases, everything = chosen_cases(options, world), {}
    document: dict[str, Any] = {"machine": machine(names, world), "cases": [], "best_peer_ratio": {}, "ratios": {}}
    print(json.dumps(document["machine"]))
    for case in cases:
        results = everything[case.name] = measure(case, names, world, schedule)
        show(case, results, world)
        off = deviations(case, results)
        document["cases"] += [entry(case, each, off.get(each.system), world) for each in results]
        document["ratios"][case.name] = ratios(results)
        document["best_peer_ratio"][case.name] = document["ratios"][case.name]["best_peer"]
        if options.json:
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        plot(everything, cases, options.plot)
    return int(any("failure" in each for each in document["cases"]))


if __name__ == "__main__":
    sys.exit(main())

"""The layouts of the parity matrix: what every model trains under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}


@dataclass(frozen=True)
class Layout:
    """A strategy on a world."""

    world: int
    strategy: list[Any]
    layers: int = 4  # of the model
    micro_batches: int = 1


def mesh(**axes: int) -> tuple[str, dict[str, int]]:
    return "parallel_mode", axes


def scheduled(schedule: str) -> tuple[str, dict[str, str]]:
    return "pipeline_parallel", {"schedule": schedule}


def pipelined(ranks: int, schedule: str) -> Layout:
    stages = ranks * STAGES_PER_RANK[schedule]
    return Layout(ranks, [mesh(pipeline=ranks), scheduled(schedule)], max(4, stages), max(4, stages))


SEQUENCE = ("tensor_parallel", {"sequence": True})
LAYOUTS: dict[str, Layout] = {
    "tensor 2": Layout(2, ["tensor_parallel", mesh(tensor=2)]),
    "tensor 2, sequence": Layout(2, [SEQUENCE, mesh(tensor=2)]),
    **{f"pipeline {ranks}, {each}": pipelined(ranks, each) for ranks in (2, 4) for each in SCHEDULES},
    "tensor 2 x zero 2": Layout(4, ["tensor_parallel", "fsdp", mesh(tensor=2, zero=2)]),
    **{
        f"pipeline 2 x {method}": Layout(4, [mesh(pipeline=2, zero=2), method, scheduled("1f1b")], 4, 4)
        for method in ("zero1", "zero2", "fsdp")
    },
    "tensor 2 x pipeline 2": Layout(
        4, [mesh(tensor=2, pipeline=2), "tensor_parallel", scheduled("interleaved")], 4, 4
    ),
    **{
        f"tensor 2, sequence x pipeline 2, {each}": Layout(
            4, [mesh(tensor=2, pipeline=2), SEQUENCE, scheduled(each)], 4, 4
        )
        for each in SCHEDULES
    },
    **{
        f"tensor 2, sequence x pipeline 2, {each} x zero 2": Layout(
            8, [mesh(tensor=2, pipeline=2, zero=2), SEQUENCE, "fsdp", scheduled(each)], 4, 4
        )
        for each in SCHEDULES
    },
    "tensor 2 x pipeline 2 x data 2": Layout(
        8, [mesh(tensor=2, pipeline=2, data=2), "tensor_parallel", scheduled("1f1b")], 4, 4
    ),
    "tensor 2 x pipeline 2 x zero 2": Layout(
        8, [mesh(tensor=2, pipeline=2, zero=2), "tensor_parallel", "fsdp", scheduled("1f1b")], 4, 4
    ),
}  # fmt: skip

"""Predict published runs, and score the predictions per source and in total."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.cost import Calibration, StepTime, simulate
from published_runs.as_user import Kernels, user_plan
from published_runs.cases import Case, NotCovered, RankMemory, case_of, rank_memory
from published_runs.table_rows import Row, flops_per_s, peak_bytes, tokens_per_s


@dataclass(frozen=True)
class Prediction:
    """A published run beside its prediction; None where the table says nothing.

    Args:
        case: What was simulated.
        tokens_per_s_per_gpu: Predicted.
        published_tokens_per_s_per_gpu: As printed, or from what is printed (TFLOPS, MFU) in the source's convention.
        memory: Predicted memory of the rank that needs most.
        published_peak_bytes: As printed, in GiB.
        out_of_memory: Whether the prediction is that it does not fit.
        published_out_of_memory: None where the table does not say whether it ran.
    """

    case: Case
    time: StepTime
    tokens_per_s_per_gpu: float
    published_tokens_per_s_per_gpu: float | None
    memory: RankMemory
    published_peak_bytes: float | None
    out_of_memory: bool
    published_out_of_memory: bool | None

    @property
    def row(self) -> Row:
        """Return the row of the table."""
        return self.case.row


def predict_row(row: Row, calibration: Calibration | None = None) -> Prediction:
    """Predict one row.

    Raises:
        NotCovered: Saying why it cannot be.
    """
    return predict_case(case_of(row), calibration)


def predict_case(case: Case, calibration: Calibration | None = None) -> Prediction:
    """Predict a run that has been read."""
    time = simulate(case.steps, case.cluster, calibration, in_turn=case.in_turn)
    memory = rank_memory(case)
    published = published_tokens_per_s(case)
    return Prediction(
        case=case,
        time=time,
        tokens_per_s_per_gpu=case.tokens_per_step / time.step_time_s / case.cluster.num_devices,
        published_tokens_per_s_per_gpu=published,
        memory=memory,
        published_peak_bytes=_published_peak(case),
        out_of_memory=not memory.fits,
        published_out_of_memory=_published_oom(case.row),
    )


def predict_as_user(row: Row, kernels: Kernels = "own") -> Prediction:
    """Predict one row as a user would, see ``as_user``.

    Raises:
        NotCovered: Saying why it cannot be.
    """
    planned = user_plan(row, kernels)
    case, known = planned.case, planned.plan.forecast
    assert known is not None
    assert known.tokens_per_s is not None
    return Prediction(
        case=case,
        time=known.time,
        tokens_per_s_per_gpu=known.tokens_per_s / case.cluster.num_devices,
        published_tokens_per_s_per_gpu=published_tokens_per_s(case),
        memory=planned.memory,
        published_peak_bytes=_published_peak(case),
        out_of_memory=not planned.memory.fits,
        published_out_of_memory=_published_oom(case.row),
    )


def _published_oom(row: Row) -> bool | None:
    return True if row.ran_out_of_memory else False if _ran(row) else None


def _published_peak(case: Case) -> float | None:
    """Return the peak as printed; more than the device has is no peak of its memory and says nothing."""
    printed = peak_bytes(case.row)
    return printed if 0 < printed <= case.cluster.device.memory_bytes else None


def _ran(row: Row) -> bool:
    """Return whether the table shows that the run worked: any figure of it, or a throughput in its notes."""
    figures = ("tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "peak_mem_gib")
    return any(row.number(column) for column in figures) or "samples" in row.notes


def published_tokens_per_s(case: Case) -> float | None:
    """Return tokens per second and GPU as printed; else from TFLOPS or MFU, by what the source counts."""
    row = case.row
    printed = tokens_per_s(row, case.cluster.num_devices)
    if printed:
        return printed
    flops = published_flops(case)
    return flops / _flops_per_token(case) if flops else None


def published_flops(case: Case) -> float | None:
    """Return FLOP/s per GPU as printed, or as MFU times the peak."""
    flops, mfu = flops_per_s(case.row), case.row.number("mfu")
    if flops:
        return flops
    if mfu:
        share = mfu / 100 if mfu > 1 else mfu
        dtype = case.run.dtype if case.run.dtype in ("fp8", "fp4") else "half"
        return share * case.cluster.device.peak_flops_per_s(dtype)
    return None


def _flops_per_token(case: Case) -> float:
    hardware = "hfu" in case.row.text("mfu").lower() and not case.row.text("tflops_per_gpu")
    counted = "hardware" if hardware else case.convention.flops
    flops = case.shape.model_flops_per_token(causal=counted == "causal")
    tied = case.shape.tied and dict(case.strategy.get("parallel_mode").axes).get("pipeline", 1) == 1  # type: ignore[union-attr]
    if case.convention.counts_embedding and not tied:
        flops += 6 * case.shape.hidden * case.shape.vocab
    if counted == "hardware" and case.strategy.get("checkpoint") is not None:
        flops *= 4 / 3
    return flops


# --- How far off predictions of published runs are: per source and in total, as plain data.

_WORST = 10
_EQUAL = 0.01  # speeds that differ by no more are one: a run that is repeated differs as much


@dataclass
class Scores:
    """Predictions of a table, and the rows that could not be predicted with the reason for each."""

    rows: int
    predictions: list[Prediction] = field(default_factory=list)
    not_covered: list[tuple[Row, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of all rows, of every source, and the worst rows.

        ``time_mape`` and ``time_median`` are of tokens per second, which weigh what is predicted too fast more than
        ``step_time_mape`` and ``step_time_median`` of the same runs do; ``memory_mape`` and ``memory_median`` are of
        peak memory. All are fractions. ``oom`` counts rows that are published as having run or not: ``tp`` predicted
        and published as out of memory, ``fn`` false "fits". ``cells`` says how well strategies are told apart, see
        :func:`of_cells`.
        """
        whole = _figures(self.predictions, self.rows)
        sources = dict.fromkeys([p.row.source for p in self.predictions] + [row.source for row, _ in self.not_covered])
        per_source = {
            source: _figures(
                [p for p in self.predictions if p.row.source == source],
                sum(p.row.source == source for p in self.predictions)
                + sum(row.source == source for row, _ in self.not_covered),
            )
            for source in sources
        }
        timed = [p for p in self.predictions if p.published_tokens_per_s_per_gpu]
        worst = sorted(timed, key=lambda p: -abs(_speed(p) - 1))[:_WORST]
        return {
            **whole,
            "cells": of_cells(self.predictions),
            "per_source": per_source,
            "worst": [
                {
                    "row": p.row.index,
                    "predicted": p.tokens_per_s_per_gpu,
                    "published": p.published_tokens_per_s_per_gpu,
                }
                for p in worst
            ],
        }


def score(
    rows: Sequence[Row], calibration: Calibration | None = None, *, as_user: bool = False, kernels: Kernels = "own"
) -> Scores:
    """Predict every row of a table; one that cannot be predicted is not covered, and never an error.

    ``kernels`` says whose kernels run what is predicted ``as_user``.
    """
    scores = Scores(len(rows))
    for row in rows:
        try:
            scores.predictions.append(predict_as_user(row, kernels) if as_user else predict_row(row, calibration))
        except NotCovered as why:
            scores.not_covered.append((row, str(why)))
        except Exception as error:  # numbers nobody would publish: one row must not cost the table
            scores.not_covered.append((row, f"{type(error).__name__}: {error}"))
    return scores


def merged(parts: Sequence[Scores]) -> Scores:
    """Return the scores of disjoint parts of a table as one, in the table's order."""
    whole = Scores(sum(part.rows for part in parts))
    whole.predictions = sorted((p for part in parts for p in part.predictions), key=lambda p: p.row.index)
    whole.not_covered = sorted((each for part in parts for each in part.not_covered), key=lambda each: each[0].index)
    return whole


def kendall_tau(predictions: Sequence[Prediction], *, of_batch: bool = False) -> float | None:
    """Return the rank correlation (tau-b) of strategies within one model and cluster, pooled over all such settings.

    Pairs of runs of one setting (model, length of a sample, devices) count whose published speeds differ by more than
    1 %: those that the prediction orders alike less those it orders otherwise, over the root of the pairs that are not
    tied on either side. None: no such pairs. ``of_batch`` compares runs of equal batches alone.
    """
    settings: dict[Any, list[Prediction]] = {}
    for each in predictions:
        if each.published_tokens_per_s_per_gpu:
            settings.setdefault((each.case.setting, of_batch and each.case.global_batch), []).append(each)
    alike = untied_published = untied_predicted = 0
    for runs in settings.values():
        for a, b in itertools.combinations(runs, 2):
            published = _order(a.published_tokens_per_s_per_gpu or 0, b.published_tokens_per_s_per_gpu or 0, _EQUAL)
            predicted = _order(a.tokens_per_s_per_gpu, b.tokens_per_s_per_gpu, 0.0) if published else 0
            alike += published * predicted
            untied_published += published != 0
            untied_predicted += predicted != 0
    return alike / (untied_published * untied_predicted) ** 0.5 if untied_published and untied_predicted else None


_FEWEST = 4  # runs of a cell in which a choice says something


def of_cells(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return how well strategies are told apart in cells: runs of one model, batch and cluster, four or more.

    A table that holds the whole field of strategies, bad ones too, has runs that wait for causes of their own (a
    broken link, a congested network), up to ten times as long as others of the same layout. So the step times of the
    fastest quarter of each cell are scored apart. ``regret`` is by how much the run that is predicted to be the
    fastest is slower than the fastest of its cell.
    """
    cells: dict[Any, list[Prediction]] = {}
    for each in predictions:
        if each.published_tokens_per_s_per_gpu:
            cells.setdefault((each.case.setting, each.case.global_batch), []).append(each)
    several = [runs for runs in cells.values() if len(runs) >= _FEWEST]
    fastest = [each for runs in several for each in sorted(runs, key=_published)[-(len(runs) // 4) :]]
    errors = [abs(1 / _speed(each) - 1) for each in fastest]
    regrets = [
        _published(max(runs, key=_published)) / _published(max(runs, key=lambda each: each.tokens_per_s_per_gpu)) - 1
        for runs in several
    ]
    return {
        "cells": len(several),
        "fastest_rows": len(fastest),
        "fastest_step_time_mape": _mean(errors),
        "fastest_step_time_median": _median(errors),
        "kendall_tau": kendall_tau([each for runs in several for each in runs], of_batch=True),
        "regret_median": _median(regrets),
        "regret_mean": _mean(regrets),
        "regret_within_5_percent": _mean([float(each <= _SMALL_REGRET) for each in regrets]),
    }


_SMALL_REGRET = 0.05


def _published(prediction: Prediction) -> float:
    return prediction.published_tokens_per_s_per_gpu or 0.0


def _order(a: float, b: float, equal: float) -> int:
    return 0 if abs(a - b) <= equal * max(a, b) else 1 if a > b else -1


def _figures(predictions: Sequence[Prediction], rows: int) -> dict[str, Any]:
    speeds = [_speed(p) for p in predictions if p.published_tokens_per_s_per_gpu]
    times, step_times = [abs(speed - 1) for speed in speeds], [abs(1 / speed - 1) for speed in speeds]
    memories = [abs(p.memory.counted_bytes / p.published_peak_bytes - 1) for p in predictions if p.published_peak_bytes]
    return {
        "rows": rows,
        "covered": len(predictions),
        "time_mape": _mean(times),
        "time_median": _median(times),
        "step_time_mape": _mean(step_times),
        "step_time_median": _median(step_times),
        "memory_mape": _mean(memories),
        "memory_median": _median(memories),
        "oom": _confusion(predictions),
        "kendall_tau": kendall_tau(predictions),
    }


def _confusion(predictions: Sequence[Prediction]) -> dict[str, int]:
    pairs = [(p.out_of_memory, p.published_out_of_memory) for p in predictions if p.published_out_of_memory is not None]
    return {
        "tp": pairs.count((True, True)),
        "fp": pairs.count((True, False)),
        "fn": pairs.count((False, True)),
        "tn": pairs.count((False, False)),
    }


def _speed(prediction: Prediction) -> float:
    """Return the predicted over the published speed."""
    published = prediction.published_tokens_per_s_per_gpu
    assert published
    return prediction.tokens_per_s_per_gpu / published


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None

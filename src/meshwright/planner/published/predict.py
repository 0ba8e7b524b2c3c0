"""Predictions for published runs: seconds and bytes of each row, in the units of its table."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import Calibration, StepTime, simulate
from meshwright.planner.published.case import case_of
from meshwright.planner.published.described import Case
from meshwright.planner.published.figures import flops_per_s, peak_bytes, tokens_per_s
from meshwright.planner.published.held import Held, held_by
from meshwright.planner.published.rows import Row


@dataclass(frozen=True)
class Prediction:
    """A published run beside its prediction; None where the table says nothing.

    Args:
        case: What was simulated.
        tokens_per_s_per_gpu: Predicted.
        published_tokens_per_s_per_gpu: As printed, or from what is printed (TFLOPS, MFU) in the source's convention.
        held: Predicted memory of the rank that holds most.
        published_peak_bytes: As printed, in GiB.
        out_of_memory: Whether the prediction is that it does not fit.
        published_out_of_memory: None where the table does not say whether it ran.
    """

    case: Case
    time: StepTime
    tokens_per_s_per_gpu: float
    published_tokens_per_s_per_gpu: float | None
    held: Held
    published_peak_bytes: float | None
    out_of_memory: bool
    published_out_of_memory: bool | None

    @property
    def row(self) -> Row:
        """The row of the table."""
        return self.case.row


def predict_row(row: Row, calibration: Calibration | None = None) -> Prediction:
    """Predicts one row.

    Raises:
        NotCovered: Saying why it cannot be.
    """
    return predict_case(case_of(row), calibration)


def predict_case(case: Case, calibration: Calibration | None = None) -> Prediction:
    """Predicts a run that has been read."""
    time = simulate(case.steps, case.cluster, calibration, in_turn=case.in_turn)
    held = held_by(case)
    published = published_tokens_per_s(case)
    oom = True if case.row.ran_out_of_memory else False if _ran(case.row) else None
    return Prediction(
        case=case,
        time=time,
        tokens_per_s_per_gpu=case.tokens_per_step / time.step_time_s / case.cluster.num_devices,
        published_tokens_per_s_per_gpu=published,
        held=held,
        published_peak_bytes=_published_peak(case),
        out_of_memory=not held.fits,
        published_out_of_memory=oom,
    )


def _published_peak(case: Case) -> float | None:
    """As printed; more than the device has is no peak of its memory and says nothing."""
    printed = peak_bytes(case.row)
    return printed if 0 < printed <= case.cluster.device.memory_bytes else None


def _ran(row: Row) -> bool:
    """Whether the table shows that the run worked: any figure of it, or a throughput in its notes."""
    figures = ("tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "peak_mem_gib")
    return any(row.number(column) for column in figures) or "samples" in row.notes


def published_tokens_per_s(case: Case) -> float | None:
    """Tokens per second and GPU as printed; else from TFLOPS or MFU, by what the source counts."""
    row = case.row
    printed = tokens_per_s(row, case.cluster.num_devices)
    if printed:
        return printed
    flops = published_flops(case)
    return flops / _flops_per_token(case) if flops else None


def published_flops(case: Case) -> float | None:
    """FLOP/s per GPU as printed, or as MFU times the peak."""
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
    if counted == "hardware" and case.strategy.get("checkpoint") is not None:
        flops *= 4 / 3
    return flops

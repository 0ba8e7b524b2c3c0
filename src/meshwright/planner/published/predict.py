"""Predictions for published runs: seconds and bytes of each row, in the units of its table."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import Calibration, Cluster, Peak, StepTime, peak, simulate
from meshwright.planner.published.case import Case, NotCovered, case_of
from meshwright.planner.published.rows import Row

_GIB = 2**30
# What a job cannot use of a device: the driver's context, collectives' buffers, kernels' workspaces.
CONTEXT_BYTES = round(1.5 * _GIB)


@dataclass(frozen=True)
class Prediction:
    """A published run beside its prediction; None where the table says nothing.

    Args:
        case: What was simulated.
        tokens_per_s_per_gpu: Predicted.
        published_tokens_per_s_per_gpu: As printed, or from what is printed (TFLOPS, MFU) in the source's convention.
        peak_bytes: Predicted, as the source counts it.
        published_peak_bytes: As printed, in GiB.
        out_of_memory: Whether the prediction is that it does not fit.
        published_out_of_memory: None where the table does not say whether it ran.
    """

    case: Case
    time: StepTime
    tokens_per_s_per_gpu: float
    published_tokens_per_s_per_gpu: float | None
    peak: Peak
    peak_bytes: int
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
    time = simulate(case.steps, case.cluster, calibration, in_turn=not case.convention.reduces_beside)
    most = max((peak(step) for step in {id(step): step for step in case.steps}.values()), key=_reserved)
    extra = _beside(case)
    held = (most.reserved_bytes if case.convention.memory == "reserved" else most.allocated_bytes) + extra
    needed = most.reserved_bytes + extra + CONTEXT_BYTES
    published = published_tokens_per_s(case)
    oom = True if case.row.ran_out_of_memory else False if _ran(case.row) else None
    peak_gib = case.row.number("peak_mem_gib")
    return Prediction(
        case=case,
        time=time,
        tokens_per_s_per_gpu=case.tokens_per_step / time.step_time_s / case.cluster.num_devices,
        published_tokens_per_s_per_gpu=published,
        peak=most,
        peak_bytes=held,
        published_peak_bytes=peak_gib * _GIB if peak_gib else None,
        out_of_memory=needed > case.cluster.device.memory_bytes,
        published_out_of_memory=oom,
    )


def _reserved(most: Peak) -> int:
    return most.reserved_bytes


def _ran(row: Row) -> bool:
    """Whether the table shows that the run worked: any figure of it, or a throughput in its notes."""
    figures = ("tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "peak_mem_gib")
    return any(row.number(column) for column in figures) or "samples" in row.notes


def _beside(case: Case) -> int:
    """Bytes of what a source keeps and our methods do not: fp32 gradients beside half ones (negative: offloaded)."""
    return 0


def published_tokens_per_s(case: Case) -> float | None:
    """Tokens per second and GPU as printed; else from TFLOPS or MFU, by what the source counts."""
    row = case.row
    printed = row.number("tokens_per_s_per_gpu")
    if printed:
        return printed
    flops = published_flops(case)
    return flops / _flops_per_token(case) if flops else None


def published_flops(case: Case) -> float | None:
    """FLOP/s per GPU as printed, or as MFU times the peak."""
    tflops, mfu = case.row.number("tflops_per_gpu"), case.row.number("mfu")
    if tflops:
        return tflops * 1e12
    if mfu:
        share = mfu / 100 if mfu > 1 else mfu
        return share * case.cluster.device.peak_flops_per_s("fp8" if case.run.dtype == "fp8" else "half")
    return None


def _flops_per_token(case: Case) -> float:
    counted = case.convention.flops
    flops = case.shape.model_flops_per_token(causal=counted == "causal")
    if counted == "hardware" and case.strategy.get("checkpoint") is not None:
        flops *= 4 / 3
    return flops


def cluster_of(prediction: Prediction) -> Cluster:
    """The cluster of a prediction."""
    return prediction.case.cluster


__all__ = ["CONTEXT_BYTES", "NotCovered", "Prediction", "predict_case", "predict_row"]

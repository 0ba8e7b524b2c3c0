"""Layouts that people really trained with, beside what the planner chooses for the same model, cluster and batch.

    python benchmarks/practice.py [--case NAME …] [--write]

``--write`` puts the table into docs/practice.md. A layout is written in Meshwright's own methods and predicted as a
user would predict it; what the planner chooses has its usual headroom.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cost import find_cluster
from meshwright.errors import MeshwrightError
from meshwright.planner import Plan, PlanRequest
from meshwright.planner.explain.plan_figures import mfu, per_gpu, short
from meshwright.planner.explain.plan_reasons import against, too_large
from meshwright.planner.plan_request import named_model
from meshwright.strategy import Strategy

PAGE = Path(__file__).parent.parent / "docs" / "practice.md"
CLOSE = 0.10  # a published layout this much slower than the planner's choice, by prediction, counts as the same
_BF16 = ("amp_native", "bf16")


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and the layout that somebody trained it with.

    Args:
        model: As ``meshwright plan --model`` takes it.
        cluster: As ``--cluster`` takes it.
        batch: Samples of a step.
        axes: Sizes of the mesh.
        methods: The methods beside it.
        micro_batches: Micro-batches of a step.
        source: Who trained so.
        measured: Tokens per second and device that the source gives.
    """

    model: str
    cluster: str
    batch: int
    axes: tuple[tuple[str, int], ...]
    methods: tuple[Any, ...]
    micro_batches: int
    source: str
    measured: float | None = None

    @property
    def layout(self) -> Strategy:
        """Return the published layout as a strategy."""
        return Strategy([("parallel_mode", {"axes": list(self.axes)}), *self.methods])


def _interleaved(stages: int) -> tuple[str, dict[str, Any]]:
    return "pipeline_parallel", {"schedule": "interleaved", "num_stages_per_rank": stages}


_TP = ("tensor_parallel", {"sequence": True})
_QWEN = (
    "mixtral:layers=94,hidden=4096,heads=64,kv_heads=4,head_dim=128,ffn=1536,vocab=151936,experts=128,"
    "experts_per_token=8"
)
# As in their engines, each of the ranks that divide the tokens of a sample has the loss of a part of them.
_CONTEXT = ("context_parallel", ("module_replace", ["fused_loss"]))
_NEMO_70B = (_TP, *_CONTEXT, _interleaved(5), "zero1", _BF16)
_LLAMA = (_TP, _interleaved(4), "zero1", _BF16)
CASES = {
    "Llama 3 70B, 64 H100": Case(
        "llama-3-70b", "h100x64", 128, (("tensor", 4), ("context", 2), ("zero", 2), ("pipeline", 4)), _NEMO_70B, 64,
        "NVIDIA NeMo, dgxc-benchmarking 24.11", 1113.0,
    ),
    "Llama 3 70B, 256 H100": Case(
        "llama-3-70b", "h100x256", 512, (("tensor", 4), ("context", 2), ("zero", 8), ("pipeline", 4)), _NEMO_70B, 64,
        "NVIDIA NeMo, dgxc-benchmarking 24.11", 1107.0,
    ),
    "Llama 3.1 405B, 16,384 H100, 8k tokens": Case(
        "llama-3.1-405b", "h100x16384", 2048, (("tensor", 8), ("zero", 128), ("pipeline", 16)), _LLAMA, 16,
        "Llama 3 (Dubey et al. 2024), Table 4",
    ),
    "Llama 3.1 405B, 16,384 H100, 131k tokens": Case(
        "llama-3.1-405b:seq=131072", "h100x16384", 128,
        (("tensor", 8), ("context", 16), ("zero", 8), ("pipeline", 16)), (*_LLAMA, *_CONTEXT), 16,
        "Llama 3 (Dubey et al. 2024), Table 4",
    ),
    "GPT-3 175B, 1,024 A100": Case(
        "gpt-3-175b:vocab=51200", "a100-80x1024", 1536, (("tensor", 8), ("data", 16), ("pipeline", 8)),
        (_TP, _interleaved(3), _BF16, ("checkpoint", {"policy": "selective"})), 96,
        "Megatron-LM (Korthikanti et al. 2022), tensor 8 x pipeline 8",
    ),
    "Mixtral 8x7B, 64 H100": Case(
        "mixtral-8x7b:seq=4096", "h100x64", 256, (("expert", 8), ("zero", 2), ("pipeline", 4)),
        ("expert_parallel", _interleaved(8), "zero1", _BF16), 16, "Megatron Core's layout for Mixtral",
    ),
    "Mixtral 8x7B, 256 H100": Case(
        "mixtral-8x7b:seq=4096", "h100x256", 1024, (("expert", 8), ("zero", 8), ("pipeline", 4)),
        ("expert_parallel", _interleaved(8), "zero1", _BF16), 16, "Megatron Core's layout for Mixtral",
    ),
    "Qwen3 235B-A22B, 256 H100": Case(
        f"{_QWEN},seq=4096", "h100x256", 2048, (("tensor", 2), ("expert", 16), ("pipeline", 8)),
        (_TP, "expert_parallel", "pipeline_parallel", "zero1", _BF16, "checkpoint"), 128,
        "Megatron Bridge: tensor 2, pipeline 8, experts over 32",
    ),
    "Qwen3 235B-A22B, 64 H100": Case(
        f"{_QWEN},seq=4096", "h100x64", 512, (("tensor", 2), ("expert", 4), ("pipeline", 8)),
        (_TP, "expert_parallel", "pipeline_parallel", "zero1", _BF16, "checkpoint"), 128,
        "the layout of 256 on a quarter of the devices; nobody publishes one",
    ),
    "Llama 2 7B, 8 A100-40": Case(
        "llama-2-7b:seq=2048", "a100-40x8", 128, (("zero", 8),), ("fsdp", _BF16, "checkpoint"), 4,
        "llm-foundry's layout for 7B: FSDP with recomputation",
    ),
    "13B, 32 V100": Case(
        "gpt:layers=40,hidden=5120,heads=40,vocab=50304,seq=1024", "v100-32x32", 128, (("zero", 32),),
        ("fsdp", ("amp_native", "fp16"), "checkpoint"), 1, "BMTrain: ZeRO 3 with recomputation",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Predictions of a case.

    Args:
        case: The case.
        published: The published layout; None where it is refused.
        compiled: The published layout with ``compile``.
        refused: Why it is, or why nothing is chosen.
        chosen: The planner's choice.
    """

    case: Case
    published: Plan | None
    compiled: Plan | None
    refused: str
    chosen: Plan | None

    @property
    def like(self) -> Plan | None:
        """Return the published layout with ``compile`` where the choice has it, and otherwise without."""
        return self.compiled if self.chosen is not None and "compile" in self.chosen.strategy else self.published

    @property
    def gap(self) -> float | None:
        """Return by how much the published layout is slower than the choice, by prediction."""
        if self.like is None or self.chosen is None:
            return None
        ours, theirs = self.chosen.forecast, self.like.forecast
        assert ours is not None
        assert theirs is not None
        return theirs.time.step_time_s / ours.time.step_time_s - 1


def outcome(case: Case) -> Outcome:
    """Predict the published layout of a case, and search for one of our own."""
    cluster = find_cluster(case.cluster)
    model = named_model(case.model)
    given, fused = (
        PlanRequest(model, cluster, case.batch, strategy=each, num_micro_batches=case.micro_batches)
        for each in (case.layout, Strategy([*case.layout.methods, "compile"]))
    )
    published, refused = _first(given)
    chosen, why = _first(PlanRequest(model, cluster, case.batch, top=1))
    return Outcome(case, published, _first(fused)[0], refused or why, chosen)


def _first(request: PlanRequest) -> tuple[Plan | None, str]:
    """Return the first plan, or None and why there is none."""
    try:
        return request.found().plans[0], ""
    except MeshwrightError as error:
        return None, error.what


def row(name: str, known: Outcome) -> str:
    """Return the table's row of a case."""
    theirs, ours = known.published, known.chosen
    gap = "" if known.gap is None else f"{100 * known.gap:+.1f} %"
    like = known.like
    fits = "" if like is None else "yes" if like.fits else f"**no**: {too_large(like)}"
    chosen = _layout(ours) or (known.refused if theirs is not None else "")
    speeds = _speed(theirs), _speed(known.compiled), _number(known.case.measured)
    cells = [name, _layout(theirs) or known.refused, fits, *speeds, chosen, _speed(ours)]
    return "| " + " | ".join([*cells, gap]) + " |"


def reason(name: str, known: Outcome) -> str:
    """Return why the choice is another one, where the published layout is more than 10 % slower; else nothing."""
    if known.gap is None or known.gap <= CLOSE or known.like is None or known.chosen is None:
        return ""
    return f"- **{name}.** The published layout is predicted {against(known.like, known.chosen)}."


def _layout(plan: Plan | None) -> str:
    return "" if plan is None else f"{short(plan)}; {plan.step.num_micro_batches} x {plan.micro_batch}"


def _speed(plan: Plan | None) -> str:
    if plan is None:
        return ""
    rate, used = per_gpu(plan), mfu(plan)
    return _number(rate) + ("" if used is None else f" ({100 * used:.0f} %)")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def table(outcomes: dict[str, Outcome]) -> str:
    """Return the table and the reasons below it."""
    titles = ["model, devices", "published layout", "fits", "predicted tokens/s per device (MFU)", "compiled",
              "measured", "the planner's choice", "predicted (MFU)", "published slower by"]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += [row(name, known) for name, known in outcomes.items()]
    reasons = [text for name, known in outcomes.items() if (text := reason(name, known))]
    sources = [
        f"- {name}: {known.case.source}, {known.case.batch:,} samples a step" for name, known in outcomes.items()
    ]
    return "\n".join(
        [*lines, "", "Where the gap is above 10 %:", "", *(reasons or ["- nowhere"]), "", "Sources:", "", *sources]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; repeatable")
    parser.add_argument("--write", action="store_true", help="write the table into docs/practice.md")
    options = parser.parse_args(arguments)
    outcomes = {}
    for name in options.case or CASES:
        outcomes[name] = outcome(CASES[name])
        print(row(name, outcomes[name]), reason(name, outcomes[name]), flush=True)
    if options.write:
        text = PAGE.read_text()
        between = f"<!-- table -->\n\n{table(outcomes)}\n\n<!-- end of table -->"
        PAGE.write_text(re.sub(r"<!-- table -->.*<!-- end of table -->", lambda _: between, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()

"""Turn the strategy and the precision of a published run into Meshwright's methods."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.cost import Scaling, Step
from meshwright.planner.family_ops import ATTENTION, PER_OP, FamilyRun
from meshwright.planner.model_shapes import BLOCK, Shape
from meshwright.strategy import Strategy
from published_runs.conventions import Convention
from published_runs.table_rows import Row


def dtype_of(row: Row, assumed: list[str]) -> Literal["fp32", "half", "fp8", "fp4"]:
    """Return the precision of products; half where a cell does not give it."""
    text = row.text("precision").lower().replace("-", "").replace("_", "")
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text or "f8" in text or "e4m3" in text:
        return "fp8"
    if "16" in text or "amp" in text or "half" in text or "mixed" in text:
        return "half"
    if "32" in text:
        return "fp32"
    assumed.append("half precision")
    return "half"


def scaling_of(row: Row, convention: Convention) -> Scaling:
    """Return how tensors are scaled for products in 8 or 4 bits, by the cell or else by the project."""
    text = row.text("precision").lower()
    if "fp4" in text:
        return "nvfp4"
    if "row" in text:
        return "rowwise"
    if "mx" in text:
        return "mxfp8" if convention.impl.scaling == "tensorwise" else "blocks"
    return convention.impl.scaling


def gathers_fp8(row: Row, convention: Convention) -> bool:
    """Return whether weights are cast before they are gathered, which needs one scale per tensor."""
    return convention.gathers_fp8 and scaling_of(row, convention) == "tensorwise"


def gathering(step: Step, row: Row, convention: Convention, run: FamilyRun) -> Step:
    """Return the step with gathers in 8 bits, if weights are cast before."""
    if run.dtype != "fp8" or not gathers_fp8(row, convention):
        return step
    traffic = tuple(
        dataclasses.replace(each, bytes_per_step=each.bytes_per_step // 2) if each.kind == "all_gather" else each
        for each in step.traffic
    )
    return step.replace(traffic=traffic)


# --- Strategies

# "VP5", "vpp=2", "v=3", "virtual pipeline 4"; "v3" alone is a version of something.
_VIRTUAL = re.compile(r"\b(?:vp+|v=|virtual)[ \w-]*?[ =:]*(\d+)", re.IGNORECASE)
_NOTHING = re.compile(r"^(?:no|n|none|0|w/o)\b|false|disabled|\boff\b|without")
_EVERYTHING = re.compile(r"^(?:true|yes|y|1|on|enabled)$|block|uniform|ckpt|checkpoint|recompu")
_EIGHTHS = tuple(eighth / 8 for eighth in range(1, 8))
ZERO = {1: "zero1", 2: "zero2", 3: "fsdp"}


def shard_axis_of(stage: int) -> str | None:
    """Return the axis that a ZeRO stage shards over."""
    return "zero" if stage else None


def zero_stage_of(row: Row, convention: Convention, assumed: list[str]) -> int:
    """Return the ZeRO stage of a row; FSDP is stage 3."""
    text = re.sub(r"fsdp ?[12]?", "fsdp", row.text("zero_stage").lower())  # FSDP2 is a version, not a stage
    found = re.search(r"(?:^|zero|stage|z)[\s_=:-]*([0-3])(?![0-9x])", text)
    if found:
        return int(found.group(1))
    if re.fullmatch(r"(?:p_)?os(?:\+g)?(?:\+p)?", text):  # Rajbhandari et al. 2020
        return 1 + text.count("+")
    if any(word in text for word in ("fsdp", "hsdp", "hybrid", "full", "param", "zero++", "infinity", "mics")):
        return 3
    if "grad" in text:
        return 2
    if "dist" in text or "optim" in text:  # Megatron's distributed optimizer
        return 1
    if not text:
        assumed.append(f"zero_stage {convention.default_zero}")
    return convention.default_zero


@dataclass(frozen=True)
class Freed:
    """Activations that are not saved on the device.

    Args:
        recomputed: The class whose modules are recomputed; "" for none.
        offloaded: Fraction of the blocks whose activations are offloaded.
    """

    recomputed: str = ""
    offloaded: float = 0.0

    def __str__(self) -> str:
        return f"{self.offloaded:.3g} of activations on the host" if self.offloaded else f"recomputes {self.recomputed}"


def freed_of(row: Row, convention: Convention, assumed: list[str]) -> tuple[Freed, ...]:
    """Return what a row frees; where the table does not give it, the candidates, less first."""
    found = tuple(Freed(each) for each in recompute_of(row, convention, assumed))
    hosts = convention.offloads_activations and len(found) > 1 and zero_stage_of(row, convention, []) == 3
    return (found[0], *(Freed(offloaded=each) for each in _EIGHTHS), *found[1:]) if hosts else found


def recompute_of(row: Row, convention: Convention, assumed: list[str]) -> tuple[str, ...]:
    """Return the recomputed class ("" for none); where the table does not give it, the candidates, less first."""
    text = row.text("ac").lower().replace("_", "-")
    raw = (row.cells.get("ac") or "").strip().lower()
    if not text and raw != "none":
        assumed.append(f"ac {convention.default_ac}")
        return {"full": (BLOCK,), "never": ("",)}.get(convention.default_ac, ("", PER_OP, BLOCK))
    if _NOTHING.search(text):
        return ("",)
    if "per-op" in text or "per op" in text or "selective op" in text:
        return (PER_OP,)
    if "attention" in text or "attn" in text:
        return ("",) if convention.impl.fused_attention else (ATTENTION,)
    if "selective" in text and not convention.impl.fused_attention:
        return (ATTENTION,)
    if re.search(r"selective|\bsac\b|partial|every|mlp|%", text):
        return (PER_OP, BLOCK)  # some share of what can be: more where less does not fit
    if "full" in text or _EVERYTHING.search(text):
        return (BLOCK,)
    return ("",)


def is_compiled(row: Row) -> bool:
    """Return whether a cell says that the model is compiled."""
    text = row.text("compile").lower()
    said = re.search(r"^(?:true|yes|y|1|on|enabled)$|compile|inductor|autotune", text)
    return said is not None and _NOTHING.search(text) is None


def says_uncompiled(row: Row) -> bool:
    """Return whether a cell says that the model is not compiled."""
    return bool(row.text("compile")) and not is_compiled(row)


def nearby_of(row: Row, sizes: dict[str, int], per_node: int) -> int:
    """Return over how many data-parallel ranks parameters are sharded: all, or under HSDP those of a group or node."""
    found = re.search(r"\b(?:HSDP|hybrid[ _-]?shard)(?: (\d+))?\b", f"{row.text('zero_stage')} {row.notes}", re.I)
    if found is None:
        return sizes["dp"] * sizes["cp"]
    ranks = int(found.group(1) or 0) or max(1, per_node // (sizes["tp"] * sizes["cp"])) * sizes["cp"]
    return ranks if (sizes["dp"] * sizes["cp"]) % ranks == 0 else sizes["dp"] * sizes["cp"]


def strategy_of(
    sizes: dict[str, int], stage: int, freed: Freed, convention: Convention, pipeline: dict[str, Any], nearby: int
) -> Strategy:
    """Return the strategy; its axes are for a simulation and may count a rank twice."""
    axes = [(name, sizes[column]) for name, column in (("tensor", "tp"), ("context", "cp")) if sizes[column] > 1]
    # Ranks that divide a sample hold equal parameters: sharding and reductions go over them, too.
    replicas = sizes["dp"] * sizes["cp"]
    axes += [("zero", nearby), ("data", replicas // nearby)] if stage and nearby < replicas else []
    axes += [(shard_axis_of(stage) or "data", replicas)] if not stage or nearby == replicas else []
    axes += [("pipeline", sizes["pp"])] if sizes["pp"] > 1 else []
    methods: list[Any] = [("parallel_mode", {"axes": axes})]
    if sizes["tp"] > 1:
        methods.append("tensor_parallel")
    if sizes["cp"] > 1:
        methods.append("context_parallel")
    if sizes["pp"] > 1:
        methods.append(("pipeline_parallel", pipeline))
    if freed.recomputed:
        methods.append(("checkpoint", {"wrap_class": freed.recomputed, "no_reentrant": not convention.reentrant}))
    methods.append("half" if stage == 0 or convention.reduce == "half" else "amp_native")
    if stage:
        methods.append(ZERO[stage])
    if freed.offloaded:
        methods.append(("offload", {"activations": freed.offloaded}))
    return Strategy(methods)


def virtual_stages_of(row: Row) -> int:
    """Return the stages of a pipeline's rank that a row says; 1 where it does not."""
    found = _VIRTUAL.search(_noted(row))
    virtual = int(found.group(1)) if found else 1
    return 2 if "interleaved" in row.notes.lower() and virtual == 1 else virtual


def _noted(row: Row) -> str:
    return f"{row.notes} {row.text('model')}"


def pipeline_of(ranks: int, run: FamilyRun, convention: Convention, shape: Shape, row: Row) -> dict[str, Any]:
    """Return the keys of ``pipeline_parallel``."""
    found = _VIRTUAL.search(_noted(row))
    virtual = virtual_stages_of(row)
    if not found and ranks > 1:
        virtual = max(virtual, _usual_stages(shape.layers // ranks, convention.stages))
    if not found and "2205.05198" in row.source and shape.layers // ranks >= 3 and shape.layers // ranks % 3 == 0:
        virtual = 3  # Korthikanti et al. 2022, Table 3
    # Some count embedding and head as blocks, and so have as many stages as blocks and two more.
    virtual = min(virtual, shape.layers // ranks)
    rounds = max(1, run.num_micro_batches // ranks)
    if virtual < 2 or run.num_micro_batches % rounds:
        return {"schedule": "1f1b" if run.num_micro_batches >= ranks else "gpipe"}
    return {"schedule": "interleaved", "num_stages_per_rank": virtual}


def _usual_stages(layers: int, most: int) -> int:
    """Return the largest number of stages up to ``most`` that divides a rank's layers, or one stage per layer."""
    usual = max(stages for stages in range(1, most + 1) if layers % stages == 0)
    return layers if usual == 1 < most else usual

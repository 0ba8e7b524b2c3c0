"""From a row to what is simulated: the model, its strategy, its cluster; and what had to be assumed."""

from __future__ import annotations

import dataclasses
import re

from meshwright.cost import Cluster, Step, find_device, make_cluster
from meshwright.cost.cluster import most_joined
from meshwright.errors import MeshwrightError
from meshwright.methods import cost_of
from meshwright.planner.families import family_step
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_shape import Shape
from meshwright.planner.published.convention import Convention
from meshwright.planner.published.described import Case
from meshwright.planner.published.figures import devices, global_batch
from meshwright.planner.published.held import held_by
from meshwright.planner.published.precision import dtype_of, gathering, gathers_fp8, scaling_of
from meshwright.planner.published.rows import Row
from meshwright.planner.published.shapes import has_unknown_experts, is_other_kind, shape_of
from meshwright.planner.published.strategies import (
    Freed,
    freed_of,
    is_compiled,
    nearby_of,
    pipeline_of,
    shard_axis_of,
    strategy_of,
    zero_stage_of,
)
from meshwright.planner.published.versions import convention_of_row

_MICRO_BATCHES = (32, 16, 8, 4, 2, 1)
_MOST_STAGES = 256
_MOST_MICRO_BATCHES = 2**16


class NotCovered(Exception):
    """Why a row cannot be predicted."""


def case_of(row: Row) -> Case:
    """Reads a row.

    Raises:
        NotCovered: When the row does not say enough, or contradicts itself.
    """
    assumed: list[str] = []
    convention = convention_of_row(row)
    try:
        cluster = _cluster(row, convention)
        if is_other_kind(row):
            raise NotCovered(f"{row.text('model')} is no decoder of equal blocks, which alone are simulated")
        if has_unknown_experts(row):
            raise NotCovered(f"{row.text('model')} is a mixture of experts whose dimensions a row cannot give")
        shape = shape_of(row, convention, assumed)
        if shape is None:
            raise NotCovered("the table gives neither the model's dimensions nor a size that is known")
        sizes = _sizes(row, cluster.num_devices)
        return _largest(row, convention, shape, cluster, sizes, assumed)
    except MeshwrightError as error:
        raise NotCovered(str(error)) from error


def _largest(
    row: Row, convention: Convention, shape: Shape, cluster: Cluster, sizes: dict[str, int], assumed: list[str]
) -> Case:
    """Where the table gives no micro-batch: the largest that fits, as one who fills a device takes; 1 in a pipeline."""
    given, whole = row.count("micro_batch"), global_batch(row, sizes["dp"], shape.seq)
    candidates = [given] if given else [1] if sizes["pp"] > 1 else list(_MICRO_BATCHES)
    for micro in candidates:
        if whole is not None and not given and (micro > 1 and whole % (micro * sizes["dp"])):
            continue
        said = list(assumed) if given else [*assumed, f"micro_batch {micro}"]
        batches = (micro, whole or micro * sizes["dp"])
        if len(candidates) == 1 or micro == 1:
            return _lightest(row, convention, shape, cluster, sizes, batches, said)
        case = _case(row, convention, shape, cluster, sizes, batches, freed_of(row, convention, said)[0], said)
        if held_by(case).fits:
            return case
    raise AssertionError("1 is among the candidates")


def _lightest(
    row: Row,
    convention: Convention,
    shape: Shape,
    cluster: Cluster,
    sizes: dict[str, int],
    batches: tuple[int, int],
    assumed: list[str],
) -> Case:
    """Where the table does not say what is recomputed: the least that fits."""
    candidates = freed_of(row, convention, assumed)
    for freed in candidates:
        said = [*assumed, str(freed)] if freed != candidates[0] else list(assumed)
        case = _case(row, convention, shape, cluster, sizes, batches, freed, said)
        if held_by(case).fits:
            return case
    return _case(row, convention, shape, cluster, sizes, batches, candidates[0], assumed)


def _case(
    row: Row,
    convention: Convention,
    shape: Shape,
    cluster: Cluster,
    sizes: dict[str, int],
    batches: tuple[int, int],
    freed: Freed,
    assumed: list[str],
) -> Case:
    micro_batch, global_batch = _fitting(convention, sizes, batches, assumed)
    stage = zero_stage_of(row, convention, assumed)
    micro_batches = max(1, round(global_batch / (sizes["dp"] * micro_batch)))
    if micro_batches > _MOST_MICRO_BATCHES:
        raise NotCovered(f"{micro_batches} micro-batches a step; at most {_MOST_MICRO_BATCHES} are simulated")
    run = _run(row, convention, shape, cluster, (micro_batch, micro_batches), assumed)
    keys = pipeline_of(sizes["pp"], run, convention, shape, row)
    strategy = strategy_of(sizes, stage, freed, convention, keys, nearby_of(row, sizes, cluster.devices_per_node))
    axes = strategy.get("parallel_mode").axes  # type: ignore[union-attr]
    virtual = keys.get("num_stages_per_rank", 1) if sizes["pp"] > 1 else 1
    steps = family_step(shape, run, axes, shard_axis=shard_axis_of(stage), stages_per_rank=virtual)
    # The ranks that divide a sample are among those that the state is sharded over, or gradients are averaged.
    steps = [step.replace(counted_again=("sequence",)) for step in steps]
    noted = bool(re.search(r"async[ _-]?tp", row.text("source"), re.IGNORECASE)) and "vanilla" not in row.notes
    beside = convention.async_tensor or noted
    shown = _shown_by(steps)
    costed = {
        rank: _as_source(
            gathering(cost_of(strategy, steps[rank]), row, convention, run), convention, stage, async_tensor=beside
        )
        for rank in dict.fromkeys(shown)
    }
    every = tuple(costed[rank] for rank in shown)
    return Case(row, convention, shape, run, cluster, strategy, stage, every, global_batch, tuple(assumed))


def _fitting(
    convention: Convention, sizes: dict[str, int], batches: tuple[int, int], assumed: list[str]
) -> tuple[int, int]:
    """Samples of a micro-batch and of a step that fit each other, as the source means them."""
    scale = sizes["tp"] if convention.batch_of_device else 1
    whole = max(batches[1] * scale, sizes["dp"])
    micro = min(batches[0] * scale, max(1, whole // sizes["dp"]))
    if convention.splits_local_batch and sizes["pp"] > 1 and whole < sizes["pp"] * micro * sizes["dp"]:
        micro = max(1, micro // sizes["pp"])
        assumed.append(f"micro_batch {micro}: the local batch over the pipeline's ranks")
    return micro, whole


def _run(
    row: Row, convention: Convention, shape: Shape, cluster: Cluster, batches: tuple[int, int], assumed: list[str]
) -> FamilyRun:
    return FamilyRun(
        micro_batch=batches[0],
        num_micro_batches=batches[1],
        dtype=dtype_of(row, assumed),
        split_tokens=convention.split_tokens or "sequence" in row.text("ac").lower(),
        fused_attention=convention.fused_attention,
        compiled=convention.compiled or is_compiled(row),
        fused_loss=convention.fused_loss,
        dropout=convention.dropout,
        seq=shape.seq,
        flash1=convention.flash1,
        vendor_attention=convention.vendor_attention,
        saves_fp8=convention.vendor_attention,  # both come with Transformer Engine
        scaling=scaling_of(row, convention),
        casts_weights=convention.casts_weights and not gathers_fp8(row, convention),
        keeps_gathered=convention.keeps_gathered,
        copies_heads=convention.copies_heads,
        balances_head=convention.balances_head,
        scatters_boundary=convention.scatters_boundary,
        logit_moves=convention.logit_moves,
        plain_norms=convention.plain_norms,
        early=cluster.device.efficiency in convention.early_on,
        logit_bytes=_logit_bytes(convention, cluster, row.count("tp") or 1),
    )


def _cluster(row: Row, convention: Convention) -> Cluster:
    if not row.text("gpu"):
        raise NotCovered("the table names no GPU")
    device = find_device(row.text("gpu"))
    number = devices(row)
    if number is None:
        number = _product(row)
    nodes = row.count("nodes")
    # Of an NVL72 a node is a tray, and the rack is what NVLink joins.
    per_node = max(1, number // nodes) if nodes and most_joined(device) == 8 else None
    network = re.search(r"(\d{3,4}) ?Gbps", row.text("source"))
    return make_cluster(device, number, per_node, float(network.group(1)) if network else None, convention.latency_s)


def _product(row: Row) -> int:
    parts = [row.count(column) for column in ("dp", "tp", "pp", "cp")]
    if parts[0] is None:
        raise NotCovered("the table gives neither the number of GPUs nor dp")
    whole = 1
    for part in parts:
        whole *= part or 1
    return whole


def _sizes(row: Row, every: int) -> dict[str, int]:
    sizes = {column: row.count(column) or 1 for column in ("tp", "pp", "cp")}
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if every % inner:
        raise NotCovered(f"tp {sizes['tp']} x pp {sizes['pp']} x cp {sizes['cp']} do not divide {every} GPUs")
    if sizes["pp"] > _MOST_STAGES:
        raise NotCovered(f"a pipeline of {sizes['pp']} ranks; at most {_MOST_STAGES} are simulated")
    given = row.count("dp")
    if given is not None and given * inner != every:
        if given == every // (sizes["tp"] * sizes["pp"]):  # counts the ranks of cp as data-parallel
            given = every // inner
        else:
            raise NotCovered(f"dp {given} x tp x pp x cp = {given * inner} ranks, and the table says {every} GPUs")
    return {**sizes, "dp": every // inner}


def _logit_bytes(convention: Convention, cluster: Cluster, tensor: int) -> tuple[int, int] | None:
    # TorchTitan runs on B200 and MI300X date from 2025, when it compiles the loss as well: logits stay in half.
    if convention.expandable and cluster.device.efficiency in ("B200", "MI300X"):
        return (2, 2)
    if convention.loss_parallel and tensor > 1:
        # torch's loss_parallel: the gradient's update, its sum with exp, and their product are tensors of their own.
        return (10, 12)
    return convention.logit_bytes


def _shown_by(steps: list[Step]) -> list[int]:
    """For every rank of a pipeline the one that stands for it: of the middle ones the first with as many blocks.

    Of equal ones it keeps most, since more of its micro-batches are in flight.
    """
    firsts: dict[tuple[bool, bool, int], int] = {}
    shown = []
    for rank, step in enumerate(steps):
        ranges = [step.stages.ranges[stage] for stage in step.stages.own] if step.stages is not None else []
        kind = (rank == 0, rank == len(steps) - 1, sum(end - first for first, end in ranges))
        shown.append(firsts.setdefault(kind, rank))
    return shown


def _as_source(step: Step, convention: Convention, stage: int, *, async_tensor: bool) -> Step:
    """What a source does otherwise than our methods: gradients reduced in fp32, or parameter by parameter."""
    if convention.live_bytes and stage == 3:
        step = step.replace(gathered="nothing")  # its buffers have a fixed size
    largest = max(sum(p.numel for p in block.parameters) for block in step.blocks if block.name != "outside")
    whole = not 0 < convention.live_bytes < 2 * largest  # both are of half weights
    traffic = []
    for each in step.traffic:
        if each.axis in step.counted_again and each.kind == "all_reduce":
            continue  # of gradients, which the axis behind it reduces over these ranks, too
        if convention.live_bytes and stage == 3 and each.hidden:
            each = dataclasses.replace(each, calls=round(each.calls * _layers_of_a_block(step)))
        if stage == 3 and each.kind == "all_gather" and not whole:
            each = dataclasses.replace(each, hidden=False)  # no room to gather the next layer while one computes
        if each.hidden and each.kind != "send" and stage < 2:
            if stage == 0 and convention.reduce == "fp32" and step.reduce_itemsize == 2:
                each = dataclasses.replace(each, bytes_per_step=2 * each.bytes_per_step)
            if convention.reduces_each and stage == 1:
                each = dataclasses.replace(
                    each, calls=sum(block.count * len(block.parameters) for block in step.blocks)
                )
        if async_tensor and each.axis == "tensor":
            each = dataclasses.replace(each, beside=True)
        traffic.append(each)
    return step.replace(traffic=tuple(traffic), gathers_ahead=convention.gathers_ahead)


def _layers_of_a_block(step: Step) -> float:
    """Collectives in the place of one: of each layer's matrix; vectors stay whole, below DeepSpeed's threshold."""
    matrices = sum(block.count * sum(len(p.shape) > 1 for p in block.parameters) for block in step.blocks)
    return matrices / max(sum(block.count for block in step.blocks), 1)

"""Turn a row into a case to simulate: model, strategy, cluster, memory, and assumptions."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster, Op, Peak, Stages, Step, find_device, make_cluster, memory, peak
from meshwright.cost.cluster import most_joined
from meshwright.cost.rank_memory import shape_on, whole_gradients
from meshwright.errors import MeshwrightError
from meshwright.methods import cost_of
from meshwright.planner.family_ops import ATTENTION, FamilyRun
from meshwright.planner.family_steps import family_step
from meshwright.planner.model_shapes import Shape
from meshwright.planner.plans import CONTEXT_BYTES, FRAGMENTED, FRAGMENTED_BY_LAYERS
from meshwright.strategy import Strategy
from published_runs.conventions import Convention, convention_of_row
from published_runs.shapes import has_unknown_experts, is_other_kind, shape_of
from published_runs.strategies import (
    Freed,
    dtype_of,
    freed_of,
    gathering,
    gathers_fp8,
    is_compiled,
    nearby_of,
    pipeline_of,
    scaling_of,
    shard_axis_of,
    strategy_of,
    zero_stage_of,
)
from published_runs.table_rows import Row, devices, global_batch


@dataclass(frozen=True)
class Case:
    """A published run as it can be simulated."""

    row: Row
    convention: Convention
    shape: Shape
    run: FamilyRun
    cluster: Cluster
    strategy: Strategy
    zero_stage: int
    steps: tuple[Step, ...]  # of the pipeline's ranks; one without
    global_batch: int
    assumed: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens per step over all devices."""
        return self.global_batch * self.shape.seq

    @property
    def in_turn(self) -> bool:
        """Return whether gradients are reduced after backward, and not during it."""
        beside = self.convention.reduces_beside
        return self.zero_stage < 2 and (not beside or (self.convention.reduces_after and self.zero_stage == 1))

    @property
    def setting(self) -> tuple[Any, ...]:
        """Return the model and the cluster: runs of one setting differ by strategy, and maybe by batch."""
        return (self.row.source, self.row.text("model"), self.shape, self.row.text("gpu"), self.cluster.num_devices)


# --- Memory

_HALF_BYTES = 2
_ADDED_BYTES = 10  # of an element: read in half, read and written in fp32
_INSTEAD_BYTES = 1024  # of a token in a block, where nanotron keeps no gathered inputs; read off its peaks


@dataclass(frozen=True)
class RankMemory:
    """Predicted memory of the rank that needs most.

    Args:
        peak: The peak by class.
        counted_bytes: As the source counts: allocated or reserved, of this rank or of the first.
        needed_bytes: Reserved, with fragmentation and the device's context.
        fits: Whether the device has as much.
    """

    peak: Peak
    counted_bytes: int
    needed_bytes: int
    fits: bool


def rank_memory(case: Case) -> RankMemory:
    """Predict the memory of a run: whether its fullest rank fits, and the peak that the source reports."""
    distinct = {id(step): step for step in case.steps}.values()
    every = [_memory_of(case, step) for step in distinct]
    most = max(every, key=lambda each: each.needed_bytes)
    return dataclasses.replace(most, counted_bytes=every[0].counted_bytes) if case.convention.first_rank else most


def _memory_of(case: Case, step: Step) -> RankMemory:
    convention, most = case.convention, peak(step)
    extra = _beside(case, step, most)
    gathers_layers = convention.live_bytes > 0 and case.zero_stage == 3
    # Expandable segments are an option of CUDA's drivers: torch ignores it on AMD's devices.
    expandable = convention.expandable and case.cluster.device.efficiency != "MI300X"
    unused = 0.0 if expandable else FRAGMENTED_BY_LAYERS if gathers_layers else FRAGMENTED
    reserved = round((most.reserved_bytes + extra) * (1 + unused))
    counted = reserved if convention.memory == "reserved" else most.allocated_bytes + extra
    needed = reserved + CONTEXT_BYTES
    return RankMemory(most, counted, needed, needed <= case.cluster.device.memory_bytes)


def _beside(case: Case, step: Step, most: Peak) -> int:
    """Return the bytes that a source needs beyond our methods; negative where it needs less."""
    convention = case.convention
    extra = convention.bucket_bytes
    replicas = math.prod(size for axis, size in step.axes if axis in ("zero", "data"))
    if convention.live_bytes and case.zero_stage == 3:
        # Two layers at once, one computing and one prefetched, with the gradients of one.
        largest = max(
            (p.numel for block in step.blocks for p in block.parameters if block.name != "outside"), default=0
        )
        extra += max(convention.live_bytes, 3 * largest * _HALF_BYTES)
    if convention.offloads:
        extra -= memory(step).optimizer
    if convention.ddp_buckets and case.zero_stage < 2 and replicas > 1:
        numel = sum(count * math.prod(shape_on(step, p, None)) for count, p in step.every_parameter() if p.trainable)
        extra += _HALF_BYTES * numel
    extra -= round((1 - convention.kept_gathered) * _kept_gathered(case, step))
    if convention.keeps_stages and step.stages is not None:
        extra += _stage_buffers(case, step, step.stages)
    if convention.wide_gradients and step.whole_gradients and step.num_micro_batches == 1:
        extra += sum(block.count * size for block, size in whole_gradients(step))
    if convention.wide_gradients and step.shard_axis is None:  # ours are in half precision until the update
        extra += max(memory(step).gradients - most.memory.gradients, 0)
    return extra


def _kept_gathered(case: Case, step: Step) -> int:
    """Return the bytes by which the gathered inputs of two layers of each block exceed what is kept without them."""
    parts = step.size("tensor")
    if not case.run.impl.keeps_gathered or parts == 1:
        return 0
    blocks, in_flight = case.shape.layers, 1
    if step.stages is not None:
        stages = step.stages
        blocks = sum(end - first for first, end in (stages.ranges[stage] for stage in stages.own))
        in_flight = _in_flight(step, stages)
    of_token = 2 * case.shape.hidden * case.run.itemsize * (1 - 1 / parts) - _INSTEAD_BYTES
    return round(blocks * in_flight * case.run.tokens * of_token)


def _in_flight(step: Step, stages: Stages) -> int:
    """Return the most micro-batches that a rank holds at once: in 1F1B as many as there are ranks from here on."""
    every = step.num_micro_batches
    return min(every, max(stages.ranks) + 1 - stages.here) if len(stages.own) == 1 else every


def _stage_buffers(case: Case, step: Step, stages: Stages) -> int:
    """Return the buffers of torch's ``PipelineStage``: inputs and gradients of all micro-batches, outputs in flight."""
    last, every, in_flight = len(stages.ranks) - 1, step.num_micro_batches, _in_flight(step, stages)
    kept = sum((stage > 0) * every + (stage < last) * (every + in_flight) for stage in stages.own)
    tokens = case.run.tokens // step.size("context")
    logits = every * tokens * (case.shape.vocab // step.size("tensor")) * case.run.itemsize
    return kept * (stages.boundary_bytes or 0) + (logits if last in stages.own else 0)


# --- From a row to a case

_MICRO_BATCHES = (32, 16, 8, 4, 2, 1)
_MOST_STAGES = 256
_MOST_MICRO_BATCHES = 2**16


class NotCovered(Exception):
    """The reason why a row cannot be predicted."""


def case_of(row: Row) -> Case:
    """Turn a row into a case.

    Raises:
        NotCovered: When the row gives too little, or contradicts itself.
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
    """Return the case; without a given micro-batch it has the largest that fits, or 1 in a pipeline."""
    given, whole = row.count("micro_batch"), global_batch(row, sizes["dp"], shape.seq)
    candidates = [given] if given else [1] if sizes["pp"] > 1 else list(_MICRO_BATCHES)
    for micro in candidates:
        if whole is not None and not given and (micro > 1 and whole % (micro * sizes["dp"])):
            continue
        assumptions = list(assumed) if given else [*assumed, f"micro_batch {micro}"]
        batches = (micro, whole or micro * sizes["dp"])
        if len(candidates) == 1 or micro == 1:
            return _lightest(row, convention, shape, cluster, sizes, batches, assumptions)
        case = _case(
            row, convention, shape, cluster, sizes, batches, freed_of(row, convention, assumptions)[0], assumptions
        )
        if rank_memory(case).fits:
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
    """Return the case; where the table does not give recomputation, it has the least that fits."""
    candidates = freed_of(row, convention, assumed)
    for freed in candidates:
        assumptions = [*assumed, str(freed)] if freed != candidates[0] else list(assumed)
        case = _case(row, convention, shape, cluster, sizes, batches, freed, assumptions)
        if rank_memory(case).fits:
            return case
        without = dataclasses.replace(case, convention=dataclasses.replace(convention, kept_gathered=0.0))
        if rank_memory(without).fits:
            return without
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
    stage_ranks = tuple(range(sizes["pp"])) * virtual
    whole = padded(shape, sizes["tp"])
    steps = family_step(whole, run, axes, shard_axis=shard_axis_of(stage), stage_ranks=stage_ranks)
    if cluster.device.efficiency in convention.early_on:
        steps = [_with_early_products(step) for step in steps]
    if micro_batch * shape.heads // sizes["tp"] % convention.softmax_of:
        steps = [_with_softmax_by_steps(step) for step in steps]
    # The ranks that divide a sample are among those that the state is sharded over, or gradients are averaged.
    steps = [step.replace(counted_again=("context",)) for step in steps]
    noted = bool(re.search(r"async[ _-]?tp", row.text("source"), re.IGNORECASE)) and "vanilla" not in row.notes
    beside = convention.async_tensor or noted
    shown = _shown_by(steps)
    costed = {
        rank: _as_source(
            gathering(cost_of(strategy, steps[rank]), row, convention, run),
            convention,
            stage,
            async_tensor=beside,
            cluster=cluster,
        )
        for rank in dict.fromkeys(shown)
    }
    every = tuple(costed[rank] for rank in shown)
    return Case(row, convention, shape, run, cluster, strategy, stage, every, global_batch, tuple(assumed))


def padded(shape: Shape, tensor: int) -> Shape:
    """Return the shape with a vocabulary that its engine can divide: into parts whose rows are aligned."""
    multiple = 8 * tensor
    return dataclasses.replace(shape, vocab=-(-shape.vocab // multiple) * multiple) if tensor > 1 else shape


def _fitting(
    convention: Convention, sizes: dict[str, int], batches: tuple[int, int], assumed: list[str]
) -> tuple[int, int]:
    """Return the samples per micro-batch and per step, as the source counts them."""
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
    own = convention.impl
    impl = dataclasses.replace(
        own,
        split_tokens=own.split_tokens or "sequence" in row.text("ac").lower(),
        compiled=own.compiled or is_compiled(row),
        scaling=scaling_of(row, convention),
        casts_weights=own.casts_weights and not gathers_fp8(row, convention),
        logit_bytes=_logit_bytes(convention, cluster, row.count("tp") or 1),
    )
    return FamilyRun(batches[0], batches[1], dtype_of(row, assumed), seq=shape.seq, impl=impl)


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
    gbps = float(network.group(1)) if network else None
    made = make_cluster(device, number, per_node, gbps, convention.latency_s)
    return dataclasses.replace(made, inter=dataclasses.replace(made.inter, step_s=convention.ring_step_s))


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
    return convention.impl.logit_bytes


_SOFTMAX_STEPS = 5  # cast to fp32, scale, mask, softmax, cast


def _with_softmax_by_steps(step: Step) -> Step:
    """Return the step with a softmax whose steps are kernels of their own."""

    def by_steps(op: Op) -> Op:
        if op.kind != "move" or ATTENTION not in op.inside:
            return op
        backward = None if op.backward_bytes is None else _SOFTMAX_STEPS * op.backward_bytes
        return dataclasses.replace(
            op, num_bytes=_SOFTMAX_STEPS * op.num_bytes, backward_bytes=backward, launches=_SOFTMAX_STEPS * op.launches
        )

    blocks = (dataclasses.replace(block, ops=tuple(map(by_steps, block.ops))) for block in step.blocks)
    return step.replace(blocks=tuple(blocks))


def _with_early_products(step: Step) -> Step:
    """Return the step with products of libraries that were not optimized for this generation of devices yet."""

    def early(op: Op) -> Op:
        is_product = op.kind == "matmul" and ATTENTION not in op.inside
        return dataclasses.replace(op, variant="early") if is_product else op

    blocks = (dataclasses.replace(block, ops=tuple(map(early, block.ops))) for block in step.blocks)
    return step.replace(blocks=tuple(blocks))


def _shown_by(steps: list[Step]) -> list[int]:
    """Return for every pipeline rank the one whose step it shares: of middle ranks, the first with as many blocks.

    The first of equal ranks saves most, since it has the most micro-batches in flight.
    """
    firsts: dict[tuple[bool, bool, int], int] = {}
    shown = []
    for rank, step in enumerate(steps):
        ranges = [step.stages.ranges[stage] for stage in step.stages.own] if step.stages is not None else []
        kind = (rank == 0, rank == len(steps) - 1, sum(end - first for first, end in ranges))
        shown.append(firsts.setdefault(kind, rank))
    return shown


def _as_source(step: Step, convention: Convention, stage: int, *, async_tensor: bool, cluster: Cluster) -> Step:
    """Return the step with the source's collectives: gradients reduced in fp32, or parameter by parameter."""
    if convention.live_bytes and stage == 3:
        step = step.replace(gathered="nothing")  # its buffers have a fixed size
    blocks = (block for block in step.blocks if block.name != "outside")
    largest = max((sum(p.numel for p in block.parameters) for block in blocks), default=0)
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
            if convention.reduces_after and stage == 1:
                # One flat buffer, reduced whole and gathered.
                whole_sum = each.kind == "reduce_scatter"
                each = dataclasses.replace(each, calls=1, kind="all_reduce" if whole_sum else each.kind)
        if async_tensor and each.axis == "tensor":
            each = dataclasses.replace(each, beside="fed")
        traffic.append(each)
    added = 0
    if convention.adds_gradients:
        added = _ADDED_BYTES * sum(n * math.prod(shape_on(step, p, None)) for n, p in step.every_parameter())
    waits = added / cluster.device.bandwidth_bytes_per_s
    if stage == 1:
        parts = step.size("zero") * sum(n for n, _ in step.every_parameter())
        waits += convention.copy_s * parts / step.num_micro_batches
    if step.stages is None or len(step.stages.ranks) - 1 in step.stages.own:
        waits += convention.micro_batch_s
    if convention.transfer_s and _has_slow_transfers(step, cluster):
        waits += convention.transfer_s * _transfers(step.size("pipeline"), step.num_micro_batches)
    host_s = convention.collective_host_s
    if host_s is not None and step.stages is not None and not cluster.is_one_node:
        host_s += convention.waiting_s * step.size("tensor")
    return step.replace(
        traffic=tuple(traffic),
        gathers_ahead=convention.gathers_ahead,
        micro_batch_s=waits,
        collective_host_s=host_s,
    )


def _has_slow_transfers(step: Step, cluster: Cluster) -> bool:
    """Return whether a run is among those of nanotron's whose transfers are slow: of pipelines, or on 64 nodes."""
    over_four = step.size("tensor") >= 4 * cluster.devices_per_node
    on_all = cluster.num_devices >= 64 * cluster.devices_per_node
    return on_all and not over_four if step.stages is None else on_all or over_four


def _transfers(ranks: int, micro_batches: int) -> float:
    """Return the transfers that a rank of a pipeline waits for, per micro-batch that the whole lasts.

    Middle ranks send and receive in both directions, those at the ends half as often. While the pipeline fills and
    drains, a stage waits for one of them in place of four.
    """
    if ranks == 1:
        return 4
    each, filling = (2, 0) if ranks == 2 else (4, 2 * (ranks - 4))
    return (each * micro_batches + filling) / (micro_batches + ranks - 1)


def _layers_of_a_block(step: Step) -> float:
    """Return the collectives per block: one per matrix, since vectors stay whole below DeepSpeed's threshold."""
    matrices = sum(block.count * sum(len(p.shape) > 1 for p in block.parameters) for block in step.blocks)
    return matrices / max(sum(block.count for block in step.blocks), 1)

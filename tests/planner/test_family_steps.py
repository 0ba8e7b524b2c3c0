import dataclasses

import pytest

from meshwright.cost import memory, peak
from meshwright.cost.peak_memory import moments
from meshwright.errors import ModelError
from meshwright.methods import cost_of
from meshwright.planner.family_ops import ATTENTION, BLOCK, PER_OP, FamilyRun, Implementation, block_saved
from meshwright.planner.family_steps import family_step
from meshwright.planner.memory_budget import fit_budget
from meshwright.planner.model_shapes import Shape
from meshwright.strategy import Strategy

LLAMA = Shape("llama", 32, 4096, 32, 128256, 8192, kv_heads=8, ffn=14336)
GPT = Shape("gpt", 12, 768, 12, 50257, 1024)


def test_parameters_are_those_of_the_models():
    assert LLAMA.num_parameters == 8_030_261_248
    assert GPT.num_parameters == 124_439_808
    mixtral = Shape("mixtral", 32, 4096, 32, 32000, 4096, 8, 14336, experts=8, experts_per_token=2)
    assert mixtral.num_parameters == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.model_flops_per_token() < 0.35 * 6 * mixtral.num_parameters


def test_flops_are_six_for_a_parameter_and_twelve_for_a_score():
    matrices = LLAMA.num_parameters - 128256 * 4096  # the embedding is looked up
    whole = 6 * matrices + 12 * 32 * 4096 * 8192
    assert LLAMA.model_flops_per_token() == pytest.approx(whole, rel=1e-3)
    assert whole - LLAMA.model_flops_per_token(causal=True) == pytest.approx(6 * 32 * 4096 * 8192, rel=1e-2)
    step = family_step(GPT, FamilyRun(2, seq=1024))[0]
    assert step.flops == pytest.approx(2 * 1024 * GPT.model_flops_per_token(causal=True), rel=1e-3)


def test_what_a_gpt_block_keeps_is_korthikantis():
    shape, sbh, scores = dataclasses.replace(GPT, seq=2048), 2048 * 4 * 768, 12 * 2048 * 2048 * 4
    old = FamilyRun(4, seq=2048, impl=Implementation("scores", dropout=True))
    assert block_saved(shape, old) == 34 * sbh + 5 * scores
    divided = dataclasses.replace(old, tensor=4)
    assert block_saved(shape, divided) == (34 * sbh + 5 * scores) // 4
    whole_tokens = dataclasses.replace(divided, impl=dataclasses.replace(old.impl, split_tokens=False))
    assert block_saved(shape, whole_tokens) == 10 * sbh + (24 * sbh + 5 * scores) // 4


def recomputed(config, axes=(("data", 1),), micro_batches=1, shape=GPT, **changes):
    """The step of every pipeline rank under ``checkpoint``; none where the config is empty."""
    every = family_step(shape, FamilyRun(2, micro_batches, seq=GPT.seq, impl=Implementation(**changes)), axes)
    work = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel"}
    methods = [("parallel_mode", {"axes": list(axes)}), *(work[name] for name, _ in axes if name in work)]
    strategy = Strategy([*methods, *([("checkpoint", config)] if config else [])])
    return [cost_of(strategy, step) for step in every]


def test_recomputation_frees_what_is_named_and_runs_it_again():
    names = ("", ATTENTION, PER_OP, BLOCK)
    none, attention, per_op, full = (recomputed(name, attention="scores")[0] for name in names)
    saved = [step.activations.saved_bytes for step in (none, attention, per_op, full)]
    assert saved == sorted(saved, reverse=True)
    again = {op.kind for op in attention.blocks[0].ops if op.recomputed}
    assert again == {"matmul", "move"}
    products = [op for op in full.blocks[0].ops if op.kind == "matmul"]
    assert [op.recomputed for op in products] == [True] * (len(products) - 1) + [False]  # nothing is saved after it
    assert not any(op.recomputed for op in none.blocks[0].ops)


def test_a_policy_keeps_products_and_fused_attention():
    none, selective, full = (recomputed(config)[0] for config in ({}, {"policy": "selective"}, {"policy": "full"}))
    again = {op.kind: op.recomputed for op in selective.blocks[0].ops}
    assert again == {"move": 1, "matmul": 0, "attention": 0}
    assert selective.recompute_flops == 0 < full.recompute_flops < none.flops / 3
    saved = [step.activations.saved_bytes for step in (none, selective, full)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 3
    # The input, queries, keys and values, the rows' sums, and what the four products and attention return.
    kept = saved[1] - none.activations.outside_bytes
    assert kept == 12 * 2 * GPT.seq * (2 * GPT.hidden * (1 + 3 + 1 + 1 + 4 + 1) + 4 * GPT.heads)
    drawn = recomputed({"policy": "selective"}, dropout=True)[0]
    assert {op.kind for op in drawn.blocks[0].ops if op.recomputed} == {"move", "attention"}
    products = recomputed({"policy": "aten.mm"}, attention="scores")[0]
    assert products.recompute_flops == sum(12 * op.flops for op in products.blocks[0].ops if op.batch > 1) > 0


def test_some_blocks_alone_are_recomputed():
    axes = (("tensor", 2),)
    none, half, full = (recomputed(config, axes)[0] for config in ({}, {"every": 2}, {"every": 1}))
    assert {op.recomputed for op in half.blocks[0].ops} == {0.5, 0.0}
    assert none.activations.saved_bytes + full.activations.saved_bytes == 2 * half.activations.saved_bytes
    assert full.recompute_flops == 2 * half.recompute_flops > 0
    sent = [sum(each.bytes_per_step for each in step.traffic) for step in (none, half, full)]
    assert sent[2] - sent[1] == sent[1] - sent[0] > 0
    first, last = recomputed({"layers": 6}, (("pipeline", 2),), 2)
    assert [max(op.recomputed for op in step.blocks[0].ops) for step in (first, last)] == [1, 0]
    assert first.recompute_flops > 0 == last.recompute_flops


def test_a_budget_is_met_on_every_pipeline_rank():
    axes, small = [("data", 1), ("pipeline", 2)], dataclasses.replace(GPT, vocab=1000)
    free, least = (recomputed(config, axes, 4, small) for config in ({}, {"policy": "full"}))
    budget = (memory(free[0]).total + memory(least[0]).total) // 2
    asked = Strategy(
        [("parallel_mode", {"axes": axes}), "pipeline_parallel", ("checkpoint", {"memory_budget": budget})]
    )
    steps = family_step(small, FamilyRun(2, 4, seq=GPT.seq), axes)
    fitted = fit_budget(asked, steps)
    found = [cost_of(fitted.strategy, step) for step in steps]
    assert all(memory(step).total <= budget for step in found)
    assert found[0].recompute_flops < least[0].recompute_flops
    assert "checkpoint: recomputes" in fitted.notices[0]


def test_a_pipeline_divides_blocks_and_only_its_last_rank_has_logits():
    axes = [("zero", 2), ("pipeline", 4)]
    strategy = Strategy([("parallel_mode", {"axes": axes}), "pipeline_parallel", "zero1"])
    ranks = family_step(GPT, FamilyRun(1, 8, seq=GPT.seq), axes, shard_axis="zero")
    steps = [cost_of(strategy, step) for step in ranks]
    assert [sum(block.count for block in step.blocks if block.name == BLOCK) for step in steps] == [3, 3, 3, 3]
    assert [step.activations.outside_bytes > 0 for step in steps] == [False, False, False, True]
    kept = [step.activations.saved_bytes - step.activations.outside_bytes for step in steps]
    assert kept == sorted(kept, reverse=True)  # 1F1B: the first rank has most micro-batches in flight
    held = [memory(step).parameters for step in steps]
    assert held[0] == held[3] + memory(steps[0]).parameters - memory(steps[3]).parameters > held[1] == held[2]


def test_a_pipeline_that_counts_the_head_gives_its_last_rank_fewer_blocks():
    axes = [("data", 1), ("pipeline", 2)]
    small = Shape("llama", 16, 2048, 32, 131072, 4096, ffn=8192, tied=True)
    plain, reaching, beyond = (
        family_step(small, FamilyRun(1, 4, seq=4096, impl=Implementation(balances_head=balances)), axes)[0]
        for balances in ("", "reaching", "beyond")
    )
    assert plain.stages.ranges == ((0, 8), (8, 16))
    assert reaching.stages.ranges == ((0, 10), (10, 16))  # the head costs as much as four blocks: ten are half
    assert beyond.stages.ranges == ((0, 11), (11, 16))


def test_stages_that_count_the_head_end_where_they_reach_their_share():
    axes = [("pipeline", 32)]
    large = Shape("llama", 80, 8192, 64, 131072, 4096, ffn=28672)
    first, *_, last = family_step(
        large, FamilyRun(1, 32, seq=4096, impl=Implementation(balances_head="reaching")), axes
    )[0].stages.ranges
    assert (first, last) == ((0, 3), (79, 80))  # 2.53 blocks each, with a head of 1.1


def test_the_peak_is_where_logits_are_large_or_where_many_blocks_are_saved():
    vast = family_step(dataclasses.replace(GPT, vocab=500_000), FamilyRun(4, seq=1024))[0]
    assert peak(vast).moment == "loss"
    deep = family_step(dataclasses.replace(GPT, layers=96, vocab=1000), FamilyRun(4, seq=1024))[0]
    assert peak(deep).moment in ("loss", "recomputation")
    idle = family_step(GPT, FamilyRun(1, seq=1024))[0].replace(activations=None)
    assert peak(idle).moment in ("update", "reduction", "loss")
    assert peak(deep).reserved_bytes >= peak(deep).allocated_bytes


@pytest.mark.parametrize(
    "changes", [{"heads": 7}, {"layers": 0}, {"kv_heads": 5}, {"hidden": -768}], ids=lambda changes: next(iter(changes))
)
def test_dimensions_that_do_not_fit_are_refused(changes):
    with pytest.raises(ModelError, match="do not fit together"):
        dataclasses.replace(GPT, **changes)


def test_a_mesh_that_cannot_divide_the_model_is_refused():
    with pytest.raises(ModelError, match="cannot divide"):
        family_step(GPT, FamilyRun(1, seq=1024), [("tensor", 8)])


def test_eager_norms_and_losses_move_more():
    def moved(**changes):
        step = family_step(LLAMA, FamilyRun(2, seq=4096, impl=Implementation(**changes)))[0]
        return [sum(op.num_bytes * op.count for op in block.ops if op.kind == "move") for block in step.blocks]

    tokens, h, kv = 2 * 4096, 4096, 1024
    usual, plain, fused = moved(), moved(plain_norms=True), moved(plain_norms=True, compiled=True)
    assert plain[0] - usual[0] == pytest.approx(2 * tokens * (2 * 16 * h + 8 * (h + kv) + 2 * (h + kv)), rel=1e-6)
    assert fused == moved(compiled=True)
    assert moved(logit_moves=(38, 14))[1] - usual[1] == tokens * 128256 * (38 - 14)


def test_recomputing_every_second_product_gathers_again_and_reduces_once():
    axes = [("tensor", 8)]
    step = family_step(LLAMA, FamilyRun(1, seq=4096), axes)[0]
    strategy = [("parallel_mode", {"axes": axes}), "tensor_parallel", "half"]

    def sent(*more):
        traffic = cost_of(Strategy([*strategy, *more]), step).traffic
        return {kind: sum(t.calls for t in traffic if t.kind == kind) for kind in ("all_gather", "reduce_scatter")}

    assert sent() == {"all_gather": 128, "reduce_scatter": 128}
    assert sent(("checkpoint", {"wrap_class": PER_OP})) == {"all_gather": 192, "reduce_scatter": 128}
    assert sent(("checkpoint", {"wrap_class": BLOCK})) == {"all_gather": 192, "reduce_scatter": 160}


def test_every_rank_of_a_pipeline_sends_for_the_blocks_it_has():
    uneven = Shape("gpt", layers=10, hidden=256, heads=4, vocab=512, seq=64)
    run = FamilyRun(micro_batch=1, num_micro_batches=4, tensor=2, seq=64)
    steps = family_step(uneven, run, [("tensor", 2), ("pipeline", 4)])
    blocks = [end - first for first, end in steps[0].stages.ranges]
    assert blocks == [2, 3, 3, 2]
    forward = [sum(b.count for b in step.boundaries if b.moment == "forward") for step in steps]
    assert forward == [4 * each for each in blocks]  # two pairs of a gather and a reduction a block


def test_gradients_that_accumulate_whole_have_no_shards_yet():
    shape, axes = Shape("gpt", layers=4, hidden=256, heads=4, vocab=512, seq=64), [("zero", 4)]
    run = FamilyRun(micro_batch=1, num_micro_batches=4, seq=64)
    step = cost_of(
        Strategy([("parallel_mode", {"axes": axes}), "amp_native", "zero1"]),
        family_step(shape, run, axes, shard_axis="zero")[0],
    )
    every = moments(step)
    assert (every["loss"].gradients, every["recomputation"].gradients) == (0, 0)
    assert every["update"].gradients == memory(step).gradients > 0
    weights_and_gradients = (2 + 4) * shape.num_parameters  # in bf16, and in fp32 until they are reduced
    assert every["loss"].gathered == pytest.approx(weights_and_gradients, rel=0.01)

import dataclasses

import pytest

from meshwright.cost import memory, peak
from meshwright.errors import ModelError
from meshwright.methods import cost_of
from meshwright.planner.families import family_step
from meshwright.planner.family_ops import ATTENTION, BLOCK, PER_OP, FamilyRun, block_saved
from meshwright.planner.family_shape import Shape
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
    old = FamilyRun(4, seq=2048, dropout=True, fused_attention=False)
    assert block_saved(shape, old) == 34 * sbh + 5 * scores
    divided = dataclasses.replace(old, tensor=4)
    assert block_saved(shape, divided) == (34 * sbh + 5 * scores) // 4
    whole_tokens = dataclasses.replace(divided, split_tokens=False)
    assert block_saved(shape, whole_tokens) == 10 * sbh + (24 * sbh + 5 * scores) // 4


def recomputed(name, **changes):
    run = FamilyRun(2, seq=GPT.seq, **changes)
    step = family_step(GPT, run, [("data", 1)])[0]
    methods = [("parallel_mode", {"axes": [("data", 1)]})] + ([("checkpoint", name)] if name else [])
    return cost_of(Strategy(methods), step)


def test_recomputation_frees_what_is_named_and_runs_it_again():
    none, attention, per_op, full = (recomputed(name, fused_attention=False) for name in ("", ATTENTION, PER_OP, BLOCK))
    saved = [step.activations.saved_bytes for step in (none, attention, per_op, full)]
    assert saved == sorted(saved, reverse=True)
    again = {op.kind for op in attention.blocks[0].ops if op.recomputed}
    assert again == {"matmul", "move"}
    products = [op for op in full.blocks[0].ops if op.kind == "matmul"]
    assert [op.recomputed for op in products] == [True] * (len(products) - 1) + [False]  # nothing is saved after it
    assert not any(op.recomputed for op in none.blocks[0].ops)


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
    plain, balanced = (
        family_step(small, FamilyRun(1, 4, seq=4096, balances_head=balances), axes)[0] for balances in (False, True)
    )
    assert plain.stages.ranges == ((0, 8), (8, 16))
    assert balanced.stages.ranges == ((0, 10), (10, 16))  # the head costs as much as four blocks


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

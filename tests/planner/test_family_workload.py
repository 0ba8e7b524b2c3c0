import dataclasses

import pytest

from meshwright.cost import find_cluster
from meshwright.errors import ConfigError, ModelError, StrategyError
from meshwright.planner.family_ops import Implementation
from meshwright.planner.family_workload import FamilyWorkload
from meshwright.planner.model_shapes import Shape, known_models, parse_family
from meshwright.planner.plans import CONTEXT_BYTES
from meshwright.strategy import Strategy

SMALL = Shape("llama", 8, 1024, 16, 32000, 2048, kv_heads=8)
MOE = Shape("mixtral", 4, 1024, 16, 32000, 2048, kv_heads=8, experts=8, experts_per_token=2)


def planned(methods, micro_batches=None, *, shape=SMALL, cluster="a100-80x8", batch=64, **options):
    return FamilyWorkload(shape, find_cluster(cluster), batch, **options).plan(Strategy(methods), micro_batches)


def mesh(**axes):
    return ("parallel_mode", axes)


def test_a_plan_of_a_family_has_seconds_tokens_and_the_memory_of_its_fullest_rank():
    plan = planned(["fsdp"], 2, dtype="bf16")
    assert plan.strategy == Strategy([mesh(data=8), "fsdp", ("amp_native", "bf16")])
    assert plan.micro_batch == 4
    assert plan.forecast.samples == 64
    assert plan.forecast.tokens_per_s == pytest.approx(64 * 2048 / plan.forecast.time.step_time_s)
    assert plan.limit_bytes == find_cluster("a100-80x8").device.memory_bytes - CONTEXT_BYTES
    reserved = plan.forecast.peak.reserved_bytes
    assert reserved < plan.needed_bytes == plan.taken_bytes == round(reserved * 1.05)
    assert plan.fits
    tight = planned(["fsdp"], 2, dtype="bf16", limit_bytes=plan.needed_bytes - 1)
    assert not tight.fits


def test_precision_comes_from_the_strategy_or_from_the_workload():
    products = {
        name: next(op.dtype for op in planned(methods, **options).step.blocks[0].ops if op.kind == "matmul")
        for name, methods, options in (
            ("fp32", ["fsdp"], {}),
            ("half", ["fsdp"], {"dtype": "bf16"}),
            ("given", [("half", "bf16")], {"dtype": "fp16"}),
            ("fp8", ["fsdp", ("fp8", "rowwise"), ("amp_native", "bf16")], {"cluster": "h100x8"}),
        )
    }
    assert products == {"fp32": "fp32", "half": "half", "given": "half", "fp8": "fp8"}
    assert "half(dtype='bf16')" in str(planned([("half", "bf16")], dtype="fp16").strategy)
    slow, fast = planned(["fsdp"]), planned(["fsdp"], dtype="bf16")
    assert fast.forecast.time.step_time_s < slow.forecast.time.step_time_s


@pytest.mark.parametrize(
    ("methods", "axis", "kind"),
    [
        ([mesh(tensor=2, zero=4), ("tensor_parallel", {"sequence": True}), "zero2"], "tensor", "reduce_scatter"),
        ([mesh(tensor=2, zero=4), "tensor_parallel", "zero2"], "tensor", "all_reduce"),
        ([mesh(sequence=2, zero=4), "sequence_parallel", "zero2"], "sequence", "all_to_all"),
        ([mesh(context=2, zero=4), "context_parallel", "zero2"], "context", "send"),
    ],
    ids=["tokens_split", "tensor", "sequence", "context"],
)
def test_axes_divide_work_and_send_what_they_divide(methods, axis, kind):
    plan, alone = planned(methods, 1), planned(["zero2"], 1)
    assert kind in {each.kind for each in plan.step.traffic if each.axis == axis}
    # Attention hides what a ring sends; behind the last block all tokens are gathered once.
    assert (plan.forecast.time.inline_s > 1e-3) == (axis != "context")
    assert alone.forecast.time.inline_s == 0
    assert plan.micro_batch == 2 * alone.micro_batch
    # Twice the samples on half of the layers or tokens are the same work.
    assert plan.forecast.time.compute_s == pytest.approx(alone.forecast.time.compute_s, rel=0.25)


def test_a_pipeline_has_a_step_for_every_rank_and_its_head_where_its_last_stage_is():
    methods = [mesh(pipeline=2, data=4), ("half", "bf16")]
    once, v_shaped = (
        planned([*methods, ("pipeline_parallel", {"schedule": schedule})], 4) for schedule in ("1f1b", "zbv")
    )
    assert len(once.steps) == len(v_shaped.steps) == len(once.forecast.peaks) == 2
    held = [[sum(p.name == "head" for b in step.blocks for p in b.parameters) for step in plan.steps]
            for plan in (once, v_shaped)]  # fmt: skip
    assert held == [[0, 1], [1, 0]]
    assert once.forecast.time.bubble_s > v_shaped.forecast.time.bubble_s > 0
    assert v_shaped.step.stages.ranks == (0, 1, 1, 0)


def test_compiled_blocks_leave_no_part_of_backward_to_fill_a_bubble_with():
    def staged(schedule, *more):
        stages = ("pipeline_parallel", {"schedule": schedule})
        return planned([mesh(pipeline=2, data=4), ("half", "bf16"), stages, *more], 4)

    def bubble_s(schedule, *more):
        return staged(schedule, *more).forecast.time.bubble_s

    # Compiled blocks are faster, and so their bubbles are shorter, unless nothing fills them.
    assert bubble_s("1f1b", "compile") < bubble_s("1f1b")
    assert bubble_s("zbv", "compile") > 1.1 * bubble_s("zbv")
    # Nor are gradients held that wait for those of weights.
    saved = staged("zbv", "compile").step.activations
    assert saved.results_bytes
    assert saved.saved_bytes == dataclasses.replace(saved, results_bytes=0).settled().saved_bytes


def test_experts_are_divided_and_tokens_travel_to_them():
    plan, whole = planned([mesh(expert=4, data=2), "expert_parallel"], 1, shape=MOE), planned([], 1, shape=MOE)
    assert {each.kind for each in plan.step.traffic if each.axis == "expert"} >= {"all_to_all"}
    experts = MOE.layers * 8 * 3 * MOE.hidden * MOE.ffn_width * 4
    assert whole.memory.parameters - plan.memory.parameters == experts * 3 // 4
    with pytest.raises(ModelError, match=r"expert axis.*8 experts"):
        planned([mesh(expert=16), "expert_parallel"], shape=MOE, cluster="h100x16")
    with pytest.raises(ModelError, match=r"split experts.*") as refused:  # as for the model itself
        planned([mesh(tensor=2, data=4), ("tensor_parallel", {"sequence": True})], shape=MOE)
    assert "expert_parallel" in str(refused.value)


@pytest.mark.parametrize(
    ("methods", "message", "options"),
    [
        ([mesh(tensor=16), "tensor_parallel"], "heads of keys and values", {"cluster": "a100x16"}),
        ([mesh(sequence=16), "sequence_parallel"], "heads", {"cluster": "a100x16"}),
        ([mesh(context=3), "context_parallel"], "tokens of a sample", {"cluster": "a100x3"}),
        ([mesh(pipeline=16), "pipeline_parallel"], "blocks|layers", {"cluster": "a100x16"}),
        ([mesh(tensor=2, data=4)], "no method works on it", {}),
        (["fp8"], "no 8-bit products", {}),
        ([("half", "bf16")], "cannot compute in bf16", {"cluster": "v100x8"}),
        ([("checkpoint", "Blok")], "does not have", {}),
    ],
)
def test_what_cannot_train_is_refused_with_the_reason(methods, message, options):
    with pytest.raises((ModelError, StrategyError), match=message):
        planned(methods, **options)


def test_a_workload_needs_a_batch_and_a_known_precision():
    for options in ({"batch": 0}, {"dtype": "int8"}):
        with pytest.raises(ConfigError, match="A workload"):
            planned([], **options)


@pytest.mark.parametrize("what", ["activation", "optimizer", "all"])
def test_what_offloading_brings_back_is_reserved_too(what):
    peak = planned(["fsdp", ("offload", what)]).forecast.peak
    assert peak.memory.returned > 0 or what == "optimizer"
    assert peak.reserved_bytes >= peak.allocated_bytes


def test_a_host_counts_what_it_offloads_to_itself():
    plain, offloaded = planned(["fsdp"], cluster="cpux4"), planned(["fsdp", "offload"], cluster="cpux4")
    assert plain.step.on_cpu
    assert offloaded.needed_bytes >= plain.needed_bytes - plain.memory.optimizer
    assert offloaded.gaps == plain.gaps


def test_families_are_read_from_text():
    shape = parse_family("gpt:layers=24,hidden=1024,heads=16,vocab=50304")
    assert shape == Shape("gpt", 24, 1024, 16, 50304, 1024)
    for name in ("meta-llama/Meta-Llama-3-8B", "someone/llama3-8b"):
        assert parse_family(name) == known_models()["llama-3-8b"]
    assert parse_family("llama-3-8b:seq=4096") == dataclasses.replace(known_models()["llama-3-8b"], seq=4096)
    assert parse_family("Meta-Llama-3.1-405B").num_parameters == pytest.approx(405.9e9, rel=2e-3)
    assert parse_family("gpt-3-175b").num_parameters == pytest.approx(175e9, rel=1e-2)
    assert parse_family("mixtral:layers=2,hidden=64,heads=4,vocab=99,experts=4,tied=true").is_tied


# Elements as Hugging Face counts them in the published weights.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320, "llama-2-34b": 33_743_970_304, "llama-2-70b": 68_976_648_192,
    "llama-1-30b": 32_528_943_616, "llama-1-65b": 65_285_660_672, "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
}  # fmt: skip


def test_known_models_have_their_published_numbers_of_parameters():
    known = known_models()
    assert {name: known[name].num_parameters for name in PUBLISHED} == PUBLISHED


def test_samples_do_not_change_a_known_model():
    assert parse_family("gpt2:seq=128").num_parameters == PUBLISHED["gpt2"]
    with pytest.raises(ModelError, match="table of positions"):
        parse_family("gpt2:seq=2048")
    assert parse_family("gpt2:seq=2048,positions=2048").num_parameters == PUBLISHED["gpt2"] + 1024 * 768
    assert parse_family("gpt:layers=1,hidden=8,heads=1,vocab=9,seq=4").positions is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama-3-8b", "did you mean 'llama-3-8b'"),
        ("gpt:layers=2", "no hidden, heads, vocab"),
        ("gpt:layrs=2", "did you mean 'layers'"),
        ("gpt:layers=two", "no number"),
        ("gpt:tied=maybe", "true or false"),
        ("gpt:layers=2,hidden=10,heads=3,vocab=9", "do not fit together"),
    ],
)
def test_what_names_no_model_is_refused(text, message):
    with pytest.raises(ModelError, match=message):
        parse_family(text)


def test_each_recipe_of_fp8_moves_its_own_bytes():
    seconds = {
        recipe: planned(["fsdp", ("fp8", recipe), ("amp_native", "bf16")], cluster="h100x8").forecast.time.step_time_s
        for recipe in ("delayed", "tensorwise", "rowwise", "mxfp8")
    }
    assert sorted(seconds, key=seconds.__getitem__)[0] == "delayed"
    assert len(set(seconds.values())) == 4


def test_the_implementation_that_is_simulated_can_be_chosen():
    usual, scores, fused = (
        planned(["fsdp"], dtype="bf16", implementation=each)
        for each in (Implementation(), Implementation("scores", dropout=True), Implementation(fused_loss=True))
    )
    assert scores.needed_bytes > usual.needed_bytes > fused.needed_bytes
    assert scores.forecast.time.step_time_s > usual.forecast.time.step_time_s > fused.forecast.time.step_time_s
    assert fused.step == planned(["fsdp"], dtype="bf16", implementation=Implementation(), fused_loss=True).step

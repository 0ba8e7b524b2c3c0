"""Plugins are strategies: which one each is, what it says of arguments without meaning, and what it refuses."""

import contextlib
import inspect
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.utils.data import IterableDataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright.compat.colossalai import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    launch,
    launch_from_torch,
)
from meshwright.strategy.value import METHOD_CONFIGS
from tests.compat.colossalai import helpers

SCALE = {"initial_scale": 65536.0, "min_scale": 1.0, "growth_interval": 1000, "hysteresis": 2, "max_scale": 2.0**32}
HALF = {"dtype": "fp16", "loss_scale": SCALE}
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("plugin", "methods"),
    [
        (TorchDDPPlugin(), [("parallel_mode", {"data": 4})]),
        (LowLevelZeroPlugin(precision="fp32"), [("parallel_mode", {"zero": 4}), "zero1"]),
        (
            LowLevelZeroPlugin(stage=2, precision="bf16", extra_dp_size=2, master_weights=False),
            [("parallel_mode", {"zero": 2, "data": 2}), "zero2", ("half", {"dtype": "bf16", "master_weights": False})],
        ),
        (HybridParallelPlugin(tp_size=1, pp_size=1), [("parallel_mode", {"data": 4}), ("half", HALF)]),
        (
            HybridParallelPlugin(1, 1, None, "bf16", 3, communication_dtype=torch.float32, methods=["checkpoint"]),
            [
                ("parallel_mode", {"data": 4}),
                ("fsdp", {"mixed_precision": {"reduce_dtype": "fp32"}}),
                ("half", "bf16"),
                "checkpoint",
            ],
        ),
        (GeminiPlugin(precision="bf16"), [("parallel_mode", {"zero": 4}), "fsdp", ("half", "bf16")]),
        (GeminiPlugin(precision="fp32", strict_ddp_mode=True), [("parallel_mode", {"data": 4})]),
        (TorchFSDPPlugin(), [("parallel_mode", {"data": 4}), "fsdp"]),
        (
            TorchFSDPPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=BF16),
            [
                ("parallel_mode", {"data": 4}),
                ("zero2", {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}),
            ],
        ),
        (TorchFSDPPlugin(sharding_strategy="NO_SHARD"), [("parallel_mode", {"data": 4})]),
        (
            LowLevelZeroPlugin(precision="fp32", cpu_offload=True),
            [("parallel_mode", {"zero": 4}), "zero1", ("offload", "optimizer")],
        ),
        (
            HybridParallelPlugin(1, 1, None, "fp32", cpu_offload=True),
            [("parallel_mode", {"data": 4}), ("offload", "optimizer")],
        ),
        (
            GeminiPlugin(precision="fp32", offload_param_frac=0.5, pin_memory=True),
            [("parallel_mode", {"zero": 4}), "fsdp", ("offload", {"parameters": 0.5})],
        ),
        (
            TorchFSDPPlugin(cpu_offload=CPUOffload(offload_params=True)),
            [
                ("parallel_mode", {"data": 4}),
                "fsdp",
                ("offload", {"parameters": 1.0}),
            ],
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Plugin) else "",
)
def test_the_strategy_of_each_plugin(plugin, methods):
    assert plugin.strategy(4) == mw.Strategy(methods)


@pytest.mark.skipif("tensor_parallel" not in METHOD_CONFIGS, reason="the method tensor_parallel is not there yet")
@pytest.mark.parametrize("plugin", [HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=2, precision="bf16")])
def test_tensor_parallelism_is_an_axis_and_a_method(plugin):
    mode = ("parallel_mode", [("tensor", 2), ("data", 4)])
    assert plugin.strategy(8) == mw.Strategy([mode, "tensor_parallel", "zero2", ("half", "bf16")])


def test_stages_and_tokens_are_axes_and_methods():
    def strategy(**options):
        return HybridParallelPlugin(**{"tp_size": 2, "precision": "fp32", **options}).strategy(8)

    def expected(axes, *methods):
        return mw.Strategy([("parallel_mode", axes), *methods])

    inside = [("tensor", 2), ("pipeline", 2), ("data", 2)]
    keys = {"schedule": "1f1b", "num_stages_per_rank": 1, "num_micro_batches": 6, "split": [3, 1]}
    found = strategy(pp_size=2, num_microbatches=6, num_layers_per_stage=[3, 1])
    assert found == expected(inside, "tensor_parallel", ("pipeline_parallel", keys))
    keys = {"schedule": "interleaved", "num_stages_per_rank": 3, "num_micro_batches": 6}
    found = strategy(pp_size=2, microbatch_size=1, pp_style="interleaved", num_model_chunks=3, dp_outside=False)
    outside = [("tensor", 2), ("data", 2), ("pipeline", 2)]
    assert found == expected(outside, "tensor_parallel", ("pipeline_parallel", keys))
    divided = ("tensor_parallel", {"sequence": True})
    assert strategy(**TOKENS, sequence_parallelism_mode="ring") == expected([("tensor", 2), ("data", 4)], divided)
    found = strategy(**TOKENS, tp_size=1, sp_size=4, zero_stage=1)
    assert found == expected([("sequence", 4), ("data", 2)], "sequence_parallel", "zero1")
    found = strategy(**TOKENS, sp_size=2, sequence_parallelism_mode="ring_attn")
    assert found == expected([("tensor", 2), ("context", 2), ("data", 2)], "tensor_parallel", "context_parallel")
    whole = HybridParallelPlugin(1, 1, 1, "fp32", **TOKENS, sequence_parallelism_mode="ring_attn")
    assert whole.strategy(2) == mw.Strategy([("parallel_mode", {"data": 2})])
    (notice,) = whole.notices()
    assert "sp_size is 1" in notice
    plugin = HybridParallelPlugin(2, 2, num_microbatches=2, num_model_chunks=2, overlap_p2p=False)
    overlap, chunks = plugin.notices()
    assert "overlap_p2p=False changes nothing" in overlap
    assert "num_model_chunks changes nothing" in chunks


def test_experts_are_an_axis_and_a_method():
    plugin = MoeHybridParallelPlugin(ep_size=2, zero_stage=1, precision="bf16")
    mode = ("parallel_mode", [("expert", 2), ("data", 2)])
    assert plugin.strategy(4) == mw.Strategy([mode, "expert_parallel", "zero1", ("half", "bf16")])
    assert "expert_parallel" not in MoeHybridParallelPlugin(ep_size=1).strategy(4)


def test_experts_lie_between_the_tensor_and_the_pipeline_axis():
    tokens = {"enable_sequence_parallelism": True, "sp_size": 2}
    every = {"tp_size": 2, "pp_size": 2, "ep_size": 2, "num_microbatches": 2, "precision": "fp32", **tokens}
    axes = [("tensor", 2), ("sequence", 2), ("expert", 2), ("pipeline", 2), ("data", 2)]
    for outside in (True, False):
        strategy = MoeHybridParallelPlugin(**every, moe_dp_outside=outside).strategy(32)
        assert list(strategy.get("parallel_mode").axes) == (axes if outside else [*axes[:3], axes[4], axes[3]])
        assert "expert_parallel" in strategy
        assert "sequence_parallel" in strategy


def test_fp8_arguments_are_methods():
    sharded, replicated = ("comm", {"all_gather": "fp8", "reduce": "int8"}), ("comm", "int8")
    for plugin, methods in (
        (LowLevelZeroPlugin(precision="bf16", use_fp8=True, fp8_communication=True), ["fp8", sharded]),
        (GeminiPlugin(precision="bf16", use_fp8=True, fp8_communication=True), ["fp8", sharded]),
        (HybridParallelPlugin(zero_stage=1, fp8_communication=True), [sharded]),
        (HybridParallelPlugin(use_fp8=True), ["fp8"]),
        (TorchFSDPPlugin(fp8_communication=True), [sharded]),
        (TorchDDPPlugin(fp8_communication=True), [replicated]),
    ):
        strategy = plugin.strategy(2)
        wanted = mw.Strategy([("fp8", "tensorwise") if method == "fp8" else method for method in methods])
        assert [strategy.get(name) for name in ("fp8", "comm")] == [wanted.get(name) for name in ("fp8", "comm")]
        assert len([notice for notice in plugin.notices() if "is the method comm" in notice]) == ("comm" in strategy)


def test_the_keyword_arguments_of_the_seed_are_accepted():
    plugin = HybridParallelPlugin(tp_size=1, zero_stage=2, pp_size=1, enable_all_optimization=True)
    (notice,) = plugin.notices()
    assert "enable_all_optimization=True changes nothing" in notice
    assert repr(plugin) == "HybridParallelPlugin(zero_stage=2, enable_all_optimization=True)"
    assert GeminiPlugin(pin_memory=False).notices() == []


SCALE_ARGUMENTS = "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale"
# In the order of ColossalAI 4f9953be, where all can be given by position.
ARGUMENTS = {
    TorchDDPPlugin: """
        broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction gradient_as_bucket_view static_graph
        fp8_communication""",
    TorchFSDPPlugin: """
        process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch mixed_precision ignored_modules
        param_init_fn sync_module_states fp8_communication""",
    LowLevelZeroPlugin: f"""
        stage precision {SCALE_ARGUMENTS} max_norm norm_type reduce_bucket_size_in_m communication_dtype
        overlap_communication overlap_allgather cpu_offload master_weights verbose cast_inputs fp8_communication use_fp8
        extra_dp_size""",
    GeminiPlugin: f"""
        chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation max_prefetch shard_param_frac
        offload_optim_frac offload_param_frac warmup_non_model_data_ratio steady_cuda_cap_ratio precision master_weights
        pin_memory force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim min_chunk_size_m memstats
        gpu_margin_mem_ratio {SCALE_ARGUMENTS} max_norm norm_type tp_size extra_dp_size enable_all_optimization
        enable_fused_normalization enable_flash_attention enable_sequence_parallelism enable_jit_fused
        enable_async_reduce use_fp8 verbose fp8_communication""",
    HybridParallelPlugin: f"""
        tp_size pp_size sp_size precision zero_stage enable_all_optimization enable_fused_normalization
        enable_flash_attention enable_jit_fused enable_sequence_parallelism sequence_parallelism_mode parallel_output
        num_microbatches microbatch_size {SCALE_ARGUMENTS} max_norm broadcast_buffers ddp_bucket_cap_mb
        find_unused_parameters check_reduction gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload
        communication_dtype overlap_communication custom_policy pp_style num_model_chunks scheduler_nodes
        num_layers_per_stage gradient_checkpoint_config enable_metadata_cache make_vocab_size_divisible_by dp_outside
        overlap_p2p overlap_allgather fp8_communication use_fp8 inner_ring_size""",
}


@pytest.mark.parametrize("plugin", ARGUMENTS, ids=lambda plugin: plugin.__name__)
def test_arguments_by_position_are_those_of_the_seed(plugin):
    parameters = inspect.signature(plugin).parameters.values()
    named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert [each.name for each in parameters if each.name not in named] == ARGUMENTS[plugin].split()
    assert named <= {"methods", "enable_sequence_overlap"}


def test_values_by_position_and_the_plugins_own_loss_scales():
    assert LowLevelZeroPlugin(2).stage == 2
    assert LowLevelZeroPlugin().initial_scale == 2.0**32
    assert GeminiPlugin().initial_scale == HybridParallelPlugin().initial_scale == 2.0**16
    experts = MoeHybridParallelPlugin(1, 1, 2, None, "bf16", 1, moe_dp_outside=False)
    assert (experts.ep_size, experts.sp_size, experts.precision, experts.zero_stage) == (2, None, "bf16", 1)
    assert repr(experts) == ("MoeHybridParallelPlugin(precision='bf16', zero_stage=1, ep_size=2, moe_dp_outside=False)")
    assert not experts.notices()


HYBRID = {"tp_size": 1, "pp_size": 1}
PIPELINE = {"tp_size": 1, "pp_size": 2, "num_microbatches": 4}
TOKENS = {"enable_sequence_parallelism": True}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LowLevelZeroPlugin(stage=3), "stage is none of its values.*1 or 2"),
        (lambda: LowLevelZeroPlugin(cast_inputs=False), "cast_inputs"),
        (lambda: LowLevelZeroPlugin(precision="bf61"), "did you mean 'bf16'"),
        (lambda: LowLevelZeroPlugin(max_norm=-1.0), "no norm to clip by"),
        (lambda: LowLevelZeroPlugin(initial_scale=0.5), "initial_scale from min_scale 1.0"),
        (lambda: LowLevelZeroPlugin(extra_dp_size=3).strategy(4), "do not divide the world"),
        (lambda: HybridParallelPlugin(tp_size=1, pp_size=2), "num_microbatches or microbatch_size. Got neither"),
        (lambda: HybridParallelPlugin(**PIPELINE, pp_style="interleaved"), "num_model_chunks of 2 or more"),
        (lambda: HybridParallelPlugin(**PIPELINE, pp_style="zbv", num_model_chunks=3), "two stages on every rank"),
        (lambda: HybridParallelPlugin(**PIPELINE, pp_style="gpipe"), "pp_style is none of its values"),
        (lambda: HybridParallelPlugin(**HYBRID, sp_size=2), "sequence parallelism is not enabled"),
        (lambda: HybridParallelPlugin(**HYBRID, **TOKENS), "sp_size of 2 or more"),
        (lambda: HybridParallelPlugin(**HYBRID, **TOKENS, sequence_parallelism_mode="split_gather"), "tp_size of 2"),
        (
            lambda: HybridParallelPlugin(**HYBRID, **TOKENS, sequence_parallelism_mode="ring_attn"),
            "sp_size of 2 or more",
        ),
        (lambda: HybridParallelPlugin(**HYBRID, zero_stage=4), "zero_stage"),
        (lambda: HybridParallelPlugin(**HYBRID, custom_policy=object()), "Shardformer"),
        (
            lambda: HybridParallelPlugin(**PIPELINE, fp8_communication=True),
            "cannot be had where stages",
        ),
        (lambda: HybridParallelPlugin(tp_size=2, fp8_communication=True), "divided weights.*a zero_stage"),
        (lambda: MoeHybridParallelPlugin(**HYBRID, ep_size=2, fp8_communication=True), "experts.*ep_size=1"),
        (lambda: HybridParallelPlugin(**HYBRID, num_microbatches=0), "not a count"),
        (lambda: HybridParallelPlugin(**HYBRID, communication_dtype=torch.bfloat16), "needs a ZeRO stage"),
        (lambda: HybridParallelPlugin(**HYBRID, microbatch_size=3).num_micro_batches(4), "does not divide the batch"),
        (lambda: HybridParallelPlugin(tp_size=3, pp_size=1).strategy(4), r"tensor 3 = 3.*multiple of 3"),
        (lambda: HybridParallelPlugin(tp_size=0, pp_size=1).strategy(4), "not a number of ranks"),
        (lambda: MoeHybridParallelPlugin(tp_size=2, pp_size=1, ep_size=3).strategy(4), "tensor 2 x expert 3 = 6"),
        (lambda: MoeHybridParallelPlugin(**HYBRID, ep_size=3).strategy(4), "expert 3 = 3"),
        (lambda: MoeHybridParallelPlugin(**HYBRID, moe_tp_size=2), "tensor parallelism of its own"),
        (lambda: GeminiPlugin(offload_optim_frac=1.5), "offload: config key 'optimizer'"),
        (lambda: GeminiPlugin(placement_policy="atuo"), "did you mean 'auto'"),
        (lambda: GeminiPlugin(shard_param_frac=0.5), "shard_param_frac"),
        (lambda: TorchFSDPPlugin(sharding_strategy="FULL"), "did you mean 'FULL_SHARD'"),
        (lambda: TorchFSDPPlugin(sharding_strategy="NO_SHARD", cpu_offload=CPUOffload(True)), "cpu_offload"),
        (lambda: TorchFSDPPlugin(sharding_strategy="NO_SHARD", mixed_precision=BF16), "TorchDDPPlugin"),
        (lambda: Booster(plugin="ddp"), "not a plugin"),
        (lambda: Booster(mixed_precision="fp8"), "mixed_precision"),
        (lambda: Booster(mixed_precision="bf16", plugin=LowLevelZeroPlugin()), "controls the precision"),
    ],
)
def test_what_cannot_be_honoured_is_refused(make, text):
    with pytest.raises(mw.MeshwrightError, match=text):
        make()


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'zero_stge'"):
        HybridParallelPlugin(tp_size=1, pp_size=1, zero_stge=2)


def misuse():
    booster = Booster(plugin=TorchDDPPlugin())
    two_norms = Booster(plugin=LowLevelZeroPlugin(max_norm=1.0, methods=[("grad_clip", 2.0)]))
    model, optim, schedule = helpers.build()
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 7)).sum().backward()
    stepped.step()
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    cases = [
        (lambda: Booster().boost(model), "without a plugin" if mw.world_size() > 1 else "nothing"),
        (lambda: booster.boost(model, helpers.build()[1]), "not the model's"),
        (lambda: booster.boost(model, stepped), "has stepped"),
        (lambda: booster.boost(model, torch.optim.LBFGS(model.parameters())), "references of its own"),
        (lambda: booster.boost(model, optim, None, None, other), "another optimizer"),
        (lambda: booster.boost(model, None, None, None, schedule), "no optimizer"),
        (lambda: booster.boost(print), "returns no module"),
        (lambda: Booster(plugin=TorchDDPPlugin(methods=[("gradient_accumulation", 2)])).boost(model), "calls backward"),
        (lambda: Booster(plugin=TorchDDPPlugin(methods=["loss_spike"])).boost(model), "losses of Accelerated.step"),
        (lambda: two_norms.boost(helpers.build()[0]), "name different norms"),
        (lambda: Booster(device="cuda", plugin=TorchDDPPlugin()).boost(model), "another device"),
        (lambda: booster.no_sync(model).__enter__(), "not one that this Booster"),
        (lambda: booster.execute_pipeline(iter([1]), model, None), "not one that this Booster"),
    ]
    for call, text in cases:
        with pytest.raises(mw.MeshwrightError, match=text):
            call()
    boosted, optim, *_ = booster.boost(model, optim)
    for again in (model, boosted):
        with pytest.raises(mw.ModelError, match=r"accelerated before|already distributed"):
            booster.boost(again)
    with pytest.raises(mw.ConfigError, match="norm was not measured"):
        optim.get_grad_norm(1.0)
    return True


def test_misuse_is_refused_on_every_rank(ranks):
    assert all(ranks(2).run(misuse))


def test_placement_by_itself_is_static():
    plugin = GeminiPlugin(placement_policy="auto", precision="fp32", offload_optim_frac=0.5)
    assert plugin.strategy(4) == GeminiPlugin(precision="fp32", offload_optim_frac=0.5).strategy(4)
    (notice,) = plugin.notices()
    assert "placement_policy='auto' is 'static'" in notice


def other_weights_on_each_rank(sync):
    """Two models in one process, of which only the first is built with one seed, as scripts do that seed once."""
    helpers.train(*helpers.boosted(TorchFSDPPlugin(sync_module_states=sync)), steps=2)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        second = helpers.boosted(TorchFSDPPlugin(sync_module_states=sync), seed=3 + mw.rank())
    return helpers.train(*second), told.getvalue()


@pytest.mark.parametrize("sync", [False, True])
def test_a_second_model_takes_the_weights_of_rank_0(ranks, sync):
    expected, _ = helpers.plain_run()
    answers = ranks(2).run(other_weights_on_each_rank, sync)
    for losses, _ in answers:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert "weights differ between ranks" in answers[0][1]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("scale", torch.full((3,), 1 / 3))
        self.register_buffer("shift", torch.full((3,), 1 / 3), persistent=False)
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift * self.count


def with_buffers(dtype):
    torch.manual_seed(1)
    model = Scaled()
    plugin = TorchFSDPPlugin(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, dtype))
    boosted, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))
    kinds = {name: buffer.dtype for name, buffer in boosted.named_buffers()}
    return kinds, list(boosted.state_dict()), boosted(torch.ones(2, 7)).dtype


def test_buffers_take_the_type_that_mixed_precision_names(ranks):
    for dtype, kind in ((torch.bfloat16, torch.bfloat16), (None, torch.float32)):
        for kinds, saved, output in ranks(2).run(with_buffers, dtype):
            assert kinds == {"scale": kind, "shift": kind, "count": torch.int64}
            assert saved == ["scale", "count", "linear.weight", "linear.bias"]
            assert output == kind, "products with a buffer in fp32 are in fp32"


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(self.up(x).relu())


def on_plain_layers(plugin):
    torch.manual_seed(1)
    model = TwoLayers()
    model, optim, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs in helpers.dataset().tensors[0].split(8):
        optim.backward(model(inputs).square().mean())
        optim.step()
        optim.zero_grad()
    return helpers.whole(model)


def advised():
    with pytest.raises(mw.ModelError) as found:
        on_plain_layers(HybridParallelPlugin(tp_size=2, precision="fp32"))
    plan = {"up": "colwise", "down": "rowwise"}
    by_plan = HybridParallelPlugin(tp_size=2, precision="fp32", methods=[("tensor_parallel", {"plan": plan})])
    as_fsdp = HybridParallelPlugin(tp_size=1, zero_stage=3, precision="fp32")
    return str(found.value), [on_plain_layers(plugin) for plugin in (by_plan, as_fsdp)]


def test_the_advice_on_layers_without_a_list_is_one_that_the_plugin_takes(ranks):
    expected = ranks(1).run(on_plain_layers, TorchDDPPlugin())[0]
    for text, results in ranks(2).run(advised):
        assert "methods=[('tensor_parallel', {'plan': {…}})]" in text
        assert "fsdp with tp_size=1 and zero_stage=3" in text
        for found in results:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def with_half_as_default():
    """Scripts of ColossalAI lower torch's default type around boost, where it makes weights of a lazy model."""
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32")
    with pytest.raises(mw.ConfigError, match="no process group of the axes tensor"):
        _ = plugin.tp_group
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        tokens = {"vocab_size": 96, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, **tokens))
        torch.set_default_dtype(dtype)
        try:
            model, *_ = Booster(plugin=plugin).boost(model)
            kept = torch.get_default_dtype()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(model(input_ids=torch.arange(16)[None]).logits)
    groups = [dist.get_process_group_ranks(group) for group in (plugin.tp_group, plugin.dp_group, plugin.pp_group)]
    return torch.equal(*results), kept, groups


def test_boost_under_another_default_type_and_the_groups_after_it(ranks):
    alone = [[0], [1], [2], [3]]
    for rank, (equal, kept, groups) in enumerate(ranks(4).run(with_half_as_default)):
        assert equal
        assert kept == torch.bfloat16
        assert groups == [[0, 1] if rank < 2 else [2, 3], [0, 2] if rank % 2 == 0 else [1, 3], alone[rank]]


def batches(options):
    loader = LowLevelZeroPlugin(precision="fp32").prepare_dataloader(TensorDataset(torch.arange(10)), 2, **options)
    return [batch.tolist() for (batch,) in loader]


def loading():
    launch_from_torch(backend="gloo", seed=0)
    launch(mw.rank(), mw.world_size(), "127.0.0.1", int(os.environ["MASTER_PORT"]), "gloo", seed=0, verbose=False)
    with pytest.raises(mw.LaunchError, match="twice with different arguments"):
        launch_from_torch(backend="gloo", seed=1)
    found = [batches(options) for options in ({}, {"shuffle": True, "seed": 3}, {"drop_last": True})]
    norm = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
    booster = Booster(plugin=TorchDDPPlugin(broadcast_buffers=False))
    model, *_ = booster.boost(norm)
    model(torch.full((2, 7), float(mw.rank())))
    return found, model.unwrap()[1].running_mean.tolist(), model.broadcast_buffers


def test_a_dataloader_yields_this_ranks_share(ranks):
    (first, mean, broadcast), (second, other_mean, _) = ranks(2).run(loading)
    assert first[0] == [[0, 2], [4, 6], [8]]
    assert second[0] == [[1, 3], [5, 7], [9]]
    shuffled = sorted(number for batch in (*first[1], *second[1]) for number in batch)
    assert shuffled == list(range(10))
    assert first[1] != first[0]
    assert first[2] == [[0, 2], [4, 6]]
    assert mean != other_mean, "each rank's own statistics where there is no CUDA"
    assert not broadcast


class _CountedStream(IterableDataset):
    """Yields the helpers' samples, and counts what is read on this rank."""

    reads = 0

    def __iter__(self):
        for number in range(helpers.SAMPLES):
            self.reads += 1
            yield helpers.dataset()[number]


def _boost_with_a_stream():
    plugin, stream = TorchDDPPlugin(), _CountedStream()
    loader = plugin.prepare_dataloader(stream, batch_size=4)
    model, optim, _ = helpers.build()
    _, _, _, same, _ = Booster(plugin=plugin).boost(model, optim, dataloader=loader)
    assert same is loader
    return stream.reads, [batch[0] for batch in same], stream.reads


def test_one_rank_of_a_host_reads_a_stream_for_the_others(ranks):
    before, batches, reads = zip(*ranks(2).run(_boost_with_a_stream), strict=True)
    assert sum(reads) - sum(before) == helpers.SAMPLES
    every = torch.stack([each for both in zip(*batches, strict=True) for each in both])
    seen = sorted(every.flatten(0, -2).tolist())
    assert seen == sorted(helpers.dataset().tensors[0].tolist())


def _boost_with_a_stream_on_one_rank():
    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(_CountedStream(), batch_size=4) if mw.rank() == 0 else None
    model, optim, _ = helpers.build()
    return Booster(plugin=plugin).boost(model, optim, dataloader=loader)[3] is loader


def test_a_loader_on_one_rank_alone_is_left_as_it_is(ranks):
    assert ranks(2).run(_boost_with_a_stream_on_one_rank) == [True, True]

import contextlib
import json
import pickle

import pytest
from hypothesis import given, strategies as st

import meshwright as mw
from meshwright import Strategy, StrategyError
from meshwright.strategy.value import METHOD_CONFIGS

NAMES = st.lists(st.sampled_from(["Block", "models", "GPT2Attention", "x_1", "<locals>"]), min_size=1, max_size=3).map(
    ".".join
)
CLASSES = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["fp16", "bf16"])
ZERO_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "atorch_wrap_cls": CLASSES,
        "atorch_ignored_cls": CLASSES,
        "wrap_trainable_outmost": st.booleans(),
        "forward_prefetch": st.booleans(),
        "limit_all_gathers": st.booleans(),
        "mixed_precision": st.fixed_dictionaries({}, optional={"param_dtype": DTYPES, "reduce_dtype": DTYPES}),
    },
)
MIXED_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "parallel_mode": st.just(([("tensor", 2), ("pipeline", 2)], None)),
        "pipe_config": st.fixed_dictionaries({"schedule": st.sampled_from(["gpipe", "zbv"])}),
        "tensor_config": st.just({"plan": {"up": "colwise"}}),
    },
)
CONFIGS = {
    "mixed_parallel": MIXED_KEYS,
    "ds_3d_parallel": MIXED_KEYS,
    "deepspeed_3d_parallel": MIXED_KEYS,
    "zero1": ZERO_KEYS,
    "zero2": ZERO_KEYS,
    "fsdp": ZERO_KEYS,
    "tensor_parallel": st.fixed_dictionaries(
        {},
        optional={"plan": st.dictionaries(st.sampled_from(["*.up", "head"]), st.sampled_from(["colwise", "rowwise"]))},
    ),
    "pipeline_parallel": st.fixed_dictionaries(
        {},
        optional={
            "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]),
            "num_micro_batches": st.integers(1, 64),
            "split": st.lists(st.integers(1, 9), min_size=1, max_size=4),
            "blocks": st.just("model.layers"),
        },
    ),
    "sequence_parallel": st.just({}),
    "context_parallel": st.fixed_dictionaries({}, optional={"balance": st.booleans()}),
    "expert_parallel": st.fixed_dictionaries({}, optional={"experts": st.just(["blocks.*.moe.units"])}),
    "comm": st.fixed_dictionaries(
        {},
        optional={
            "all_gather": st.sampled_from(["int8", "fp8"]),
            "reduce": st.sampled_from(["int8", "int4"]),
            "block_size": st.sampled_from([16, 128]),
            "scale_dtype": st.sampled_from(["fp32", "bf16"]),
            "min_numel": st.integers(0, 100_000),
            "hierarchical": st.one_of(st.just("auto"), st.integers(1, 8)),
        },
    ),
    "fp8": st.fixed_dictionaries(
        {},
        optional={
            "recipe": st.just("delayed"),
            "include": st.sampled_from(["layers", ("attention", "mlp")]),
            "exclude": st.sampled_from(["head", ("gate", "lm_head")]),
            "verbose": st.booleans(),
            "margin": st.integers(0, 3),
            "amax_history_len": st.integers(1, 1024),
            "emulate": st.booleans(),
        },
    ),
    "module_replace": st.fixed_dictionaries(
        {},
        optional={
            "include": st.lists(st.sampled_from(["attention", "rms_norm", "HF_LlamaAttention_FA", "mine"]), max_size=3),
            "exclude": st.sampled_from(["rotary", ("swiglu", "layer_norm")]),
            "attention": st.sampled_from(["auto", "sdpa", "flex", "flash"]),
            "loss": st.one_of(st.booleans(), st.just("lm_head")),
        },
    ),
    "compile": st.fixed_dictionaries(
        {},
        optional={
            "whole": st.booleans(),
            "backend": st.sampled_from(["inductor", "aot_eager"]),
            "mode": st.sampled_from(["default", "max-autotune"]),
            "dynamic": st.booleans(),
            "fullgraph": st.booleans(),
            "activation_budget": st.floats(0, 1),
        },
    ),
    "half": st.fixed_dictionaries({}, optional={"dtype": DTYPES, "master_weights": st.booleans()}),
    "amp_native": st.fixed_dictionaries({}, optional={"dtype": DTYPES, "skip_if_nonfinite": st.booleans()}),
    "checkpoint": st.fixed_dictionaries({}, optional={"wrap_class": CLASSES, "no_reentrant": st.booleans()}),
    "offload": st.none() | st.sampled_from(["optimizer", "activation", "all", {"optimizer": 0.5, "disk": "states"}]),
    "outer": st.fixed_dictionaries(
        {"rule": st.sampled_from(["bmuf", "slowmo", "diloco"])},
        optional={
            "sync_every": st.integers(1, 500),
            "lr": st.floats(0, 2),
            "quantise": st.sampled_from(["int8", "none"]),
        },
    ),
    "grad_clip": st.fixed_dictionaries(
        {}, optional={"max_norm": st.floats(0.01, 10), "norm_type": st.sampled_from(["inf", 1.0, 2.0])}
    ),
    "gradient_accumulation": st.fixed_dictionaries({"num_micro_batches": st.integers(1, 64)}),
    "skip_nonfinite": st.sampled_from([None, "skip", "stop"]),
    "loss_spike": st.sampled_from([None, "warn"])
    | st.fixed_dictionaries(
        {"action": st.sampled_from(["skip", "warn", "stop", "rollback"])},
        optional={"window": st.integers(2, 500), "threshold": st.floats(0.5, 50), "patience": st.integers(1, 100)},
    ),
    "weight_vote": st.sampled_from([None, 50, "heal"])
    | st.fixed_dictionaries({}, optional={"every": st.integers(1, 500), "action": st.sampled_from(["warn", "stop"])}),
    "ema": st.fixed_dictionaries(
        {},
        optional={
            "decay": st.floats(0.5, 0.9999),
            "warmup": st.booleans(),
            "every": st.integers(1, 100),
            "dtype": st.sampled_from(["fp32", "bf16"]),
        },
    ),
    "parallel_mode": st.fixed_dictionaries(
        {}, optional={"zero": st.integers(1, 64), "data": st.integers(1, 64), "tensor": st.integers(1, 64)}
    ),
}
STRATEGIES = st.dictionaries(st.sampled_from(sorted(CONFIGS)), st.none(), max_size=5).flatmap(
    lambda chosen: st.fixed_dictionaries({name: CONFIGS[name] for name in chosen}).map(
        lambda configs: Strategy(list(configs.items()))
    )
)


@given(STRATEGIES)
def test_a_strategy_survives_json_text_bytes_and_pickling_between_ranks(strategy):
    for copy in (
        Strategy(strategy.to_json()),
        Strategy(strategy.to_json().encode()),
        Strategy(str(strategy)),
        Strategy(list(strategy)),
        Strategy(strategy),
        pickle.loads(pickle.dumps(strategy)),
    ):
        assert copy == strategy
        assert hash(copy) == hash(strategy)
        assert copy.to_json() == strategy.to_json()


@given(STRATEGIES, STRATEGIES)
def test_a_diff_is_empty_exactly_for_equal_strategies(one, other):
    assert (one.diff(other) == "") == (one == other)


def test_every_method_is_covered_here():
    assert set(CONFIGS) == set(METHOD_CONFIGS)


def test_the_order_of_methods_has_no_meaning():
    one, other = Strategy(["fsdp", "checkpoint"]), Strategy(["checkpoint", "fsdp"])
    assert one == other
    assert len({one, other}) == 1


def test_files(tmp_path):
    strategy = Strategy(["zero2", ("amp_native", "bf16")])
    strategy.save(tmp_path / "strategy.json")
    assert Strategy(tmp_path / "strategy.json") == strategy
    assert Strategy(str(tmp_path / "strategy.json")) == strategy
    assert json.loads((tmp_path / "strategy.json").read_text())["schema_version"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["strategy.json"]


def test_a_pickle_in_a_file_is_refused_in_one_paragraph(tmp_path):
    path = tmp_path / "strategy.json"
    path.write_bytes(pickle.dumps(["zero2"]))
    with pytest.raises(StrategyError, match=r"^This strategy is a pickle.*Got a pickle in the file"):
        Strategy(path)


def test_a_strategy_is_immutable_and_changes_by_copy():
    strategy = Strategy(["zero2"])
    with pytest.raises(AttributeError, match="immutable"):
        strategy.methods = ()
    assert strategy.with_method(("amp_native", "bf16")).names == ("zero2", "amp_native")
    assert strategy.with_method("checkpoint").without("zero2") == Strategy(["checkpoint"])
    assert strategy.names == ("zero2",)


def test_classes_are_stored_by_qualified_name():
    class Inner:
        pass

    by_class = Strategy([("fsdp", {"atorch_wrap_cls": (Inner, "Other")})])
    names = by_class.get("fsdp").atorch_wrap_cls
    assert names == (f"{__name__}.{Inner.__qualname__}", "Other")


@pytest.mark.parametrize(
    ("seed_form", "same_as"),
    [
        (("amp_native", "bf16"), "amp_native(dtype='bf16')"),
        (("amp_native", {"enabled": True, "dtype": "torch.float16"}), "amp_native"),
        (("half", "bf16"), "half(dtype='bf16')"),
        (("zero2", {"not_use_fsdp", True}), "zero2(not_use_fsdp=True)"),
        (("zero1", {"use_ds_zero", True}), "zero1(use_ds_zero=True)"),
        (("checkpoint", ("A", "B")), "checkpoint('A', 'B')"),
        (("checkpoint", "A"), "checkpoint(wrap_class=['A'])"),
        (("fsdp", {"fsdp_wrap_params_outmost": True}), "fsdp(wrap_trainable_outmost=True)"),
        (("parallel_mode", ([("zero", 2), ("data", 4)], None)), "parallel_mode(zero=2, data=4)"),
        (("parallel_mode", ([("pipe", 2)], None, False, True)), "parallel_mode(pipeline=2)"),
        (("parallel_mode", ("tensor", 8)), "parallel_mode(tensor=8)"),
        (("parallel_mode", ([("tensor", 8)],)), "parallel_mode(tensor=8)"),
        (("tensor_parallel", {"shard_planner": None, "tp_ranks": None}), "tensor_parallel"),
        (
            ("pipeline_parallel", {"nstages": 2, "chunks": 4, "pipe_schedule": "1F1B", "pipe_ranks": None}),
            "pipeline_parallel(nstages=2, num_micro_batches=4)",
        ),
        (("deepspeed_3d_parallel", {"tie_first": True, "logit_helper": None}), "deepspeed_3d_parallel(tie_first=True)"),
        (["parallel_mode", None], "parallel_mode"),
        (("zero2", None, False), "zero2"),
    ],
)
def test_forms_of_the_seed(seed_form, same_as):
    assert Strategy([seed_form]) == Strategy(same_as)


BAD = [
    (pickle.dumps([("zero2", None)]), "pickle", "JSON"),
    (pickle.dumps([("zero2", None)], protocol=0), "pickle", "JSON"),
    (["zero9"], "did you mean 'zero", "one of"),
    (["paralle_mode"], "did you mean 'parallel_mode'", "one of"),
    (["pipline_parallel"], "did you mean 'pipeline_parallel'", "one of"),
    ([("parallel_mode", ("tensr", 8))], "did you mean 'tensor'", "one of"),
    ([("deepspeed_3d_parallel", {"tpinfo": 1})], "'tpinfo' configures another engine", "parallel_mode"),
    ([("ds_3d_parallel", {"batch_fn": 1})], "pass it as prepare_input", "pipe_config"),
    ([("pipeline_parallel", {"memory_limit": "40 apples"})], "'memory_limit'", "byte"),
    ([("zero2", {"atorch_wrap_class": ()})], "did you mean 'atorch_wrap_cls'", "keys from"),
    ([("amp_native", {"dtype": "fp32"})], "'dtype'", "'fp16' or 'bf16'"),
    ([("amp_native", 3)], "wrong kind", "dictionary"),
    ([("amp_native", {"enabled": False})], "disabled", "leave the method out"),
    ([("fsdp", {"sharding_strategy": "FULL_SHARD"})], "another engine", "SHARD_GRAD_OP"),
    ([("fsdp", {"cpu_offload": True})], "another engine", "leave it out"),
    ([("zero2", {"auto_wrap_policy": print})], "another engine", "atorch_wrap_cls"),
    ([("fsdp", {"atorch_wrap_cls": ("A",), "atorch_size_based_min_num_params": 3})], "by class and by size", "or"),
    ([("parallel_mode", ([("date", 2)], None))], "did you mean 'data'", "one of"),
    ([("parallel_mode", ([("data", 2), ("data", 2)], None))], "listed twice", "once"),
    ([("parallel_mode", ([("data", 0)], None))], "impossible size", "1 or more"),
    ([("parallel_mode", ([("data", 2)], None, True))], "several instances", "one job for each"),
    ([("zero2", None, True)], "tunable", "final"),
    (["zero2", "zero2"], "listed twice", "once"),
    ([3], "not a method", "name"),
    (3, "not a strategy", "list of methods"),
    ("{not json", "not valid JSON", ""),
    ('{"format": "other"}', "not a strategy", "meshwright.strategy"),
    ('{"format": "meshwright.strategy", "schema_version": 99, "methods": []}', "schema version", "1"),
    ('{"format": "meshwright.strategy", "schema_version": 1, "methods": 3}', "no list", "methods"),
    ("zero2 + __import__('os').system('x')", "not a strategy", "joined by"),
    ("zero2(atorch_wrap_cls=open('x'))", "not a strategy", "joined by"),
    ("amp_native bf17", "'dtype' has a value", "'bf16'"),
    ("zero 8: fsdp twice", "of a wrong kind", "keys from"),
    ("zero 0: fsdp", "impossible size", "1 or more"),
    ("zero 2 x zero 4: fsdp", "listed twice", "once"),
    ("fsdp, checkpoint evry=2", "no config key 'evry'", "every"),
    ("no/such/file.json", "cannot be read", "JSON file"),
    (b"\xff\xfe", "not text", "UTF-8"),
]


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("fsdp + amp_native bf16", ["fsdp", ("amp_native", "bf16")]),
        ("one rank: checkpoint selective every=2", [("checkpoint", {"policy": "selective", "every": 2})]),
        ("data 8", [("parallel_mode", {"data": 8})]),
        ("zero2, module_replace rms_norm/fused_loss", ["zero2", ("module_replace", ("rms_norm", "fused_loss"))]),
        (
            "tensor 2 x zero 4: zero2, module_replace fused_loss, offload optimizer=0.5",
            [
                ("parallel_mode", {"tensor": 2, "zero": 4}), "tensor_parallel", "zero2",
                ("module_replace", {"include": ["fused_loss"]}), ("offload", {"optimizer": 0.5}),
            ],
        ),
        (
            "zero 4 x pipeline 2: pipeline_parallel interleaved num_stages_per_rank=4, zero1, grad_clip 0.5",
            [
                ("parallel_mode", {"zero": 4, "pipeline": 2}), "zero1", ("grad_clip", 0.5),
                ("pipeline_parallel", {"schedule": "interleaved", "num_stages_per_rank": 4}),
            ],
        ),
    ],
)  # fmt: skip
def test_a_strategy_is_read_as_tables_show_it(text, methods):
    assert Strategy(text) == Strategy(methods)


@pytest.mark.parametrize(("source", "what", "expected"), BAD, ids=[str(bad[1]) for bad in BAD])
def test_bad_input_is_one_clear_paragraph(source, what, expected):
    with pytest.raises(StrategyError) as caught:
        Strategy(source)
    text = str(caught.value)
    assert what in text
    assert expected in text
    assert "What to do: " in text
    assert "\n" not in text


@given(st.one_of(st.text(), st.binary(), st.text().map(lambda text: '{"format": "meshwright.strategy"' + text)))
def test_nothing_but_the_documented_error(source):
    with contextlib.suppress(StrategyError):
        mw.Strategy(source)


def test_inert_keys_are_said_to_change_nothing():
    strategy = Strategy([("fsdp", {"limit_all_gathers": True, "use_orig_params": True, "sync_module_states": True})])
    notices = strategy.methods[0].notices()
    assert len(notices) == 2
    assert all("changes nothing" in notice for notice in notices)

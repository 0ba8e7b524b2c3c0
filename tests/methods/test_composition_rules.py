"""The composition law: every rule is quoted where it holds, and nowhere else."""

import pytest

from meshwright import Strategy, StrategyError
from meshwright.methods import known_methods, resolve, rules
from meshwright.strategy.value import METHOD_CONFIGS

EAGER = {"backend": "eager"}
IGNORED = {"atorch_ignored_cls": "LayerNorm"}
GATHERED = ("fp8", {"emulate": True, "recipe": "tensorwise", "all_gather": True})
ZBV = ("pipeline_parallel", {"schedule": "zbv"})
REENTRANT = ("checkpoint", {"no_reentrant": False})
WHOLE = ("compile", {**EAGER, "whole": True})
FUSED = ("module_replace", {"loss": True})
UNDER_KEYS = [
    [("half", "bf16"), "amp_native"],
    [FUSED, ZBV],
    [("module_replace", ["fused_loss"]), WHOLE],
    [("expert_parallel"), ("zero1", IGNORED)],
    [("expert_parallel"), ("zero2", {"wrap_trainable_outmost": True})],
    [("expert_parallel"), ("fsdp", IGNORED)],
    [("expert_parallel", {"z_loss": 1e-3}), "pipeline_parallel"],
    [GATHERED, "outer", "fsdp"],
    [GATHERED, "tensor_parallel", "fsdp"],
    [GATHERED, ("half", {"master_weights": False}), "fsdp"],
    [REENTRANT, ZBV],
    ["pipeline_parallel", ("zero1", IGNORED)],
    ["pipeline_parallel", ("zero2", IGNORED)],
    ["pipeline_parallel", ("fsdp", {"wrap_trainable_outmost": True})],
    [WHOLE, "pipeline_parallel"],
    [("compile", EAGER), REENTRANT],
    [("compile", {**EAGER, "activation_budget": 0.5}), "checkpoint"],
    *([("compile", {**EAGER, "whole": True, "fullgraph": True}), name] for name in ("zero1", "zero2", "fsdp")),
]
UNDER_KEYS += [
    [("pipeline_parallel", {"num_micro_batches": 4}), ("gradient_accumulation", 2)],
    [("amp_native", "fp16"), ("skip_nonfinite", "stop")],
    [("half", "fp16"), ("skip_nonfinite", "stop")],
    ["outer", ("skip_nonfinite", "stop")],
    ["outer", ("loss_spike", "rollback")],
    [GATHERED, "ema", "fsdp"],
    [("outer", "streaming_diloco"), "ema"],
    [GATHERED, ("comm", {"all_gather": "int8"}), "fsdp"],
]
AXIS_OF = {method.method_name: method.axis for method in known_methods() if method.axis}


def answer(methods, size=2):
    """What a strategy is refused with, on a mesh with the axes of its methods; empty where it is not."""
    strategy = Strategy(methods)
    axes = {AXIS_OF[name]: size for name in strategy.names if name in AXIS_OF}
    world = size ** len(axes) * 2
    try:
        resolve(Strategy([("parallel_mode", {**axes, "data": 2}), *methods]), world)
    except StrategyError as error:
        return error.what if error.expected and error.got and error.fix else f"incomplete: {error}"
    return ""


def test_every_rule_is_quoted():
    never = {rule.text: answer([rule.first, rule.second]) for rule in rules() if rule.always}
    assert all(text == said for text, said in never.items()), never
    said = [answer(methods) for methods in UNDER_KEYS]
    assert sorted(said) == sorted(rule.text for rule in rules() if not rule.always)


def test_rules_hold_where_both_methods_are_at_work():
    for methods in UNDER_KEYS:
        others = [each if isinstance(each, str) else each[0] for each in methods]
        axes = [AXIS_OF.get(name) for name in others]
        if any(axes) and "outer" not in others:
            assert answer(methods, size=1) == "", methods
    stops = ["outer", ("skip_nonfinite", "stop")]
    assert "does not go together" in answer(stops)
    with pytest.raises(StrategyError, match="does not go together with outer"):
        resolve(Strategy([("parallel_mode", {"replica": 1, "data": 2}), *stops]), 2)


def test_what_a_method_needs():
    assert (
        answer([GATHERED]) == "fp8 with all_gather=True needs zero1 or zero2 or fsdp: no other method gathers weights"
    )
    assert answer([GATHERED, "zero1"]) == answer(["fp8"]) == ""


def test_the_law_names_what_there_is():
    for method in known_methods():
        assert method.effect, method
        named = {conflict.other for conflict in method.conflicts} | {name for n in method.needs for name in n.any_of}
        assert named <= set(METHOD_CONFIGS), method
    never = [(rule.first, rule.second) for rule in rules() if rule.always]
    assert len(never) == len(set(never))  # each is declared once

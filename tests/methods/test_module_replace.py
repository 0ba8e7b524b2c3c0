"""``module_replace``: what takes a module's place computes the same, keeps what was on it, and is in the plan."""

import copy
import dataclasses
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.cost import find_cluster
from meshwright.methods import ModuleReplace, SearchScope, register_replace_pair, replacement_of
from meshwright.methods.replace import fused_layers as liger
from meshwright.methods.replace.attention_backends import fused_with_sinks, gains_by_attention
from meshwright.methods.replace.fused_layers import proven_forward
from meshwright.methods.replace.user_pairs import _PAIRS
from meshwright.planner.strategy_choice import choose
from meshwright.planner.workload import Workload
from meshwright.strategy import Strategy
from tests import tiny
from tests.methods import expert_runs, split_runs
from tests.methods.test_checkpoint import job
from tests.methods.test_parity import STEPS, check_weights, full_weights

CPU = torch.device("cpu")


def eager(model):
    if hasattr(model, "config"):
        model.config._attn_implementation = "eager"
    return model


def replaced(model, config=None, *others, axes=(), device=CPU):
    """The model with its modules replaced, and what is said of it."""
    strategy = Strategy([("module_replace", config), *others])
    found = replacement_of(strategy, model, axes, device)
    found.put_in(model)
    return model, str(found)


@pytest.fixture
def pair():
    """Registers pairs that are gone after the test."""
    before = dict(_PAIRS)
    yield register_replace_pair
    _PAIRS.clear()
    _PAIRS.update(before)


def clip():
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": tiny.VOCAB, "max_position_embeddings": tiny.SEQ_LEN, "eos_token_id": 1}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={**small, "image_size": 4, "patch_size": 2}, projection_dim=8)
    )
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "clip"])
def test_attention_of_transformers_computes_the_same_with_padding(name):
    plain = (clip() if name == "clip" else eager(tiny.build(name))).double()
    model, said = replaced(copy.deepcopy(plain), ["attention"])
    assert " eager -> sdpa" in said
    ids = tiny.Tokens().ids[:3]
    mask = (torch.arange(tiny.SEQ_LEN) < torch.tensor([[12], [7], [5]])).long()
    pixels = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 3, 4, 4)
    results = []
    for each in (plain, model):
        if name == "clip":
            output = each(input_ids=ids, attention_mask=mask, pixel_values=pixels)
            used = output.logits_per_text
        else:
            used = each(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        used.square().mean().backward()
        results.append([used.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-6)  # eager softmax is in fp32


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_attention_with_sinks_is_fused_and_computes_the_same_with_padding(compiled):
    plain = split_runs.build("gptoss")  # one block sees five tokens, one all
    model, said = replaced(copy.deepcopy(plain), ["attention"])
    assert said == "attention: 2 modules eager -> meshwright_sinks"
    for block in model.model.layers if compiled else ():
        block.compile(fullgraph=False, dynamic=False)
    ids, real = tiny.Tokens().ids[:3], (torch.arange(tiny.SEQ_LEN) < torch.tensor([[12], [7], [5]])).long()
    for mask in (None, real, real.flip(1)):
        results = []
        for each in (plain, model):
            used = each(input_ids=ids, attention_mask=mask).logits
            (used if mask is None else used[mask.bool()]).square().mean().backward()
            results.append([used.detach(), *(p.grad.clone() for p in each.parameters())])
            each.zero_grad()
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
        grads = dict(zip([name for name, _ in model.named_parameters()], results[1][1:], strict=True))
        assert all(grad.any() for name, grad in grads.items() if "sinks" in name)
    with pytest.raises(mw.ModelError, match="gives its attention softcap"):
        fused_with_sinks(model, *torch.randn(3, 1, 2, 4, 8), None, softcap=30.0)


def test_queries_of_a_cache_see_the_keys_before_them():
    results = []
    for model in (split_runs.build("gptoss"), replaced(split_runs.build("gptoss"), ["attention"])[0]):
        cache, parts = None, []
        for part in tiny.Tokens().ids[:2].split([4, 3, 1, tiny.SEQ_LEN - 8], dim=1):
            with torch.no_grad():
                output = model.eval()(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        results.append(torch.cat(parts, 1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_attention_with_sinks_that_computes_something_else_is_left(monkeypatch):
    model = split_runs.build("gptoss")
    module = sys.modules[type(model).__module__]
    own = module.eager_attention_forward

    def twice(*args, **kwargs):
        found, weights = own(*args, **kwargs)
        return 2 * found, weights

    monkeypatch.setattr(module, "eager_attention_forward", twice)
    assert not gains_by_attention(model)
    assert "stays eager: its own attention is another than softmax" in replaced(model, ["attention"])[1]
    assert model.config._attn_implementation == "eager"


def test_attention_that_was_chosen_or_cannot_be_is_left_alone_and_said():
    chosen = tiny.build("gpt2")
    assert "attention: is sdpa already" in replaced(chosen, ["attention"])[1]
    watched = eager(tiny.build("gpt2"))
    watched.config.output_attentions = True
    assert "stays eager: config.output_attentions" in replaced(watched)[1]
    assert watched.config._attn_implementation == "eager"
    with pytest.raises(mw.ModelError, match="cannot be sdpa"):
        replaced(watched, {"attention": "sdpa"})
    for choice, others in (("flash", []), ("flash", [("amp_native", "bf16")]), ("flex", [])):
        with pytest.raises(mw.StrategyError, match=f"cannot compute attention as '{choice}'"):
            replaced(eager(tiny.build("gpt2")), {"attention": choice}, *others)
    assert "MultiheadAttention calls" in replaced(nn.Sequential(nn.MultiheadAttention(4, 2)))[1]
    assert replaced(tiny.plain())[1].startswith("nothing was replaced")


class Rms(nn.Module):
    """RMSNorm, or something that looks like it."""

    def __init__(self, kind, width=8):
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.ones(width)), 1e-5, kind

    def forward(self, x):
        if self.kind == "mean":
            return F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)
        wide = x.float()
        size = wide.abs().mean(-1, True) if self.kind == "l1" else (wide.square().mean(-1, True) + self.eps).sqrt()
        if self.kind == "eps outside":
            size = wide.square().mean(-1, True).sqrt() + self.eps
        if self.kind == "gemma":
            return (wide / size * (1 + self.weight.float())).type_as(x)
        return self.weight * (wide / size).type_as(x)


@pytest.mark.parametrize(
    ("kind", "found"), [("llama", True), ("gemma", True), ("mean", False), ("l1", False), ("eps outside", False)]
)
def test_a_norm_is_replaced_where_it_is_proven_to_be_one(kind, found):
    module = Rms(kind)
    assert (proven_forward(module, "eps") is not None) == found
    torch.nn.init.normal_(module.weight)
    model, x = nn.Sequential(copy.deepcopy(module)), torch.randn(3, 8, requires_grad=True)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    weight = model[0].weight
    _, said = replaced(model, ["rms_norm"])
    assert ("1 modules (Rms)" in said) == found
    assert model[0].weight is weight
    assert type(model[0]).__name__ == "Rms"
    assert isinstance(copy.deepcopy(model)[0], Rms)
    torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-6)
    assert calls  # the hook is still there


def runs_of(model):
    """Logits and gradients of a small batch."""
    ids = torch.arange(2 * tiny.SEQ_LEN).view(2, -1) % 60
    logits = model(input_ids=ids).logits
    model.zero_grad()
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "eager", "deepseek3", "gptoss"])
def test_experts_weigh_before_their_last_product(name):
    model = expert_runs.build(name)
    before = runs_of(model)
    _, said = replaced(model, ["experts"])
    assert "weigh before their last product" in said
    for got, expected in zip(runs_of(model), before, strict=True):
        assert (got - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_experts_are_as_exact_in_half_precision(name):
    experts = expert_runs.build(name).model.layers[-1].mlp.experts
    hidden, weights = torch.randn(9, expert_runs.WIDTH), torch.rand(9, 2)
    index = torch.rand(9, expert_runs.EXPERTS).topk(2).indices
    exact = experts(hidden, index, weights)
    own = experts.to(torch.bfloat16)(hidden.bfloat16(), index, weights) - exact
    new = replaced(nn.ModuleList([experts]), ["experts"])[0][0](hidden.bfloat16(), index, weights)
    assert new.dtype == torch.bfloat16
    assert (new - exact).norm() < 1.2 * own.norm()


def test_experts_that_compute_something_else_are_left():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    class Doubled(Qwen3MoeExperts):
        def forward(self, *args):
            return 2 * super().forward(*args)

    model = expert_runs.build("qwen3")
    for block in model.model.layers:
        block.mlp.experts.__class__ = Doubled
    assert "no stacked experts" in replaced(model, ["experts"])[1]
    assert "experts" not in replaced(tiny.plain())[1]


class Old(nn.Linear):
    """What users replace."""


class Constructed(nn.Linear):
    """Takes the arguments of its source."""

    def forward(self, x):
        return super().forward(x) * 2


class Made(nn.Module):
    """Keeps its weight transposed."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    @classmethod
    def from_module(cls, old):
        made = cls(old.in_features)
        made.weight.data, made.bias.data = old.weight.detach().T.clone(), old.bias.detach()
        return made.requires_grad_(old.weight.requires_grad)

    def forward(self, x):
        return (x @ self.weight + self.bias) * 2


class Wrapping(nn.Module):
    """Takes the module that it replaces, and holds it."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x) * 2


class Net(nn.Module):
    """Twice one module, one in a list, one frozen, one whose weight is tied to a module of another class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = self.again = Old(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(Old(4, 4, bias=True), nn.ReLU())])
        self.frozen = Old(4, 4).requires_grad_(False).eval()
        self.tied, self.other = Old(4, 4), nn.Linear(4, 4)
        self.other.weight = self.tied.weight

    def forward(self, x):
        for module in (self.first, self.again, self.layers[0], self.frozen, self.tied, self.other):
            x = module(x)
        return x


@pytest.mark.parametrize("target", [Constructed, Made, Wrapping])
def test_a_pair_keeps_weights_ties_modes_and_hooks(pair, target):
    pair("mine", pair_cls=(Old, target))
    model = Net()
    if target is Made:
        model.other.weight = nn.Parameter(torch.ones(4, 4))
    calls = []
    model.layers[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
    before, names, x = dict(model.named_parameters()), list(model.state_dict()), torch.randn(2, 4)
    expected = F.relu(F.linear(x, model.first.weight, model.first.bias) * 2)  # of the first alone
    strategy = Strategy([("module_replace", "mine")])
    found = replacement_of(strategy, model, (), CPU)
    with found.tried(model):
        assert type(model.first) is target
    assert type(model.first) is Old
    found.put_in(model)
    assert f"mine: 4 modules Old -> {target.__name__}" in str(found)
    assert model.first is model.again
    assert not model.frozen.training
    torch.testing.assert_close(F.relu(model.first(x)), expected)
    model(x)
    assert calls == [1]
    assert [p.requires_grad for p in model.frozen.parameters()] == [False, False]
    if target is not Made:
        assert list(model.state_dict()) == (names if target is Constructed else list(model.state_dict()))
        after = {name.replace(".inner", ""): p for name, p in model.named_parameters()}
        assert all(after[name] is parameter for name, parameter in before.items())
        assert (
            model.other.weight
            is dict(model.tied.named_parameters())["weight" if target is Constructed else "inner.weight"]
        )


class Larger(nn.Linear):
    """Has a weight too many."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(1))


class Failing(nn.Module):
    """Cannot be made."""

    @classmethod
    def from_module(cls, old):
        raise RuntimeError("no kernel here")


def test_a_pair_that_cannot_be_made_names_both_classes(pair):
    for target, said in ((Larger, "scale"), (Failing, "no kernel here"), (Made, "tied to another module")):
        pair("mine", pair_cls=(Old, target))
        with pytest.raises(mw.ModelError, match=rf"(?s)(Old.*{target.__name__}|{target.__name__}.*Old).*{said}"):
            replaced(Net(), ["mine"])
    with pytest.raises(mw.ModelError, match="the model itself"):
        replaced(Old(2, 2), ["mine"])


def test_pairs_are_registered_as_in_atorch_and_gated_by_dtype(pair):
    from meshwright.compat.atorch import register_replace_pair as as_atorch

    assert as_atorch is register_replace_pair
    as_atorch("my_optimized_module", supported_dtypes={torch.float16, "bf16"}, pair_cls=(Old, Constructed))
    _, said = replaced(Net())
    assert "my_optimized_module: computes in bf16, fp16, and the job in fp32" in said
    assert "4 modules Old -> Constructed" in replaced(Net(), None, ("amp_native", "bf16"))[1]

    @as_atorch("decorated", kwargs={"need_src_module": True})
    class Sub(Old):
        def __init__(self, source):
            super().__init__(source.in_features, source.out_features)
            self.load_state_dict(source.state_dict())
            self.requires_grad_(source.weight.requires_grad)

    model, said = replaced(Net(), {"decorated": None, "verbose": True})
    assert "decorated: 4 modules Old -> Sub" in said
    assert model.other.weight is model.tied.weight
    for wrong, words in (
        ({"name": "attention", "pair_cls": (Old, Sub)}, "built-in"),
        ({"name": "x", "pair_cls": (Old,)}, "not a pair"),
        ({"name": "x", "pair_cls": (Old, Sub), "kwargs": {"need_module": True}}, "need_src_module"),
        ({"name": "x", "pair_cls": (Old, Sub), "supported_dtypes": [torch.int8]}, "nothing computes in"),
    ):
        with pytest.raises(mw.ConfigError, match=words):
            as_atorch(**wrong)


def test_configs_are_read_as_users_write_them():
    read = [
        Strategy([("module_replace", raw)]).methods[0]
        for raw in (
            ["attention", "rms_norm"], {"HF_LlamaAttention_FA": None, "rms_norm": {}, "verbose": True},
            {"include": ["attention", "rms_norm"]},
        )
    ]  # fmt: skip
    assert {method.include for method in read} == {("attention", "rms_norm")}
    whole = Strategy([("module_replace", {"exclude": "rotary", "attention": "sdpa", "loss": True})])
    assert Strategy(whole.to_json()) == whole == Strategy(str(whole))
    with pytest.raises(mw.StrategyError, match=r"no pair 'rms_nrom' \(did you mean 'rms_norm'"):
        replaced(tiny.plain(), ["rms_nrom"])
    with pytest.raises(mw.StrategyError, match="attention"):
        Strategy([("module_replace", {"attention": "fast"})])
    with pytest.raises(mw.ModelError, match="head whose logits"):
        replaced(tiny.Mlp(), {"loss": True})


def test_liger_takes_the_place_of_what_is_proven(monkeypatch):
    """On the CPU with torch in Liger's place: the wiring, not the kernels."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    used = []

    def counted(name, function):
        return lambda *args: used.append(name) or function(*args)

    functions = types.ModuleType("functions")
    functions.liger_swiglu = counted("swiglu", lambda a, b: F.silu(a) * b)
    functions.liger_rope = counted("rope", apply_rotary_pos_emb)
    functions.liger_layer_norm = counted("norm", lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps))
    monkeypatch.setattr(liger, "liger_functions", lambda device: functions)
    ids = tiny.Tokens().ids[:2]
    plain = tiny.build("llama")
    model, said = replaced(copy.deepcopy(plain))
    for name in ("swiglu", "rotary"):
        assert f"{name}: 2 modules use liger-kernel" in said
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert sorted(used) == ["rope"] * 2 + ["swiglu"] * 2
    assert replaced(tiny.plain())[1].startswith("layer_norm: 5 modules use liger-kernel")


def test_the_loss_does_without_logits_and_the_plan_knows(ranks):
    assert ranks(1).run(lose_logits) == [True]


def lose_logits():
    """Transformers' own loss from labels, and a caller's: loss, gradients and bytes with and without logits."""
    for name, own in (("bert", True), ("plain", False)):
        found = []
        for config in (None, {"loss": True}):
            ids = tiny.Tokens().ids[:8].clone()
            inputs = tiny.prepare_for(name)(ids, CPU)
            batch = {**inputs, "labels": ids.clone()} if own else ids
            trained = mw.accelerate(
                tiny.build(name), torch.optim.SGD, None, None if own else tiny.loss_func, optim_args={"lr": 0.1},
                strategy=[("module_replace", config)], sample_batch=batch, batch_size=8,
                prepare_input=None if own else tiny.prepare_for(name), model_input_format=tiny.input_format(name),
            )  # fmt: skip
            result, measured = trained.measured_step(batch)
            weights = {key: p.detach().clone() for key, p in trained.model.named_parameters()}
            found.append((result.loss, weights, measured["activations"], trained.plan.memory.activations))
            assert trained.evaluate(batch) < result.loss
        (loss, weights, kept, planned), (other, others, less, planned_less) = found
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-6)
        assert (kept, less) == (planned, planned_less), name
        assert less < kept
    return True


TOKENS = ("tensor_parallel", {"sequence": True})


class Twice(nn.Linear):
    """For a parity run: computes as nn.Linear does."""


def train_replaced(name, strategy):
    """As ``test_parity.train``, of an eager model."""
    register_replace_pair("linears", pair_cls=(nn.Linear, Twice))
    try:
        trained = mw.accelerate(
            eager(split_runs.build(name)), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=strategy,
            optim_args={"lr": 0.1, "momentum": 0.9}, prepare_input=tiny.prepare_for(name),
            model_input_format=tiny.input_format(name), dataloader_args={"batch_size": 8}, num_micro_batches=2,
        )  # fmt: skip
    finally:
        del _PAIRS["linears"]
    losses = [trained.step(batch).loss.item() for _, batch in zip(range(STEPS), trained.dataloader, strict=False)]
    return losses, full_weights(trained.model), trained._job.notices


REPLACED = ("module_replace", ["attention", "linears"])
CASES = {
    "fsdp, sinks": ("gptoss", [REPLACED, "fsdp", "checkpoint"]),
    "sequence, sinks": (
        "gptoss",
        [("parallel_mode", {"sequence": 2}), "sequence_parallel", REPLACED],
    ),
    "context, sinks": (
        "gptoss",
        [("parallel_mode", {"context": 2}), "context_parallel", REPLACED],
    ),
    "sequence, compile, sinks": (  # which compile replaces itself there
        "gptoss",
        [("parallel_mode", {"sequence": 2}), "sequence_parallel", ("module_replace", ["linears"]), "compile"],
    ),
    "tensor, context, compile, sinks": (
        "gptoss",
        [("parallel_mode", {"tensor": 2, "context": 2}), TOKENS, "context_parallel", REPLACED, "compile", "checkpoint"],
        4,
    ),
    "tensor, sinks": (
        "gptoss",
        [("parallel_mode", {"tensor": 2}), TOKENS, REPLACED],
    ),
    "fsdp": ("llama", [("module_replace", {"loss": True}), "fsdp", "checkpoint"]),
    "data": ("gpt2", [("module_replace", {"loss": True})]),
    "tensor": ("llama", [("parallel_mode", {"tensor": 2}), "tensor_parallel", "module_replace"]),
    "tensor, loss": (
        "llama",
        [("parallel_mode", {"tensor": 2}), "tensor_parallel", ("module_replace", {"loss": True})],
    ),
    "tensor, sharded, loss": (
        "llama",
        [("parallel_mode", {"tensor": 2, "zero": 2}), TOKENS, "fsdp", ("module_replace", {"loss": True})],
        4,
    ),
    "tensor, pipeline, loss": (
        "llama",
        [
            ("parallel_mode", {"tensor": 2, "pipeline": 2}),
            TOKENS,
            "pipeline_parallel",
            ("module_replace", {"loss": True}),
        ],
        4,
    ),
    "sequence": ("bert", [("parallel_mode", {"sequence": 2}), "sequence_parallel", ("module_replace", {"loss": True})]),
    "pipeline, loss": (
        "llama",
        [("parallel_mode", {"pipeline": 2}), "pipeline_parallel", ("module_replace", {"loss": True})],
    ),
    "pipeline, gpipe, loss": (
        "gpt2",
        [
            ("parallel_mode", {"pipeline": 2}),
            ("pipeline_parallel", {"schedule": "gpipe"}),
            ("module_replace", {"loss": True}),
            "checkpoint",
        ],
    ),
    "pipeline, sharded, loss": (
        "llama",
        [
            ("parallel_mode", {"pipeline": 2, "zero": 2}),
            "pipeline_parallel",
            "fsdp",
            ("module_replace", {"loss": True}),
        ],
        4,
    ),
    "pipeline": ("llama", [("parallel_mode", {"pipeline": 2}), "pipeline_parallel", "module_replace"]),
}


@pytest.mark.parametrize(
    "case",
    [c if c in ("fsdp", "fsdp, sinks", "tensor, loss") else pytest.param(c, marks=pytest.mark.long) for c in CASES],
)
def test_parity(ranks, case):
    name, strategy, *world = CASES[case]
    results = ranks(*world or (2,)).run(train_replaced, name, strategy)
    expected, _, before, weights = split_runs.reference(name, "sgd")
    assert all(losses == results[0][0] for losses, _, _ in results)
    assert results[0][0] == pytest.approx(expected, rel=1e-5)
    # Ranks of a pipeline hold parts.
    held = {key.removeprefix("module."): value for _, own, _ in results for key, value in own.items()}
    check_weights(held, before, weights)
    becomes = "eager -> meshwright_sinks" if REPLACED in strategy else "eager -> sdpa"
    becomes = becomes if ("module_replace", ["linears"]) not in strategy else ""
    assert any("linears:" in notice and becomes in notice for notice in results[0][2])


def test_ddp_cannot_look_for_unused_parameters_through_logits_that_are_not_there():
    real = job(tiny.plain())
    ModuleReplace(loss=True).check(real)
    real.find_unused_parameters = True
    ModuleReplace().check(real)
    with pytest.raises(mw.StrategyError, match="unused parameters"):
        ModuleReplace(loss=True).check(real)


WIDE_VOCAB = 2000


class WideTokens(torch.utils.data.Dataset):
    """Sequences of a vocabulary whose logits are most of a step."""

    def __init__(self):
        self.ids = torch.randint(0, WIDE_VOCAB, (80, 96), generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def wide_model():
    torch.manual_seed(3)
    return tiny.gpt2.GPT2(vocab_size=WIDE_VOCAB, seq_len=96, dim=16, num_layers=2, num_heads=2)


def next_tokens(inputs, output, scale=1.0):
    logits = output[:, :-1] if scale == 1.0 else output[:, :-1] * scale
    return F.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())


def train_chosen(scale):
    """Train by the strategy that a search chooses for a described machine; with a plain loss, logits do not fit."""
    trained = mw.accelerate(
        wide_model(), torch.optim.SGD, WideTokens(), functools.partial(next_tokens, scale=scale),
        cluster=find_cluster("cpux2"), memory_limit=2_000_000 if scale == 1.0 else None,
        optim_args={"lr": 0.1, "momentum": 0.9}, dataloader_args={"batch_size": 8, "shuffle": False},
    )  # fmt: skip
    losses = [trained.step(batch).loss.item() for _, batch in zip(range(STEPS), trained.dataloader, strict=False)]
    weights = {key.removeprefix("module."): value for key, value in full_weights(trained.model).items()}
    return losses, weights, str(trained.strategy)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_search_chooses_the_loss_without_logits_where_the_users_loss_can_do_without(ranks, scale):
    losses, weights, strategy = ranks(2).run(train_chosen, scale)[0]
    model, expected = wide_model(), []
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in WideTokens().ids.split(8)[:STEPS]:
        loss = next_tokens(batch, model(batch), scale)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert ("module_replace" in strategy) == (scale == 1.0)
    assert losses == pytest.approx(expected, rel=1e-5)
    check_weights(weights, before, {key: value.detach() for key, value in model.named_parameters()})


def test_a_search_offers_the_loss_without_logits_where_there_is_a_head_and_ddp_reads_no_graph():
    of_classes = nn.Sequential(nn.Embedding(64, 20), nn.Embedding(2, 20), nn.Linear(20, 2))  # no head over words
    cases = ((tiny.plain(), False, 1), (tiny.plain(), True, 0), (tiny.Mlp(), False, 0), (of_classes, False, 0))
    for model, follows, options in cases:
        assert len(ModuleReplace.search_options(SearchScope(model=model, follows_graph=follows))) == options
    (option,) = ModuleReplace.search_options(SearchScope())
    assert option.fuses_loss
    assert not option.not_simulated
    assert ModuleReplace(loss=True).not_simulated


def test_a_search_replaces_attention_that_computes_all_scores_unless_told_not_to():
    scope = SearchScope(model=split_runs.build("gptoss"))
    assert not ModuleReplace.is_optional(scope)
    assert [each.include for each in ModuleReplace.search_options(scope)] == [
        ("attention",),
        ("attention", "fused_loss"),
    ]
    for model in (tiny.build("gpt2"), tiny.plain(), None):
        assert ModuleReplace.is_optional(SearchScope(model=model))
    asked = {"global_batch": 8, "sample_batch": tiny.Tokens().ids[:2], "loss_func": logits_squared}
    axes = ["context_parallel", "pipeline_parallel", "sequence_parallel", "tensor_parallel"]
    others = ["amp_native", "checkpoint", "compile", "half", "offload", *axes]  # are left out: searches are quicker
    found = mw.plan(split_runs.build("gptoss"), "h100x2", excluded=others, **asked)
    assert all(plan.strategy.get("module_replace").fuses_attention for plan in found)
    without = mw.plan(split_runs.build("gptoss"), "h100x2", excluded=["module_replace", *others], **asked)
    assert all("module_replace" not in plan.strategy for plan in without)
    wish = ("module_replace", "rms_norm")
    by_name = mw.plan(split_runs.build("gptoss"), "h100x2", included=[wish], excluded=others, **asked)
    assert all(plan.strategy.get("module_replace").include == ("rms_norm",) for plan in by_name)


def test_what_is_chosen_where_no_cluster_is_known_replaces_such_attention_too():
    def inputs(samples):
        return tiny.Tokens().ids[:samples]

    def forward(model, ids):
        return model(ids).logits.square().mean()

    model = split_runs.build("gptoss")
    subject = Workload(model, CPU, torch.optim.SGD, inputs, forward, 8, None, 2, 3, limit_bytes=None)
    plan, reason = choose(subject)
    assert reason.startswith("chose parallel_mode(data=2) + module_replace(include=['attention']): the first that fits")
    assert plan.memory.activations < choose(subject, excluded=["module_replace"])[0].memory.activations
    by_name, _ = choose(subject, included=[("module_replace", "rms_norm")])
    assert by_name.strategy.get("module_replace").include == ("rms_norm",)
    subject = dataclasses.replace(subject, model=tiny.build("gpt2"))
    assert "module_replace" not in choose(subject)[0].strategy


def logits_squared(_, output):
    return output.logits.float().square().mean()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_plan_says_where_a_loss_needs_logits_after_all(scale):
    loss, ids = functools.partial(next_tokens, scale=scale), WideTokens().ids[:2]
    asked = {
        "global_batch": 8,
        "sample_batch": ids,
        "loss_func": loss,
        "strategy": [("module_replace", ["fused_loss"])],
    }
    (plan,) = mw.plan(wide_model(), "h100x2", **asked)
    assert [notice for notice in plan.notices if "computed for mul" in notice] == [plan.in_vain] * (scale != 1.0)

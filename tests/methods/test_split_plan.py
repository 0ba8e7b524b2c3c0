"""Plans of tensor parallelism: what they mean, and what is refused before anything is changed."""

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import meshwright as mw
from meshwright.methods import TensorParallel
from meshwright.methods.tensor.split_checks import check_grouped
from meshwright.methods.tensor.split_plan import norm_casts_first
from meshwright.planner import Workload
from tests.methods.split_runs import LATENT, MLP_PLAN, SIZES, Mlp, build

GPT2_PLAN = {"h.*.mlp.c_fc": "colwise"}


def styles(model, plan=None, ranks=2):
    return {layer.path: layer.style.name for layer in TensorParallel(plan=plan or {}).layers(model, ranks)}


def test_a_transformers_model_brings_its_own_plan():
    found = styles(build("llama"))
    assert len(found) == 2 + 2 * 7
    assert found["model.layers.1.mlp.down_proj"] == "rowwise"
    assert found["model.embed_tokens"] == "embedding_rowwise"
    assert styles(build("headless")).keys() == {
        path.removeprefix("model.") for path in found if path.startswith("model.")
    }


def test_a_users_entries_override_those_of_the_model():
    found = styles(build("llama"), {"lm_head": "replicate", "model.layers.*.mlp.up_proj": "colwise_rep"})
    assert found["lm_head"] == "replicate"
    assert found["model.layers.0.mlp.up_proj"] == "colwise_gather_output"
    assert found["model.layers.0.mlp.gate_proj"] == "colwise"


def test_what_is_tied_to_a_planned_layer_is_split_alike():
    model = build("tied")
    model.tp_plan = {key: value for key, value in model.tp_plan.items() if key != "model.embed_tokens"}
    assert styles(model)["model.embed_tokens"] == "embedding_rowwise"
    model.tp_plan = {"model.embed_tokens": "rowwise", "model.layers.*.mlp.down_proj": "rowwise_rep"}
    assert styles(model)["lm_head"] == "vocabulary_head"


def test_sinks_are_split_with_their_heads():
    """Not where the user's entries name a part of the attention, or the axis does not divide the heads of keys."""
    found, attention = styles(build("gptoss")), "model.layers.0.self_attn"
    assert found[attention] == "sinks"
    assert found[f"{attention}.q_proj"] == "colwise"
    assert attention not in styles(build("gptoss"), {f"{attention}.q_proj": "replicate"})
    assert attention not in styles(build("gptoss"), ranks=4)


@pytest.mark.parametrize("name", ["olmo2", "olmoe"])
def test_norms_over_all_heads_are_split_with_them(name):
    """Otherwise the model's own plan holds, which computes all heads on every rank."""
    found, attention = styles(build(name)), "model.layers.0.self_attn"
    assert found[f"{attention}.q_norm"] == found[f"{attention}.k_norm"] == "wide_norm"
    assert (found[f"{attention}.q_proj"], found[f"{attention}.o_proj"]) == ("colwise", "rowwise")
    for whole in (
        styles(build(name), {f"{attention}.k_norm": "replicate"}),
        styles(build(name), {f"{attention}.v_proj": "colwise_gather_output"}),
        styles(build(name), ranks=4),  # which do not divide the heads of keys
    ):
        assert f"{attention}.q_norm" not in whole
        assert whole[f"{attention}.q_proj"] == "colwise_gather_output"


class Squared(nn.Module):
    """No norm of root mean squares, though it looks like one."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, hidden):
        return self.weight * hidden / (hidden.square().mean(-1, keepdim=True) + self.eps)


def test_what_a_norm_computes_is_tried_out():
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

    assert norm_casts_first(Olmo2RMSNorm(8)) is False
    assert norm_casts_first(OlmoeRMSNorm(8)) is True
    with torch.device("meta"):
        assert norm_casts_first(OlmoeRMSNorm(64)) is True
    for other in (Squared(), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, eps=None)):
        assert norm_casts_first(other) is None
    model = build("llama")
    with pytest.raises(mw.ModelError, match=r"wide_norm cannot split model\.layers\.0\.mlp"):
        styles(model, {"model.layers.0.mlp": "wide_norm"})


@pytest.mark.parametrize("name", ["extended", "extended, tied"])
def test_words_that_the_axis_does_not_divide_stay_whole(name):
    split = TensorParallel().split(build(name), 2)
    assert len(split.layers) == 2 * 7
    assert split.remarks == ("model.embed_tokens, lm_head stay whole: 2 ranks do not divide a vocabulary of 61",)
    with pytest.raises(mw.ModelError, match=r"does not divide \S*(lm_head|embed_tokens).*resize_token_embeddings"):
        TensorParallel(plan={"lm_head": "colwise_gather_output"}).split(build(name), 2)


def test_a_strategy_with_a_plan_is_a_value():
    strategy = mw.Strategy([MLP_PLAN])
    assert strategy == mw.Strategy(str(strategy)) == mw.Strategy(strategy.to_json())
    assert len({strategy, mw.Strategy(str(strategy))}) == 1
    tokens = mw.Strategy([("tensor_parallel", {"sequence": True})])
    assert tokens == mw.Strategy(str(tokens)) == mw.Strategy(tokens.to_json()) != mw.Strategy(["tensor_parallel"])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.experts = nn.Linear(8, 8), nn.Parameter(torch.ones(2, 2))


class Headed(Beside):
    def __init__(self):
        super().__init__()
        self.head_dim, self.norm = 8, nn.Identity()


PAIR = {"into": "colwise", "out": "rowwise"}
ODD = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 1}
REFUSED = {
    "no plan": (nn.Sequential(nn.Linear(2, 2)), {}, 2, "no repeated blocks.*fsdp, which needs no plan"),
    "unknown style": (Beside(), {"into": "diagonal"}, 2, "unknown style for into.*colwise.*'diagonal'"),
    "unknown module": (Beside(), {"inot": "colwise"}, 2, "did you mean 'into'"),
    "no linear layer": (Beside(), {"norm": "colwise"}, 2, "Expected a torch.nn.Linear. Got LayerNorm"),
    "splits nothing": (Beside(), {"norm": "replicate"}, 2, "splits no layer"),
    "size": (Beside(), {"out": "rowwise"}, 3, r"does not divide out.*multiple of 3 in dim 1.*\(8, 8\)"),
    "own head count": (Attention(), PAIR, 2, "counts its heads itself.*num_heads.*-1"),
    "half a head": (Headed(), PAIR, 2, "cuts through the heads of into.*8 features, 1 heads"),
    "beside": (Beside(), PAIR, 2, "says nothing of .*norm.*replicated_with_grad_allreduce"),
    "bare parameter": (Bare(), {"into": "colwise", "experts": "rowwise"}, 2, "names no module"),
    "heads": (build("llama"), {}, 3, "does not divide"),
    "key-value heads": (build("llama"), {"lm_head": "replicate"}, 4, "num_key_value_heads.*multiple of 4.*Got 2"),
    "tied apart": (build("tied"), {"lm_head": "replicate"}, 2, "split differently.*None: whole"),
    "embedding": (
        nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {"0": "embedding_rowwise"}, 2, "does more.*max_norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused(case):
    model, plan, ranks, said = REFUSED[case]
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises((mw.ModelError, mw.StrategyError), match=said) as caught:
        TensorParallel(plan=plan).layers(model, ranks)
    assert "What to do" in str(caught.value)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}


EXPERTS = "model.layers.*.mlp.experts"


def test_stacked_experts_are_split_by_the_features_between_their_products():
    model = build("mixtral")
    experts = next(layer for layer in TensorParallel().layers(model, 2) if layer.path.endswith("experts"))
    assert {name: (dim, experts.parts_of(name)) for name, _, dim in experts.parameters()} == {
        "gate_up_proj": (1, (32, 32)), "down_proj": (2, ()),
    }  # fmt: skip
    whole = TensorParallel(plan={EXPERTS: "replicate"}).layers(model, 2)
    assert all(dim is None for layer in whole if "experts" in layer.path for *_, dim in layer.parameters())


def test_parts_of_experts_in_half_precision_are_checked_as_such():
    layers = TensorParallel().layers(build("qwen3 moe"), 2)
    with pytest.raises(mw.ModelError, match=r"multiples of 16 bytes. Got 24 bytes: 24 features over 2 ranks"):
        check_grouped(layers, 2, itemsize=2)


def experts_with(name, shape):
    model = build("mixtral")
    setattr(model.model.layers[0].mlp.experts, name, nn.Parameter(torch.ones(shape)))
    return model


EXPERTS_REFUSED = {
    "bias": (lambda: experts_with("bias", (4, 24)), {}, 2, r"experts model.layers.0.mlp.experts cannot be.*bias of sh"),
    "stacked bias": (lambda: experts_with("bias", (4, 1, 24)), {}, 2, "bias of shape.*None.*'replicate'"),
    "size": (lambda: experts_with("gate_up_proj", (4, 50, 24)), {}, 2, r"does not divide .*experts.*2 tensors in one"),
    "grouped": (lambda: build("qwen3 moe"), {}, 4, "multiples of 16 bytes.*'eager'"),
    "sequence": (
        lambda: build("mixtral"),
        {"sequence": True},
        2,
        r"split experts.*'replicate'.*leave sequence",
    ),
}


@pytest.mark.parametrize("case", EXPERTS_REFUSED)
def test_experts_that_cannot_be_split_are_refused(case):
    model, keys, ranks, said = EXPERTS_REFUSED[case]
    with pytest.raises((mw.ModelError, mw.StrategyError), match=said):
        TensorParallel(**keys).layers(model(), ranks)


def test_a_plan_that_the_model_cannot_run_with_is_refused_before_anything_is_changed():
    def plan_for(entries):
        workload = Workload(
            Mlp(), torch.device("cpu"), None, lambda samples: torch.ones(samples, 7), lambda model, x: model(x).sum(),
            8, 1, 2, 3, limit_bytes=None,
        )  # fmt: skip
        return workload.plan(mw.Strategy([("tensor_parallel", {"plan": entries}), ("parallel_mode", {"tensor": 2})]))

    assert plan_for(dict(MLP_PLAN[1]["plan"])).memory.activations is not None
    with pytest.raises(mw.ModelError, match=r"cannot run with its layers split.*Got .*both layers of a pair"):
        plan_for({"layers.*.0": "colwise", "layers.*.2": "replicate"})


def test_a_sandwiched_mlp_is_planned_whole():
    assert list(styles(Mlp(), dict(MLP_PLAN[1]["plan"]))) == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]


@pytest.mark.parametrize("key", ["shard_planner", "tp_ranks"])
def test_keys_of_atorchs_planner_are_refused(key):
    with pytest.raises(mw.StrategyError, match="configures another engine"):
        mw.Strategy([("tensor_parallel", {key: "mip"})])


def test_a_method_without_its_axis_and_an_axis_without_its_method():
    from meshwright.methods import resolve

    with pytest.raises(mw.StrategyError, match="tensor_parallel has no mesh axis to work on"):
        resolve(mw.Strategy(["tensor_parallel"]), 4)
    with pytest.raises(mw.StrategyError, match="add tensor_parallel to the strategy"):
        resolve(mw.Strategy([("parallel_mode", {"tensor": 2, "data": 2})]), 4)
    assert resolve(mw.Strategy(["tensor_parallel", ("parallel_mode", {"tensor": 2, "data": 2})]), 4).axes


def _latent_attention(heads=4, change=lambda model: None):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "use_cache": False}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **LATENT, **sizes}))
    change(model.model.layers[0].self_attn)
    return {path.rpartition(".")[2]: style for path, style in styles(model).items() if "self_attn" in path}


def test_a_latent_attention_that_the_models_own_plan_leaves_whole_is_split_where_it_can_be():
    split = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise", "kv_a_proj_with_mqa": "mla_kv_a_proj"}
    assert _latent_attention() == split
    assert _latent_attention(heads=3) == {}  # two ranks do not divide them
    # Something with weights for each head, of which nobody here knows.
    assert _latent_attention(change=lambda attention: attention.register_module("gate", nn.Linear(2, 4))) == {}
    scale = nn.Parameter(torch.ones(4))
    assert _latent_attention(change=lambda attention: attention.register_parameter("scale", scale)) == {}


def test_keeping_what_is_gathered_needs_tokens_to_gather():
    with pytest.raises(mw.StrategyError, match="keep_gathered with sequence=True"):
        mw.Strategy([("tensor_parallel", {"keep_gathered": True})])
    strategy = mw.Strategy([("tensor_parallel", {"sequence": True, "keep_gathered": True})])
    assert "keep_gathered=True" in str(strategy)
    assert mw.Strategy(str(strategy)) == strategy

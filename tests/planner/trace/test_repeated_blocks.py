"""A few blocks stand for all of a model, also where they are of several kinds."""

import pytest
import torch
from torch import nn

from meshwright.planner.trace.continued_blocks import NotRepeatedError
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.repeated_blocks import find_repeated
from tests.planner.trace.models import VOCAB, ids, of_tokens


class Named(nn.Module):
    """Blocks with a setting each, and a sum that goes through what the first has made."""

    def __init__(self, kinds, shares=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(kind)) for kind in kinds)
        self.shares = shares

    def forward(self, x):
        first = None
        for number, layer in enumerate(self.layers):
            x = layer(x)
            first = x if first is None else first
            if number == self.shares:
                x = x * first
        return x.sum()


def test_blocks_that_differ_are_not_repeated():
    assert find_repeated(Named([0.5] * 8)) is not None
    assert find_repeated(Named([0.5] * 7)) is None  # too few for it
    assert find_repeated(Named([0.5] * 4 + [0.1] * 4)) is None
    frozen = Named([0.5] * 8)
    frozen.layers[3][0].weight.requires_grad_(False)
    assert find_repeated(frozen) is None


def test_a_place_that_counts_is_seen_by_comparing():
    model = Named([0.0] * 8, shares=4)
    one = Pass(model, torch.ones(2, 4), lambda model, x: model(x))
    with pytest.raises(NotRepeatedError, match="more blocks"):
        one.predict_repeated(find_repeated(model), check=True)


class Wide(nn.Module):
    """A block that takes the weight of a layer that it never calls, and what all blocks of its kind share."""

    def __init__(self, index, kind):
        super().__init__()
        self.index, self.kind = index, kind
        self.inner = nn.Linear(6, 4 + kind)
        self.outer = nn.Linear(4 + kind, 6)

    def forward(self, x, shared):
        return x + self.outer(torch.tanh(nn.functional.linear(x, self.inner.weight)) * shared)


class Mixed(nn.Module):
    """Blocks of several kinds, whose kinds the model looks up in a list of its own."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = list(kinds)
        self.layers = nn.ModuleList(Wide(index, kind) for index, kind in enumerate(kinds))

    def forward(self, x):
        shared = {kind: torch.ones(2, 4 + kind).exp() for kind in {*self.kinds}}
        for index, layer in enumerate(self.layers):
            x = layer(x, shared[self.kinds[index]])
        return x.square().sum()


PATTERNS = {
    "every sixth": ([0, 0, 0, 0, 0, 1] * 5 + [0, 0], 15),
    "one after the other": ([0, 1] * 6, 6),
    "a few at the beginning": ([1, 1, 1] + [0] * 13, 7),
    "three kinds": ([0, 1, 0, 2] * 8, 12),
    "a block apart": ([0] * 8 + [1] + [0] * 11, 8),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_of_several_kinds_are_extended_exactly(name):
    kinds, fewest = PATTERNS[name]
    model = Mixed(kinds)
    one = Pass(model, torch.ones(2, 6), lambda model, x: model(x))
    repeated = find_repeated(model)
    assert len(repeated.few) == fewest
    assert {*repeated.few} <= {*repeated.more}
    whole, few = one.predict(), one.predict_repeated(repeated, check=True)
    assert few.agrees(whole)
    assert model.kinds == kinds  # whole again
    assert len(list(model.layers)) == len(kinds)
    # A block saves its input, the result of tanh, that times what its kind shares, which is saved once.
    own = sum(2 * (6 + 2 * (4 + kind)) for kind in kinds)
    assert few.activations.saved_bytes == 4 * (own + sum(2 * (4 + kind) for kind in {*kinds}) + 2 * 6)


def test_kinds_that_do_not_repeat_run_whole():
    assert find_repeated(Mixed(range(12))) is None
    assert find_repeated(Mixed([0, 0, 0, 1, 0, 0, 1, 1, 0, 1])) is None
    model = Mixed([0] * 12)
    model.layers[3].inner.weight = model.layers[2].inner.weight
    assert find_repeated(model) is None


_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB}


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(num_hidden_layers=26, num_key_value_heads=2, head_dim=8, sliding_window=4, **_WIDTHS)
    )


def deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ranks = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_hidden_layers=16, num_key_value_heads=4, moe_intermediate_size=16, **ranks, **experts, **_WIDTHS
        )
    )


def mamba2():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    return Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=10, hidden_size=32, vocab_size=VOCAB, **sizes))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    widths = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": VOCAB}
    return T5ForConditionalGeneration(T5Config(num_layers=9, num_decoder_layers=11, decoder_start_token_id=0, **widths))


@pytest.mark.parametrize(
    "make", [deepseek, *(pytest.param(make, marks=pytest.mark.long) for make in (gemma3, mamba2, t5))]
)
def test_models_whose_blocks_differ_are_extended_exactly(make):
    torch.manual_seed(0)
    model = make()
    one = Pass(model, ids(2), of_tokens)
    repeated = find_repeated(model)
    assert 3 * len(repeated.few) <= 2 * len(repeated.blocks)
    assert one.predict_repeated(repeated, check=True).agrees(one.predict())

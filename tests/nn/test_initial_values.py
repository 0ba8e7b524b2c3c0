"""A recorded build gives, tensor by tensor, the values of the ordinary one, and leaves the generator as it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.nn import initial_values
from meshwright.nn.initial_values import Recording, record, record_reset, remember, remembered

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Plain(nn.Module):
    """Everything that builds do: ties, padding, buffers of numbers, draws over draws, views, orthogonal weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(6, 2, 12) for _ in range(2)])
        self.position = nn.Parameter(torch.randn(1, 5, 6) * 0.02)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)), persistent=False)
        self.register_buffer("steps", torch.tensor([1.0, 2.0]) * torch.arange(2))
        nn.init.orthogonal_(self.layers[1].linear1.weight)
        nn.init.trunc_normal_(self.layers[0].linear1.weight, std=0.1)
        nn.init.sparse_(self.layers[0].linear2.weight, 0.5)
        self.layers[0].linear2.weight.data[0] = 1.0
        self.apply(lambda module: nn.init.zeros_(module.bias) if isinstance(module, nn.Linear) else None)
        self.norm, self.conv, self.gru = nn.BatchNorm1d(4), nn.Conv2d(3, 4, 3), nn.GRU(4, 5, 2)


def seeded():
    torch.manual_seed(5)
    model = Plain()
    torch.manual_seed(6)
    model.late = nn.Linear(3, 3)
    return model


def transformers_model(name, config, **changes):
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**SIZES | changes))


BUILDS = {
    "plain": Plain,
    "plain in bf16": lambda: Plain().to(torch.bfloat16),
    "seeded inside": seeded,
    "llama": lambda: transformers_model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, vocab_size=50),
    "bert": lambda: transformers_model("BertForMaskedLM", "BertConfig", vocab_size=50),
    "t5": lambda: transformers_model("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, vocab_size=50),
    "vit": lambda: transformers_model("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4),
    "mixtral": lambda: transformers_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, vocab_size=50),
}


def tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def computed(values, names=None):
    found = {}
    values.compute(list(names or values.places), lambda name, whole: found.update({name: whole.clone()}))
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_values_are_those_of_the_ordinary_build(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    expected = tensors(BUILDS[name]())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    model, values = record(BUILDS[name])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name != "scale")
    assert values.without_values() == []
    found = computed(values)
    assert found.keys() == expected.keys() == tensors(model).keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert torch.equal(torch.get_rng_state(), after)


def test_one_tensor_alone_has_the_same_values():
    torch.manual_seed(3)
    expected = tensors(Plain())
    torch.manual_seed(3)
    _, values = record(Plain)
    for name in ("conv.weight", "embedding.weight", "mask"):
        assert torch.equal(computed(values, [name])[name], expected[name])


def test_values_that_are_drawn_need_the_draws_before_them():
    """Random buffers, as of Fourier features, are computed before the parameters."""

    def build():
        model = nn.Linear(4, 4)
        model.register_buffer("features", torch.randn(3))
        return model

    torch.manual_seed(3)
    expected = build()
    torch.manual_seed(3)
    before, (_, values), found = torch.get_rng_state(), record(build), {}
    values.compute(["features"], lambda name, whole: found.update({name: whole.clone()}), draws=False)
    assert torch.equal(found["features"], expected.features)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_is_freed_before_the_next_is_made(monkeypatch):
    """The peak is one tensor: what is drawn first and overwritten later does not stay until then."""

    def build():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        for layer in model:
            nn.init.normal_(layer.weight)
        return model.to(torch.float64)

    _, values = record(build)
    alive, most = set(), 0

    class Counting(dict):
        def __setitem__(self, key, value):
            nonlocal most
            super().__setitem__(key, value)
            most = max(most, sum(each.nbytes() for each in self.values()))

    run = initial_values._Replay.run

    def counted(self):
        self._memory = Counting()
        run(self)
        alive.update(self._memory)

    monkeypatch.setattr(initial_values._Replay, "run", counted)
    computed(values)
    assert not alive
    assert most <= 2 * 64 * 64 * 8


def test_parameters_that_nothing_initialises_are_named():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.bias = nn.Parameter(torch.zeros(3))

    assert record(Raw)[1].without_values() == ["weight"]


def test_a_build_that_needs_values_is_refused():
    with pytest.raises(ModelError, match=r"cannot be built without memory.*device='cpu'"):
        record(lambda: nn.Linear(int(torch.ones(2).sum().item()), 2))
    with pytest.raises(ModelError, match="returns no module"):
        record(lambda: None)


def test_modules_on_meta_reset_themselves_in_the_order_of_construction():
    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4))

    torch.manual_seed(3)
    expected = tensors(build())
    torch.manual_seed(3)
    with torch.device("meta"):
        model = build()
    values = record_reset(model)
    found = computed(values)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_recordings_are_found_by_their_models():
    recording = Recording()
    with recording:
        model = nn.Linear(2, 2)
    assert remembered(model) is None
    remember(recording)
    assert remembered(nn.Linear(2, 2)) is None
    assert remembered(model) is recording.values_of(model)

"""Models born sharded hold the ordinary build's weights, bit for bit, and train as it does, under every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshwright as mw
from tests import tiny
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import BATCH, STEPS
from tests.parity import models
from tests.parity.layouts import Layout, mesh, scheduled

LAYOUTS = {
    "data": Layout(2, []),
    "zero1": Layout(2, ["zero1"]),
    "zero2": Layout(2, ["zero2"]),
    "fsdp": Layout(2, ["fsdp"]),
    "half": Layout(2, ["fsdp", ("half", "bf16")]),
    "whole in half": Layout(2, [("half", "bf16")]),
    "offload": Layout(2, ["fsdp", ("offload", "all")]),
    "tensor": Layout(2, ["tensor_parallel", mesh(tensor=2)]),
    "pipeline": Layout(2, [mesh(pipeline=2), scheduled("1f1b")], 4, 4),
    "hybrid": Layout(4, ["fsdp", mesh(data=2, zero=2)]),
    "tensor x zero": Layout(4, ["tensor_parallel", "fsdp", mesh(tensor=2, zero=2)]),
    "pipeline x zero": Layout(4, [mesh(pipeline=2, zero=2), "fsdp", scheduled("1f1b")], 4, 4),
    "tensor x pipeline": Layout(4, [mesh(tensor=2, pipeline=2), "tensor_parallel", scheduled("interleaved")], 4, 4),
}
EXPERTS = {
    "expert": Layout(2, ["expert_parallel", mesh(expert=2)]),
    "expert x zero": Layout(4, ["expert_parallel", "fsdp", mesh(expert=2, zero=2)]),
    "expert x tensor": Layout(4, ["expert_parallel", "tensor_parallel", mesh(tensor=2, expert=2)]),
    "expert x pipeline": Layout(4, ["expert_parallel", scheduled("1f1b"), mesh(expert=2, pipeline=2)], 2, 2),
}
FURTHER = {
    "ema": Layout(2, ["fsdp", "ema"]),
    "outer": Layout(2, [("outer", {"sync_every": 2})]),
    "fp8": Layout(2, ["fsdp", "fp8"]),
    "module_replace": Layout(2, ["fsdp", "module_replace"]),
    "checkpoint": Layout(2, ["fsdp", "checkpoint"]),
    "sequence": Layout(2, ["sequence_parallel", mesh(sequence=2)]),
    "zbv": Layout(2, [mesh(pipeline=2), scheduled("zbv")], 4, 4),
}
ALL = LAYOUTS | EXPERTS | FURTHER
KINDS = ("plain", "gpt2", "llama", "qwen2", "bert", "t5")


def some(cases, chosen):
    """The cases as parameters of a test; all but the chosen ones are long."""
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.long) for case in cases]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))


def mixtral(layers):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    return MixtralForCausalLM(
        MixtralConfig(**models.DECODER | {"intermediate_size": 48}, num_hidden_layers=layers, num_local_experts=4)
    )


def vit(layers):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in models.SIZES.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=layers, image_size=8, patch_size=4))


def builder(name, layers):
    if name in ("mixtral", "vit"):
        return lambda: globals()[name](layers)
    return lambda: models.build(name, layers)


def prepare_for(name):
    return (lambda data, device: {"pixel_values": data.to(device)}) if name == "vit" else models.prepare_for(name)


def loss_of(name):
    return (lambda inputs, output: output.logits.square().mean()) if name == "vit" else models.loss_func


def train(name, layout, start, folder=None):
    """Ten steps; returns the weights before, the losses, and the weights after.

    ``start`` says how the model is given: built, as a function, or on meta; a built one loads a folder itself.
    """
    case, build = ALL[layout], builder(name, ALL[layout].layers)
    torch.manual_seed(1)
    if start == "on meta":
        with torch.device("meta"):
            model = build()
    else:
        model = build if start == "born" else build()
    if folder is not None and start == "built":
        model = type(model).from_pretrained(folder)
    result = mw.accelerate(
        model, torch.optim.AdamW, Images() if name == "vit" else tiny.Tokens(), loss_of(name), strategy=case.strategy,
        optim_args={"lr": 1e-3, "fused": True}, prepare_input=prepare_for(name),
        model_input_format="unpack_dict" if name == "vit" else models.input_format(name),
        dataloader_args={"batch_size": BATCH}, num_micro_batches=case.micro_batches,
        weights=folder if start != "built" else None,
    )  # fmt: skip
    before = {key: value.clone() for key, value in whole_weights(result.model).items()}
    losses = [result.step(batch).loss.item() for batch in itertools.islice(result.dataloader, STEPS)]
    return before, losses, whole_weights(result.model)


def both(name, layout, start, folder=None):
    return train(name, layout, "built", folder), train(name, layout, start, folder)


def check(every):
    for ordinary, born in every:
        for wanted, got in ((ordinary[0], born[0]), (ordinary[2], born[2])):
            assert wanted.keys() == got.keys()
            assert [key for key in wanted if not torch.equal(wanted[key], got[key])] == []
        assert ordinary[1] == born[1]


BUILT = [
    ("plain", "fsdp"),
    *zip(("llama", "t5"), ("offload", "pipeline"), strict=True),
]


@pytest.mark.parametrize(("name", "layout"), some(itertools.product((*KINDS, "vit", "mixtral"), LAYOUTS), BUILT))
def test_equals_the_ordinary_build(name, layout, ranks):
    check(ranks(LAYOUTS[layout].world).run(both, name, layout, "born"))


@pytest.mark.parametrize(
    "layout", some([(each,) for each in (*EXPERTS, "fsdp", "tensor", "tensor x zero")], [("tensor",)])
)
def test_experts(layout, ranks):
    check(ranks(ALL[layout].world).run(both, "mixtral", layout, "born"))


@pytest.mark.parametrize("layout", some([("data",), ("fsdp",), ("pipeline x zero",)], []))
def test_images(layout, ranks):
    check(ranks(ALL[layout].world).run(both, "vit", layout, "born"))


@pytest.mark.parametrize(
    ("name", "layout"),
    some(itertools.product(("plain", "llama"), FURTHER), [("plain", each) for each in ("ema", "outer")]),
)
def test_beside_other_methods(name, layout, ranks):
    check(ranks(ALL[layout].world).run(both, name, layout, "born"))


@pytest.mark.parametrize(
    ("name", "layout"),
    some(
        itertools.product(("mixtral", "vit"), ("data", "fsdp", "tensor x zero")),
        [("vit", "fsdp")],
    ),
)
def test_built_on_meta_by_others(name, layout, ranks):
    """A transformers model is built again from its config."""
    check(ranks(ALL[layout].world).run(both, name, layout, "on meta"))


STORED = [
    *itertools.product(("gpt2", "llama", "qwen2", "bert", "t5"), LAYOUTS),
    *itertools.product(("llama", "gpt2"), ("zbv", "outer")),
    *itertools.product(("mixtral",), (*EXPERTS, "fsdp", "tensor x zero")),
    *itertools.product(("vit",), ("data", "fsdp", "pipeline x zero")),
]


READ = [("vit", "fsdp")]


@pytest.mark.parametrize(("name", "layout"), some(STORED, READ))
def test_reads_stored_weights(name, layout, ranks, tmp_path):
    model = builder(name, ALL[layout].layers)()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)  # no initial values
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    check(ranks(ALL[layout].world).run(both, name, layout, "born", str(tmp_path)))


def with_a_new_head(folder):
    from transformers import LlamaForSequenceClassification

    def build():
        torch.manual_seed(3)
        config = models.llama(2).config
        config.num_labels, config.pad_token_id = 3, 0
        return LlamaForSequenceClassification(config)

    options = {
        "strategy": ["fsdp"], "weights": folder, "sample_batch": {"input_ids": torch.ones(2, 4, dtype=torch.long)},
        "model_input_format": "unpack_dict",
    }  # fmt: skip
    with pytest.raises(mw.MeshwrightError, match=r"score\.weight.*allow_missing_weights=True"):
        mw.accelerate(build, torch.optim.SGD, None, lambda _, output: output.logits.mean(), **options)
    result = mw.accelerate(
        build, torch.optim.SGD, None, lambda _, output: output.logits.mean(), allow_missing_weights=True, **options
    )
    return whole_weights(result.model)


def test_a_new_head_over_stored_weights_is_initialised(ranks, tmp_path):
    model = models.build("llama", 2)
    model.save_pretrained(tmp_path)
    base, (first, other) = dict(model.named_parameters()), ranks(2).run(with_a_new_head, str(tmp_path))
    assert all(torch.equal(value, other[name]) for name, value in first.items())
    assert first["score.weight"].std() > 0
    assert all(torch.equal(value, base[name]) for name, value in first.items() if name != "score.weight")

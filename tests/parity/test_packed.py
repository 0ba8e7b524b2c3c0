"""Several documents in one sample, told apart by position ids that restart: as if each had been trained alone."""

import functools

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.store.entries import unwrapped
from tests.methods.split_runs import whole_weights
from tests.parity.layouts import mesh, scheduled
from tests.parity.runs import Trained, apart, merged

VOCAB, TOKENS, SAMPLES, STEPS = 64, 31, 4, 10  # the axes divide no such number of tokens
LENGTHS = ([5, 10, 16], [1, 13, 2, 15], [31], [7, 24])
SGD = {"lr": 0.1, "momentum": 0.9}
LAYOUTS = {
    "data": (2, [], 1),
    "fsdp": (2, ["fsdp"], 1),
    "micro-batches": (2, ["zero2"], 2),
    "tensor": (2, ["tensor_parallel", mesh(tensor=2)], 1),
    "sequence": (2, ["sequence_parallel", mesh(sequence=2)], 1),
    "context": (2, ["context_parallel", mesh(context=2)], 1),
    "context, recomputed": (2, ["context_parallel", "checkpoint", mesh(context=2)], 1),
    "pipeline": (2, [scheduled("1f1b"), mesh(pipeline=2)], 2),
    "sequence x context": (4, ["sequence_parallel", "context_parallel", mesh(sequence=2, context=2)], 1),
    "context x zero": (4, ["context_parallel", "fsdp", mesh(context=2, zero=2)], 1),
    "tensor x pipeline": (4, ["tensor_parallel", scheduled("zbv"), mesh(tensor=2, pipeline=2)], 4),
}
SHORT = {("llama", "fsdp"), ("llama", "context")}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    # A cache, as models have it by default: with one, transformers takes a sample for a single document.
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    ))  # fmt: skip


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=TOKENS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


MODELS = {"llama": llama, "gpt2": gpt2}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]()


def documents(step):
    """Per sample its documents."""
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths] for lengths in LENGTHS]


def packed(step):
    """The samples as transformers' collator for flattened batches makes them, one row each."""
    for sample in documents(step):
        yield {
            "input_ids": torch.cat(sample),
            "position_ids": torch.cat([torch.arange(len(each)) for each in sample]),
            "labels": torch.cat([torch.cat([torch.tensor([-100]), each[1:]]) for each in sample]),
        }


def loss_func(inputs, output):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten())


def num_labels(inputs):
    return (inputs["labels"][:, 1:] != -100).sum()


@functools.cache
def alone(name):
    """One process, a document at a time."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim, losses = torch.optim.SGD(model.parameters(), **SGD), []
    for step in range(STEPS):
        optim.zero_grad()
        every = [each for sample in documents(step) for each in sample if len(each) > 1]
        labels = sum(len(each) - 1 for each in every)
        parts = [F.cross_entropy(model(each[None]).logits[0, :-1], each[1:], reduction="sum") for each in every]
        loss = torch.stack(parts).sum() / labels
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return Trained(losses, [], before, {key: value.detach() for key, value in model.named_parameters()})


def accelerated(name, layout):
    _, strategy, micro_batches = LAYOUTS[layout]
    return mw.accelerate(
        build(name), torch.optim.SGD, [each for step in range(STEPS) for each in packed(step)], loss_func,
        strategy=strategy, optim_args=SGD, dataloader_args={"batch_size": SAMPLES, "shuffle": False},
        num_micro_batches=micro_batches, model_input_format="unpack_dict", loss_weight=num_labels,
    )  # fmt: skip


def train(name, layout):
    result = accelerated(name, layout)
    assert not unwrapped(result.model).config.use_cache
    assert any("use_cache was set to False" in notice for notice in result._job.notices)
    losses = [result.step(batch).loss.item() for batch in result.dataloader]
    return losses, whole_weights(unwrapped(result.model))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in SHORT else [pytest.mark.long])
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_documents_of_a_sample_do_not_see_each_other(ranks, name, layout):
    every, expected = ranks(LAYOUTS[layout][0]).run(train, name, layout), alone(name)
    for losses, _ in every:
        assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert apart(merged([weights for _, weights in every]), expected) < 1e-5


def flattened(layout):
    """Losses of batches that transformers' collator makes: one row of as many tokens as the documents have."""
    from transformers import DataCollatorWithFlattening

    result = mw.accelerate(
        build("llama"), torch.optim.SGD,
        [{"input_ids": each.tolist()} for step in range(STEPS) for sample in documents(step) for each in sample],
        loss_func, strategy=LAYOUTS[layout][1], optim_args=SGD, model_input_format="unpack_dict",
        loss_weight=num_labels,
        dataloader_args={"batch_size": 10, "shuffle": False, "collate_fn": DataCollatorWithFlattening()},
    )  # fmt: skip
    return [result.step(batch).loss.item() for batch in result.dataloader]


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("context", marks=pytest.mark.long)])
def test_flattened_batches_are_their_documents(ranks, layout):
    for losses in ranks(2).run(flattened, layout):
        assert losses == pytest.approx(alone("llama").losses, rel=1e-6)

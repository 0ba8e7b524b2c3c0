"""GPT in BMTrain's structure: the model of examples/gpt2/gpt2.py, on any number of ranks and with padding."""

import gpt2
import pytest
import sizes
import torch
import torch.nn.functional as F
from layers import causal_padding_mask
from models import GPT

import meshwright as bmt
from tests.examples.blocks import SIZES, build, plain, plain_name, positions

# Hugging Face's counts of the published weights.
PUBLISHED = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


def _ids(per_rank=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, SIZES["vocab_size"], (bmt.world_size(), per_rank, 16), generator=generator)
    return whole.flatten(0, 1), whole[bmt.rank()]


def _as_in_plain_torch(file):
    model = build()
    bmt.save(model, file)
    reference = plain(torch.load(file, weights_only=True))
    everyone, ids = _ids()
    logits = model(ids, positions(ids), torch.ones_like(ids, dtype=torch.bool))
    expected = reference(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids, positions(ids)), expected, rtol=1e-5, atol=1e-5)

    gpt2.next_token_loss(ids, logits).backward()
    gpt2.next_token_loss(everyone, reference(everyone)).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor()
        torch.testing.assert_close(whole, wanted[plain_name(name)], rtol=1e-4, atol=1e-6, msg=name)
        assert whole.abs().max() > 1e-4, name


@pytest.mark.parametrize("world", [1, 2])
def test_logits_and_gradients_are_those_of_the_plain_model(ranks, world, tmp_path):
    ranks(world).run(_as_in_plain_torch, tmp_path / "gpt.pt")


def test_a_position_sees_itself_and_the_real_tokens_before_it():
    seen = causal_padding_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]).bool())
    padded_behind, padded_before = [[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert seen.int().tolist() == [[padded_behind], [padded_before]]


def _padding():
    model = build()
    _, ids = _ids(per_rank=3)
    lengths = torch.tensor([16, 5, 0])
    pos = positions(ids)
    mask = pos < lengths[:, None]
    logits = model(ids, pos, mask)
    alone = model(ids[1:2, :5], pos[1:2, :5])
    torch.testing.assert_close(logits[1:2, :5], alone, rtol=1e-5, atol=1e-5)
    other = torch.where(mask, ids, (ids + 1) % SIZES["vocab_size"])
    assert torch.equal(model(other, pos, mask)[mask], logits[mask])
    # Also a sequence that is nothing but padding leaves gradients finite.
    F.cross_entropy(logits.flatten(0, 1), torch.where(mask, ids, -100).flatten()).backward()
    assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())


def _variants():
    _, ids = _ids()
    expected = build()(ids, positions(ids))
    for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):
        logits = build(dtype)(ids, positions(ids))
        assert logits.dtype == dtype
        assert (logits - expected).abs().max() < tolerance * expected.abs().max()
    assert not any("bias" in name for name, _ in build(bias=False).named_parameters())
    wide_heads = build(dim_head=24)  # heads whose dims do not add up to the model's, as in the seed
    assert wide_heads(ids, positions(ids)).shape == (2, 16, SIZES["vocab_size"])


def _initial_values():
    model = GPT(**SIZES | {"dim_model": 256, "num_layers": 8})
    bmt.init_parameters(model)
    std = {name: p.full_tensor().std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, value in std.items():
        residual = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        assert value == pytest.approx(0.005 if residual else 0.02, rel=0.05), name
    ones = [p.full_tensor() for name, p in model.named_parameters() if name.endswith("norm.weight")]
    zeros = [p.full_tensor() for name, p in model.named_parameters() if name.endswith("bias")]
    assert len(ones) == 17
    assert all(each.eq(1).all() for each in ones)
    assert all(each.eq(0).all() for each in zeros)
    counted = sizes.num_parameters(**SIZES | {"dim_model": 256, "num_layers": 8})
    assert sum(p.numel() for p in model.parameters()) == counted


def _one_rank():
    _padding()
    _variants()
    _initial_values()


def test_padding_half_types_missing_biases_and_initial_values(ranks):
    ranks(1).run(_one_rank)


@pytest.mark.parametrize("name", sizes.SIZES)
def test_every_size_counts_as_the_plain_model_of_that_size(name):
    size = sizes.SIZES[name]
    with torch.device("meta"):
        model = gpt2.GPT2(
            size["vocab_size"], size["max_distance"], size["dim_model"], size["num_layers"], size["num_heads"]
        )
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert sizes.num_parameters(**size) == counted == PUBLISHED.get(name, counted)
    billions = {"2.7b": 2.65, "6.7b": 6.65, "13b": 12.85}.get(name, counted / 1e9)
    assert counted / 1e9 == pytest.approx(billions, abs=0.01)

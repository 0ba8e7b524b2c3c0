import math

import gpt2
import pytest
import torch

SIZES = {"vocab_size": 61, "seq_len": 16, "dim": 32, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _ids(batch=4):
    return torch.randint(0, SIZES["vocab_size"], (batch, SIZES["seq_len"]))


@pytest.mark.parametrize("tie_weights", [True, False])
def test_shapes_and_tied_weights(tie_weights):
    model = gpt2.gpt2(**SIZES, tie_weights=tie_weights)
    assert model(_ids()).shape == (4, 16, 61)
    assert model(_ids()[:, :5]).shape == (4, 5, 61)
    tied = model.head.weight.untyped_storage().data_ptr() == model.token_embedding.weight.untyped_storage().data_ptr()
    assert tied == tie_weights
    assert isinstance(model.blocks, torch.nn.ModuleList)


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_no_position_sees_what_follows_it(changed):
    model = gpt2.GPT2(**SIZES)
    ids = _ids()
    other = ids.clone()
    other[:, changed] = (other[:, changed] + 1) % SIZES["vocab_size"]
    difference = (model(ids) - model(other)).abs().amax(dim=(0, 2))
    assert difference[:changed].eq(0).all()
    assert difference[changed:].gt(0).all()


def test_an_untrained_model_guesses():
    loss = gpt2.next_token_loss(ids := _ids(64), gpt2.GPT2(**SIZES)(ids))
    assert loss.item() == pytest.approx(math.log(SIZES["vocab_size"]), abs=0.1)


def test_the_loss_compares_each_position_with_the_next_token():
    ids = _ids()
    logits = torch.full((4, 16, 61), -100.0)
    logits[:, :-1].scatter_(2, ids[:, 1:, None], 100.0)
    assert gpt2.next_token_loss(ids, logits).item() == 0.0
    logits[:, -1] = torch.nan  # the last position predicts nothing
    assert gpt2.next_token_loss(ids, logits).item() == 0.0


def test_residual_projections_start_smaller():
    block = gpt2.GPT2(vocab_size=61, seq_len=4, dim=128, num_layers=8).blocks[3]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.qkv.bias.eq(0).all()


def test_a_repeated_batch_is_learnt():
    model = gpt2.gpt2(**SIZES, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = _ids()
    for _ in range(25):
        loss = gpt2.next_token_loss(ids, model(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    assert gpt2.next_token_loss(ids, model(ids)).item() < 1.0


def test_dropout_is_for_training_only():
    model = gpt2.GPT2(**SIZES, dropout=0.5)
    ids = _ids()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))

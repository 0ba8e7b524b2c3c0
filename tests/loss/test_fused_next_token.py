from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from meshwright.errors import ModelError
from meshwright.loss import next_token_loss
from tests.loss.helpers import live_bytes

IDS = torch.arange(12).reshape(2, 6) % 7


def _certain():
    logits = torch.full((2, 6, 7), -100.0)
    logits[:, :-1].scatter_(2, IDS[:, 1:, None], 100.0)
    logits[:, -1] = torch.nan  # the last position predicts nothing
    return logits


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)])
@pytest.mark.parametrize("ids", [IDS, {"input_ids": IDS}])
def test_each_position_predicts_the_next_token(ids, wrap):
    assert next_token_loss(ids, wrap(_certain())).item() == 0.0


def test_a_guess_costs_the_logarithm_of_the_vocabulary():
    assert next_token_loss(IDS, torch.zeros(2, 6, 7, dtype=torch.bfloat16)).item() == pytest.approx(1.9459, abs=1e-4)


@pytest.mark.parametrize("output", [torch.zeros(2, 6), torch.zeros(2, 5, 7), (torch.zeros(2, 6, 7),), None])
def test_an_output_without_logits_is_refused(output):
    with pytest.raises(ModelError, match=r"logits of shape \(2, 6, vocabulary\)"):
        next_token_loss(IDS, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_loss_of_the_shifted_tokens_in_a_part_of_the_memory(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, 5000, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(5000, (4, 64), generator=generator)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss = next_token_loss(ids, logits)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(each, logits) for each in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient)
    peak, _ = live_bytes(lambda: next_token_loss(ids, logits).backward())
    assert peak < 1.5 * logits.numel() * dtype.itemsize + 2**22

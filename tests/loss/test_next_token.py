from types import SimpleNamespace

import pytest
import torch

from meshwright.errors import ModelError
from meshwright.loss import next_token_loss

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

"""Models that recompute a part of forward by themselves, such as those of transformers can."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.cost.peak_memory import moments
from tests.live_bytes import LiveBytes

HIDDEN, BLOCKS, SEQ, SAMPLES = 32, 6, 64, 2


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Recomputing(nn.Module):
    def __init__(self, vocab, **how):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, HIDDEN), nn.Linear(HIDDEN, vocab)
        self.blocks = nn.ModuleList(Feedforward() for _ in range(BLOCKS))
        self.how = how

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def predicted_peak(model, ids):
    sample = {"sample_batch": {"ids": ids}, "model_input_format": "unpack_dict"}
    (plan,) = mw.plan(model, "a100-80x1", global_batch=SAMPLES, strategy=[], **sample)
    of_backward = [held for moment, held in moments(plan.step).items() if moment in ("loss", "recomputation")]
    return max(held.activations + held.recomputation + held.gradients for held in of_backward)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("vocab", [8, 4096])  # the peak is a block's, and the loss's
def test_what_a_model_recomputes_by_itself_is_held_as_predicted(vocab, reentrant):
    model, ids = Recomputing(vocab, use_reentrant=reentrant), torch.zeros(SAMPLES, SEQ, dtype=torch.long)
    with torch.device("meta"):
        without_values = Recomputing(vocab, use_reentrant=reentrant)
    predicted = predicted_peak(model, ids)
    assert predicted_peak(without_values, ids) == predicted
    assert all(parameter.grad is None for parameter in model.parameters())  # of the pass without data, nothing stays
    with LiveBytes() as live:
        model(ids)["loss"].backward()
    assert predicted == pytest.approx(live.peak, rel=0.02)

"""Blocks that return views, or pass on what they are given: schedules that split backward detach it in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import meshwright as mw
from tests import tiny
from tests.methods import split_runs
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights

STEPS, BATCH, LAYERS = 10, 8, 4


class Viewing(nn.Module):
    """Works on rows, and returns a view of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        rows = x.reshape(-1, 12)
        return (rows + self.down(F.gelu(self.up(rows)))).view(x.shape)


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(tiny.VOCAB, 12), nn.Linear(12, tiny.VOCAB)
        self.layers = nn.ModuleList(Viewing() for _ in range(LAYERS))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(name):
    torch.manual_seed(3)
    if name == "views":
        return Views()
    import transformers

    if name == "opt":
        config = transformers.OPTConfig(
            vocab_size=tiny.VOCAB, hidden_size=12, ffn_dim=24, num_hidden_layers=LAYERS, num_attention_heads=2,
            max_position_embeddings=16, dropout=0.0, word_embed_proj_dim=12, use_cache=False,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config)
    config = transformers.T5Config(
        vocab_size=64, d_model=24, d_kv=6, d_ff=52, num_layers=LAYERS, num_heads=4, dropout_rate=0.0
    )
    return transformers.T5EncoderModel(config)


def trained(name, schedule, methods):
    """Losses and this rank's weights after ten steps on the ranks; without a schedule, of one process."""
    data, args = tiny.Tokens(), {"lr": 0.1, "momentum": 0.9}
    model, losses = build(name), []
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    if schedule is None:
        optim = torch.optim.SGD(model.parameters(), **args)
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=0))
        for _, ids in zip(range(STEPS), loader, strict=False):
            optim.zero_grad()
            loss = split_runs.loss_func({"input_ids": ids}, model(input_ids=ids))
            loss.backward()
            optim.step()
            losses.append(loss.item())
        return losses, {key: value.detach() for key, value in model.named_parameters()}, before
    job = mw.accelerate(
        model, torch.optim.SGD, data, split_runs.loss_func, optim_args=args, dataloader_args={"batch_size": BATCH},
        prepare_input=tiny.prepare_for("llama"), model_input_format="unpack_dict", num_micro_batches=4,
        strategy=[("parallel_mode", {"pipeline": 2}), ("pipeline_parallel", {"schedule": schedule}), *methods],
    )  # fmt: skip
    for _, batch in zip(range(STEPS), job.dataloader, strict=False):
        losses.append(job.step(batch).loss.item())
    return losses, whole_weights(job.model), before


CASES = [
    ("views", "zbv", []), ("opt", "dualpipev", []), ("t5", "zbv", ["checkpoint"]),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("views", "dualpipev", ["checkpoint"]), ("opt", "zbv", ["checkpoint"]), ("t5", "dualpipev", ["checkpoint"]),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schedule", "methods"), CASES, ids=str)
def test_stages_return_what_a_schedule_may_detach(ranks, name, schedule, methods):
    losses, after, before = trained(name, None, ())
    merged = {}
    for found, weights, _ in ranks(2).run(trained, name, schedule, methods):
        assert found == pytest.approx(losses, rel=1e-4)
        merged |= weights
    assert merged.keys() == after.keys()
    check_weights(merged, before, after)


def test_t5_in_half(ranks):
    losses, *_ = trained("t5", None, ())
    for found, *_ in ranks(2).run(trained, "t5", "zbv", [("half", "bf16"), "checkpoint"]):
        assert found == pytest.approx(losses, rel=1e-2)

"""``sequence_parallel`` against one plain process, and both twins; what it cannot work on is refused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.methods.tokens.token_split import tokens_dim
from tests import tiny
from tests.methods import split_runs
from tests.methods.test_parity import check_weights

reference = functools.cache(split_runs.reference)
TOKENS = ("tensor_parallel", {"sequence": True})
CASES = {
    "plain": (2, "plain", {"sequence": 2}, [], 1),
    "grouped": (2, "llama", {"sequence": 2}, ["checkpoint"], 2),
    "fsdp": (4, "ungrouped", {"sequence": 2, "zero": 2}, ["fsdp"], 1),
    "gpt2": (2, "gpt2", {"sequence": 2}, ["fsdp", "checkpoint"], 2),
    "bert": (2, "bert", {"sequence": 2}, [], 2),
    "qwen2": (2, "qwen2", {"sequence": 2}, [], 1),
    "sinks": (2, "gptoss", {"sequence": 2}, ["checkpoint"], 2),
    "sinks, fsdp": (4, "gptoss", {"sequence": 2, "zero": 2}, ["fsdp"], 1),
    "uneven": (2, "vit", {"sequence": 2}, ["checkpoint"], 2),
    "tensor": (4, "llama", {"tensor": 2, "sequence": 2}, ["tensor_parallel"], 1),
    "tensor, tokens cut twice": (4, "llama", {"tensor": 2, "sequence": 2}, [TOKENS, "checkpoint"], 1),
    "tokens cut twice, fsdp": (8, "qwen3", {"tensor": 2, "sequence": 2, "zero": 2}, [TOKENS, "fsdp"], 2),
    "data": (4, "plain", {"sequence": 2, "data": 2}, [], 2),
    "shards over data": (4, "plain", {"data": 2, "sequence": 2}, ["zero2"], 1),
    "three axes": (8, "plain", {"zero": 2, "sequence": 2, "data": 2}, ["fsdp"], 1),
}
SHORT = ("fsdp", "uneven")


def check_parity(pool, name, strategy, micro, mode="sgd"):
    """Ten steps on the ranks of a pool are those of one process; predicted bytes are checked on the way."""
    results = pool.run(split_runs.train, name, strategy, mode, micro)
    losses, norms, before, expected = reference(name, mode)
    assert all(result[:2] == results[0][:2] for result in results)
    if mode == "adamw":
        assert results[0][0] == pytest.approx(losses, rel=1e-4)
        return
    assert results[0][0] == pytest.approx(losses, rel=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
    weights = {key.removeprefix("module."): value for key, value in results[0][2].items()}  # DDP's
    check_weights(weights, before, expected)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES])
def test_parity(ranks, case):
    world, name, mesh, methods, micro = CASES[case]
    check_parity(ranks(world), name, [("parallel_mode", mesh), "sequence_parallel", *methods], micro)


class Block(nn.Module):
    """Attention and what a test does to it."""

    def __init__(self, kind, heads):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv = nn.Linear(12, 36)

    def forward(self, x, positions):
        tokens = x.shape[1]
        h = x + torch.arange(tokens)[:, None] if self.kind == "positions inside" else x + positions
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        if self.kind == "no attention":
            return x + v.transpose(1, 2).flatten(2).cumsum(1)
        causal = torch.ones(tokens, tokens).tril().bool() if self.kind == "mask inside" else None
        return x + F.scaled_dot_product_attention(q, k, v, causal, is_causal=causal is None).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Blocks that are handed sines of positions."""

    def __init__(self, kind="right", heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 12)
        self.blocks = nn.ModuleList(Block(kind, heads) for _ in range(2))

    def forward(self, ids):
        x, positions = self.embed(ids), torch.arange(ids.shape[1])[:, None].sin().expand(-1, 12)
        for block in self.blocks:
            x = block(x, positions)
        return x


def net(model, mesh=None, method="sequence_parallel"):
    return mw.accelerate(
        model, torch.optim.SGD, tiny.Tokens(), lambda x, out: out.square().mean(), optim_args={"lr": 0.1},
        strategy=[("parallel_mode", mesh or {"sequence": 2}), method], dataloader_args={"batch_size": 2},
    )  # fmt: skip


def refusals():
    """What is said of models and numbers that do not fit; training goes on after it."""
    said = {}
    for name, build in {
        "heads": lambda: net(Net(heads=3)),
        "positions inside": lambda: net(Net("positions inside")),
        "mask inside": lambda: net(Net("mask inside")),
        "no attention": lambda: net(Net("no attention")),
        "no blocks": lambda: net(nn.Embedding(64, 3)),
        "few tokens": lambda: net(Net()).step(torch.ones(2, 2, dtype=torch.long)),
    }.items():
        try:
            build()
        except mw.MeshwrightError as error:
            said[name] = str(error)
    bare = mw.accelerate(
        split_runs.build("ungrouped"), torch.optim.SGD, None, tiny.loss_func, optim_args={"lr": 0.1},
        strategy=[("parallel_mode", {"sequence": 2, "data": 1}), "sequence_parallel", "fsdp"],
    )  # fmt: skip
    assert bare.plan.step.shard_axis == "sequence"
    assert not any("no sample" in notice for notice in bare._job.notices)  # the model's dummy input, of 5 tokens
    result, apart = net(Net()), 0.0
    for tokens in (12, 11, 5, 12):
        ids = torch.arange(2 * tokens).view(2, tokens)
        apart = max(apart, (result.evaluate(ids) - Net()(ids).square().mean()).abs().item())
    return said, apart


def test_what_cannot_work_is_refused_on_all_ranks(ranks):
    for said, apart in ranks(2).run(refusals):
        for name, words in {
            "heads": "does not divide the attention heads",
            "positions inside": "blocks.0 does not compute the same on a part of the tokens",
            "mask inside": "mask",
            "no attention": "blocks.0 calls no attention",
            "no blocks": "no repeated blocks",
            "few tokens": "parts of two or more",
        }.items():
            assert words in said[name], (name, said)
        assert apart < 1e-6


class Disordered(Net):
    """Runs its blocks, or uses what they return, in ways that parts of the tokens do not fit."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        if way == "shared":
            self.blocks.append(self.blocks[0])

    def forward(self, ids):
        x, positions = self.embed(ids), torch.arange(ids.shape[1])[:, None].sin().expand(-1, 12)
        seen = []
        for block in self.blocks[:1] if self.way == "stops" and ids[0, 0] == 0 else self.blocks:
            x = block(x, positions)
            seen.append(x)
        if self.way == "again":
            x = self.blocks[0](x, positions)
        if self.way == "twice":
            for block in self.blocks:
                x = block(x.tanh(), positions)
        return x[:, :1] + seen[0][:, :1] if self.way == "skips" else x[:, :1]


def disordered(way, method, sample):
    """The error at the start or in the first step, and else ten losses, on the ranks and of one process."""
    data = tiny.Tokens()
    data.ids[:, 0] = 0
    job = model = None
    try:
        job = mw.accelerate(
            Disordered(way), torch.optim.SGD, data if sample else None, lambda x, out: out.square().mean(),
            optim_args={"lr": 0.1}, strategy=[("parallel_mode", {method: 2}), f"{method}_parallel"],
            **({"dataloader_args": {"batch_size": 2}} if sample else {}),
        )  # fmt: skip
        model = Disordered(way)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for start in range(10):
            batch = data.ids[start : start + 2]
            loss = model(batch).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses.append((job.step(batch).loss.item(), loss.item()))
    except mw.MeshwrightError as error:
        return str(error), model is not None
    return losses, True


@pytest.mark.parametrize("method", ["sequence", pytest.param("context", marks=pytest.mark.long)])
def test_blocks_that_run_out_of_turn(ranks, method):
    """With a loss on one position, a gather too few would be no error, and train something else."""
    for way, words in (
        ("again", "the model ends after blocks.0 without blocks.1"),
        ("shared", "the model ends after blocks.0 without blocks.1"),
        ("stops", "the model ends after blocks.0 without blocks.1"),
        ("skips", "depends on what blocks.0 returns"),
    ):
        for said, began in ranks(2).run(disordered, way, method, True):
            assert words in said, (way, said)
            assert not began or way == "stops"
        for said, _ in ranks(2).run(disordered, way, method, False):
            assert words in said, (way, said)
    for sample in (True, False):
        for losses, _ in ranks(2).run(disordered, "twice", method, sample):
            assert [ours for ours, _ in losses] == pytest.approx([alone for _, alone in losses], rel=1e-5)


class Vectors(Net):
    """Takes features: a gradient leaves through them."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x, torch.zeros(x.shape[1], 12))
        return x


def gradient_of_an_input(axes):
    given = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    gradients = []
    job = mw.accelerate(
        Vectors(), torch.optim.SGD, None, lambda x, out: out.square().mean(), optim_args={"lr": 0.1},
        strategy=[("parallel_mode", axes), *(f"{axis}_parallel" for axis in axes)], sample_batch=given,
    )  # fmt: skip
    for model in (job.model, Vectors()):
        x = given.clone().requires_grad_()
        model(x * 1).square().mean().backward()
        gradients.append(x.grad)
    return (gradients[0] - gradients[1]).abs().max().item() / gradients[1].abs().max().item()


@pytest.mark.parametrize("axis", ["sequence", "context"])
def test_a_gradient_that_leaves_through_the_input_is_whole(ranks, axis):
    assert max(ranks(2).run(gradient_of_an_input, {axis: 2})) < 1e-6


@pytest.mark.long
def test_checkpoints_go_between_layouts(ranks, tmp_path):
    sequence = [("parallel_mode", {"sequence": 2, "zero": 2}), "sequence_parallel", "fsdp"]
    for name, source, target in (("plain", sequence, ["zero2"]), ("ungrouped", ["zero2"], sequence)):
        before = ranks(4).run(split_runs.save_and_go_on, tmp_path / name, name, source)
        after = ranks(4).run(split_runs.load_and_go_on, tmp_path / name, name, target)
        assert after[0] == pytest.approx(before[0], abs=1e-4)


def test_what_goes_with_tokens():
    """Which dim of an argument is cut; masks stay whole."""
    hidden, square, ids = torch.ones(2, 6, 5), torch.ones(6, 6), torch.ones(2, 6, dtype=torch.long)
    assert tokens_dim("x", hidden, 6) == 1
    assert tokens_dim("encoder", torch.ones(2, 7, 5), 6) is None
    assert tokens_dim("attention_mask", square[None, None], 6) is None
    assert tokens_dim("attention_mask", torch.ones(2, 1, 1, 6), 6) is None
    assert tokens_dim("attention_mask", ids, 6) is None
    assert tokens_dim("position_ids", ids, 6) == 1
    assert tokens_dim("position_embeddings", square, 6) == 0
    assert tokens_dim("cos", torch.ones(2, 1, 6, 4), 6) == 2

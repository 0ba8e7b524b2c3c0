"""Models whose lists hold containers, and whose blocks are an nn.Sequential.

``ModuleList([ModuleList([attention, mlp]), …])``, lists of ModuleDicts, and ``Sequential(*[Block(), …])``.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import meshwright as mw
from meshwright.store.model_file import whole_state_dict
from tests import tiny
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights

STEPS, BATCH = 10, 8
DIM = 14
PLAIN = ("lists", "dicts", "sequence")


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Pair(nn.Module):
    """A block with a list of its own inside."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x) + x
        return x


class Net(nn.Module):
    """A model as lucidrains writes them, or as Karpathy does; ``kind`` says of what its list is one."""

    def __init__(self, kind):
        super().__init__()
        mlp = [
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM)) for _ in "abc"
        ]
        self.embed, self.head = nn.Embedding(tiny.VOCAB, DIM), nn.Linear(DIM, tiny.VOCAB)
        pairs = [(Attention(DIM), each) for each in mlp]
        if kind == "lists":
            self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        elif kind == "sequence":
            self.layers = nn.Sequential(*(Pair(*pair) for pair in pairs))
        else:
            self.layers = nn.ModuleList(nn.ModuleDict({"attention": a, "mlp": m}) for a, m in pairs)

    def forward(self, ids):
        x = self.embed(ids)
        if isinstance(self.layers, nn.Sequential):
            return self.head(self.layers(x))
        for pair in self.layers:
            attention, mlp = pair if isinstance(pair, nn.ModuleList) else (pair["attention"], pair["mlp"])
            x = attention(x) + x
            x = mlp(x) + x
        return self.head(x)


class Images(Dataset):
    def __init__(self):
        self.pixels = torch.randn(80, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": index % 4}


class Labelled(tiny.Tokens):
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build(name):
    torch.manual_seed(3)
    if name in PLAIN:
        return Net(name)
    import transformers

    if name == "pvt":
        config = transformers.PvtConfig(
            image_size=32, num_encoder_blocks=2, depths=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2],
            sequence_reduction_ratios=[2, 1], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
            hidden_dropout_prob=0, drop_path_rate=0.0, num_labels=4,
        )  # fmt: skip
        return transformers.PvtForImageClassification(config)
    if name == "poolformer":
        config = transformers.PoolFormerConfig(
            hidden_sizes=[8, 8, 16, 16], depths=[1, 2, 1, 1], drop_path_rate=0.0, num_labels=4
        )
        return transformers.PoolFormerForImageClassification(config)
    config = transformers.FunnelConfig(
        vocab_size=tiny.VOCAB, block_sizes=[2, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=32,
        hidden_dropout=0, attention_dropout=0, activation_dropout=0,
    )  # fmt: skip
    return transformers.FunnelForMaskedLM(config)


def data(name):
    return tiny.Tokens() if name in PLAIN else Labelled() if name == "funnel" else Images()


def loss_func(inputs, output):
    return output.loss if hasattr(output, "loss") else tiny.loss_func(inputs, output)


@functools.cache
def reference(name):
    """Losses, initial and final weights of a plain loop in one process."""
    model, dataset = build(name), data(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, num_replicas=1, rank=0, seed=0))
    for _, batch in zip(range(STEPS), loader, strict=False):
        optim.zero_grad()
        loss = loss_func(batch, model(**batch) if isinstance(batch, dict) else model(batch))
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses, before, {key: value.detach() for key, value in model.named_parameters()}


def accelerated(name, strategy):
    return mw.accelerate(
        build(name), torch.optim.SGD, data(name), loss_func, optim_args={"lr": 0.1, "momentum": 0.9}, strategy=strategy,
        dataloader_args={"batch_size": BATCH}, model_input_format=None if name in PLAIN else "unpack_dict",
    )  # fmt: skip


def train(name, strategy):
    """Losses, this rank's weights, and what the first step's activations were predicted and measured to take."""
    job = accelerated(name, strategy)
    losses, sizes = [], None
    for _, batch in zip(range(STEPS), job.dataloader, strict=False):
        if sizes is None:
            step, measured = job.measured_step(batch)
            sizes = (job.plan.memory.activations, measured["activations"], measured["host_activations"])
        else:
            step = job.step(batch)
        losses.append(step.loss.item())
    whole = whole_state_dict if "pipeline_parallel" in strategy else whole_weights
    return losses, whole(job.model), sizes


def check(pool, name, strategy, within=0.0):
    """Hold ten steps on the ranks against one process; return what activations took on the device and the host.

    What Funnel's blocks are given nested in tuples is predicted to be kept for their recomputation, and measured not.
    """
    expected, before, after = reference(name)
    results = pool.run(train, name, strategy)
    for losses, weights, (predicted, on_device, _) in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        if weights or losses is results[0][0]:  # rank 0 has those of a pipeline
            check_weights({key.removeprefix("module."): value for key, value in weights.items()}, before, after)
        assert predicted == pytest.approx(on_device, rel=within) or (name == "funnel" and "checkpoint" in strategy)
    return results[0][2][1:]


@pytest.mark.parametrize("name", ["lists", "sequence", pytest.param("dicts", marks=pytest.mark.long)])
def test_parts_of_containers_are_sharded_recomputed_and_offloaded(ranks, name):
    plain, _ = check(ranks(2), name, [])
    for strategy in (["fsdp"], ["zero2"]):
        assert check(ranks(2), name, strategy) == (plain, 0)
    for strategy in (["checkpoint"], ["fsdp", "checkpoint"]):
        recomputed, _ = check(ranks(2), name, strategy)
        assert recomputed < plain / 2
    on_device, on_host = check(ranks(2), name, [("offload", "activation")])
    assert on_device < plain / 2 < on_host


def test_sequences_of_blocks_are_cut_compiled_and_share_samples(ranks):
    check(ranks(2), "sequence", [("parallel_mode", {"pipeline": 2}), "pipeline_parallel", "checkpoint"], 0.03)
    check(ranks(2), "sequence", [("parallel_mode", {"context": 2}), "context_parallel"])
    check(ranks(2), "sequence", ["fsdp", ("compile", {"backend": "aot_eager"})], 0.03)


def test_a_stage_of_a_sequence_may_have_one_block(ranks):
    axes = ("parallel_mode", {"pipeline": 2, "zero": 2})
    check(ranks(4), "sequence", [axes, "pipeline_parallel", "zero1", "checkpoint"], 0.03)


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.long) for n in ("pvt", "funnel")), "poolformer"])
def test_models_of_transformers_with_lists_of_lists(ranks, name):
    plain, _ = check(ranks(2), name, [])
    recomputed, _ = check(ranks(2), name, ["fsdp", "checkpoint"])
    assert recomputed < plain / 2


REFUSED = {
    "cannot be cut": (
        [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
        "the entries of layers are containers",
    ),
    "sharded by class": ([("fsdp", {"atorch_wrap_cls": "ModuleList"})], "has no forward"),
    "recomputed by class": ([("checkpoint", "ModuleList")], "has no forward"),
}


def refusals():
    said = {}
    for case, (strategy, _) in REFUSED.items():
        try:
            accelerated("lists", strategy)
        except mw.MeshwrightError as error:
            said[case] = str(error)
    return said


def test_containers_themselves_are_refused_on_all_ranks(ranks):
    for said in ranks(2).run(refusals):
        for case, (_, words) in REFUSED.items():
            assert words in said[case], (case, said)

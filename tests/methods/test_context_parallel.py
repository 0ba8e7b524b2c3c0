"""``context_parallel`` against one plain process, alone and beside other axes; what it cannot work on is refused."""

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.methods import resolve
from tests import tiny
from tests.methods import pipeline_runs, split_runs
from tests.methods.test_pipeline_parallel import check_predictions
from tests.methods.test_pipeline_parity import run as check_pipeline, scheduled
from tests.methods.test_sequence_parallel import TOKENS, Block, Net, check_parity, net, reference

UNBALANCED = ("context_parallel", {"balance": False})
FUSED = ("module_replace", {"loss": True})
BOTH = ["sequence_parallel", "context_parallel"]
CASES = {
    "plain": (2, "plain", {"context": 2}, ["context_parallel"], 1),
    "grouped": (2, "llama", {"context": 2}, ["context_parallel", "checkpoint"], 2),
    "fsdp": (4, "llama", {"context": 2, "zero": 2}, ["context_parallel", "fsdp"], 1),
    "zero inside": (4, "vit", [("zero", 2), ("context", 2)], ["context_parallel", "zero1"], 1),
    "zero outside, replicas": (
        8, "llama", [("context", 2), ("data", 2), ("zero", 2)], ["context_parallel", "zero2"], 2,
    ),
    "kept on fewer ranks": (
        8, "llama", [("context", 2), ("zero", 4)], ["context_parallel", ("fsdp", {"reshard_after_forward": 4})], 1,
    ),
    "loss of rows and words": (4, "llama", {"tensor": 2, "context": 2}, [TOKENS, UNBALANCED, FUSED], 1),
    "loss of rows and words, tied": (
        4, "gpt2", {"tensor": 2, "context": 2}, ["tensor_parallel", "context_parallel", FUSED, "checkpoint"], 2,
    ),
    "loss of rows and words, sharded": (
        8, "llama", {"tensor": 2, "context": 2, "zero": 2}, ["tensor_parallel", "context_parallel", FUSED, "fsdp"], 2,
    ),
    "loss in parts": (4, "llama", {"sequence": 2, "context": 2}, [*BOTH, FUSED, "fsdp"], 2),
    "gpt2": (2, "gpt2", {"context": 2}, [UNBALANCED, "fsdp", "checkpoint"], 2),
    "bert": (2, "bert", {"context": 2}, ["context_parallel"], 1),
    "sinks": (2, "gptoss", {"context": 2}, ["context_parallel"], 1),
    "sinks, four": (4, "gptoss", {"context": 4}, [UNBALANCED, "checkpoint"], 2),
    "sinks, heads inside": (4, "gptoss", {"sequence": 2, "context": 2}, ["sequence_parallel", "context_parallel"], 1),
    "sinks, tokens cut twice": (4, "gptoss", {"tensor": 2, "context": 2}, [TOKENS, "context_parallel"], 1),
    "uneven": (2, "vit", {"context": 2}, ["context_parallel", "fsdp"], 1),
    "uneven, two axes": (4, "vit", {"sequence": 2, "context": 2}, ["sequence_parallel", "context_parallel"], 1),
    "four": (4, "plain", {"context": 4}, [UNBALANCED, "zero2"], 1),
    "data": (4, "plain", {"context": 2, "data": 2}, ["context_parallel"], 2),
    "heads inside": (
        4, "llama", {"sequence": 2, "context": 2}, ["sequence_parallel", "context_parallel", "checkpoint"], 1,
    ),
    "three axes": (
        8, "plain", {"sequence": 2, "context": 2, "data": 2}, ["sequence_parallel", "context_parallel", "fsdp"], 1,
    ),
    "tensor": (4, "gpt2", {"tensor": 2, "context": 2}, ["tensor_parallel", "context_parallel", "checkpoint"], 1),
    "tokens cut twice": (4, "llama", {"tensor": 2, "context": 2}, [TOKENS, UNBALANCED, "checkpoint"], 1),
    "tokens cut twice, gpt2": (4, "gpt2", {"tensor": 2, "context": 2}, [TOKENS, UNBALANCED], 2),
    "tokens cut twice, padded": (4, "plain", {"tensor": 2, "context": 2}, [TOKENS, "context_parallel"], 1),
    "tokens cut twice, bert": (4, "bert", {"tensor": 2, "context": 2}, [TOKENS, "context_parallel"], 1),
    "tokens cut three times, padded": (
        8, "llama", {"tensor": 2, "sequence": 2, "context": 2}, [TOKENS, "sequence_parallel", UNBALANCED], 1,
    ),
    "tokens cut twice, fsdp": (8, "llama", {"tensor": 2, "context": 2, "zero": 2}, [TOKENS, UNBALANCED, "fsdp"], 1),
}  # fmt: skip
SHORT = ("plain", "grouped", "sinks", "loss of rows and words")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES])
def test_parity(ranks, case):
    world, name, mesh, methods, micro = CASES[case]
    check_parity(ranks(world), name, [("parallel_mode", mesh), *methods], micro)


def shards(meshes):
    """Return of each mesh whether its shards are the whole, put together, and in how many parts they are."""
    found = []
    for mesh in meshes:
        model = split_runs.build("plain")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        job = mw.accelerate(
            model, torch.optim.SGD, None, tiny.loss_func, optim_args={"lr": 0.1},
            strategy=[("parallel_mode", mesh), "context_parallel", "fsdp"], sample_batch=torch.arange(24).view(2, 12),
        )  # fmt: skip
        whole = all(torch.equal(p.full_tensor(), before[name]) for name, p in job.model.named_parameters())
        mesh_of = next(iter(job.model.parameters())).device_mesh
        found.append((whole, mesh_of[mesh_of.mesh_dim_names[-1]].size(), mesh_of.ndim))
    return found


def test_weights_are_sharded_over_the_ranks_that_share_samples(ranks):
    """In whatever order the axes are nested: process groups number their ranks upwards."""
    meshes = [{"context": 2, "zero": 2}, {"zero": 2, "context": 2}, {"context": 2, "data": 2}, {"context": 4}]
    for found in ranks(4).run(shards, meshes):
        assert found == [(True, 4, 1)] * 4


@pytest.mark.long
def test_weights_are_sharded_beside_replicas(ranks):
    meshes = [[("data", 2), ("context", 2), ("zero", 2)], [("zero", 2), ("data", 2), ("context", 2)]]
    for found in ranks(8).run(shards, meshes):
        assert found == [(True, 4, 2)] * 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "llama", "gpt2"])
def test_adamw(ranks, name):
    check_parity(ranks(2), name, [("parallel_mode", {"context": 2}), "context_parallel"], 1, mode="adamw")


@pytest.mark.long
def test_precision(ranks):
    """Attention runs as autocast would run it, and half as much travels; gradients of keys and values in fp32."""
    losses = reference("llama", "sgd")[0]
    for methods in ([("amp_native", "bf16")], [("half", "bf16"), "fsdp"]):
        strategy = [("parallel_mode", {"context": 2}), "context_parallel", *methods]
        for result in ranks(2).run(split_runs.train, "llama", strategy, "sgd", 1):
            assert result[0] == pytest.approx(losses, rel=1e-2)


def staged(axis, schedule, *methods):
    return [("parallel_mode", {axis: 2, "pipeline": 2}), scheduled(schedule), f"{axis}_parallel", *methods]


STAGED = {
    "ring": [("llama", staged("context", "1f1b")), ("plain", staged("context", "zbv", "checkpoint"))],
    "heads": [("gpt2", staged("sequence", "1f1b")), ("plain", staged("sequence", "gpipe", "checkpoint"))],
}


@pytest.mark.long
@pytest.mark.parametrize("axis", STAGED)
def test_blocks_of_a_stage_work_on_parts(ranks, axis):
    check_pipeline(ranks(4), STAGED[axis])
    check_predictions(ranks(4).run(pipeline_runs.sent_and_kept, STAGED[axis][:1]))


class Other(Block):
    """Attention of other forms."""

    def forward(self, x, positions):
        q, k, v = self.qkv(x + positions).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        dropout = 0.5 if self.kind == "dropout" and self.training else 0.0
        if self.kind == "cross":
            k, v = k[:, :, :3], v[:, :, :3]
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)


def other(kind):
    model = Net()
    for place in range(2):
        model.blocks[place] = Other(kind, 2)
    return model


def refusals():
    """What is said of models and numbers that do not fit; training goes on after it."""
    said, ring = {}, ({"context": 2}, "context_parallel")
    for name, build in {
        "positions inside": lambda: net(Net("positions inside"), *ring),
        "no attention": lambda: net(Net("no attention"), *ring),
        "cross": lambda: net(other("cross"), *ring),
        "dropout": lambda: net(other("dropout"), *ring),
        "tokens": lambda: net(Net(), *ring).step(torch.ones(2, 3, dtype=torch.long)),
    }.items():
        try:
            build()
        except mw.MeshwrightError as error:
            said[name] = str(error)
    ids, apart = torch.arange(20).view(2, 10), []
    for inputs, method in (
        (torch.arange(24).view(2, 12), "context_parallel"), (ids, UNBALANCED), (ids, "context_parallel"),
        (torch.arange(18).view(2, 9), UNBALANCED),
    ):  # fmt: skip
        result = net(Net(heads=3), {"context": 2}, method)  # the axis divides no heads
        apart.append((result.evaluate(inputs) - Net(heads=3)(inputs).square().mean()).abs().item())
    return said, apart


def test_what_cannot_work_is_refused_on_all_ranks(ranks):
    for said, apart in ranks(2).run(refusals):
        for name, words in {
            "positions inside": "blocks.0 does not compute the same on a part of the tokens",
            "no attention": "blocks.0 calls no attention",
            "cross": "not among the tokens",
            "dropout": "dropout in attention",
            "tokens": "two chunks per rank. Expected 4 tokens or more. Got 3",
        }.items():
            assert words in said[name], (name, said)
        assert max(apart) < 1e-6


def with_padding(ids, device):
    """The first sample has padding before it, the second behind it."""
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def padded(axes):
    """Loss and gradient norm of a step on padded samples, in one process and over each axis."""
    ids = torch.arange(48).view(4, 12)
    model = split_runs.build("llama")
    loss = tiny.loss_func(inputs := with_padding(ids, "cpu"), model(**inputs))
    loss.backward()
    found = [(loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())]
    for axis in axes:
        result = mw.accelerate(
            split_runs.build("llama"), torch.optim.SGD, None, tiny.loss_func, optim_args={"lr": 0.1},
            strategy=[("parallel_mode", {axis: 2}), f"{axis}_parallel"], sample_batch=ids,
            prepare_input=with_padding, model_input_format="unpack_dict",
        )  # fmt: skip
        step = result.step(ids)
        found.append((step.loss.item(), step.grad_norm.item()))
    return found


def test_padding_is_masked_across_ranks(ranks):
    expected, *found = ranks(2).run(padded, ["sequence", "context"])[0]
    for each in found:
        assert each == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_checkpoints_go_between_layouts(ranks, tmp_path):
    ring = [("parallel_mode", {"context": 2, "zero": 2}), "context_parallel", "fsdp"]
    for name, source, target in (("plain", ring, ["zero2"]), ("llama", ["zero2"], ring)):
        before = ranks(4).run(split_runs.save_and_go_on, tmp_path / name, name, source)
        after = ranks(4).run(split_runs.load_and_go_on, tmp_path / name, name, target)
        assert after[0] == pytest.approx(before[0], abs=1e-4)


def test_which_axis_shards_and_what_does_not_go_together():
    def resolved(mesh, *methods):
        return resolve(mw.Strategy([("parallel_mode", mesh), *methods]), 4)

    both = ["sequence_parallel", "context_parallel", "fsdp"]
    assert resolved({"sequence": 2, "context": 2}, *both).shard_axis == "context_sequence"
    assert resolved({"context": 4}, "context_parallel", "fsdp").shard_axis == "context"
    assert resolved({"context": 2, "data": 2}, "context_parallel", "fsdp").shard_axis == "data_context"
    with pytest.raises(mw.StrategyError, match="no method works on it"):
        resolved({"context": 4})

"""``expert_parallel`` against one plain process, and both twins; what it cannot work on is refused."""

import functools

import pytest
import torch
from benchmarks import experts
from torch import nn

import meshwright as mw
from meshwright.errors import ModelError
from meshwright.methods.expert.divided_experts import prove
from meshwright.methods.expert.expert_layers import expert_layers
from meshwright.methods.tensor.block_trials import SampleRun
from tests import tiny
from tests.methods import expert_runs
from tests.methods.test_parity import check_weights
from tests.parity.layouts import SCHEDULES, SEQUENCE, scheduled

# Llama-4's shared expert takes flat rows, of which tokens cannot be gathered.
WITHOUT_SHARED = ("tensor_parallel", {
    "sequence": True,
    "plan": {f"model.layers.*.feed_forward.shared_expert.{name}": "replicate"
             for name in ("gate_proj", "up_proj", "down_proj")},
})  # fmt: skip
KEEPING = ("checkpoint", {"policy": "selective"})
CASES = {
    "mixtral": (2, "mixtral", {"expert": 2}, [], "sgd", 1),
    "listed": (2, "listed", {"expert": 2}, ["checkpoint"], "sgd", 2),
    "fsdp": (4, "mixtral", {"expert": 2, "zero": 2}, ["fsdp", "checkpoint"], "sgd", 2),
    "stacked": (2, "stacked", {"expert": 2}, ["fsdp"], "adamw", 1),
    "eager": (2, "eager", {"expert": 2}, ["zero2"], "sgd", 1),
    "qwen3": (2, "qwen3", {"expert": 2}, [("checkpoint", {"no_reentrant": False})], "sgd", 1),
    "replaced": (4, "qwen3", {"expert": 2, "zero": 2}, [("module_replace", ["experts"]), "fsdp"], "sgd", 2),
    "replaced tensor": (
        4, "mixtral", {"tensor": 2, "expert": 2}, [("module_replace", ["experts"]), "tensor_parallel"], "sgd", 1
    ),
    **{
        f"{name} {axis}": (4, name, {axis: 2, "expert": 2} if axis == "tensor" else {"expert": 2, axis: 2}, methods,
                           "sgd", micro)
        for name in expert_runs.FAMILIES
        for axis, methods, micro in (
            ("tensor", ["tensor_parallel"], 1), ("pipeline", [scheduled("1f1b")], 2), ("zero", ["fsdp"], 1),
            ("sequence", ["sequence_parallel"], 1), ("context", ["context_parallel"], 1),
        )
    },
    **{
        f"{name} tensor sequence": (4, name, {"tensor": 2, "expert": 2}, [SEQUENCE], "sgd", 1)
        for name in ("qwen2", "deepseek2", "gptoss", "glm4", "olmoe")
    },
    "llama4 tensor sequence": (4, "llama4", {"tensor": 2, "expert": 2}, [WITHOUT_SHARED], "sgd", 1),
    # Experts that take rows, a sigmoid on them, and an expert that all tokens share.
    "llama4": (2, "llama4", {"expert": 2}, [], "sgd", 1),
    "llama4 fsdp": (4, "llama4", {"expert": 2, "zero": 2}, ["fsdp", "checkpoint"], "adamw", 2),
    "kept results": (4, "llama4", {"expert": 2, "zero": 2}, ["zero2", KEEPING], "sgd", 2),
    "half": (2, "mixtral", {"expert": 2}, [("half", "bf16")], "bf16", 1),
    "amp": (2, "mixtral", {"expert": 2}, ["zero1", ("amp_native", "bf16")], "bf16", 1),
    "amp whole": (2, "mixtral", {"expert": 2}, [("amp_native", "bf16")], "bf16", 1),
    "amp whole tensor": (
        4, "qwen3", {"tensor": 2, "expert": 2}, ["tensor_parallel", ("amp_native", "bf16")], "bf16", 2
    ),
    "amp listed": (2, "listed", {"expert": 2}, [("amp_native", "bf16")], "bf16", 1),
    "half listed": (2, "listed", {"expert": 2}, ["zero2", ("half", "bf16")], "bf16", 1),
    "data": (4, "mixtral", {"expert": 2, "data": 2}, [], "sgd", 2),
    "listed data": (4, "listed", {"expert": 2, "data": 2}, [], "sgd", 1),
    "listed fsdp": (4, "listed", {"zero": 2, "expert": 2}, ["fsdp"], "sgd", 2),
    "listed zero1": (2, "listed", {"expert": 2}, ["zero1"], "adamw", 1),
    "over data": (4, "stacked", {"data": 2, "expert": 2}, ["zero2"], "sgd", 1),
    "four": (4, "listed", {"expert": 4}, ["fsdp", "checkpoint"], "sgd", 1),
    "three axes": (8, "stacked", {"data": 2, "zero": 2, "expert": 2}, ["fsdp"], "sgd", 1),
    # Beside other axes.
    "sequence qwen3": (4, "qwen3", {"expert": 2, "sequence": 2}, ["sequence_parallel", "checkpoint"], "adamw", 1),
    "sequence fsdp": (4, "attending", {"expert": 2, "sequence": 2}, ["sequence_parallel", "fsdp"], "sgd", 2),
    "context listed": (4, "attending", {"expert": 2, "context": 2}, ["context_parallel"], "adamw", 1),
    "context data": (8, "mixtral", {"expert": 2, "context": 2, "data": 2}, ["context_parallel"], "sgd", 1),
    "context zero": (8, "attending", {"expert": 2, "context": 2, "zero": 2}, ["context_parallel", "zero2"], "sgd", 1),
    **{
        f"pipeline {schedule}": (4, f"{model} 4", {"expert": 2, "pipeline": 2}, [scheduled(schedule)], "sgd", 4)
        for schedule, model in zip(SCHEDULES, ("qwen3", "attending", "mixtral", "attending", "qwen3"), strict=True)
    },
    "pipeline adamw": (4, "mixtral 4", {"expert": 2, "pipeline": 2}, [scheduled("zbv"), "checkpoint"], "adamw", 2),
    "pipeline fsdp": (4, "mixtral", {"expert": 2, "pipeline": 2}, [scheduled("1f1b"), "fsdp"], "sgd", 2),
    "pipeline data": (8, "attending", {"expert": 2, "pipeline": 2, "data": 2}, [scheduled("1f1b")], "sgd", 2),
    "pipeline zero": (8, "mixtral", {"expert": 2, "pipeline": 2, "zero": 2}, [scheduled("1f1b"), "fsdp"], "sgd", 2),
    "pipeline zero listed": (
        8, "attending", {"expert": 2, "pipeline": 2, "zero": 2}, [scheduled("1f1b"), "zero2"], "sgd", 2
    ),
    "pipeline sequence": (
        8, "mixtral", {"expert": 2, "pipeline": 2, "sequence": 2}, [scheduled("1f1b"), "sequence_parallel"], "sgd", 2
    ),
    "tensor qwen3": (4, "qwen3", {"tensor": 2, "expert": 2}, ["tensor_parallel", "checkpoint"], "adamw", 2),
    "tensor listed": (4, "attending", {"tensor": 2, "expert": 2}, ["tensor_parallel"], "sgd", 2),
    "tensor zero": (8, "qwen3", {"tensor": 2, "expert": 2, "zero": 2}, ["tensor_parallel", "fsdp"], "sgd", 1),
    "tensor context": (
        8, "mixtral", {"tensor": 2, "expert": 2, "context": 2}, ["tensor_parallel", "context_parallel"], "sgd", 1
    ),
    "tensor sequence": (4, "mixtral", {"tensor": 2, "expert": 2}, [SEQUENCE], "sgd", 1),
    "tensor sequence qwen3": (4, "qwen3", {"tensor": 2, "expert": 2}, [SEQUENCE, "checkpoint"], "adamw", 2),
    "tensor sequence listed": (4, "attending", {"tensor": 2, "expert": 2}, [SEQUENCE], "sgd", 1),
    "tensor sequence latent": (4, "deepseek3", {"tensor": 2, "expert": 2}, [SEQUENCE], "sgd", 1),
    "tensor sequence latent recomputed": (
        4, "deepseek3", {"tensor": 2, "expert": 2}, [SEQUENCE, "checkpoint"], "adamw", 2
    ),
    "tensor sequence latent pipeline": (
        8, "deepseek3", {"tensor": 2, "expert": 2, "pipeline": 2}, [SEQUENCE, scheduled("1f1b")], "sgd", 2
    ),
    "tensor sequence zero": (8, "mixtral", {"tensor": 2, "expert": 2, "zero": 2}, [SEQUENCE, "fsdp"], "sgd", 1),
    "tensor sequence pipeline": (
        8, "mixtral", {"tensor": 2, "expert": 2, "pipeline": 2}, [SEQUENCE, scheduled("1f1b")], "sgd", 2
    ),
    "tensor pipeline": (
        8, "mixtral", {"tensor": 2, "expert": 2, "pipeline": 2}, ["tensor_parallel", scheduled("1f1b")], "sgd", 2
    ),
    "tensor pipeline listed": (
        8, "attending", {"tensor": 2, "expert": 2, "pipeline": 2}, ["tensor_parallel", scheduled("gpipe")], "sgd", 2
    ),
}  # fmt: skip
SHORT = ("mixtral", "llama4", "half listed", "pipeline zbv", "tensor sequence latent")
LONG = pytest.mark.long
reference = functools.cache(expert_runs.reference)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else LONG) for c in CASES])
def test_parity(ranks, case):
    world, name, mesh, methods, mode, micro = CASES[case]
    strategy = [("parallel_mode", mesh), "expert_parallel", *methods]
    results = ranks(world).run(expert_runs.train, name, strategy, mode, micro)
    losses, norms, before, expected = reference(name, "sgd" if mode == "sgd" else "adamw")
    assert all(result[:2] == results[0][:2] for result in results)
    assert results[0][0] == pytest.approx(losses, rel=1e-2 if mode == "bf16" else 1e-4)
    assert results[0][1] == pytest.approx(norms, rel={"bf16": 5e-2, "adamw": 1e-4, "sgd": 1e-5}[mode])
    if mode == "sgd":
        check_weights({key: value for result in results for key, value in result[2].items()}, before, expected)
    check_traffic([result[3] for result in results])
    assert len({result[4][0] for result in results}) == 1
    assert all(result[4][1] for result in results) or name in ("eager", "stacked"), "these cannot be traced"
    runs = 11 * micro + 1  # asking leaves buffers as they are, and so does recomputing
    calls = {number for result in results for number in result[4][2]}
    assert calls <= {runs} or "pipeline" in mesh, "of another rank's block it is 0"


def check_traffic(every):
    """All-to-alls as predicted in the mean over the ranks; other collectives on each."""
    exchanged = [sent.pop("all_to_all", 0) for sent, _ in every]  # a stage may have no experts
    predicted = [expected.pop("all_to_all", 0) for _, expected in every]
    assert sum(exchanged) == sum(predicted)
    for sent, expected in every:
        assert sent == expected


def sent_per_token():
    """Bytes of a token's rows in the all-to-alls of a layer and step, and the least possible."""
    result = experts.job(experts.QUICK, "grouped_mm", ("parallel_mode", {"expert": 2}), "expert_parallel")
    return experts.bytes_per_token(result, experts.batch(1)), experts.least_bytes(experts.QUICK)


def test_a_token_is_sent_once_to_each_of_its_experts(ranks):
    for sent, least in ranks(2).run(sent_per_token):
        assert sent == least


def test_ranks_and_experts_without_tokens(ranks):
    mesh = ("parallel_mode", {"expert": 2})
    for name in ("stacked", "listed"):
        for apart, loss in ranks(2).run(expert_runs.without_tokens, name, [mesh, "expert_parallel"]):
            assert apart < 1e-6
            assert abs(loss) < 1e-6
    assert max(ranks(2).run(expert_runs.without_questions)) < 1e-6


BESIDE = {
    "pipeline": ("listed", {"pipeline": 2}, ["pipeline_parallel"], 2),
    "pipeline stacked": ("stacked", {"pipeline": 2}, ["pipeline_parallel", "fsdp"], 2),
    "sequence": ("attending", {"sequence": 2}, ["sequence_parallel"], 1),
    "tensor": ("attending", {"tensor": 2}, ["tensor_parallel"], 1),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BESIDE)
def test_ranks_without_tokens_beside_other_axes(ranks, case):
    name, axes, methods, micro = BESIDE[case]
    strategy = [("parallel_mode", {**axes, "expert": 2}), "expert_parallel", *methods]
    for apart, loss in ranks(4).run(expert_runs.without_tokens, name, strategy, micro):
        assert apart < 1e-6
        assert abs(loss) < 1e-6


def worst(results, expected, before):
    """The distance of all ranks' weights, as a part of the way."""
    weights = {key: value for result in results for key, value in result[1].items()}
    off = torch.stack([(weights[key] - value).norm() for key, value in expected.items()]).norm()
    return (off / torch.stack([(before[key] - value).norm() for key, value in expected.items()]).norm()).item()


@pytest.mark.parametrize("name", ["attending", pytest.param("mixtral", marks=LONG)])
def test_replicas_synchronise_their_experts(ranks, name):
    """Replicas that take the mean of their weights after each step are like one process."""
    averaging = ("outer", {"rule": "local_sgd", "sync_every": 1})
    strategy = [("parallel_mode", {"expert": 2, "replica": 2}), "expert_parallel", averaging]
    results = ranks(4).run(expert_runs.apart, name, strategy)
    alone = ranks(1).run(expert_runs.apart, name, [])[0]
    assert worst(results, alone[1], alone[0]) < 1e-5


SMALL = {"min_numel": 64, "reduce": "int8"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["attending", "mixtral"])
@pytest.mark.parametrize("rest", [{"data": 2}, {"zero": 2}], ids=str)
def test_averages_of_experts_are_compressed(ranks, name, rest):
    """Four steps: later ones route tokens elsewhere."""
    sharding = ["fsdp", ("comm", {**SMALL, "all_gather": "int8"})] if "zero" in rest else [("comm", SMALL)]
    strategy = [("parallel_mode", {"expert": 2, **rest}), "expert_parallel", *sharding]
    results = ranks(4).run(expert_runs.apart, name, strategy, "sgd", 4)
    alone = ranks(1).run(expert_runs.apart, name, [], "sgd", 4)[0]
    assert 1e-4 < worst(results, alone[1], alone[0]) < 0.05
    traffic = [result[2] for result in results]
    for sent in (sent for pair in traffic for sent in pair if "data" in rest):
        sent.pop("all_reduce", 0)  # whether experts have gradients: a bucket's few bytes are taken for a norm's
    check_traffic(traffic)


@pytest.mark.parametrize("name", ["listed", pytest.param("mixtral", marks=LONG)])
def test_checkpoints_go_between_layouts(ranks, tmp_path, name):
    divided = [("parallel_mode", {"expert": 2}), "expert_parallel", "fsdp"]
    before = ranks(2).run(expert_runs.save_and_go_on, tmp_path / "divided", name, divided)
    after = ranks(1).run(expert_runs.load_and_go_on, tmp_path / "divided", name, [])
    assert after[0] == pytest.approx(before[0], rel=1e-5)
    ranks(2).run(expert_runs.save_and_go_on, tmp_path / "whole", name, ["fsdp"])
    after = ranks(2).run(expert_runs.load_and_go_on, tmp_path / "whole", name, divided[:2])
    assert after[0] == pytest.approx(before[0], rel=1e-4)


def test_what_cannot_work_is_refused_on_all_ranks(ranks):
    for said in ranks(2).run(expert_runs.refusals):
        for name, words in {
            "indivisible": "does not divide the experts of blocks.0.moe.experts",
            "unlike": "differ",
            "none": "no experts that can be divided",
            "pattern": "'blocks.*.moe.units' names no module",
            "in place": "changes its input in place",
            "chain": "does not compute the same when its experts are divided",
            "ignored": "atorch_ignored_cls",
            "no method": "add expert_parallel",
            "no axis": "expert_parallel has no mesh axis",
            "one rank": "nothing",
        }.items():
            assert words in said[name], (name, said[name])


def test_experts_are_found_and_proved():
    listed, stacked = expert_runs.build("listed"), expert_runs.build("stacked")
    for model, number in ((listed, 2), (stacked, 2)):
        layers = expert_layers(model, (), 2)
        assert len(layers) == number
    assert prove(expert_layers(listed, (), 4)[0], 4) == (expert_runs.WIDTH, expert_runs.TOP_K)
    assert listed.blocks[0].moe.calls == 0
    assert prove(expert_layers(stacked, ("blocks.*.moe.units",), 2)[1], 2) is None
    stacked.blocks[0].moe.units.bias = nn.Parameter(torch.zeros(7))
    with pytest.raises(mw.ModelError, match="not one for each expert"):
        expert_layers(stacked, (), 2)


class Crowd(expert_runs.Units):
    """Experts that look at each other's tokens."""

    def forward(self, hidden, index, weights):
        return super().forward(hidden - hidden.mean(0), index, weights)


def test_experts_that_mix_tokens_are_refused():
    model = expert_runs.build("stacked")
    model.blocks[1].moe.units = Crowd()
    with pytest.raises(mw.ModelError, match=r"blocks.1.moe.units does not compute the same"):
        prove(expert_layers(model, (), 2)[1], 2)


def test_rows_of_zeros_must_count_nothing(monkeypatch):
    """They are not sent, so experts must not answer them, nor learn from them."""
    layer = expert_layers(expert_runs.build("llama4"), (), 2)[1]
    assert layer.takes_rows
    assert prove(layer, 2) == (expert_runs.WIDTH, 1)
    own = layer.module.forward
    for wrong in (lambda rows: own(rows) + 1, lambda rows: own(rows) + rows):
        monkeypatch.setattr(layer.module, "forward", wrong)
        with pytest.raises(mw.ModelError, match=r"experts that answer rows of zeros"):
            prove(layer, 2)


def test_divided_tokens_are_not_taken_over_from_beside_the_axis():
    """There a proof passes by the router, whose gradients would have to be summed; this model cannot be tried alone."""
    ids = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    sample = SampleRun(lambda samples: ids[:samples], lambda model, inputs: model(inputs))
    strategy = mw.Strategy([("parallel_mode", {"tensor": 2, "expert": 2}), "expert_parallel", SEQUENCE])
    tensor, model = strategy.get("tensor_parallel"), expert_runs.attending(2)
    tensor.traced_layers(model, {"tensor": 2, "expert": 2}, sample, strategy)
    with pytest.raises(ModelError, match="nonzero"):
        tensor.split(model, 2, sample)

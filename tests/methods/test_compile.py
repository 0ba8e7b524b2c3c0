"""``compile``: the same numbers as one plain process, under the model's own names; what does not work is refused."""

import contextlib
import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import meshwright as mw
from meshwright.cost import find_cluster
from meshwright.methods import Compile, SearchScope
from meshwright.nn import compile_forward, find_blocks
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.model_shapes import parse_family
from meshwright.strategy import Strategy
from tests import tiny
from tests.methods import split_runs
from tests.methods.expert_runs import attending
from tests.methods.test_checkpoint import job
from tests.methods.test_parity import BATCH, check_weights, full_weights
from tests.parity.layouts import scheduled
from tests.planner.trace.models import mixtral as stacked_experts

EAGER = {"backend": "aot_eager"}  # compiles forward and backward, and runs them with eager kernels
ONE_GRAPH = {**EAGER, "fullgraph": True}
SELECTIVE = ("checkpoint", {"policy": "selective"})
CASES = {
    "fsdp": (2, "plain", [("compile", {"backend": "eager", "fullgraph": True}), "fsdp", "checkpoint"], 2),
    "fsdp llama": (2, "llama", [("compile", EAGER), "fsdp", "checkpoint"], 2),
    "data": (2, "gpt2", [("compile", EAGER)], 1),
    "zero2": (2, "plain", [("compile", {**EAGER, "activation_budget": 0.5}), "zero2"], 2),
    "hybrid": (4, "plain", [("compile", EAGER), "fsdp", ("parallel_mode", {"zero": 2, "data": 2})], 1),
    "tensor": (2, "llama", [("compile", ONE_GRAPH), ("parallel_mode", {"tensor": 2}), "tensor_parallel"], 1),
    "tokens": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"tensor": 2}), ("tensor_parallel", {"sequence": True}),
         "checkpoint"],
        1,
    ),
    "tokens, kept": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"tensor": 2}), ("tensor_parallel", {"sequence": True}), SELECTIVE],
        2,
    ),
    "tensor, again": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"tensor": 2}), "tensor_parallel", ("checkpoint", {"every": 2})], 2,
    ),
    "tokens, sharded": (
        4, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"axes": [["tensor", 2], ["zero", 2]]}),
         ("tensor_parallel", {"sequence": True}), "fsdp", "checkpoint"],
        2,
    ),
    "tokens gathered again": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"tensor": 2}), ("tensor_parallel", {"sequence": True})],
        2,
    ),
    "heads": (2, "llama", [("compile", ONE_GRAPH), ("parallel_mode", {"sequence": 2}), "sequence_parallel"], 1),
    "heads, kept": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"sequence": 2}), "sequence_parallel", SELECTIVE], 2,
    ),
    "offloaded": (2, "llama", [("compile", ONE_GRAPH), "fsdp", ("offload", "activation")], 2),
    "whole": (2, "plain", [("compile", {**EAGER, "whole": True})], 1),
    "whole fsdp": (2, "plain", [("compile", {**EAGER, "whole": True}), "fsdp"], 1),
    "replaced": (2, "llama", [("compile", EAGER), ("module_replace", {"loss": True}), "fsdp"], 1),
    "pipeline": (2, "plain", [("compile", EAGER), ("parallel_mode", {"pipeline": 2}), "pipeline_parallel"], 2),
    "zbv": (2, "deep", [("compile", EAGER), ("parallel_mode", {"pipeline": 2}), scheduled("zbv")], 4),
    "dualpipev": (2, "deep", [("compile", EAGER), ("parallel_mode", {"pipeline": 2}), scheduled("dualpipev")], 4),
    # What searches choose by themselves.
    "zero2 selective": (
        2, "llama", [("compile", EAGER), "zero2", SELECTIVE, ("module_replace", {"loss": True})], 2,
    ),
    "fsdp selective": (
        2, "llama", [("compile", EAGER), "fsdp", SELECTIVE, ("module_replace", {"loss": True})], 2,
    ),
    "fsdp every second": (2, "llama", [("compile", EAGER), "fsdp", ("checkpoint", {"every": 2})], 2),
    "context": (
        2, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"context": 2}), "context_parallel",
         ("module_replace", {"loss": True})],
        2,
    ),
    "context, again": (
        2, "llama", [("compile", ONE_GRAPH), ("parallel_mode", {"context": 2}), "context_parallel", "checkpoint"], 2,
    ),
    "context, kept": (
        4, "llama",
        [("compile", ONE_GRAPH), ("parallel_mode", {"axes": [["context", 2], ["tensor", 2]]}), "context_parallel",
         ("tensor_parallel", {"sequence": True}), SELECTIVE],
        2,
    ),
    "interleaved": (
        2, "deep",
        [("compile", EAGER), ("parallel_mode", {"pipeline": 2}), scheduled("interleaved"), SELECTIVE],
        4,
    ),
    "tensor and pipeline": (
        4, "llama",
        [("compile", EAGER), ("parallel_mode", {"tensor": 2, "pipeline": 2}), ("tensor_parallel", {"sequence": True}),
         "pipeline_parallel"],
        2,
    ),
}  # fmt: skip
SHORT = ("fsdp", "tokens gathered again", "context, again")
# Graphs in a process where blocks share them, whatever axis divides them: of blocks that run again, and of others.
GRAPHS = {case: 2 if "every" in str(CASES[case]) else 1 for case in CASES if "fullgraph" in str(CASES[case][2])}


def train(name, strategy, micro_batches):
    """Ten steps; losses, weights and the number of graphs that were compiled."""
    torch._dynamo.reset()
    counters.clear()
    accelerated = mw.accelerate(
        split_runs.build(name), torch.optim.SGD, tiny.Tokens(), split_runs.loss_func, strategy=strategy,
        optim_args={"lr": 0.1, "momentum": 0.9}, prepare_input=split_runs.prepare_for(name),
        model_input_format=tiny.input_format("plain" if name in split_runs.BARE else name),
        dataloader_args={"batch_size": BATCH}, num_micro_batches=micro_batches,
    )  # fmt: skip
    steps = zip(range(10), accelerated.dataloader, strict=False)
    losses = [accelerated.step(batch).loss.item() for _, batch in steps]
    for step in accelerated.plan.steps:  # of a pipeline: what is compiled runs backward in one part
        assert not step.activations.splits_backward
    return losses, full_weights(accelerated.model), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES])
def test_parity(ranks, case):
    world, name, strategy, micro_batches = CASES[case]
    results = ranks(world).run(train, name, strategy, micro_batches)
    expected, _, before, weights = split_runs.reference(name, "sgd")
    assert all(losses == results[0][0] for losses, _, _ in results)
    if case in GRAPHS:
        assert [graphs for *_, graphs in results] == [GRAPHS[case]] * world
    assert results[0][0] == pytest.approx(expected, rel=1e-5)
    every = results if "pipeline" in str(strategy) else results[:1]  # the ranks of a pipeline hold parts
    found = {key.removeprefix("module."): value for _, own, _ in every for key, value in own.items()}
    check_weights(found, before, weights)


def accelerated(config, batch, *others, model=None):
    return mw.accelerate(
        model or tiny.build("plain"), torch.optim.SGD, None, tiny.loss_func, optim_args={"lr": 0.1},
        strategy=[("compile", config), *others], sample_batch=batch, batch_size=len(batch),
    )  # fmt: skip


def names_hooks_and_bytes():
    """In one process: what stays of a model, what is compiled how often, and what is saved for backward."""
    torch._dynamo.reset()
    batch = tiny.Tokens().ids[:4].clone()
    plain = mw.accelerate(
        tiny.build("plain"), torch.optim.SGD, None, tiny.loss_func, optim_args={"lr": 0.1}, sample_batch=batch,
        batch_size=4, strategy=[],
    )  # fmt: skip
    expected, kept = plain.measured_step(batch)
    counter = CompileCounterWithBackend("aot_eager")
    with mock.patch.object(torch, "compile", _compiling_with(counter)):
        once = accelerated(EAGER, batch)
    assert list(once.model.state_dict()) == list(plain.model.state_dict())
    seen = []
    once.model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    result, measured = once.measured_step(batch)
    assert counter.frame_count == 1  # both blocks share it
    assert seen == [1]
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-6, atol=0)
    assert measured["activations"] == pytest.approx(once.plan.memory.activations, rel=0.02)
    assert once.plan.memory.activations <= kept["activations"]
    none = accelerated({**EAGER, "activation_budget": 0}, batch)
    result, measured = none.measured_step(batch)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-6, atol=0)
    assert measured["activations"] == none.plan.memory.activations < kept["activations"] / 2
    torch.testing.assert_close(none.evaluate(batch), plain.evaluate(batch), rtol=1e-6, atol=0)
    copied = copy.deepcopy(none.model)
    torch.testing.assert_close(copied(batch), none.model(batch))
    return True


def _compiling_with(backend):
    original = torch.compile
    return lambda function, **options: original(function, **{**options, "backend": backend})


def test_names_and_hooks_stay_and_blocks_share_what_is_compiled(ranks):
    assert ranks(1).run(names_hooks_and_bytes) == [True]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"backend": "inductr"}, "did you mean 'inductor'"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        ({**EAGER, "mode": "default"}, "inductor's"),
    ],
)
def test_what_cannot_be_compiled_is_refused(config, said):
    with pytest.raises(mw.StrategyError, match=said):
        Compile.parse(config).check(job(tiny.build("plain")))


@pytest.mark.parametrize(
    ("config", "micro_batches", "said"),
    [
        ({"mode": "reduce-overhead"}, 2, "in the memory of a CUDA graph"),
        ({"mode": "max-autotune"}, 4, "4 micro-batches"),
        ({"backend": "cudagraphs"}, 2, "backend='cudagraphs'"),
        ({"mode": "reduce-overhead", "dynamic": True}, 1, "of one shape"),
        ({"mode": "reduce-overhead"}, 1, None),
        ({"mode": "max-autotune-no-cudagraphs"}, 2, None),
        (None, 2, None),
    ],
)
def test_what_a_cuda_graph_cannot_hold_is_refused(config, micro_batches, said):
    on_gpu = job(tiny.build("plain"))
    on_gpu.device, on_gpu.num_micro_batches = torch.device("cuda"), micro_batches
    compiled = Compile.parse(config)
    with mock.patch.object(Compile, "_check_backend"):
        if said is None:
            compiled.check(on_gpu)
        else:
            with pytest.raises(mw.StrategyError, match=said):
                compiled.check(on_gpu)
        on_gpu.device = torch.device("cpu")  # where nothing is captured
        compiled.check(on_gpu)
    with mock.patch("meshwright.methods.compile.compile_forward"):
        compiled.apply(on_gpu)
    assert ["no CUDA graphs" in line for line in on_gpu.notices] == [True] * (compiled.mode == "reduce-overhead")


@pytest.mark.parametrize(
    ("changes", "is_tried"),
    [
        ({}, True), ({"half_dtype": None}, False),
        ({"model": nn.Linear(2, 2)}, False),
        ({"model": tiny.build("plain")}, True),
    ],
)  # fmt: skip
def test_a_search_tries_blocks_on_gpus(changes, is_tried):
    scope = dataclasses.replace(SearchScope(8, "bf16"), **changes)
    assert Compile.search_options(scope) == ((Compile.parse(None),) if is_tried else ())


def test_a_search_leaves_compiled_modules_and_state_spaces_alone():
    scope = SearchScope(8, "bf16", model=tiny.build("plain"))
    scope.model.stem = nn.Conv1d(2, 2, 1)  # what is not in a block is not compiled
    assert Compile.search_options(scope)
    find_blocks(scope.model)[0][1].mixer = nn.Conv1d(2, 2, 1)
    assert Compile.search_options(scope) == ()
    scope = dataclasses.replace(scope, model=tiny.build("plain"))
    compile_forward([find_blocks(scope.model)[0][1]], contextlib.nullcontext, backend="eager")
    assert Compile.search_options(scope) == ()


@pytest.mark.parametrize("kind", ["grouped_mm", "eager", "listed"])
def test_a_search_leaves_experts_that_are_called_one_by_one_alone(kind):
    model = attending(2) if kind == "listed" else stacked_experts()
    if kind != "listed":
        model.set_experts_implementation(kind)
    assert bool(Compile.search_options(SearchScope(8, "bf16", model=model))) == (kind == "grouped_mm")


def test_a_block_of_stacked_experts_is_one_graph():
    torch.manual_seed(0)
    model, ids = stacked_experts(), torch.randint(0, 50, (2, 16))
    model.config.use_cache = False  # a cache knows its layer, and every layer would be a graph of its own
    expected = model(ids, labels=ids).loss
    torch._dynamo.reset()
    counters.clear()
    compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend="aot_eager")
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", ["norms of adapters", "another forward"])
def test_a_search_leaves_blocks_alone_that_would_not_gain(kind):
    model = tiny.build("plain")
    block = find_blocks(model)[-1][1]
    if kind == "norms of adapters":
        block.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})
    else:
        block.forward = block.forward
    assert Compile.search_options(SearchScope(8, "bf16", model=model)) == ()


def test_texts_are_written_without_compiling_every_layer():
    model = stacked_experts()
    ids = torch.randint(0, 50, (1, 4))
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    torch._dynamo.reset()
    counters.clear()
    compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend="aot_eager")
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert not counters["stats"]


def test_a_process_may_compile_a_class_for_many_models():
    torch._dynamo.reset()
    for _ in range(12):
        counters.clear()
        model = tiny.build("plain")
        compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend="eager")
        model(torch.zeros(1, tiny.SEQ_LEN, dtype=torch.long))
        assert counters["stats"]["unique_graphs"] == 1


def test_blocks_of_divided_experts_that_run_again_are_not_compiled_and_that_is_told():
    divided = job(tiny.build("plain"))
    divided.recomputed = dict.fromkeys(path for path, _ in find_blocks(divided.model))
    with mock.patch.object(type(divided), "axes", (("expert", 2),)):
        Compile(**EAGER).apply(divided)
    assert ["beside an expert axis" in line for line in divided.notices] == [True]


def test_plans_count_no_gain_where_no_block_is_compiled():
    for model, axes, again, gains in (
        ("llama-3-8b", [("zero", 8)], ["checkpoint"], True),
        ("llama-3-8b", [("tensor", 2), ("zero", 4)], ["tensor_parallel"], True),
        ("llama-3-8b", [("tensor", 2), ("zero", 4)], ["tensor_parallel", "checkpoint"], True),
        ("llama-3-8b", [("context", 2), ("zero", 4)], ["context_parallel", "checkpoint"], True),
        ("mixtral-8x7b", [("expert", 8)], ["expert_parallel", "checkpoint"], False),
    ):
        subject = FamilyModel("", parse_family(f"{model}:seq=4096")).subject(find_cluster("h100x8"), 16, None)
        methods = [("parallel_mode", {"axes": axes}), "fsdp", ("amp_native", "bf16"), *again]
        plain, compiled = (
            subject.plan(Strategy([*methods, *more]), 1).forecast.time.step_time_s for more in ([], ["compile"])
        )
        assert (compiled < 0.95 * plain) is gains
        assert gains or compiled == plain


def test_a_machine_without_compiler_and_a_model_without_blocks_are_told():
    with mock.patch("shutil.which", return_value=None), pytest.raises(mw.StrategyError, match=r"C\+\+ compiler"):
        Compile().check(job(tiny.build("plain")))
    with pytest.raises(mw.ModelError, match=r"no repeated blocks.*whole"):
        Compile(**EAGER).check(job(nn.Linear(2, 2)))
    assert Strategy([("compile", "whole")]).get("compile").whole
    with pytest.raises(mw.StrategyError, match="activation_budget"):
        Strategy([("compile", {"activation_budget": 1.5})])


@pytest.mark.long
def test_inductor_computes_the_same(ranks):
    losses, weights, _ = ranks(1).run(train, "plain", ["compile"], 1)[0]
    expected, _, before, after = split_runs.reference("plain", "sgd")
    assert losses == pytest.approx(expected, rel=1e-5)
    check_weights(weights, before, after)


class Convolves(torch.nn.Module):
    """A block of a ResNet."""

    def __init__(self, before, behind):
        super().__init__()
        self.convolution = torch.nn.Conv2d(before, behind, 3, stride=2, padding=1, bias=False)
        self.norm, self.activation = torch.nn.BatchNorm2d(behind), torch.nn.ReLU(inplace=True)

    def forward(self, x):
        return self.activation(self.norm(self.convolution(x)))


def _convolving(strategy, *, in_blocks=True):
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(Convolves(3, 4), Convolves(4, 6), Convolves(6, 5))
    model = torch.nn.Sequential(blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(5, 3))
    if not in_blocks:  # as in a ViT
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8), torch.nn.Flatten(), torch.nn.Sequential(*_follows()))
    images = torch.randn(10, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=lambda batch, output: output.square().mean() + output[:, 0].mean(),
        strategy=strategy, optim_args={"lr": 0.05}, sample_batch=images[0],
    )  # fmt: skip
    return [job.step(batch).loss.item() for batch in images]


def _convolves():
    given = []

    def noted(*args, **options):
        given.append(options["dynamic"])
        compile_forward(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.methods.compile.compile_forward", noted)
        losses = _convolving([("compile", {"backend": "aot_eager"})])
        _convolving([("compile", {"backend": "eager", "dynamic": True})])
        _convolving([("compile", {"backend": "eager"})], in_blocks=False)
    assert given == [False, True, None]
    assert losses == pytest.approx(_convolving([]), rel=1e-4)


def test_blocks_with_convolutions_are_compiled_for_every_shape(ranks):
    ranks(1).run(_convolves)


class Follows(torch.nn.Module):
    """A block whose forward moves a buffer that its result depends on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.3)
        return x + torch.tanh(self.layer(x - self.centre))


def _follows():
    return [Follows() for _ in range(3)]


def _following(strategy):
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*_follows())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), blocks, torch.nn.Linear(8, 1))
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=lambda batch, output: (output - batch.sum(-1, keepdim=True)).square().mean(),
        strategy=strategy, optim_args={"lr": 0.05}, sample_batch=torch.zeros(8, 8),
    )  # fmt: skip
    for index in range(10):
        job.step(torch.randn(8, 8, generator=torch.Generator().manual_seed(index)))
    return torch.cat([value.detach().flatten() for value in job.model.state_dict().values()])


def _beside_recomputation():
    compiled = ("compile", {"backend": "aot_eager"})
    expected = _following([])
    torch.testing.assert_close(_following([compiled]), expected)
    with pytest.warns(UserWarning, match=r"Follows is not compiled: its forward changes buffers \(of Follows\)"):
        found = _following(["checkpoint", compiled])
    torch.testing.assert_close(found, expected)


def test_blocks_that_change_buffers_are_recomputed_as_in_plain_code(ranks):
    ranks(1).run(_beside_recomputation)

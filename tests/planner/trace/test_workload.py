"""Plans of models without weights, on devices that are not here; what a model's refusal says."""

import re

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.cost import make_cluster, simulate
from meshwright.planner import Workload
from meshwright.planner.family_ops import FamilyRun, Implementation
from meshwright.planner.family_steps import family_step
from meshwright.planner.model_shapes import Shape
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.tracer import Conditions, Tracer
from meshwright.planner.workload import tokens_per_sample
from meshwright.strategy import Strategy
from tests import tiny
from tests.planner.trace.models import FAMILIES, SEQ, ids, images

CUDA = torch.device("cuda")


def workload(model, inputs_of, forward, device=CUDA, **changes):
    given = {"batch_size": 8, "num_micro_batches": 1, "world": 1, "zero_level": 3, "limit_bytes": None, **changes}
    return Workload(model, device, torch.optim.AdamW, inputs_of, forward, **given)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "bert", "vit", "mixtral")]


@pytest.mark.parametrize("name", ["llama", *LONG])
def test_models_without_weights_are_planned_as_those_with(name):
    make, inputs_of, forward = FAMILIES[name]
    with torch.device("meta"):
        empty = make()
    real = make()
    plans = [
        workload(each, inputs_of, forward, cluster=make_cluster("A100", 1)).plan(Strategy([("half", "bf16")]))
        for each in (empty, real)
    ]
    assert plans[0].memory == plans[1].memory
    assert plans[0].step == plans[1].step
    assert plans[0].forecast.time.step_time_s == plans[1].forecast.time.step_time_s > 0
    assert all(tensor.device.type == "meta" for tensor in empty.parameters())
    tokens = None if name == "vit" else SEQ
    assert plans[0].forecast.tokens_per_sample == tokens
    if not torch.cuda.is_available():
        assert any("traced as on cpu" in gap for gap in plans[0].gaps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_on_cuda_attention_is_fused_with_dropout_too():
    model = tiny.plain(num_layers=1, dropout=0.1)

    def forward(model, ids):
        return model(ids).sum()

    given = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    here, there = (Pass(model, given, forward, device=device).predict() for device in (None, CUDA))
    kinds = [{op.kind for ops in each.ops.by_path.values() for op in ops} for each in (here, there)]
    assert "attention" not in kinds[0]
    assert "attention" in kinds[1]
    assert there.activations.saved_bytes < here.activations.saved_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.parametrize("weights", [False, True])
def test_attention_of_torchs_own_layer_is_fused_with_dropout_where_it_returns_no_weights(weights):
    model = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

    def forward(model, x):
        return model(x, x, x, need_weights=weights)[0].sum()

    found = Pass(model, torch.zeros(2, 12, 32), forward, device=CUDA).predict()
    assert ("attention" in {op.kind for op in found.ops.outside}) == (not weights)


def test_a_module_is_simulated_as_its_family_is():
    layers, hidden, heads, vocab, seq = 8, 2048, 16, 8192, 2048
    with torch.device("meta"):
        model = tiny.gpt2.GPT2(vocab, seq, hidden, layers, heads)
    cluster = make_cluster("H100-SXM", 1)
    plan = workload(
        model,
        lambda n: torch.zeros(n, seq, dtype=torch.long),
        lambda model, ids: tiny.gpt2.next_token_loss(ids, model(ids)),
        batch_size=4,
        cluster=cluster,
    ).plan(Strategy([("half", "bf16")]))
    # The loss runs in fp32, and of the example's only the log-softmax is kept.
    run = FamilyRun(micro_batch=4, seq=seq, impl=Implementation(logit_bytes=(4, 4)))
    (family,) = family_step(Shape("gpt", layers, hidden, heads, vocab, seq), run)
    own = plan.step
    counts = [sum(count * p.numel for count, p in step.every_parameter()) for step in (own, family)]
    assert counts[0] == counts[1]
    forwards = [
        sum(b.count * op.flops for b in s.blocks for op in b.ops if op.moment != "backward") for s in (own, family)
    ]
    assert forwards[0] == forwards[1]
    assert own.activations.saved_bytes == pytest.approx(family.activations.saved_bytes, rel=1e-3)
    family = family.replace(parameters=own.parameters, gradients=own.gradients, master=own.master)
    family = family.replace(compute_itemsize=own.compute_itemsize, optimizer=own.optimizer)
    assert simulate(own, cluster).compute_s == pytest.approx(simulate(family, cluster).compute_s, rel=0.03)
    (blocks, _) = own.blocks
    assert blocks.count == layers  # equal blocks have one description


def test_sizes_and_blocks_that_are_continued_are_what_a_pass_finds(monkeypatch):
    def inputs_of(samples):
        return torch.zeros(samples, tiny.SEQ_LEN, dtype=torch.long)

    def forward(model, ids):
        return tiny.loss_func(ids, model(ids))

    model = tiny.plain(num_layers=9)
    tracer = Tracer(model, inputs_of, forward)
    passes = []
    monkeypatch.setattr(Pass, "_record", lambda self, real=Pass._record: passes.append(1) or real(self))
    for samples in (2, 4, 8):
        tracer.of(Conditions("bf16", None, None, samples, None))
    assert len(passes) == 4  # one of them to compare blocks with
    found = tracer.of(Conditions("bf16", None, None, 6, None))
    assert len(passes) == 4
    whole = Pass(model, inputs_of(6), forward, param_dtype=torch.bfloat16).predict()
    assert (found.activations, found.flops, found.ops) == (whole.activations, whole.flops, whole.ops)


class Breaks:
    """Divides layers, and fails as it runs."""

    divides_batch, dims, local_shape = False, {}, staticmethod(lambda parameter: tuple(parameter.shape))

    def running(self, log):
        raise RuntimeError("a part does not fit")

    def boundaries(self, model, log):
        return ()


def test_what_fails_divided_is_not_run_again_whole(monkeypatch):
    def forward(model, ids):
        return tiny.loss_func(ids, model(ids))

    tracer = Tracer(tiny.plain(num_layers=9), lambda samples: torch.zeros(samples, 16, dtype=torch.long), forward)
    tracer.of(Conditions("bf16", None, None, 2, None))
    passes = []
    monkeypatch.setattr(Pass, "_record", lambda self, real=Pass._record: passes.append(1) or real(self))
    with pytest.raises(mw.ModelError, match="a part does not fit"):
        tracer.of(Conditions("bf16", None, None, 2, Breaks()))
    assert len(passes) == 1  # a few blocks, once
    tracer.of(Conditions("bf16", None, None, 4, None))
    assert len(passes) == 2  # those of the model itself repeat as before


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.how = how

    def forward(self, x):
        return self.how(self.inner(x)).sum()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            lambda x: x if x.sum() > 0 else -x,
            r"_local_scalar_dense.*head \(Reads\), line \d+ of test_workload.py.*where",
        ),
        (lambda x: x[x > 0], r"nonzero.*head \(Reads\).*depends on values.*mask"),
        (lambda x: x @ x.new_ones(5, 5), r"RuntimeError.*head \(Reads\), line \d+ of test_workload.py"),
    ],
)
def test_what_cannot_be_traced_names_the_operation_and_the_module(how, said):
    model = nn.Module()
    model.head = Reads(how)
    plan = workload(model, lambda n: torch.ones(n, 3), lambda m, x: m.head(x), torch.device("cpu")).plan(Strategy())
    (gap,) = plan.gaps
    assert re.search(said, gap), gap
    assert plan.memory.activations is None
    assert plan.step.blocks[-1].ops == ()


def test_tokens_are_told_from_other_inputs():
    assert tokens_per_sample(ids) == SEQ
    assert tokens_per_sample(images) is None
    assert tokens_per_sample(lambda n: (torch.ones(n, 3), torch.zeros(n, 9, dtype=torch.long))) == 9
    assert tokens_per_sample(lambda n: None) is None
    assert tokens_per_sample(lambda n: 1 / 0) is None


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 12)

    def forward(self, x):
        return self.used(x)


def test_parameters_without_gradients_are_named():
    data, given = torch.ones(2, 4), {"global_batch": 4, "strategy": ["fsdp"]}
    plans = [
        mw.plan(model, "cpux2", sample_batch=data, loss_func=lambda x, y: y.sum(), **given)[0]
        for model in (PartlyUsed(), nn.Sequential(*(PartlyUsed() for _ in range(7))), nn.Linear(4, 4))
    ]
    few, many, none = (plan.notices for plan in plans)
    assert [notice.split(";")[0] for notice in few] == ["no gradient comes to idle.weight, idle.bias"]
    assert "idle.bias, " in many[0]
    assert "and others" in many[0]
    assert none == ()

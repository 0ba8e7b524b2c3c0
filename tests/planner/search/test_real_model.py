"""A search asks any subject for plans; here a real module's."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from meshwright.cost import make_cluster
from meshwright.errors import StrategyError
from meshwright.planner import Workload, choices, choose, default_space
from meshwright.planner.search import find, search, search_in_stages
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.search_space import Candidates
from meshwright.planner.search.search_state import family_of_plan, rank_of_plan
from meshwright.planner.search.within_time import OutOfTimeError, TimeLimit
from meshwright.planner.trace.fake_pass import Pass
from meshwright.strategy import Strategy
from tests import tiny


def loss(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def workload(limit_bytes):
    return Workload(
        tiny.plain(num_layers=4), torch.device("cpu"), torch.optim.AdamW,
        lambda n: torch.zeros(n, tiny.SEQ_LEN, dtype=torch.long), loss, 8, None, 2, 3,
        limit_bytes=limit_bytes, cluster=make_cluster("A100", 2),
    )  # fmt: skip


def test_a_search_over_a_real_model_ends_within_its_predictions():
    subject = workload(None)
    space = default_space(subject, lower_precision=False)
    found = search(subject, space=space.replace(micro_batches=(None, 2)), top=3, max_predictions=20)
    assert 0 < found.num_predicted <= 20
    assert len(found.plans) == 3
    times = [plan.forecast.time.step_time_s for plan in found.plans]
    assert times == pytest.approx(sorted(times), rel=2e-3)  # what differs by less is a tie


def test_choosing_with_a_cluster_searches_and_keeps_precision_and_micro_batches():
    plan, reason = choose(workload(None), excluded=["pipeline_parallel", "sequence_parallel", "context_parallel"])
    assert "the fastest that fits" in reason
    assert not {"amp_native", "half"} & set(plan.strategy.names)
    assert plan.step.num_micro_batches == 1
    tight, _ = choose(
        workload(plan.needed_bytes - 1),
        excluded=["pipeline_parallel", "sequence_parallel", "context_parallel", "tensor_parallel"],
    )
    assert tight.strategy != plan.strategy
    assert tight.fits


@pytest.mark.long  # tests/planner/search/test_search.py asks it of a family
def test_a_real_model_that_fits_nowhere_is_told_how_many_devices_would_do():
    with pytest.raises(StrategyError, match=r"take \d+ of these"):
        search_in_stages(
            workload(200 * 2**10), default_space(workload(None), lower_precision=False), excluded=["offload"], top=1
        )


def _late_after(traces):
    """A limit that is over once so many passes over the model have begun, and the list of these."""
    begun = []

    class Late(TimeLimit):
        @property
        def is_over(self):
            return len(begun) >= traces

    def recorded(self, parts, plain=Pass._recorded):
        if len(begun) >= traces:
            raise OutOfTimeError
        begun.append(self)
        return plain(self, parts)

    return mock.patch.multiple(find, TimeLimit=Late), mock.patch.object(Pass, "_recorded", recorded), begun


def test_when_the_time_is_up_what_needs_least_memory_is_planned_from_the_traces_that_there_are():
    late, counted, begun = _late_after(2)  # the second is cut off
    with late, counted:
        found = search_in_stages(workload(None), default_space(workload(None)), top=1, limit_s=1.0)
    assert len(begun) == 2
    least = workload(None).plan(Strategy(["fsdp", ("amp_native", "bf16"), "checkpoint"]), 4)  # of the first trace
    assert found.plans[0].forecast.time.step_time_s < least.forecast.time.step_time_s
    assert found.out_of_time
    late, counted, _ = _late_after(0)
    with late, counted, pytest.raises(StrategyError, match=r"(?s)time was up.*limit_s"):
        search_in_stages(workload(None), default_space(workload(None)), top=1, limit_s=1.0)


def test_the_time_ends_inside_a_module_too():
    steps = []

    class Loop(torch.nn.Linear):
        def forward(self, x):
            for step in range(100_000):
                x = x.sin()
                steps.append(step)
            return super().forward(x)

    class Late(TimeLimit):
        @property
        def is_over(self):
            return len(steps) >= 100

    model, limit = Loop(4, 4), Late(1.0)
    one = Pass(model, torch.ones(2, 4), lambda model, x: model(x).sum())
    with limit.watched(), pytest.raises(OutOfTimeError):
        one.predict()
    assert 100 <= len(steps) < 200
    assert limit.place == "Loop"


@pytest.mark.parametrize("precision", ["amp_native", "half"])
def test_the_state_of_what_is_not_sharded_is_known_from_the_probe_of_what_is(precision):
    subject = workload(None)
    space = default_space(subject).replace(precision=choices(precision))
    branches = []
    for recompute in space.recompute:
        candidates = Candidates(space.replace(recompute=(recompute,)), 2, 2, 8)
        (mesh,) = (mesh for mesh in candidates.meshes() if not mesh.inner and mesh.pipeline == 1)
        branches += candidates.branches(mesh)
    bounds = Bounds(subject, subject.cluster)
    bounds.undivided(next(each for each in branches if each.sharding and not each.recompute))
    plain = [each for each in branches if not each.sharding]
    held = [bounds.held_bytes(each, 0, 2) for each in plain]
    assert bounds.num_probes == 1
    for branch, found in zip(plain, held, strict=True):
        own = Bounds(subject, subject.cluster)
        own.undivided(branch)
        assert own.held_bytes(branch, 0, 2) == pytest.approx(found, rel=1e-3)


def test_bounds_of_a_real_model_that_is_sharded_are_not_above_its_plans():
    model = tiny.gpt2.GPT2(vocab_size=64, seq_len=tiny.SEQ_LEN, dim=512, num_layers=2, num_heads=8)
    # Autocast casts the weights of every layer, which sharding gathers in half: bounds without it were 10 % too high.
    subject = Workload(
        model, torch.device("cuda"), torch.optim.AdamW,
        lambda n: torch.zeros(n, tiny.SEQ_LEN, dtype=torch.long), loss, 16, None, 8, 3,
        limit_bytes=None, cluster=make_cluster("H100", 8),
    )  # fmt: skip
    bounds = Bounds(subject, subject.cluster)
    space = default_space(subject).replace(sizes={}, hybrid=False, sharding=choices("zero1", "fsdp"))
    candidates = Candidates(space, 8, 8, 16)
    branches = [branch for mesh in candidates.meshes() for branch in candidates.branches(mesh)]
    assert any(branch.sharding for branch in branches)
    for branch in branches:
        seconds = subject.plan(branch.strategy(), 1).forecast.time.step_time_s
        assert bounds.roughly_s(branch, 2, 1) <= seconds
        assert bounds.step_s(branch, 2, 1) <= seconds


class Patches(torch.nn.Module):
    """Blocks over an odd number of tokens, few beside their width, as a vision Transformer's with its class token."""

    def __init__(self, block):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Plain(torch.nn.Sequential):
    """Two layers."""

    def __init__(self):
        super().__init__(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))


class Experts(torch.nn.Module):
    """Four experts, each for as many tokens, one product for all."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.zeros(4, *shape)) for shape in ((512, 2048), (2048, 512)))

    def forward(self, x):
        each = x.transpose(0, 1).reshape(4, -1, 512)
        return torch.bmm(torch.bmm(each, self.up).relu(), self.down).view(x.shape[1], x.shape[0], 512).transpose(0, 1)


def patches(batch_size, block=Plain, tokens=197):
    return Workload(
        Patches(block), torch.device("cuda"), torch.optim.AdamW, lambda n: torch.zeros(n, tokens, 512),
        lambda model, x: model(x), batch_size, None, 8, 3, limit_bytes=None, cluster=make_cluster("A100", 8),
    )  # fmt: skip


@pytest.mark.parametrize(("block", "tokens"), [(Plain, 197), (Experts, 196)])
def test_bounds_scale_gradients_of_weights_by_the_tokens_that_they_sum_over(block, tokens):
    # Of one sample these products sum over an odd number of tokens, which has no fast kernel; of 64 they do not.
    subject = patches(512, block, tokens)
    bounds = Bounds(subject, subject.cluster)
    space = default_space(subject).replace(sizes={}, hybrid=False, sharding=choices("zero1"), recompute=((),))
    candidates = Candidates(space, 8, 8, 512)
    branches = [branch for mesh in candidates.meshes() for branch in candidates.branches(mesh)]
    for branch in branches:
        seconds = subject.plan(branch.strategy(), 1).forecast.time.step_time_s
        assert 0.5 * seconds <= bounds.step_s(branch, 64, 1) <= seconds


def test_the_best_of_families_that_are_farther_behind_is_looked_for_last():
    subject = patches(64)
    near = search_in_stages(subject, default_space(subject), top=5, reach=1.01)
    wide = search_in_stages(subject, default_space(subject), top=5, reach=4.0)
    assert near.plans[0].strategy == wide.plans[0].strategy
    assert {family_of_plan(plan) for plan in near.plans} < {family_of_plan(plan) for plan in wide.plans}
    figures = [rank_of_plan(plan, "tokens_per_s")[0] for plan in wide.plans]
    assert figures[-1] > 1.08 * figures[0]

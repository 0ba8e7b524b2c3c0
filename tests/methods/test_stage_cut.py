"""Where models are cut, and what is known of schedules without running them."""

import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from benchmarks.schedule_bubble import bubble_fraction

from meshwright import ModelError, Strategy, StrategyError
from meshwright.cost import memory
from meshwright.methods import PipelineParallel
from meshwright.methods.pipeline import splice as parts
from meshwright.methods.pipeline.outer_parameters import trace_blocks
from meshwright.methods.pipeline.schedules import (
    SCHEDULES,
    actions,
    check_micro_batches,
    live_peaks,
    most_in_flight,
    stage_ranks,
)
from meshwright.methods.pipeline.splice import Elsewhere
from meshwright.methods.pipeline.stage_cut import Balancer, balanced_bounds
from meshwright.planner import Workload
from meshwright.planner.pipeline_cuts import CandidateStages
from tests import tiny


def every_cut(count, stages):
    return [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]


def test_the_dearest_stage_is_as_cheap_as_any_cut_makes_it_and_the_others_are_as_even():
    choice = random.Random(0)
    for _ in range(30):
        count, stages = choice.randint(3, 8), choice.randint(1, 3)
        costs = [choice.randint(1, 9) for _ in range(count)]

        def dearest(bounds, costs=costs):
            return max(sum(costs[first:end]) for first, end in itertools.pairwise(bounds))

        def unevenness(bounds, costs=costs):
            return sum(sum(costs[first:end]) ** 2 for first, end in itertools.pairwise(bounds))

        found, least = balanced_bounds(costs, range(stages)), min(map(dearest, every_cut(count, stages)))
        assert dearest(found) == least
        even = [cut for cut in every_cut(count, stages) if dearest(cut) == least]
        assert unevenness(found) == min(map(unevenness, even))


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)], ids=["one", "v", "interleaved"])
def test_the_fastest_of_the_cuts_that_fit(ranks):
    """Against all cuts, for memory that grows with blocks of different sizes, more on early ranks."""
    choice = random.Random(1)
    none = 0
    for _ in range(25):
        costs = [choice.randint(1, 9) for _ in range(7)]
        sizes = [choice.randint(1, 9) for _ in range(7)]

        def need(rank, ranges, sizes=sizes):
            return (4 - rank) * sum(sum(sizes[first:end]) for first, end in ranges)

        def most(bounds, need=need):
            ranges = list(itertools.pairwise(bounds))
            return max(need(r, tuple(g for g, owner in zip(ranges, ranks, strict=True) if owner == r)) for r in ranks)

        def dearest(bounds, costs=costs):
            takes = [sum(costs[first:end]) for first, end in itertools.pairwise(bounds)]
            of_ranks = [sum(itertools.compress(takes, (owner == rank for owner in ranks))) for rank in set(ranks)]
            return max(of_ranks), max(takes)

        every = every_cut(7, len(ranks))
        limit = choice.choice(sorted(map(most, every)))
        balancer = Balancer(costs, ranks, need)
        fitting = [bounds for bounds in every if most(bounds) <= limit]
        found = balancer.fastest(limit)
        assert most(found) <= limit
        assert dearest(found) == min(map(dearest, fitting))
        least = min(map(most, every))
        assert most(balancer.smallest()) == least
        assert balancer.fastest(least - 1) is None
        assert balancer.is_exhaustive
        none += dearest(found) > min(map(dearest, every))
    assert none > 2  # the limit matters in some


@pytest.mark.parametrize("ranks", [(*range(32), *range(32)), (*range(32), *reversed(range(32)))], ids=["rounds", "v"])
@pytest.mark.parametrize("limit", [None, 72.5])
def test_blocks_are_even_between_ranks_with_several_stages(ranks, limit):
    """94 blocks in 64 stages, and a head of as many FLOPs as two: no rank has four where another one has two."""
    costs = [10] * 93 + [32]

    def need(rank, ranges):
        blocks = [end - first for first, end in ranges] + [0]
        return (29.4 - 0.39 * rank) * blocks[0] + (16.9 - 0.38 * rank) * blocks[1]

    if limit is None:
        bounds = balanced_bounds(costs, ranks)
    else:
        bounds = Balancer(costs, ranks, need).fastest(limit)
    takes = [sum(costs[first:end]) for first, end in itertools.pairwise(bounds)]
    of_ranks = [sum(itertools.compress(takes, (owner == rank for owner in ranks))) for rank in range(32)]
    assert len(takes) == 64
    assert sum(takes) == sum(costs)
    without_head = [each for rank, each in enumerate(of_ranks) if rank != ranks[-1]]
    assert max(without_head) == 30  # of 20, which some have: 92 blocks on 31 ranks
    if limit is not None:
        assert max(size for _, size in Balancer(costs, ranks, need).needs(bounds)) <= limit


def test_a_rank_that_holds_too_much_hands_blocks_to_stages_beside_its_own():
    """GPT-3 in 24 stages: the first rank has the embedding, too, and two stages take five blocks anyway."""
    ranks, costs = tuple(range(8)) * 3, [1.0] * 95 + [4.0]

    def need(rank, ranges):
        return sum(end - first for first, end in ranges) + (3 if rank == 0 else 0)

    balancer = Balancer(costs, ranks, need)
    even = balanced_bounds(costs, range(24))
    assert max(need for _, need in balancer.needs(even)) == 15
    found = balancer.relieved(even, 14)
    assert max(need for _, need in balancer.needs(found)) == 14
    takes = [sum(costs[first:end]) for first, end in itertools.pairwise(found)]
    assert max(takes) == max(sum(costs[first:end]) for first, end in itertools.pairwise(even))
    assert (
        sum(size**2 for size in takes) - sum(sum(costs[first:end]) ** 2 for first, end in itertools.pairwise(even)) <= 2
    )
    assert balancer.relieved(even, 15) == even
    assert balancer.relieved(even, 12) is None  # 96 blocks on eight ranks


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 4)])
def test_schedules_keep_and_wait_as_their_papers_say(ranks, count):
    bubble = (ranks - 1) / (count + ranks - 1)  # Huang et al. 2019; Narayanan et al. 2019 has the same
    assert bubble_fraction("gpipe", ranks, 1, count) == pytest.approx(bubble)
    assert bubble_fraction("1f1b", ranks, 1, count) == pytest.approx(bubble)
    # Narayanan et al. 2021, §2.2: v stages on a rank divide the bubble by v.
    interleaved = (ranks - 1) / (2 * count + ranks - 1)
    assert bubble_fraction("interleaved", ranks, 2, count) == pytest.approx(interleaved)
    assert bubble_fraction("zbv", ranks, 2, count) < interleaved
    assert live_peaks("gpipe", ranks, 1, count, [1] * ranks) == (count,) * ranks
    assert live_peaks("1f1b", ranks, 1, count, [1] * ranks) == tuple(min(ranks - r, count) for r in range(ranks))
    assert max(live_peaks("zbv", ranks, 2, count, [1] * 2 * ranks)) <= 2 * ranks  # as 1f1b's first rank holds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_a_rank(schedule):
    per_rank = PipelineParallel.parse({"schedule": schedule}).stages_per_rank
    ranks = stage_ranks(schedule, 4, per_rank)
    assert [ranks.count(rank) for rank in range(4)] == [per_rank] * 4
    assert ranks[-1] == (0 if SCHEDULES[schedule].v_shaped else 3)


def cut(model, config, ranks=2):
    ids = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    method = PipelineParallel.parse(config)
    forward = lambda m, x: tiny.loss_func(x, m(x))  # noqa: E731
    return method.cut(model, ranks, trace_blocks(model, method.blocks_of(model), ids, forward))


def test_tied_weights_are_trained_at_both_ends_and_nothing_is_held_in_between():
    torch.manual_seed(0)
    found = cut(tiny.plain(num_layers=8), None, ranks=4)
    places = {item.name: (item.trained_on, item.buffer_on) for item in found.outside}
    assert places == {
        "token_embedding.weight": ((0, 3), ()),
        "position_embedding.weight": ((0,), ()),
        "norm.weight": ((3,), ()),
        "norm.bias": ((3,), ()),
    }
    assert found.boundary_bytes == 2 * tiny.SEQ_LEN * 20 * 4
    assert found.sizes[-1] <= min(found.sizes[:-1])  # the head is the last stage's work, also counted in parameters


def test_a_cut_by_hand_and_atorchs_words():
    assert cut(tiny.plain(num_layers=4), {"split": [1, 3]}).sizes == (1, 3)
    method = PipelineParallel.parse({"chunks": 4, "pipe_schedule": "Interleaved1F1B"})
    assert (method.num_micro_batches, method.schedule) == (4, "interleaved")


class Slow(torch.nn.Module):
    """A block that multiplies by its weight several times: more time, no more parameters."""

    def __init__(self, times, width=16):
        super().__init__()
        self.times, self.weight = times, torch.nn.Parameter(torch.eye(width))

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(x @ self.weight)
        return x


class Uneven(torch.nn.Module):
    """Blocks of equal size: the first ones are slow and keep much; looked up before them, a head of 6 times behind."""

    def __init__(self, times=(6, 6, 1, 1, 1, 1, 1, 1), head=6, words=400):
        super().__init__()
        self.table = torch.nn.Embedding(words, 16)
        self.layers = torch.nn.ModuleList(Slow(each) for each in times)
        self.head = torch.nn.Linear(16, 16 * head)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def workload(model, world=4, micro_batches=8, samples=8):
    return Workload(
        model=model, device=torch.device("cpu"), optim_func=lambda p: torch.optim.AdamW(p, lr=0.1), world=world,
        inputs_of=lambda count: torch.zeros(count, 5, dtype=torch.long), forward=lambda m, x: m(x), zero_level=3,
        batch_size=samples, num_micro_batches=micro_batches, limit_bytes=None,
    )  # fmt: skip


def planned(model, strategy, world=4):
    return workload(model, world).plan(Strategy(strategy))


def four(**keys):
    return [("parallel_mode", {"pipeline": 4}), ("pipeline_parallel", keys)]


def test_stages_take_equal_time_not_equal_parameters():
    plan = planned(Uneven(), four())
    assert plan.cut.sizes == (1, 1, 5, 1)
    flops = [step.flops for step in plan.steps]
    one = 3 * 2 * 5 * 16 * 16  # forward and backward of a product, for the 5 tokens of a micro-batch
    assert flops == [6 * one, 6 * one, 5 * one, 7 * one]
    assert plan.notices == ()
    # Recomputation is time: not of the head, and with it a stage of five blocks is as dear as before.
    again = planned(Uneven(), [*four(), "checkpoint"])
    assert [step.recompute_flops for step in again.steps] == [2 * one, 2 * one, 5 * one // 3, one // 3]
    frozen = Uneven(head=1)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(not name.startswith(("table", "layers.0", "layers.1")))
    # No backward pass goes through the first two, and none beyond the third: 6, 6, 2, 3, 3, 3, 3 and 6 products.
    assert planned(frozen, four()).cut.sizes == (1, 2, 3, 2)


class Attends(torch.nn.Module):
    """A block of attention alone: no product that torch's own counter knows on a CPU."""

    def forward(self, x):
        heads = x.unsqueeze(1)
        return x + torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


def test_attention_counts_where_stages_are_cut_and_stages_add_up_to_the_model():
    model = Uneven(times=(1,) * 8)
    for index in range(4):
        model.layers[index] = torch.nn.Sequential(*(Attends() for _ in range(6)), Slow(1))
    plan, whole = planned(model, four()), planned(model, [], world=1)
    # Scores and their sums over values, 2 products of 2 * 5 * 5 * 16 in forward; backward computes scores anew: 5.
    attention, one = 6 * 7 * 2 * 5 * 5 * 16, 3 * 2 * 5 * 16 * 16
    costs = [one + attention] * 4 + [one] * 3 + [7 * one]  # the head's six with the last
    assert plan.cut.bounds == balanced_bounds(costs, range(4))
    assert plan.cut.bounds != balanced_bounds([one] * 7 + [7 * one], range(4))
    assert sum(step.flops for step in plan.steps) == pytest.approx(whole.step.flops, abs=4)


def test_the_least_time_that_memory_allows():
    """Against every cut given by hand: early stages of 1f1b keep more micro-batches, and get fewer blocks."""
    work = workload(Uneven(times=(2,) * 8, head=1, words=4), samples=64)
    free = work.plan(Strategy(four()))
    assert free.cut.sizes == (2, 2, 2, 2)
    by_hand = [work.plan(Strategy(four(split=[b - a for a, b in itertools.pairwise(cut)]))) for cut in every_cut(8, 4)]
    most = {each.cut.bounds: max(memory(step).total for step in each.steps) for each in by_hand}
    dearest = {each.cut.bounds: max(step.flops for step in each.steps) for each in by_hand}
    assert work.plan(Strategy(four(memory_limit=most[free.cut.bounds]))).cut == free.cut
    limit = most[free.cut.bounds] - 1
    tight = work.plan(Strategy(four(memory_limit=f"{limit} B")))
    assert most[tight.cut.bounds] <= limit
    assert dearest[tight.cut.bounds] == min(dearest[cut] for cut, size in most.items() if size <= limit)
    assert tight.notices == ("pipeline_parallel: stages of 1, 2, 3, 2 blocks, as memory allows",)


def test_no_cut_fits():
    with pytest.raises(StrategyError) as caught:
        planned(Uneven(), four(memory_limit="40 KiB"))
    said = str(caught.value)
    assert "at most 40.00 KiB on every rank" in said
    assert "on pipeline rank 0 (stage 0) where least is needed, with stages of 1, " in said
    assert "checkpoint" in said
    assert "fsdp over an axis zero" in said
    least = float(said.partition("Got ")[2].split(" ")[0])
    fits = planned(Uneven(), four(memory_limit=int((least + 0.01) * 1024)))
    assert max(memory(step).total for step in fits.steps) == pytest.approx(least * 1024, abs=6)
    with pytest.raises(StrategyError, match=r"stages given do not fit.*no split"):
        planned(Uneven(), four(memory_limit="40 KiB", split=[2, 2, 2, 2]))
    assert planned(Uneven(), four(split=[2, 2, 2, 2])).cut.sizes == (2, 2, 2, 2)


class Opaque(Uneven):
    """Looks at values, which a trace without data has not."""

    def forward(self, ids):
        assert self.table.weight.sum().item() != 3
        return super().forward(ids)


def test_a_model_that_cannot_be_traced_is_balanced_by_parameters_and_says_so():
    plan = planned(Opaque(), four())
    assert plan.cut.sizes == (2, 2, 2, 2)
    assert any("balanced by their parameters" in notice for notice in plan.notices)
    with pytest.raises(StrategyError, match="no cut into stages fits"):
        planned(Opaque(), four(memory_limit=1000))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("methods", [[], ["checkpoint", ("half", "bf16")], ["zero2"]], ids=str)
def test_candidates_hold_what_the_cut_then_holds(schedule, methods):
    """What the search asks of a rank is what the plan then says of it, for every kind of outside parameter."""
    sharded = [("parallel_mode", {"pipeline": 2, "zero": 2})]
    strategy = [*methods, *(sharded if methods == ["zero2"] else [("parallel_mode", {"pipeline": 2})])]
    asked = {}
    need = CandidateStages.need

    def noted(self, rank, ranges):
        asked[rank, ranges] = need(self, rank, ranges)
        return asked[rank, ranges]

    with mock.patch.object(CandidateStages, "need", noted):
        pipeline = ("pipeline_parallel", {"schedule": schedule, "memory_limit": "1 GiB"})
        plan = planned(tiny.plain(num_layers=5), [*strategy, pipeline], 4 if methods == ["zero2"] else 2)
    ranges = list(itertools.pairwise(plan.cut.bounds))
    for rank, step in enumerate(plan.steps):
        own = tuple(each for each, owner in zip(ranges, plan.cut.ranks, strict=True) if owner == rank)
        assert asked[rank, own] == memory(step).total


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("methods", [[], ["checkpoint", ("half", "bf16")]], ids=str)
def test_what_is_estimated_of_a_rank_is_what_it_holds(schedule, methods):
    """Estimate every number of equal blocks as simulations have it, on ranks with one stage and with two."""
    made = []
    init = CandidateStages.__init__

    def noted(self, *args, **keys):
        init(self, *args, **keys)
        made.append(self)

    pipeline = ("pipeline_parallel", {"schedule": schedule, "memory_limit": "1 GiB"})
    with mock.patch.object(CandidateStages, "__init__", noted):
        plan = planned(tiny.plain(num_layers=14), [*methods, ("parallel_mode", {"pipeline": 2}), pipeline], 2)
    (candidates,), ranks, choice = made, plan.cut.ranks, random.Random(0)
    for _ in range(12):
        bounds = (0, *sorted(choice.sample(range(1, 14), len(ranks) - 1)), 14)
        for rank in (0, 1):
            own = tuple(each for each, owner in zip(itertools.pairwise(bounds), ranks, strict=True) if owner == rank)
            assert candidates.estimated_need(rank, own) == candidates.need(rank, own)


@pytest.mark.parametrize("share", [1, 0.5, 2], ids=["right", "low", "high"])
def test_a_search_by_estimates_ends_at_a_cut_that_fits(share, monkeypatch):
    """It asks for a rank's step much less often; where estimates are wrong, the search is made again without them."""
    estimated, step = CandidateStages.estimated_need, CandidateStages._step
    steps = []
    monkeypatch.setattr(CandidateStages, "estimated_need", lambda *args: round(share * estimated(*args)))
    monkeypatch.setattr(CandidateStages, "_step", lambda *args: steps.append(1) or step(*args))
    work = workload(tiny.plain(num_layers=24), samples=64)
    free = work.plan(Strategy(four(schedule="interleaved")))
    limit = max(memory(each).total for each in free.steps) - 1
    steps.clear()
    plan = work.plan(Strategy(four(schedule="interleaved", memory_limit=f"{limit} B")))
    assert max(memory(each).total for each in plan.steps) <= limit
    assert plan.cut != free.cut
    assert (len(steps) < 50) == (share == 1)
    with pytest.raises(StrategyError, match="no cut into stages fits"):
        work.plan(Strategy(four(schedule="interleaved", memory_limit=f"{limit // 3} B")))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_what_is_in_flight_is_what_torchs_tables_keep(name):
    for ranks, micro_batches in itertools.product((2, 3, 4), (2, 4, 6, 8)):
        for per_rank in {"interleaved": (2, 3), "zbv": (2,)}.get(name, (1,)):
            try:
                check_micro_batches(name, ranks, ranks * per_rank, micro_batches)
            except StrategyError:
                continue
            kept = dict.fromkeys(range(ranks), 0)
            for rank, row in enumerate(actions(name, ranks, per_rank, micro_batches)):
                held = itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[kind] for kind, _, _ in row)
                kept[rank] = max(held)
            assert max(kept.values()) == most_in_flight(name, ranks, per_rank, micro_batches)
            assert list(kept.values()) == list(
                live_peaks(name, ranks, per_rank, micro_batches, (1,) * ranks * per_rank)
            )


def test_attributes_of_foreign_blocks_stay_readable_and_hold_nothing():
    block = torch.nn.TransformerEncoderLayer(8, 2)
    block.reduction, block.absent = torch.nn.Sequential(torch.nn.Linear(2, 2)), None
    stand_in = Elsewhere(block, lambda call, x: x)
    assert stand_in.self_attn.batch_first is False
    assert stand_in.self_attn.in_proj_weight.is_meta
    assert stand_in.absent is None
    assert stand_in.reduction.training
    assert not list(stand_in.parameters())
    assert not stand_in.state_dict()
    with pytest.raises(AttributeError, match="'strange' is asked of a block"):
        _ = stand_in.strange


def test_an_embedding_of_another_stage_still_tells_its_device_and_type():
    table = torch.nn.Embedding(9, 4, dtype=torch.bfloat16)
    parts._release(table, "weight", table.weight, "stands in", SimpleNamespace(dtype=None), torch.device("cpu"))
    ids = torch.zeros(2, 3, dtype=torch.long).to(table.weight.device)  # as peft's prompt tuning does
    assert (table.weight.dtype, table.weight.shape) == (torch.bfloat16, (9, 4))
    assert table.weight.untyped_storage().nbytes() == 2
    assert table(ids).shape == (2, 3, 4)
    assert not list(table.parameters())
    assert not table.state_dict()


def test_a_block_that_is_listed_twice_is_named():
    block, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="block 0 again as block 2"):
        trace_blocks(torch.nn.Sequential(block, other, block), [block, other, block], None, lambda model, x: model(x))

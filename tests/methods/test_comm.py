"""Quantised communication: against the same training in whole numbers, across ranks, and against its cost twin."""

import warnings

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.comm.compression import Packing, gathered_messages, reduced_row, route
from meshwright.cost import Encoding
from meshwright.errors import StrategyError
from meshwright.store import CheckpointStore, TrainingState
from meshwright.strategy import Strategy
from tests import tiny
from tests.methods import split_runs
from tests.methods.test_half_precision import overflow_on_one_rank
from tests.methods.test_traffic import Counter

STEPS = 10
SMALL = {"min_numel": 16, "block_size": 32}
BATCH = torch.randn(8, 7, generator=torch.Generator().manual_seed(5))
BITS = {**SMALL, "all_gather": "int8", "reduce": "int8"}


def loss_func(inputs, output):
    return (output.float() - 1).square().mean()


def accelerate(strategy, micro=1, optim=torch.optim.SGD, **options):
    torch.manual_seed(1)
    args = {"lr": 0.1, "momentum": 0.9} if optim is torch.optim.SGD else {"lr": 1e-3}
    return mw.accelerate(
        tiny.Mlp(), optim, None, loss_func, strategy=strategy, sample_batch=BATCH[:2], optim_args=args, batch_size=8,
        num_micro_batches=micro, **options,
    )  # fmt: skip


def full(model):
    inner = getattr(model, "module", model)
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in inner.named_parameters()
    }


def predicted(step):
    total = {}
    for traffic in step.traffic:
        total[traffic.kind] = total.get(traffic.kind, 0) + traffic.bytes_per_step
    return total


def part(rank, world):
    return BATCH[rank * 8 // world : (rank + 1) * 8 // world]


def trained(strategy, micro=1, steps=STEPS):
    """Losses, whole weights before and after, and the bytes of the last step: sent, and predicted."""
    result = accelerate(strategy, micro)
    before, rank, world = full(result.model), mw.rank(), mw.world_size()
    batch = part(rank, world)
    losses = [result.step(batch).loss.item() for _ in range(steps - 1)]
    with Counter() as counter:
        losses.append(result.step(batch).loss.item())
    assert counter.bytes == predicted(result.plan.step), strategy
    return losses, before, full(result.model)


def distance(one, two):
    return torch.stack([(one[name] - two[name]).norm() for name in one]).norm()


def compare(cases, micro=None, steps=STEPS):
    """How far training in few bits ends from the same in whole numbers, as a part of the way, and the weights.

    In fp32 sharding, recomputation and micro-batches change nothing, as other tests show.
    """
    exact, results = {}, []
    for sharding, precision, keys, *own_micro, _ in cases:
        plain = [*sharding, *precision] if precision else []
        if str(plain) not in exact:
            exact[str(plain)] = trained(plain, steps=steps)
        expected_losses, before, expected = exact[str(plain)]
        losses, _, weights = trained([*sharding, *precision, ("comm", keys)], micro or own_micro[0], steps)
        off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) / expected_losses[0]
        results.append((float(distance(weights, expected) / distance(before, expected)), off, weights))
    return results


# How far from training in whole numbers ten steps may end, as a part of the way. Measured: about half of it.
CASES = [
    ([], [], {**SMALL, "reduce": "int8"}, 1, 0.01),
    ([], [], {**SMALL, "reduce": "int4"}, 2, 0.15),
    (["zero1"], [], BITS, 2, 0.01),
    (["zero2", "checkpoint"], [], {**SMALL, "all_gather": "fp8", "reduce": "int8"}, 2, 0.04),
    (["fsdp"], [], {**BITS, "reduce": "int4", "scale_dtype": "bf16"}, 2, 0.15),
    (["fsdp", "checkpoint"], [("amp_native", "bf16")], BITS, 1, 0.015),
    (["zero2"], [("half", "bf16")], BITS, 1, 0.015),
]
LOSS = 0.01  # of the first loss, at any step


@pytest.mark.long
def test_ten_steps_end_near_training_in_whole_numbers(ranks):
    """Bytes are counted inside, with gradient accumulation, recomputation and half precision."""
    for case, (apart, off, weights), (*_, others) in zip(CASES, *ranks(2).run(compare, CASES), strict=True):
        assert 0 < apart < case[-1], case
        assert off < LOSS, case
        assert all(torch.equal(weights[name], others[name]) for name in weights), case


def weights_in_forward():
    """What a rank computes with, and its whole master weights: a matrix, and a bias below min_numel."""
    result = accelerate(["fsdp", ("comm", BITS)])
    linear, seen = result.model.layers[0][0], []
    linear.register_forward_pre_hook(
        lambda module, args: seen.append([p.detach().clone() for p in (module.weight, module.bias)])
    )
    result.step(part(mw.rank(), 2))
    result.evaluate(part(mw.rank(), 2))
    return seen[-1], [p.full_tensor().detach().clone() for p in (linear.weight, linear.bias)]


def resumed(folder):
    """Whole weights after 4 steps and a checkpoint, 3 more in the same run, and in one that has loaded it."""
    strategy, batch = ["fsdp", ("comm", {**BITS, "reduce": "int4"})], part(mw.rank(), 2)
    first = accelerate(strategy, optim=torch.optim.AdamW)
    for _ in range(4):
        first.step(batch)
    mw.save(first.model, folder / "weights.pt")
    saved, exact = torch.load(folder / "weights.pt"), full(first.model)
    assert all(torch.equal(saved[name], exact[name]) for name in exact)
    CheckpointStore(folder / "run").save(TrainingState(first.model, first.optim, step=4))
    second = accelerate(strategy, optim=torch.optim.AdamW)
    CheckpointStore(folder / "run").load(TrainingState(second.model, second.optim))
    for run in (first, second):
        for _ in range(3):
            run.step(batch)
    return full(first.model), full(second.model)


class Partly(tiny.Mlp):
    """Has a layer beside each block's that nobody uses."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.append(torch.nn.Identity())
            layer[-1].unused = torch.nn.Parameter(torch.zeros(8, 8))


def unused_parameters():
    """A unit of which not all parameters have gradients is reduced in whole numbers, and says so."""
    results = []
    for strategy in ([], [("comm", {**SMALL, "reduce": "int4"})]):
        torch.manual_seed(1)
        result = mw.accelerate(
            Partly(), torch.optim.SGD, None, loss_func, strategy=["fsdp", *strategy], optim_args={"lr": 0.1}
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result.step(part(mw.rank(), 2))
        results.append((full(result.model), sum("took no part" in str(each.message) for each in said)))
    (expected, silent), (weights, warned) = results
    assert (silent, warned) == (0, 3)
    return max(float((weights[n] - expected[n]).abs().max()) for n in expected if n.startswith("layers"))


def two_ranks(folder):
    overflows = [
        overflow_on_one_rank([*methods, ("comm", {**SMALL, "reduce": bits})])
        for methods, bits in (([("half", "fp16")], "int8"), (["zero2", ("half", "fp16")], "int4"))
    ]
    return weights_in_forward(), resumed(folder), unused_parameters(), overflows


def test_copies_are_equal_and_masters_exact_and_runs_go_on(ranks, tmp_path):
    results = ranks(2).run(two_ranks, tmp_path)
    ((weight, bias), (master, master_bias)), *_ = results[0]
    assert torch.equal(bias, master_bias)
    assert not torch.equal(weight, master)
    assert (weight - master).abs().max() <= master.abs().max() / 254 * 1.0001
    for ((other, other_bias), _), (first, second), apart, overflows in results:
        assert torch.equal(other, weight)
        assert torch.equal(other_bias, bias)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert apart < 1e-6
        assert overflows == [0.5, 0.5]


def levels():
    """One level against two, of messages and of sums, on 2 nodes of 2 ranks."""
    generator = torch.Generator().manual_seed(mw.rank())
    rows = torch.randn(4, 100, generator=generator)
    flat, cut = route(dist.group.WORLD, None), route(dist.group.WORLD, 2)
    whole = Packing((60, 40), (True, True), None)
    few = Packing((60, 40), (True, False), Encoding("int8", 16))
    message = few.pack(rows[:1]).view(-1)
    assert torch.equal(gathered_messages(message, flat), gathered_messages(message, cut))
    one, two = (reduced_row(rows, whole, way) for way in (flat, cut))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    rough, rougher = (reduced_row(rows, few, way) for way in (flat, cut))
    half_step = 4.5 / 254  # of blocks whose largest is below 4.5
    assert (rough - one)[:60].abs().max() < 4 * half_step
    assert (rougher - one)[:60].abs().max() < 4 * half_step + 2 * 2 * half_step
    torch.testing.assert_close(rougher[60:], one[60:], rtol=1e-6, atol=1e-6)


NODES = {"hierarchical": 2}
HSDP = ("parallel_mode", {"zero": 2, "data": 2})
LARGE_CASES = [
    (["fsdp"], [], {**SMALL, "all_gather": "int8", "reduce": None}, 0.01),
    (["fsdp"], [], {**SMALL, **NODES, "all_gather": "int8", "reduce": None}, 0.01),
    (["zero1"], [], {**SMALL, **NODES, "all_gather": None, "reduce": None}, 1e-5),
    (["zero2"], [], {**BITS, **NODES}, 0.01),
    ([], [], {**SMALL, **NODES, "reduce": "int8"}, 0.01),
    ([("fsdp", {"reshard_after_forward": 2})], [], {**BITS, "hierarchical": "auto"}, 0.01),
    (["fsdp", HSDP], [], BITS, 0.01),
]


def four_ranks():
    levels()
    return compare(LARGE_CASES, 2, 3)


@pytest.mark.long
def test_over_nodes_and_over_two_axes(ranks):
    every = ranks(4).run(four_ranks)
    for (*_, keys, bound), (apart, off, weights), *others in zip(LARGE_CASES, *every, strict=True):
        assert apart < bound, keys
        assert off < min(LOSS, bound), keys
        assert all(torch.equal(weights[name], other[name]) for *_, other in others for name in weights), keys
    (flat_apart, _, flat), (*_, cut) = every[0][:2]
    assert flat_apart > 1e-3
    assert all(torch.allclose(flat[name], cut[name], rtol=0, atol=1e-7) for name in flat)


def beside_a_tensor_axis():
    """Losses of two steps on a mesh of 2 x 2 in few bits, and in whole numbers."""
    losses = []
    for methods in ([("comm", {**BITS, "min_numel": 100})], []):
        job = mw.accelerate(
            split_runs.build("llama"), torch.optim.SGD, tiny.Tokens(), tiny.loss_func,
            strategy=["fsdp", "tensor_parallel", ("parallel_mode", {"tensor": 2, "zero": 2}), *methods],
            optim_args={"lr": 0.1}, prepare_input=tiny.prepare_for("llama"), model_input_format="unpack_dict",
            dataloader_args={"batch_size": 8},
        )  # fmt: skip
        for _, batch in zip(range(2), job.dataloader, strict=False):
            with Counter() as counter:
                losses.append(job.step(batch).loss.item())
            assert counter.bytes == predicted(job.plan.step)
    return losses


@pytest.mark.long
def test_beside_a_tensor_axis(ranks):
    for first, second, *expected in ranks(4).run(beside_a_tensor_axis):
        assert [first, second] == pytest.approx(expected, rel=1e-3)
        assert [first, second] != expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"all_gather": "int4"}, "int8"),
        ({"reduce": "fp8"}, "int8"),
        ({"reduce": None}, "changes nothing"),
        ({"block_size": 33}, "even"),
        ({"block_size": 4}, "greater"),
        ({"min_numel": -1}, "greater"),
        ({"hierarchical": 0}, "hierarchical"),
        ({"scale_dtype": "fp16"}, "bf16"),
        ({"bits": 8}, "no config key"),
    ],
)
def test_bad_keys(keys, said):
    with pytest.raises(StrategyError, match=said):
        Strategy([("comm", keys)])


def test_short_form_and_text():
    strategy = Strategy([("comm", "int4"), "fsdp"])
    assert Strategy(str(strategy)) == strategy == Strategy(strategy.to_json())
    assert str(strategy.get("comm")) == "comm(reduce='int4')"


def refusals():
    found = []
    for strategy in (
        [("comm", {"all_gather": "int8"})],
        ["fsdp", ("comm", {"hierarchical": 3})],
        ["fsdp", ("parallel_mode", ([("data", 2)], [1, 0])), ("comm", {"hierarchical": 1})],
    ):
        with pytest.raises(StrategyError) as error:
            accelerate(strategy)
        found.append(str(error.value))
    told = [
        " ".join(accelerate(["fsdp", ("comm", keys)])._job.notices)
        for keys in ({}, {**SMALL, "hierarchical": 2}, {**SMALL, "hierarchical": 1})
    ]
    return found, told


def test_what_cannot_work_is_refused_and_what_changes_nothing_is_said(ranks):
    for (unsharded, nodes, order), (small, *levels) in ranks(2).run(refusals):
        assert "no other method gathers weights" in unsharded
        assert "unequal parts" in nodes
        assert "rank_order" in order
        assert "quantises nothing" in small
        assert all("hierarchical changes nothing" in told for told in levels)

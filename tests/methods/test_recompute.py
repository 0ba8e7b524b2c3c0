"""Partial and selective recomputation: gradients, predicted bytes and operations against measured ones, budgets."""

import copy
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw
from meshwright.cost import Step, memory
from meshwright.cost.activations import FROM_LOW_RANK, TO_LOW_RANK
from meshwright.errors import StrategyError
from meshwright.methods import Checkpoint
from meshwright.methods.recompute import call_name
from meshwright.nn.four_bit import BLOCK
from meshwright.planner import Workload
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.live_tensors import record_saved
from meshwright.strategy import Strategy
from tests import tiny
from tests.counted_flops import UNKNOWN
from tests.live_bytes import peak_bytes
from tests.methods import expert_runs
from tests.methods.test_checkpoint import forward, job

IDS = tiny.Tokens(4).ids
CHOICES = {
    "half": {"layers": 0.5},
    "one": {"layers": 1, "policy": "selective"},
    "every": {"every": 2},
    "selective": {"policy": "selective"},
    "every second": {"policy": "every_second"},
    "operators": {"policy": [torch.ops.aten.mm.default, "aten::addmm"], "wrap_class": "MLP"},
    "mixed": {"each": ("full", "none", "selective")},
    "attention": {"wrap_class": "Attention", "every": 2},
    "reentrant": {"no_reentrant": False, "layers": 2},
}


def activations_of(model):
    return Pass(model, IDS, forward).predict().activations


def step_of(activations):
    return Step(blocks=(), axes=(("data", 1),), activations=activations)


def measured(model):
    """Bytes kept, and operations of backward, of a real pass."""
    with record_saved(model) as saved:
        loss = forward(model, IDS)
    kept = saved.bytes
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        loss.backward()
    return kept, counter.get_total_flops()


@pytest.mark.parametrize("policy", ["selective", "every_second"])
def test_adapters_train_alike_and_what_leads_up_from_a_low_rank_runs_again(policy):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    changed, ids = copy.deepcopy(plain), torch.randint(0, 64, (4, 32))
    (checked := job(changed)), Checkpoint(policy=policy).apply(checked)
    kept = []
    for model in (plain, changed):
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        for _ in range(10):
            with record_saved(model) as saved:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kept.append(saved.bytes)
    for (name, mine), theirs in zip(changed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("kind", CHOICES)
def test_predicted_bytes_and_operations_are_those_measured(kind):
    torch.manual_seed(0)
    model = tiny.plain(num_layers=3)
    changed, method = copy.deepcopy(model), Checkpoint.parse(CHOICES[kind])
    predicted = method.cost(step_of(activations_of(model)))
    method.apply(job(changed))
    kept, again = measured(changed)
    everything, once = measured(model)
    assert predicted.activations.saved_bytes == kept < everything
    assert predicted.recompute_flops == again - once
    for (name, a), (_, b) in zip(model.named_parameters(), changed.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, msg=name)


def test_what_selective_keeps_is_really_held():
    """Against every storage alive, not only those that are counted as saved."""
    model = tiny.plain(num_layers=3)
    held = []
    for keys in ({}, {"policy": "selective"}, {"policy": "selective", "layers": 2}):
        changed = copy.deepcopy(model)
        Checkpoint(**keys).apply(job(changed))
        with record_saved(changed) as saved:
            loss, _ = peak_bytes(forward, changed, IDS)
        held.append(saved.bytes)
        loss.backward()
    assert held[0] < held[1] < held[2]


def test_random_numbers_are_drawn_again():
    torch.manual_seed(0)
    model = tiny.plain(dropout=0.5)
    changed = copy.deepcopy(model)
    Checkpoint(policy="selective").apply(job(changed))
    for each in (model, changed):
        torch.manual_seed(9)
        forward(each, IDS).backward()
    for a, b in zip(model.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"every": 2, "layers": 1}, "at most one"),
        ({"layers": 1.5}, "fraction up to 1.0"),
        ({"policy": "selective", "no_reentrant": False}, "reentrant recomputation can keep no results"),
        ({"policy": ["aten.mmm"]}, "unknown operator"),
        ({"policy": "aten.view"}, "cannot be kept"),
        ({"policy": [3]}, "unknown operator"),
    ],
)
def test_configs_that_cannot_be_followed(keys, message):
    with pytest.raises(StrategyError, match=message):
        Checkpoint.parse(keys)


def test_other_numbers_of_modules_are_refused():
    for keys, message in (({"each": ("full",)}, "one for each of 2"), ({"layers": 3}, "layers up to 2")):
        with pytest.raises(StrategyError, match=message):
            Checkpoint(**keys).check(job(tiny.plain()))


def workload(model, micro_batches=1, world=1):
    return Workload(
        model=model, device=torch.device("cpu"), optim_func=lambda p: torch.optim.AdamW(p), world=world, zero_level=3,
        inputs_of=lambda count: tiny.Tokens(count).ids, forward=forward, batch_size=8 * micro_batches,
        num_micro_batches=micro_batches, limit_bytes=None,
    )  # fmt: skip


def every_plan(work, base=()):
    kinds = itertools.product(("none", "selective", "full"), repeat=3)
    return [work.plan(Strategy([*base, ("checkpoint", {"each": each})])) for each in kinds]


def test_a_budget_is_met_with_the_fewest_operations():
    """Against every choice there is, for budgets between the least and the most."""
    work = workload(tiny.plain(num_layers=3))
    plans = every_plan(work)
    sizes = sorted({plan.memory.total for plan in plans})
    for budget in (*sizes[:: max(1, len(sizes) // 5)], sizes[-1]):
        found = work.plan(Strategy([("checkpoint", {"memory_budget": budget})]))
        assert found.memory.total <= budget
        best = min(plan.step.recompute_flops for plan in plans if plan.memory.total <= budget)
        assert found.step.recompute_flops == best
        assert any("checkpoint: recomputes" in notice for notice in found.notices)
        assert found.strategy.get("checkpoint").memory_budget is None
        assert Strategy(found.strategy.to_json()) == found.strategy
    with pytest.raises(StrategyError, match=r"cannot be met.*at the least") as caught:
        work.plan(Strategy([("checkpoint", {"memory_budget": sizes[0] - 1})]))
    assert "activations" in str(caught.value) or "optimizer" in str(caught.value)
    only = work.plan(Strategy([("checkpoint", {"memory_budget": sizes[-1] - 1, "policy": "full"})]))
    assert "selective" not in only.strategy.get("checkpoint").each


def test_a_budget_without_a_sample_is_refused():
    work = workload(tiny.plain())
    work.inputs_of = lambda count: None
    with pytest.raises(StrategyError, match="needs predicted activations"):
        work.plan(Strategy([("checkpoint", {"memory_budget": "1 GiB"})]))


def test_each_rank_of_a_pipeline_meets_the_budget():
    work = workload(tiny.plain(num_layers=4), micro_batches=4, world=2)
    base = [("parallel_mode", {"pipeline": 2}), ("pipeline_parallel", {"split": [2, 2]})]
    free = work.plan(Strategy(base))
    least = work.plan(Strategy([*base, "checkpoint"]))
    budget = (free.memory.total + least.memory.total) // 2
    found = work.plan(Strategy([*base, ("checkpoint", {"memory_budget": budget})]))
    assert all(memory(step).total <= budget for step in found.steps)
    each = found.strategy.get("checkpoint").each
    assert sum(step.recompute_flops for step in found.steps) < sum(step.recompute_flops for step in least.steps)
    # The first rank keeps two micro-batches, the second one: it recomputes no more than it must.
    assert set(each[:2]) != {"none"}


def test_collectives_are_sent_again_where_blocks_are_recomputed():
    for axis in ("tensor", "sequence", "expert"):
        work = workload(expert_runs.build("listed") if axis == "expert" else tiny.plain(num_layers=4), world=2)
        base = [("parallel_mode", {axis: 2}), f"{axis}_parallel"]
        plans = [work.plan(Strategy([*base, *added])) for added in ([], [("checkpoint", {"every": 2})], ["checkpoint"])]
        none, half, full = (
            sum(t.bytes_per_step for t in plan.step.traffic if t.axis == axis and t.moment == "backward")
            for plan in plans
        )
        assert full - half == half - none > 0, axis


def trained(strategy, micro_batches=1):
    torch.manual_seed(0)
    result = mw.accelerate(
        tiny.plain(num_layers=4), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=strategy,
        optim_args={"lr": 0.1, "momentum": 0.9}, dataloader_args={"batch_size": 8}, num_micro_batches=micro_batches,
    )  # fmt: skip
    batches = iter(result.dataloader)
    first, sizes = result.measured_step(next(batches))
    losses = [first.loss.item(), *(result.step(batch).loss.item() for _, batch in zip(range(9), batches, strict=False))]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in result.model.parameters()]
    total = torch.stack([w.detach().double().norm() for w in weights if w is not None]).square().sum()
    step = result.plan.steps[result._job.index("pipeline")] if result.plan.steps else result.plan.step
    return losses, total.item(), sizes["activations"], memory(step).activations


SELECTIVE = ("checkpoint", {"policy": "selective", "every": 2})
SECOND = ("checkpoint", {"policy": "every_second"})
MIXED = ("checkpoint", {"each": ("full", "selective", "none", "selective")})
PIPELINE = ("parallel_mode", {"pipeline": 2})
LAYOUTS = {
    "fsdp": (["fsdp"], MIXED, 2),
    "tensor": ([("parallel_mode", {"tensor": 2}), "tensor_parallel"], MIXED, 1),
    "pipeline": ([PIPELINE, "pipeline_parallel"], MIXED, 2),
    "zbv": ([PIPELINE, ("pipeline_parallel", {"schedule": "zbv"})], MIXED, 4),
    "dualpipev": ([PIPELINE, ("pipeline_parallel", {"schedule": "dualpipev"})], SECOND, 4),
    "amp": (["fsdp", ("amp_native", "bf16")], SELECTIVE, 1),
    "sequence": ([("parallel_mode", {"sequence": 2}), "sequence_parallel"], SELECTIVE, 1),
}


def both(base, method, micro_batches):
    """What a layout trains to, without and with recomputation."""
    return [trained(strategy, micro_batches) for strategy in (base, [*base, method])]


@pytest.mark.parametrize(
    "names",
    [
        ("fsdp", "zbv"),
        pytest.param(("dualpipev", "pipeline", "tensor", "amp", "sequence"), marks=pytest.mark.long),
    ],
)
def test_training_is_the_same_under_every_layout(ranks, names):
    for name in names:
        for plain, changed in ranks(2).run(both, *LAYOUTS[name])[:1]:
            assert changed[0] == pytest.approx(plain[0], rel=1e-6), name
            assert changed[1] == pytest.approx(plain[1], rel=1e-6), name
            assert changed[2] < plain[2], name
            assert plain[3] - changed[3] == plain[2] - changed[2], name  # what it frees, predicted and measured


def test_compiled_blocks_recompute_selectively():
    torch.manual_seed(0)
    model, x = tiny.Mlp((8, 8)), torch.randn(4, 8)
    changed = copy.deepcopy(model)
    Checkpoint(policy="selective").apply(job(changed))
    for block in changed.layers:
        block.compile(backend="aot_eager")
    for each in (model, changed):
        each(x).square().sum().backward()
    for a, b in zip(model.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_products_in_four_bits_are_kept_as_products_are():
    """Compiled code has each as one operator, which names nothing that a policy keeps."""
    operator = torch.ops.meshwright.four_bit_product.default
    for rows, columns, name in ((512, 256, "aten.mm"), (512, 16, FROM_LOW_RANK), (16, 512, TO_LOW_RANK)):
        weight = torch.empty(columns, rows, device="meta")
        plain = call_name(torch.ops.aten.mm.default, (torch.empty(4, columns, device="meta"), weight))
        sizes = [rows, columns, rows * columns // BLOCK]
        assert call_name(operator, (torch.empty(4, columns), torch.empty(9), sizes, False)) == plain == name

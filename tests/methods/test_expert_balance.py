"""Biases of the choice of experts, the z-loss of routers and the counts of tokens, against one plain process."""

import functools

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.methods.composition import check_rules
from meshwright.nn import fp32_buffer
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny
from tests.methods import expert_runs
from tests.methods.expert_runs import EXPERTS, Moe, accelerated, is_plain, prepare_for, step_of
from tests.methods.split_runs import whole_weights
from tests.methods.test_expert_parallel import check_traffic
from tests.methods.test_parity import BATCH, STEPS, check_weights
from tests.methods.test_traffic import Counter
from tests.parity.layouts import SEQUENCE, scheduled

RATE, Z = 0.02, 0.05


class BiasedMoe(Moe):
    """Chooses experts by probabilities and a bias, and weighs answers by probabilities alone."""

    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("choice_bias", torch.zeros(EXPERTS))

    def forward(self, x):
        self.calls += 1
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        index = (scores.detach() + self.choice_bias).topk(expert_runs.TOP_K).indices
        weights = scores.gather(1, index)
        if not hasattr(self, "experts"):
            return self.units(tokens, index, weights).view_as(x)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out.view_as(x)


def build(name):
    if not is_plain(name):
        return expert_runs.build(name)
    torch.manual_seed(3)
    model = expert_runs.attending(2) if name == "attending" else expert_runs.Net(name)
    for block in model.blocks:
        holder = "mlp" if name == "attending" else "moe"
        setattr(block, holder, BiasedMoe("stacked" if name == "stacked" else "listed"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def biases(model):
    found = {name.removeprefix("module."): value.clone() for name, value in model.named_buffers()}
    return {name: value for name, value in found.items() if name.endswith(("choice_bias", "correction_bias"))}


def routers(model):
    return [m for m in model.modules() if getattr(getattr(m, "weight", None), "shape", ())[:1] == (EXPERTS,)
            and m.weight.dim() == 2]  # fmt: skip


class Watched:
    """What a plain model's routers say and choose in one step."""

    def __init__(self, model):
        self.logits, self.chosen = {}, {}
        for number, router in enumerate(routers(model)):
            router.register_forward_hook(functools.partial(self._note, number))
        self.model = model

    def _note(self, number, module, args, output):
        self.logits[number] = output[0] if isinstance(output, tuple) else output
        if isinstance(output, tuple):
            self.chosen[number] = output[2]

    def z_loss(self):
        return sum(each.float().logsumexp(-1).square().mean() for each in self.logits.values())

    def counts(self):
        if not self.chosen:
            every = [each for each in self.model.modules() if isinstance(each, BiasedMoe)]
            for number, block in enumerate(every):
                scores = self.logits[number].softmax(-1) + block.choice_bias
                self.chosen[number] = scores.topk(expert_runs.TOP_K).indices
        found = [index.flatten().bincount(minlength=EXPERTS) for index in self.chosen.values()]
        self.chosen = {}
        return found


def reference(name, rate, z_loss):
    """Losses, norms, first and last weights, biases and the counts of the last step of one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim = torch.optim.SGD(model.parameters(), **expert_runs.OPTIMIZERS["sgd"][1])
    watched, losses, norms, counts = Watched(model), [], [], []
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    for _, ids in zip(range(STEPS), torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order), strict=False):
        optim.zero_grad()
        inputs = prepare_for(name)(ids, "cpu")
        loss = tiny.loss_func(inputs, model(**inputs) if isinstance(inputs, dict) else model(inputs))
        (loss + (z_loss or 0) * watched.z_loss()).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        losses.append(loss.item())
        optim.step()
        counts = watched.counts()
        owned = [value for key, value in model.named_buffers() if key.endswith(("choice_bias", "correction_bias"))]
        for value, each in zip(owned, counts, strict=False):
            value += (rate or 0) * (each.float().mean() - each).sign()
    return losses, norms, before, {k: v.detach() for k, v in model.named_parameters()}, biases(model), counts


def train(name, strategy, micro):
    """Ten steps; losses, norms, whole weights, this rank's biases, counts, bytes sent and predicted."""
    result = accelerated(name, strategy, "sgd", micro, build(name))
    losses, norms, batch = [], [], None
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        done = result.step(batch)
        losses.append(done.loss.item())
        norms.append(done.grad_norm.item())
    load = result.expert_load
    counts, busiest = [each.clone() for each in load.counts().values()], load.imbalance().item()
    weights, own = whole_weights(getattr(result.model, "module", result.model)), biases(result.model)
    with Counter() as counter:
        result.step(batch)
    expected = {}
    for traffic in step_of(result).traffic:
        expected[traffic.kind] = expected.get(traffic.kind, 0) + traffic.bytes_per_step
    return losses, norms, weights, own, counts, busiest, (counter.bytes, expected)


BOTH = {"bias_rate": RATE, "z_loss": Z}
BIAS = {"bias_rate": RATE}
CASES = {
    "stacked": (2, "stacked", {"expert": 2}, [], BOTH, 2),
    "listed": (2, "listed", {"expert": 2}, ["checkpoint"], BOTH, 1),
    "data": (4, "listed", {"expert": 2, "data": 2}, [], BOTH, 2),
    "zero": (4, "deepseek3", {"expert": 2, "zero": 2}, ["fsdp", "checkpoint"], BOTH, 2),
    "reentrant": (2, "deepseek3", {"expert": 2}, [("checkpoint", {"no_reentrant": False})], BOTH, 1),
    "z qwen3": (2, "qwen3", {"expert": 2}, ["zero2"], {"z_loss": Z}, 2),
    "z tensor": (4, "qwen3", {"tensor": 2, "expert": 2}, ["tensor_parallel"], {"z_loss": Z}, 1),
    "z tensor sequence": (4, "qwen3", {"tensor": 2, "expert": 2}, [SEQUENCE], {"z_loss": Z}, 1),
    "tensor": (4, "deepseek3", {"tensor": 2, "expert": 2}, ["tensor_parallel"], BOTH, 1),
    "sequence": (4, "attending", {"expert": 2, "sequence": 2}, ["sequence_parallel"], BOTH, 1),
    "context": (4, "qwen3", {"expert": 2, "context": 2}, ["context_parallel"], {"z_loss": Z}, 1),
    "pipeline": (4, "deepseek3 3", {"expert": 2, "pipeline": 2}, [scheduled("1f1b")], BIAS, 4),
    "one rank": (2, "stacked", {"data": 2, "expert": 1}, [], BOTH, 1),
    "one rank listed": (2, "listed", {"data": 2, "expert": 1}, ["fsdp"], BOTH, 1),
}
SHORT = ("listed", "zero")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES])
def test_experts_are_balanced_as_in_one_process(ranks, case):
    world, name, mesh, methods, keys, micro = CASES[case]
    strategy = [("parallel_mode", mesh), ("expert_parallel", keys), *methods]
    results = ranks(world).run(train, name, strategy, micro)
    losses, norms, before, expected, moved, counts = reference(name, keys.get("bias_rate"), keys.get("z_loss"))
    for result in results:
        assert result[0] == pytest.approx(losses, rel=1e-4)
        assert result[1] == pytest.approx(norms, rel=1e-5)
        assert all(torch.equal(value, moved[key]) for key, value in result[3].items())
        assert [each.tolist() for each in result[4]] == [each.tolist() for each in counts]
        assert result[5] == pytest.approx(max(each.max() / each.double().mean() for each in counts).item())
    check_weights({key: value for result in results for key, value in result[2].items()}, before, expected)
    if "bias_rate" in keys:
        assert any(value.abs().max() > RATE for value in moved.values())
    if mesh["expert"] > 1:
        check_traffic([result[6] for result in results])


def save_and_load(directory, strategy):
    """Losses of three steps after a checkpoint: of the job that saved it, and of a new one."""
    first = accelerated("deepseek3 3", strategy, "adamw", 2, build("deepseek3 3"))
    batches = list(first.dataloader)
    for batch in batches[:3]:
        first.step(batch)
    CheckpointStore(directory).save(TrainingState(first.model, first.optim, step=3))
    expected = [first.step(batch).loss.item() for batch in batches[3:6]]
    again = accelerated("deepseek3 3", strategy, "adamw", 2, build("deepseek3 3"))
    again.step(batches[0])
    CheckpointStore(directory).load(TrainingState(again.model, again.optim))
    return expected, [again.step(batch).loss.item() for batch in batches[3:6]], biases(first.model), biases(again.model)


@pytest.mark.long
@pytest.mark.parametrize("beside", [{"zero": 2}, {"pipeline": 2}], ids=str)
def test_biases_are_saved_with_the_model(ranks, tmp_path, beside):
    other = ["fsdp"] if "zero" in beside else [scheduled("1f1b")]
    strategy = [("parallel_mode", {"expert": 2, **beside}), ("expert_parallel", {"bias_rate": 0.5}), *other]
    for expected, got, first, again in ranks(4).run(save_and_load, tmp_path, strategy):
        assert got == pytest.approx(expected, rel=1e-6)
        assert all(torch.equal(first[key], again[key]) for key in first)


def in_half():
    """A bias in bf16 that small updates would not move; the one its fp32 value stands for."""
    strategy = [("parallel_mode", {"expert": 2}), ("expert_parallel", {"bias_rate": 1e-3}), ("half", "bf16")]
    result = accelerated("stacked", strategy, "bf16", model=build("stacked"))
    for block in result.model.blocks:
        block.moe.choice_bias.fill_(4.0)
    for batch, _ in zip(result.dataloader, range(9), strict=False):
        result.step(batch)
    return [(block.moe.choice_bias.dtype, block.moe.choice_bias.tolist()) for block in result.model.blocks]


def test_small_updates_reach_a_bias_in_half_precision(ranks):
    for dtype, values in ranks(2).run(in_half)[0]:
        assert dtype == torch.bfloat16
        assert any(value != 4.0 for value in values)


def save_in_half(directory):
    """Biases in fp32: of a job in bf16 that saved them, and of others, in bf16 and fp32, that loaded them."""

    def job(*methods):
        strategy = [("parallel_mode", {"expert": 2}), ("expert_parallel", {"bias_rate": 1e-3}), *methods]
        return accelerated("stacked", strategy, "bf16" if methods else "sgd", model=build("stacked"))

    def fine(model):
        return torch.stack([fp32_buffer(block.moe, "choice_bias") for block in model.blocks]).clone()

    first, again, plain = job(("half", "bf16"), "zero2"), job(("half", "bf16")), job()
    batches = list(first.dataloader)
    for block in first.model.blocks:
        block.moe.choice_bias.fill_(4.0)
    for batch in batches[:3]:
        first.step(batch)
    CheckpointStore(directory).save(TrainingState(first.model, step=3))
    saved = fine(first.model)
    for each in (again, plain):
        CheckpointStore(directory).load(TrainingState(each.model))
    rounded = torch.stack([block.moe.choice_bias for block in again.model.blocks])
    return saved, fine(again.model), fine(plain.model), rounded


def test_checkpoints_have_the_fp32_value_of_a_bias_in_half_precision(ranks, tmp_path):
    for saved, again, plain, rounded in ranks(2).run(save_in_half, tmp_path):
        assert torch.equal(saved, again)
        assert torch.equal(saved, plain)
        assert torch.equal(saved.bfloat16(), rounded)
        assert not torch.equal(saved, rounded.float())


def said_of(keys, model, *methods, **changes):
    try:
        accelerated("listed", [("parallel_mode", {"expert": 2, **changes}), ("expert_parallel", keys), *methods],
                    "sgd", model=model)  # fmt: skip
    except mw.MeshwrightError as error:
        return str(error)
    return "nothing"


def refusals():
    without_router = expert_runs.build("listed")
    for block in without_router.blocks:
        block.moe.second = nn.Linear(expert_runs.WIDTH, EXPERTS)
    return {
        "bias": said_of({"bias_rate": 0.1}, expert_runs.build("listed")),
        "router": said_of({"z_loss": 0.1}, without_router),
        "rate": said_of({"bias_rate": -1}, expert_runs.build("listed")),
    }


def test_what_cannot_be_balanced_is_refused(ranks):
    for said in ranks(2).run(refusals):
        assert "finds no bias" in said["bias"]
        assert "finds no router" in said["router"]
        assert "bias_rate" in said["rate"]
    strategy = mw.Strategy(["pipeline_parallel", ("expert_parallel", {"z_loss": 0.1})])
    with pytest.raises(mw.StrategyError, match="by what the loss was scaled"):
        check_rules(strategy, {"expert": 2, "pipeline": 2})

"""Small runs with a pipeline axis, on the ranks of a pool; used by the tests of ``pipeline_parallel``."""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

import meshwright as mw
from meshwright import runtime
from meshwright.cost import memory
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import BATCH, OPTIMIZERS, STEPS
from tests.methods.test_traffic import Counter

LAYERS = 4
TWO = ("parallel_mode", {"pipeline": 2})


def build(name):
    torch.manual_seed(3)
    if name == "plain":
        return tiny.plain(num_layers=LAYERS)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=tiny.VOCAB, n_embd=20, n_layer=LAYERS, n_head=2, n_positions=tiny.SEQ_LEN, resid_pdrop=0,
                embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    config = LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=52, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tiny.SEQ_LEN, use_cache=False,
        tie_word_embeddings=name == "tied",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def kind_of(name):
    return "plain" if name == "plain" else "llama"


def reference(name, mode="sgd"):
    """Losses, gradient norms, initial and final weights of a plain loop in one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim_class, args = OPTIMIZERS[mode]
    optim = optim_class(model.parameters(), **args)
    losses, norms = [], []
    for ids in batches():
        optim.zero_grad()
        inputs = tiny.prepare_for(kind_of(name))(ids, "cpu")
        loss = tiny.loss_func(inputs, model(inputs) if name == "plain" else model(**inputs))
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def batches():
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
    return [ids for _, ids in zip(range(STEPS), loader, strict=False)]


def accelerated(name, strategy, mode="sgd", micro=4, **keys):
    optim_class, args = OPTIMIZERS[mode]
    return mw.accelerate(
        build(name), optim_class, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=args,
        prepare_input=tiny.prepare_for(kind_of(name)), model_input_format=tiny.input_format(kind_of(name)),
        dataloader_args={"batch_size": BATCH}, num_micro_batches=micro, **keys,
    )  # fmt: skip


def train(name, strategy, mode="sgd", micro=4):
    """Ten steps; losses, gradient norms and this rank's weights. Predicted bytes of state are checked on the way."""
    result = accelerated(name, strategy, mode, micro)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        step = result.step(batch)
        losses.append(step.loss.item())
        norms.append(step.grad_norm.item())
    predicted = memory(result.plan.steps[result._job.index("pipeline")], result._job.coordinate)
    for kind, size in measured_state(result.model, result.optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    return losses, norms, whole_weights(result.model)


class Pair(nn.Module):
    """A block with two hidden states and a third output that goes nowhere; counts its calls in a buffer."""

    def __init__(self, width, dropout):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.kind = "pair"

    def forward(self, x, *, carry, scale):
        if self.training:
            self.calls += 1
        x = x + self.drop(torch.tanh(self.inner(x))) * scale
        return x, carry + x.mean(-1, keepdim=True), x.detach().sum()


class Pairs(nn.Module):
    """A plain model with a bare parameter that all blocks use, and a normalisation before and behind them."""

    def __init__(self, layers=4, width=6, dropout=0.0):
        super().__init__()
        self.fails = False
        self.scale = nn.Parameter(torch.full((1,), 0.7))
        self.bias = nn.Parameter(torch.linspace(-1, 1, width))
        self.first = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Pair(width, dropout) for _ in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x + self.bias)
        carry = torch.zeros_like(x)
        for layer in self.layers:
            assert layer.kind == "pair"
            x, carry, _ = layer(x, carry=carry, scale=self.scale)
        if self.fails and x.isfinite().all():  # a value that only the last stage sees
            raise ValueError("on purpose")
        return self.last(x + carry)


def square(inputs, output):
    return output.float().square().mean()


def pairs(strategy, micro=2, sample=True, dropout=0.0, mesh=None, **keys):
    torch.manual_seed(4)
    return mw.accelerate(
        Pairs(dropout=dropout), torch.optim.AdamW, None, square,
        strategy=[*strategy, ("parallel_mode", {"pipeline": 2, **(mesh or {})})],
        optim_args={"lr": 0.02}, num_micro_batches=micro, sample_batch=torch.ones(2, 6) if sample else None, **keys,
    )  # fmt: skip


ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))


def pairs_reference(steps):
    torch.manual_seed(4)
    model = Pairs()
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        optim.zero_grad()
        loss = square(None, model(ROWS[: 8 - 2 * (step % 2)]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def pairs_on(strategy, steps, by_hand=False, sample=True, **keys):
    """Steps of changing batch sizes; losses, this rank's weights, and the loss of an evaluation at the end."""
    result = pairs(strategy, sample=sample, max_grad_norm=0.1, **keys)
    losses = []
    for step in range(steps):
        rows = ROWS[: 8 - 2 * (step % 2)]
        if not by_hand:
            losses.append(result.step(rows).loss.item())
            continue
        result.optim.zero_grad()
        for index, part in enumerate(rows.chunk(2)):
            with contextlib.nullcontext() if index else result.no_sync():
                loss = result.loss_func(part, result.model(part)) / 2
                loss.backward()
            losses += [0.0] if not index else []
            losses[-1] += loss.item()
        result.clip_grad_norm(0.1)
        result.optim.step()
    calls = [layer.calls.item() for layer in result.model.layers if not layer.calls.is_meta]
    return losses, whole_weights(result.model), result.evaluate(ROWS).item(), calls


class Echo(nn.Module):
    """A block that uses its weights twice, the second time on what came of the first, and may not use ``start``.

    Autograd returns one gradient for ``one`` and ``other``, and an expanded one for ``shift``.
    """

    def __init__(self, width, uses_start):
        super().__init__()
        self.inner, self.uses_start = nn.Linear(width, width), uses_start
        self.one, self.other, self.shift = (nn.Parameter(torch.randn(width) / 4) for _ in range(3))

    def forward(self, x, start):
        again = self.inner(torch.tanh(self.inner(x))) + (self.one + self.other) + self.shift.sum()
        return x + again + (start if self.uses_start else 0), start


class Echoes(nn.Module):
    """The last stage gets ``start`` and has no use for it."""

    def __init__(self, layers=4, width=6):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Echo(width, number < layers - 1) for number in range(layers))

    def forward(self, x):
        x = start = self.first(x)
        for layer in self.layers:
            x, start = layer(x, start)
        return self.last(x)


def echoes(schedule):
    """Ten steps, without a schedule in one plain process: this rank's weights, and those before."""
    torch.manual_seed(4)
    model = Echoes()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if schedule is None:
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(STEPS):
            optim.zero_grad()
            square(None, model(ROWS)).backward()
            optim.step()
        return {name: p.detach() for name, p in model.named_parameters()}, before
    result = mw.accelerate(
        model, torch.optim.SGD, None, square, strategy=[TWO, ("pipeline_parallel", {"schedule": schedule})],
        optim_args={"lr": 0.05}, num_micro_batches=4, sample_batch=ROWS[:2],
    )  # fmt: skip
    for _ in range(STEPS):
        result.step(ROWS)
    return whole_weights(result.model), before


def dropping(methods):
    """Losses of one batch with dropout, the weights at rest."""
    result = pairs(["pipeline_parallel", *methods], dropout=0.5)
    for group in result.optim.param_groups:
        group["lr"] = 0.0
    return [result.step(ROWS).loss.item() for _ in range(3)]


def several():
    """What two ranks show of the splice itself; see the test."""
    every = {"scheduled": pairs_on(["pipeline_parallel"], 3), "by hand": pairs_on(["pipeline_parallel"], 3, True)}
    every["untraced"] = pairs_on(["pipeline_parallel"], 3, sample=False)
    every["v by hand"] = pairs_on([("pipeline_parallel", {"schedule": "zbv"})], 3, True)
    every["v"] = pairs_on([("pipeline_parallel", {"schedule": "zbv"})], 3)
    first, again = (dropping(methods) for methods in ([], ["checkpoint"]))
    assert first == again  # recomputing draws the same masks
    assert max(first) - min(first) > 1e-4  # and each step others
    drawn = runtime.gather_objects(torch.rand(()).item())
    assert drawn[0] == drawn[1]  # in their blocks alone stages draw for themselves
    every["recomputed"] = pairs_on(["pipeline_parallel", "checkpoint"], 3)
    return every


def with_built_optimizer():
    """An optimizer built over the whole model goes on with this rank's part: losses, and its first group's size."""
    torch.manual_seed(4)
    model = Pairs()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optim = torch.optim.AdamW([{"params": matrices}, {"params": others}], lr=0.02)
    result = mw.accelerate(
        model, optim, None, square, strategy=[TWO, "pipeline_parallel"], num_micro_batches=2, max_grad_norm=0.1,
        sample_batch=torch.ones(2, 6),
    )  # fmt: skip
    losses = [result.step(ROWS[: 8 - 2 * (step % 2)]).loss.item() for step in range(3)]
    return losses, [len(group["params"]) for group in optim.param_groups]


def failing(methods=(), mesh=None):
    """A stage fails: the error is everywhere, and training goes on."""
    result = pairs([*methods, "pipeline_parallel"], micro=2, mesh=mesh)
    result.step(ROWS)
    said = []
    result.model.fails = True
    for rows in (
        ROWS,
        ROWS[:4],
        torch.ones(8, 7),
        torch.ones(7, 6),
    ):  # a known shape, a new one, a wrong one, a ragged one
        try:
            result.step(rows)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    result.model.fails = False
    return said, result.step(ROWS).loss.item()


def go_on(result, batches, directory, save_step=None, load=None):
    """Optionally loads a checkpoint; three steps; optionally saves; three more: their losses."""
    if load is not None:
        CheckpointStore(directory).load(TrainingState(result.model, result.optim), directory / f"step-{load:08d}")
    if save_step is None:
        return [result.step(batch).loss.item() for batch in batches[3:6]]
    for batch in batches[:3]:
        result.step(batch)
    CheckpointStore(directory, keep=None).save(TrainingState(result.model, result.optim, step=save_step))
    return [result.step(batch).loss.item() for batch in batches[3:6]]


def checkpoints(directory):
    """Saved by stages and loaded into shards, and the other way round: the losses that follow."""
    piped = [TWO, ("pipeline_parallel", {"schedule": "1f1b"})]
    saved = accelerated("plain", piped, "adamw")
    batches = list(saved.dataloader)
    by_stages = go_on(saved, batches, directory, save_step=1)
    shards = accelerated("plain", ["fsdp"], "adamw", micro=1)
    own = list(shards.dataloader)
    shards.step(own[0])
    into_shards = go_on(shards, own, directory, load=1)
    by_shards = go_on(accelerated("plain", ["fsdp"], "adamw", micro=1), own, directory, save_step=2)
    stages = accelerated("plain", [TWO, ("pipeline_parallel", {"schedule": "dualpipev"})], "adamw")
    stages.step(batches[0])
    return by_stages, into_shards, by_shards, go_on(stages, batches, directory, load=2)


def load_plain(directory):
    """The checkpoint of the stages in one plain process."""
    result = accelerated("plain", [], "adamw", micro=1)
    return go_on(result, list(result.dataloader), directory, load=1)


def overflowing():
    """Steps skipped when one stage's gradients overflow, and the loss scale after them."""
    result = pairs(["pipeline_parallel", ("amp_native", "fp16")])
    skipped = []
    for step in range(3):
        if step == 1 and mw.rank() == 0:
            result.model.layers[0].inner.weight.register_hook(poison := Poison())
        skipped.append(result.step(ROWS).skipped)
        if step == 1 and mw.rank() == 0:
            poison.on = False
    return skipped, result.optim.scaler.get_scale()


class Poison:
    """A gradient hook that overflows."""

    on = True

    def __call__(self, gradient):
        return gradient * float("inf") if self.on else gradient


def halves():
    """Losses in bf16: of a model that normalises before its blocks, without and with masters."""
    losses = {}
    for methods in ([("half", "bf16")], [("amp_native", "bf16"), "checkpoint"]):
        result = mw.accelerate(
            tiny.build("bert"), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func,
            strategy=[*methods, TWO, "pipeline_parallel"], optim_args={"lr": 1e-3},
            prepare_input=tiny.prepare_for("bert"), model_input_format="unpack_dict",
            dataloader_args={"batch_size": BATCH}, num_micro_batches=2,
        )  # fmt: skip
        losses[str(methods)] = [result.step(b).loss.item() for _, b in zip(range(3), result.dataloader, strict=False)]
        predicted = memory(result.plan.steps[mw.rank()], result._job.coordinate)
        for kind, size in measured_state(result.model, result.optim).items():
            assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, methods)
    return losses


def train_several(cases):
    return [train(*case) for case in cases]


def sent_and_kept(cases):
    """Bytes on the wire and kept for backward in one step, measured and as predicted, for several strategies."""
    every = []
    for name, strategy in cases:
        result = accelerated(name, strategy)
        batch = next(iter(result.dataloader))
        result.step(batch)
        with Counter() as counter:
            result.step(batch)
        _, measured = result.measured_step(batch)
        step = result.plan.steps[result._job.index("pipeline")]
        predicted = {}
        for traffic in step.traffic:
            predicted[traffic.kind] = predicted.get(traffic.kind, 0) + traffic.bytes_per_step
        every.append((counter.bytes, predicted, measured["activations"], memory(step).activations))
    return every


def alive_messages(schedules, micro):
    """Count hidden states and gradients sent in a step of every schedule: all, and the most in memory at once."""
    every = []
    for schedule in schedules:
        result = accelerated("plain", [TWO, ("pipeline_parallel", {"schedule": schedule})], micro=micro)
        batch = torch.stack([tiny.Tokens()[index] for index in range(2 * micro)])
        result.step(batch)
        sent, most = {"F": [], "B": []}, {"F": 0, "B": 0}

        def spied(kind, operations, sent=sent, most=most):
            def call(stage, number):
                found = operations(stage, number)
                sent[kind] += [StorageWeakRef(each.tensor.untyped_storage()) for each in found]
                for each, refs in sent.items():
                    most[each] = max(most[each], sum(not ref.expired() for ref in refs))
                return found

            return call

        forward = spied("F", PipelineStage.get_fwd_send_ops)
        backward = spied("B", PipelineStage.get_bwd_send_ops)
        with mock.patch.multiple(PipelineStage, get_fwd_send_ops=forward, get_bwd_send_ops=backward):
            result.step(batch)
        left = sum(not ref.expired() for refs in sent.values() for ref in refs)
        every.append(({kind: len(refs) for kind, refs in sent.items()}, most, left))
    return every

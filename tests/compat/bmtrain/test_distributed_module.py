"""The properties that BMTrain's tests hold its wrappers to: values, gradients and training as in plain torch."""

import pytest
import torch
from torch import nn

from meshwright import runtime
from meshwright.compat.bmtrain import distributed_module as roots
from meshwright.compat.bmtrain.block import Block, no_sync
from meshwright.compat.bmtrain.block_list import TransformerBlockList
from meshwright.compat.bmtrain.model_setup import init_parameters
from meshwright.compat.bmtrain.parameter import DistributedParameter
from tests.compat.bmtrain.seed_models import (
    DIM,
    FORMS,
    IN,
    Layer,
    Model,
    PlainLayer,
    build,
    full,
    gradients,
    largest_difference,
    weights,
)

WORLDS = [1, 2, 4]
ALL_FORMS = (*FORMS, "wrapped")


def batches(steps, per_rank=3, seed=1):
    """Every rank's inputs of every step, (steps, world, per_rank, IN)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, runtime.world_size(), per_rank, IN, generator=generator)


def loss_of(model, x, factor=1.0):
    return model(x, factor).square().mean()


def trained(model, data, whole=False, lr=1e-2, accumulate=1):
    """Adam with a large eps (so that rounding is not amplified); returns losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3, foreach=False)
    losses = []
    for x in data:
        x = x.flatten(0, 1) if whole else x[runtime.rank()]
        for part in x.chunk(accumulate):
            loss = loss_of(model, part) / accumulate
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def changes(model, before):
    return {name: value - before[name] for name, value in weights(model).items()}


def moved(model, before):
    return max(change.abs().max() for change in changes(model, before).values())


def _initial_values():
    plain = weights(build("plain"))
    for form in ALL_FORMS:
        found = weights(build(form))
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in plain.items()}
        assert all(torch.equal(found[name], plain[name]) for name in plain), form


@pytest.mark.parametrize("world", WORLDS)
def test_initial_values_are_those_of_one_process(ranks, world):
    ranks(world).run(_initial_values)


_LONG = ("zero1", "zero2", "sqrt", "kept", "wrapped")
TRAINED = [
    *((2, form) for form in ALL_FORMS if form not in _LONG),
    *(
        pytest.param(world, form, marks=pytest.mark.long)  # a list on 4 ranks trains in test_bmtrain
        for world, form in (*((2, form) for form in _LONG), (4, "list"), (4, "wrapped"))
    ),
]


def _gradients_and_training(form, steps):
    data = batches(steps)
    plain, model = build("plain"), build(form)
    loss_of(plain, data[0].flatten(0, 1), 1.3).backward()
    output, expected = model(data[0][runtime.rank()], 1.3), plain(data[0][runtime.rank()], 1.3)
    assert torch.allclose(output, expected, atol=1e-6, rtol=1e-6)
    output.square().mean().backward()
    assert largest_difference(gradients(model), gradients(plain)) < 1e-6
    once = gradients(model)
    loss_of(model, data[0][runtime.rank()], 1.3).backward()
    assert largest_difference(gradients(model), {name: 2 * value for name, value in once.items()}) < 1e-6
    model.zero_grad()
    plain.zero_grad()
    before = weights(plain)
    trained(plain, data, whole=True)
    trained(model, data)
    assert moved(model, before) > 1e-2
    assert largest_difference(changes(model, before), changes(plain, before)) < 1e-5


@pytest.mark.parametrize(("world", "form"), TRAINED)
def test_trains_as_one_process(ranks, world, form):
    ranks(world).run(_gradients_and_training, form, 10)


def test_one_rank_trains_as_plain_torch(ranks):
    ranks(1).run(_gradients_and_training, "list", 10)


def _accumulation():
    data = batches(1, per_rank=4)[0]
    plain, model = build("plain"), build("zero1")
    loss_of(plain, data.flatten(0, 1)).backward()
    first, second = data[runtime.rank()].chunk(2)
    with no_sync(model):
        (loss_of(model, first) / 2).backward()
    inside = [p.grad for name, p in model.named_parameters() if name.startswith("layers")]
    assert all(grad is None for grad in inside)  # nothing was reduced yet
    (loss_of(model, second) / 2).backward()
    assert largest_difference(gradients(model), gradients(plain)) < 1e-6


def test_zero1_reduces_once_after_no_sync(ranks):
    ranks(2).run(_accumulation)


def _hidden_states(num_hidden):
    """Several hidden states in and out, constants, and a loss on last or intermediate states."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(PlainLayer() for _ in range(num_hidden))

        def forward(self, *args):
            hidden, (scale, offset) = args[:num_hidden], args[num_hidden:]
            out = [layer(h, 0.5) * scale + offset for layer, h in zip(self.layers, hidden, strict=True)]
            return out[0] if num_hidden == 1 else (*out[1:], out[0])

    def built(wrap):
        torch.manual_seed(2)
        return wrap([Mixing() for _ in range(3)])

    def inputs():
        generator = torch.Generator().manual_seed(4)
        return [torch.randn(2, DIM, generator=generator).requires_grad_() for _ in range(num_hidden + 2)]

    def by_hand(layers, args):
        hidden, rest, states = args[:num_hidden], args[num_hidden:], []
        for layer in layers:
            states.append(hidden)
            out = layer(*hidden, *rest)
            hidden = (out,) if num_hidden == 1 else out
        return (*hidden, *(torch.stack(each) for each in zip(*states, strict=True)))

    results = {}
    for name, wrap in (
        ("plain", nn.ModuleList),
        ("blocks", lambda layers: nn.ModuleList(Block(layer) for layer in layers)),
        ("list", lambda layers: TransformerBlockList(layers, num_hidden=num_hidden)),
        ("sqrt", lambda layers: TransformerBlockList(layers, num_hidden=num_hidden, sqrt=True)),
    ):
        for part in ("last", "middle", "both"):
            layers, args = built(wrap), inputs()
            if isinstance(layers, TransformerBlockList):
                outputs = layers(*args, return_hidden_states=True)
            else:
                outputs = by_hand(layers, args)
            last, states = outputs[:num_hidden], outputs[num_hidden:]
            assert all(state.shape == (3, 2, DIM) for state in states)
            chosen = {"last": last, "middle": states, "both": outputs}[part]
            sum(each.square().sum() for each in chosen).backward()
            found = {f"input {k}": x.grad if x.grad is not None else torch.zeros(()) for k, x in enumerate(args)}
            found |= {f"output {k}": full(x) for k, x in enumerate(outputs)} | gradients(layers)
            expected = results.setdefault(part, found)
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-5), (name, part, key)


@pytest.mark.parametrize("num_hidden", [1, 3])
def test_hidden_states_and_their_gradients(ranks, num_hidden):
    ranks(2).run(_hidden_states, num_hidden)


def _requires_grad():
    data = batches(4)
    for form in ("list", "wrapped", "kept"):
        plain, model = build("plain"), build(form)
        frozen_at = {0: ["layers.1", "embed"], 1: [], 2: ["layers.0.up.weight", "gain"], 3: ["layers"]}
        for step, x in enumerate(data):
            for each, part in ((plain, x.flatten(0, 1)), (model, x[runtime.rank()])):
                frozen = [n for n, _ in each.named_parameters() if n.startswith(tuple(frozen_at[step]) or ("-",))]
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name not in frozen)
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                loss_of(each, part).backward()
                optimizer.step()
                assert all(dict(each.named_parameters())[name].grad is None for name in frozen), (form, step)
                optimizer.zero_grad()
        assert largest_difference(weights(model), weights(plain)) < 1e-6, form


def test_requires_grad_is_toggled_between_steps(ranks):
    ranks(2).run(_requires_grad)


def _frozen_first():
    """All frozen when first run, as for LoRA or a probe, then thawed."""
    data = batches(3)
    plain, model = build("plain"), build("list")
    for each in (plain, model):
        each.requires_grad_(False)
        dict(each.named_parameters())["gain"].requires_grad_(True)
    for step, x in enumerate(data):
        for each, part in ((plain, x.flatten(0, 1)), (model, x[runtime.rank()])):
            loss_of(each, part).backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            if step == 0:
                each.requires_grad_(True)
    assert largest_difference(weights(model), weights(plain)) < 1e-6


def test_a_frozen_model_can_be_thawed(ranks):
    ranks(2).run(_frozen_first)


def _counts():
    """How often a block's forward runs: once when nothing needs gradients, twice (recompute) when something does."""

    class Counting(Layer):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return super().forward(x)

    def calls(frozen, input_grad):
        torch.manual_seed(0)
        block = Block(Counting())
        block.requires_grad_(not frozen)
        x = torch.ones(2, DIM, requires_grad=input_grad)
        Counting.calls = 0
        out = block(x)
        if out.requires_grad:
            out.sum().backward()
        return Counting.calls, out.requires_grad, [p.grad is not None for p in block.parameters()]

    assert calls(frozen=True, input_grad=False) == (1, False, [False] * 4)
    assert calls(frozen=True, input_grad=True) == (2, True, [False] * 4)
    assert calls(frozen=False, input_grad=False) == (2, True, [True] * 4)
    assert calls(frozen=False, input_grad=True) == (2, True, [True] * 4)


def test_recomputes_only_what_needs_gradients(ranks):
    ranks(2).run(_counts)


def _dropout():
    """Training and evaluation reach through the wrappers, and recomputation draws the same numbers."""
    for form in ("blocks", "list", "sqrt", "wrapped"):
        model, kept = build(form, dropout=0.5), build("kept", dropout=0.5)
        x = batches(1)[0][runtime.rank()]
        for each in (model, kept):
            each(x)  # the first forward of all seeds the ranks
        torch.manual_seed(9)
        loss_of(model, x).backward()
        torch.manual_seed(9)
        loss_of(kept, x).backward()
        assert largest_difference(gradients(model), gradients(kept)) < 1e-6, form
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))
        assert all(not module.training for module in model.modules())
        model.train()
        assert all(module.training for module in model.modules())


def test_dropout_and_modes(ranks):
    ranks(2).run(_dropout)


def _seeds():
    """Ranks make the same model and draw different dropout masks; also a second model, made after the first ran."""
    roots._seeded = None  # as in a new process
    model = build("list", dropout=0.5)
    x = torch.ones(2, IN)
    masked = [model(x), model(x)]
    seen = runtime.gather_objects([out.detach() for out in masked])
    different = [out for of_rank in seen for out in of_rank]
    assert all(not torch.equal(a, b) for k, a in enumerate(different) for b in different[:k])
    torch.rand(runtime.rank())  # and now their generators stand in different places, whoever was first
    state = torch.get_rng_state()
    second = Model("list")
    init_parameters(second)
    drawn = second.state_dict()["layers.0.up.weight"].full_tensor()
    assert all(torch.equal(drawn, other) for other in runtime.gather_objects(drawn))
    reference = Model("list")
    if runtime.rank() == 0:
        torch.set_rng_state(state)
    init_parameters(reference)
    assert torch.equal(full(reference.layers[0].up.weight), drawn)


def test_ranks_share_weights_and_not_dropout(ranks):
    ranks(4).run(_seeds)


def _no_grad_then_step():
    """Weights gathered for an evaluation do not outlive a change of the shards."""
    for form in ("zero2", "list"):
        model, plain = build(form), build("plain")
        data = batches(2)
        with torch.no_grad():
            model(data[0][runtime.rank()])
        trained(model, data)
        trained(plain, data, whole=True)
        with torch.no_grad():
            x = data[0][runtime.rank()]
            assert torch.allclose(model(x), plain(x), atol=1e-6)


def test_evaluation_between_steps(ranks):
    ranks(2).run(_no_grad_then_step)


class Plain(nn.Module):
    """Not a DistributedModule: its Blocks are roots of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(Layer()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _other_places():
    """Blocks without any root, a list on its own, and a part of a model run before the whole."""
    torch.manual_seed(0)
    model = Plain()
    for p in model.parameters():
        assert isinstance(p, DistributedParameter)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(runtime.rank()))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    part = build("list")
    part.layers(x).sum().backward()
    part.zero_grad()
    plain = build("plain")
    data = batches(1)[0]
    loss_of(plain, data.flatten(0, 1)).backward()
    loss_of(part, data[runtime.rank()]).backward()
    assert largest_difference(gradients(part), gradients(plain)) < 1e-6


def test_blocks_outside_distributed_modules(ranks):
    ranks(2).run(_other_places)


def _plain_parameters_outside():
    """A plain module beside the Blocks: BMTrain lets the ranks drift apart."""
    torch.manual_seed(3)
    model = build("list")
    model.head = nn.Linear(IN, 2)
    x = batches(1)[0]
    model.head(model(x[runtime.rank()])).square().mean().backward()
    every = runtime.gather_objects(model.head.weight.grad)
    assert all(torch.equal(every[0], other) for other in every)


def test_gradients_of_plain_parameters_are_averaged(ranks):
    ranks(2).run(_plain_parameters_outside)

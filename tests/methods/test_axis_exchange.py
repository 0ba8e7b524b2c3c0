"""Exchanges over a tensor axis: layers with one gathered input, and hidden states that are gathered late."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.methods.tensor.axis_exchange import (
    GatheredInput,
    LateTokens,
    TensorAxis,
    TracedAxis,
    gathered_late,
    treats_tokens_alone,
)
from tests import tiny
from tests.loss.helpers import Doubled
from tests.methods import split_runs
from tests.methods.test_parity import check_weights

WIDTH, DIM = 6, 1


class Pair:
    """Two products of one gathered input, then a product by rows whose tokens are scattered."""

    def __init__(self, keeps=False):
        self.axis = TensorAxis(init_device_mesh("cpu", (mw.world_size(),)))
        self.tokens = GatheredInput(self.axis, DIM, keeps=keeps)
        made = torch.Generator().manual_seed(1)
        columns = [torch.randn(WIDTH, 2 * self.axis.size, generator=made) for _ in range(2)]
        self.whole = [*columns, torch.randn(2 * self.axis.size, WIDTH, generator=made)]
        dims = (1, 1, 0)
        self.weights = [self.axis.part_of(w, d).requires_grad_() for w, d in zip(self.whole, dims, strict=True)]
        self.references = [weight.clone().requires_grad_() for weight in self.whole]
        self.dims = dims

    def __call__(self, part):
        first, second, last = self.weights
        whole = self.tokens.gather(part)
        hidden = self.tokens.around(whole.matmul, first) * self.tokens.around(whole.matmul, second).sigmoid()
        summed = self.axis.scatter_tokens(self.tokens.behind(hidden @ last), DIM)
        self.tokens.forget()
        return summed

    def reference(self, whole):
        first, second, last = self.references
        return ((whole @ first) * (whole @ second).sigmoid()) @ last

    def check(self):
        """Compare gradients with those of one process, and drop them."""
        for weight, reference, dim in zip(self.weights, self.references, self.dims, strict=True):
            torch.testing.assert_close(weight.grad, self.axis.part_of(reference.grad, dim), rtol=1e-5, atol=1e-5)
            weight.grad = reference.grad = None


def several_lengths(how):
    pair, sizes = Pair(), []
    packed = []
    for samples, tokens in ((1, 8), (3, 4), (2, 12), (1, 4)):
        whole = torch.randn(samples, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        plain = whole.clone().requires_grad_()
        pair.reference(plain).square().sum().backward()
        leaf = pair.axis.part_of(whole, DIM).requires_grad_()
        part = leaf * 1
        if how == "checkpoint":
            loss = checkpoint(pair, part, use_reentrant=False).square().sum()
        elif how == "hooks":
            with saved_tensors_hooks(lambda tensor: (packed.append(tensor.shape), tensor)[1], lambda tensor: tensor):
                loss = pair(part).square().sum()
            sizes.append((tuple(part.shape) in map(tuple, packed), tuple(whole.shape) in map(tuple, packed)))
            packed.clear()
        else:
            loss = pair(part).square().sum()
        if how == "twice":
            loss.backward(retain_graph=True)
            for weight in pair.weights:
                weight.grad = None
            leaf.grad = None
        loss.backward()
        torch.testing.assert_close(leaf.grad, pair.axis.part_of(plain.grad, DIM), rtol=1e-5, atol=1e-5)
        pair.check()
    return sizes


@pytest.mark.parametrize("how", ["plain", "checkpoint", "hooks", "twice"])
def test_gradients_are_those_of_one_process(ranks, how):
    for sizes in ranks(4).run(several_lengths, how):
        # Hooks around see the part; batches of one sample are views of the same memory.
        assert all(part and not whole for part, whole in sizes)


def changed_in_place():
    pair, said = Pair(), []
    part = torch.randn(2, 4, WIDTH) * 1
    loss = pair(part).sum()
    part.add_(1)
    try:
        loss.backward()
    except mw.ModelError as error:
        said.append(str(error))
    frozen = Pair()
    for weight in frozen.weights[:2]:
        weight.requires_grad_(False)
    leaf = torch.randn(2, 4, WIDTH, requires_grad=True)
    part = leaf * 1
    loss = frozen(part).sum()
    part.add_(1)  # nothing needs it
    loss.backward()
    return said


def test_a_part_that_is_changed_in_place_is_refused(ranks):
    for (said,) in ranks(2).run(changed_in_place):
        assert "changed in place after forward" in said


# --- Tokens gathered late


class Running(nn.Module):
    """Adds up the tokens so far."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x.cumsum(1)


class Averaging(nn.Module):
    """Subtracts a mean over the tokens, which it knows from training otherwise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.weight * (x - (x.mean((0, 1)) if self.training else self.mean))


def test_norms_are_found_to_treat_each_token_alone():
    alone = (nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(4, bias=False), nn.LayerNorm(4, device="meta"))
    assert all(map(treats_tokens_alone, alone))
    others = (
        Running(), Averaging(), nn.Linear(4, 4), nn.Embedding(4, 4), nn.BatchNorm1d(4), nn.Dropout(),
        nn.LayerNorm((4, 4)), nn.Sequential(nn.LayerNorm(4)), nn.PReLU(2),
    )  # fmt: skip
    assert not any(map(treats_tokens_alone, others))


def test_hidden_states_are_gathered_when_something_needs_them():
    axis, gathered = TracedAxis(2), []

    def gather(part):
        gathered.append(part.shape)
        return axis.gather(part, 1)

    part = torch.randn(2, 3, 4, requires_grad=True)
    late = gathered_late(part, 6, gather)
    assert isinstance(late, LateTokens)
    assert (late.shape, late.requires_grad, late.dtype) == ((2, 6, 4), True, torch.float32)
    assert "part=(2, 3, 4)" in repr(late)
    again = gathered_late(late, 12, lambda whole: axis.gather(whole, 1))
    assert again.shape == (2, 12, 4)
    assert not gathered
    assert (late[:, 1:] + late[:, 1:]).shape == (2, 5, 4)
    assert len(gathered) == 1  # once
    assert again.sum(-1).shape == (2, 12)
    assert not isinstance(gathered_late(part.detach(), 6, gather), LateTokens)
    with torch.no_grad():
        assert not isinstance(gathered_late(part, 6, gather), LateTokens)


class Late(tiny.gpt2.GPT2):
    """Uses the last hidden state in ways that models do, and in some that they do not."""

    def __init__(self, kind):
        torch.manual_seed(3)
        super().__init__(vocab_size=64, seq_len=tiny.SEQ_LEN, dim=20, num_layers=2, num_heads=2)
        self.kind = kind
        self.norm.weight.requires_grad_(kind != "frozen")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)

    def forward(self, ids):
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        normed = self.norm(x)
        if self.kind == "beside":
            return self.head(normed) + x.mean(1, keepdim=True).sum(-1, keepdim=True)
        if self.kind == "functions":
            return self.head(Doubled.apply(self.norm(Doubled.apply(x))) + Doubled.apply(normed))
        return self.head(self.norm(normed)) if self.kind == "twice" else self.head(normed)


MESHES = {
    "sequence": (2, [("parallel_mode", {"sequence": 2}), "sequence_parallel", "fsdp"]),
    "context": (2, [("parallel_mode", {"context": 2}), ("context_parallel", {"balance": False}), "zero1"]),
    "tensor": (2, [("parallel_mode", {"tensor": 2}), ("tensor_parallel", {"sequence": True})]),
    "tensor x context": (
        4,
        [
            ("parallel_mode", {"tensor": 2, "context": 2}),
            ("tensor_parallel", {"sequence": True}),
            ("context_parallel", {"balance": False}),
            ("fsdp", {"atorch_wrap_cls": ("Block", "LayerNorm")}),
        ],
    ),
}
KINDS = ("as models do", "beside", "functions", "twice", "frozen")


def trained(kind, strategy):
    result = mw.accelerate(
        Late(kind), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=strategy,
        optim_args={"lr": 0.1, "momentum": 0.9}, dataloader_args={"batch_size": 4, "shuffle": False},
    )  # fmt: skip
    losses = [result.step(batch).loss.item() for _, batch in zip(range(10), result.dataloader, strict=False)]
    return losses, split_runs.whole_weights(result.model)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])])
@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[] if m == "tensor" else pytest.mark.long) for m in MESHES])
def test_what_uses_the_last_hidden_state_gets_all_of_it(ranks, mesh, kind):
    world, strategy = MESHES[mesh]
    results = ranks(world).run(trained, kind, strategy)
    model, losses = Late(kind), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _, ids in zip(range(10), torch.utils.data.DataLoader(tiny.Tokens(), batch_size=4), strict=False):
        optim.zero_grad()
        loss = tiny.loss_func(ids, model(ids))
        loss.backward()
        optim.step()
        losses.append(loss.item())
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
    check_weights(results[0][1], before, {name: p.detach() for name, p in model.named_parameters()})

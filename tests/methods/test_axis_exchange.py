"""Layers with one gathered input: what they save, and the gradients of the whole, on several ranks."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.methods.tensor.axis_exchange import GatheredInput, TensorAxis

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

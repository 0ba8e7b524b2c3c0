"""Every collective against one process that holds all ranks' tensors in one stack and lets torch differentiate."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.comm import all_gather, all_reduce, broadcast, reduce_scatter
from meshwright.runtime import rank, world_size

REDUCTIONS = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _numbers(*shape, seed):
    """Small whole numbers, alike on every rank: many zeros and ties, and no rounding in half precision."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _own(stack, dtype, *, contiguous):
    """This rank's row as a leaf; its strides are those of a transposed tensor where it shall not be contiguous."""
    row = stack.detach()[rank()].to(dtype)
    leaf = row.clone() if contiguous else row.mT.contiguous().mT
    assert leaf.is_contiguous() == contiguous
    return leaf.requires_grad_()


def _check(name, x, stack, y, expected_y, loss, expected_loss):
    """Compares value and gradient, also after a second backward into the same gradient."""
    torch.testing.assert_close(y.float(), expected_y.detach(), msg=lambda text: f"{name} value: {text}")
    (expected,) = torch.autograd.grad(expected_loss, stack)
    for times in (1, 2):
        loss.backward(retain_graph=times == 1)
        torch.testing.assert_close(
            x.grad, times * expected[rank()].to(x.dtype), msg=lambda text: f"{name} gradient: {text}"
        )
    assert y.dtype == x.dtype


def _all_reduce_cases():
    world = world_size()
    weights = _numbers(world, 4, 6, seed=1)
    for dtype, op, contiguous in itertools.product(DTYPES, REDUCTIONS, (True, False)):
        for grad in ("replicated", "partial"):
            stack = _numbers(world, 4, 6, seed=2).requires_grad_()
            x = _own(stack, dtype, contiguous=contiguous)
            y, expected_y = all_reduce(x, op, grad=grad), REDUCTIONS[op](stack)
            if grad == "replicated":  # one loss that all ranks end in
                loss, expected_loss = (weights[0] * y.float()).sum(), (weights[0] * expected_y).sum()
            else:
                loss, expected_loss = (weights[rank()] * y.float()).sum(), (weights.sum(0) * expected_y).sum()
            _check(f"{op} {grad} {dtype}", x, stack, y, expected_y, loss, expected_loss)
    assert torch.equal(all_reduce(torch.tensor(rank())), torch.tensor(sum(range(world))))


def _gather_and_scatter_cases():
    world = world_size()
    weights = _numbers(world, world, 4, 6, seed=1)
    for dtype, contiguous in itertools.product(DTYPES, (True, False)):
        for grad in ("replicated", "partial"):
            stack = _numbers(world, 4, 6, seed=2).requires_grad_()
            x = _own(stack, dtype, contiguous=contiguous)
            own, total = (weights[0], weights[0]) if grad == "replicated" else (weights[rank()], weights.sum(0))
            y = all_gather(x, grad=grad)
            _check(f"all_gather {grad}", x, stack, y, stack, (own * y.float()).sum(), (total * stack).sum())
        for op in REDUCTIONS:
            stack = _numbers(world, 4, 6, seed=3).requires_grad_()
            x = _own(stack, dtype, contiguous=contiguous)
            y, parts = reduce_scatter(x, op), REDUCTIONS[op](stack).view(world, 4 // world, 6)
            loss = (weights[0, rank(), : 4 // world] * y.float()).sum()
            expected_loss = (weights[0, :, : 4 // world] * parts).sum()
            _check(f"reduce_scatter {op}", x, stack, y, parts[rank()], loss, expected_loss)
    assert all_gather(torch.tensor(rank())).tolist() == list(range(world))  # no dims
    assert all_gather(torch.empty(0, 3)).shape == (world, 0, 3)
    assert reduce_scatter(torch.empty(world, 0)).shape == (1, 0)
    for op in ("max", "min", "prod"):  # whole numbers, and no gradient
        stack = _numbers(world, 4, 6, seed=3)
        assert torch.equal(reduce_scatter(stack[rank()].int(), op), REDUCTIONS[op](stack).chunk(world)[rank()].int())


def _broadcast_cases():
    world = world_size()
    weights = _numbers(world, 4, 6, seed=1)
    for dtype, root in itertools.product(DTYPES, range(world)):
        stack = _numbers(world, 4, 6, seed=2).requires_grad_()
        x = _own(stack, dtype, contiguous=False)
        y, expected_y = broadcast(x, root), stack[root]
        loss, expected_loss = (weights[rank()] * y.float()).sum(), (weights.sum(0) * expected_y).sum()
        _check(f"broadcast {root}", x, stack, y, expected_y, loss, expected_loss)
    # The other ranks may pass a mere buffer: they send their gradients all the same.
    x = torch.full((3,), float(rank()), requires_grad=rank() == world - 1)
    broadcast(x, world - 1).sum().backward()
    assert x.grad is None or x.grad.tolist() == [world] * 3
    assert (x.grad is None) == (rank() != world - 1)
    x = torch.ones(2, requires_grad=rank() != 0)
    assert not broadcast(x, 0).requires_grad or world == 1


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("cases", [_all_reduce_cases, _gather_and_scatter_cases, _broadcast_cases])
def test_values_and_gradients(ranks, cases, size):
    ranks(size).run(cases)


def _bmtrain_cases():
    """The two properties of BMTrain's own test, as they are stated there."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1,), float(rank() + 1), dtype=dtype, requires_grad=True)
        y = all_reduce(x, "prod")
        (y * y / 2).sum().backward()
        others = torch.tensor([float(r + 1) for r in range(world_size()) if r != rank()]).prod()
        assert x.grad.item() == (y * others).item()
    # One tensor used twice in one loss.
    x = torch.full((2,), float(rank() + 1), requires_grad=True)
    (all_reduce(x, "avg") * all_reduce(x, "max")).sum().backward()
    mean, most = (world_size() + 1) / 2, world_size()
    assert x.grad.tolist() == pytest.approx([most / world_size() + (mean if rank() + 1 == most else 0)] * 2)
    # Means of halves do not pass through an infinite sum.
    assert all_reduce(torch.full((1,), 40000.0, dtype=torch.float16), "avg").item() == 40000


def test_what_bmtrain_promises(ranks):
    ranks(4).run(_bmtrain_cases)


def _penalty(stack, call):
    """Sum of squared gradients of a loss that is not linear, over what ``call`` makes of a leaf."""
    leaf = stack.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf), leaf, create_graph=True)
    grad.square().sum().backward()
    return leaf.grad


def _second_order_cases():
    world = world_size()
    stack = torch.randn(world, world, 3, dtype=torch.float64)  # seeded alike
    weights = torch.randn(world, world, 3, dtype=torch.float64)
    cases = {
        "all_gather": (all_gather, lambda s, r: s, lambda w, r: w[r][:, None]),
        "all_reduce": (lambda x: all_reduce(x, "avg", grad="partial"), lambda s, r: s.mean(0), lambda w, r: w[r]),
        "reduce_scatter": (reduce_scatter, lambda s, r: s.sum(0)[r : r + 1], lambda w, r: w[r, :1]),
        "broadcast": (lambda x: broadcast(x, world - 1), lambda s, r: s[world - 1], lambda w, r: w[r]),
    }
    for name, (ours, reference, weight) in cases.items():
        own = _penalty(stack[rank()], lambda x, f=ours, w=weight: (w(weights, rank()) * f(x) ** 3).sum())
        expected = _penalty(
            stack,
            lambda s, f=reference, w=weight: sum((w(weights, r) * f(s, r) ** 3).sum() for r in range(world)),
        )
        torch.testing.assert_close(own, expected[rank()], msg=lambda text, name=name: f"{name}: {text}")
    with pytest.raises(Exception, match="cannot be differentiated again"):
        _penalty(stack[rank()], lambda x: all_reduce(x, "prod").square().sum())


def test_gradients_of_gradients(ranks):
    ranks(2).run(_second_order_cases)


def _along_an_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero"))
    x = torch.full((2,), float(rank()), requires_grad=True)
    for name, others in (("data", [rank() % 2, rank() % 2 + 2]), ("zero", [rank() // 2 * 2, rank() // 2 * 2 + 1])):
        for group in (mesh[name], mesh[name].get_group()):
            assert all_reduce(x, "sum", group).tolist() == [sum(others)] * 2
            assert all_reduce(x, "sum", comm=group).tolist() == [sum(others)] * 2
            assert broadcast(x, root=1, comm=group).tolist() == [others[1]] * 2
            assert torch.equal(all_gather(x, comm=group), all_gather(x, group))
            assert torch.equal(reduce_scatter(x, op="max", comm=group), all_reduce(x, "max", group)[:1])
            assert broadcast(x, 1, group).tolist() == [others[1]] * 2
            assert reduce_scatter(x, "avg", group).tolist() == [sum(others) / 2]
            gathered = all_gather(x, group)
            assert gathered.tolist() == [[other] * 2 for other in others]
            (gathered * (rank() + 1)).sum().backward()
            assert x.grad.tolist() == [sum(other + 1 for other in others)] * 2
            x.grad = None
    pair = dist.new_group([0, 1])
    with pytest.raises(Exception, match="one mesh axis"):
        all_reduce(x, group=mesh)
    if rank() > 1:
        with pytest.raises(RuntimeError, match=r"This rank is not in the group.*rank [23] of the world"):
            all_reduce(x, group=pair)
    else:
        assert all_reduce(x, group=pair).tolist() == [1, 1]


def test_groups_and_mesh_axes(ranks):
    ranks(4).run(_along_an_axis)

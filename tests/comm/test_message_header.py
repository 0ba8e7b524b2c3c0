"""What ranks are told when they do not do the same; and results, which may differ in length."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright import ConfigError, LaunchError
from meshwright.comm import all_gather, all_reduce, broadcast, gather_result, reduce_scatter
from meshwright.runtime import rank, world_size

ONE = torch.ones(4)
GRAD = torch.ones(4, requires_grad=True)
MISMATCHES = [
    (lambda: all_reduce(ONE), lambda: all_reduce(torch.ones(8)), r"float32 of shape \(8\).* on rank 1"),
    (lambda: all_reduce(ONE), lambda: all_reduce(ONE.half()), r"Got all_reduce.*float16"),
    (lambda: all_reduce(ONE), lambda: all_reduce(ONE, "max"), "op='max'"),
    (lambda: all_reduce(ONE), lambda: all_gather(ONE), r"Expected all_reduce\(op='sum'.*Got all_gather"),
    (lambda: reduce_scatter(ONE), lambda: reduce_scatter(torch.ones(2, 2)), r"\(2, 2\)"),
    (lambda: all_gather(ONE), lambda: all_gather(GRAD), "Got .*gradient required"),
    (lambda: broadcast(ONE), lambda: broadcast(ONE, 1), "root=1"),
    (lambda: broadcast(ONE), lambda: broadcast(torch.ones(3)), r"\(3\)"),
    (lambda: broadcast(GRAD), torch.no_grad()(lambda: broadcast(ONE)), r"Got rank 0 required, rank 1 off \(no_grad\)"),
    (lambda: gather_result(ONE), lambda: gather_result(torch.ones(4, 2)), r"rows of shape \(2\)"),
    (lambda: gather_result(ONE), lambda: gather_result(ONE.int()), "int32"),
]


def _mismatch(index):
    *calls, words = MISMATCHES[index]
    with pytest.raises(LaunchError, match=words) as caught:
        calls[rank()]()
    assert caught.value.agreed
    assert all_reduce(torch.tensor(1)).item() == 2  # nothing is left half-done between the ranks
    return str(caught.value)


def test_a_mismatch_is_one_error_on_every_rank(ranks):
    for index in range(len(MISMATCHES)):
        first, second = ranks(2).run(_mismatch, index)
        assert first == second
    # Where backward sends nothing, a rank may do without a gradient.
    ranks(2).run(_one_sided_gradient)


def _one_sided_gradient():
    x = torch.ones(2, requires_grad=rank() == 0)
    y = all_reduce(x)
    assert y.requires_grad == (rank() == 0)


REFUSALS = [
    (lambda x: all_reduce(x, "summ"), r"did you mean 'sum'.*Expected one of sum, avg, max, min, prod"),
    (lambda x: all_reduce(x, grad="partially"), "did you mean 'partial'"),
    (lambda x: all_gather(x, grad=None), "Expected one of replicated, partial"),
    (lambda x: reduce_scatter(x, "mix"), "did you mean 'min'.*Expected one of sum, avg"),
    (lambda x: all_gather(x, dist.group.WORLD, comm=dist.group.WORLD), "given two groups.*leave comm out"),
    (lambda x: reduce_scatter(x), r"multiple of 2.*Got shape \[3\]"),
    (lambda x: reduce_scatter(x.sum()), r"Got shape \[\]"),
    (lambda x: all_reduce(x.int(), "avg"), "no mean of whole numbers"),
    (lambda x: reduce_scatter(x.int(), "avg"), "no mean of whole numbers"),
    (lambda x: broadcast(x, 2), r"root is not a rank of the group. Expected 0..1. Got 2"),
    (lambda x: all_gather(x[(None,) * 60]), "too many dims"),
    (lambda x: all_gather([x]), "Got list"),
    (lambda x: all_reduce(DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Replicate()])), "Got DTensor"),
]


def _refusals():
    for call, words in REFUSALS:
        with pytest.raises(ConfigError, match=words):
            call(torch.ones(3))


def test_arguments_that_cannot_be(ranks):
    ranks(2).run(_refusals)


@pytest.mark.parametrize("call", [all_reduce, all_gather, reduce_scatter, broadcast, gather_result])
def test_before_init_distributed(call):
    with pytest.raises(LaunchError, match=r"init_distributed\(\) before it.*What to do"):
        call(torch.ones(1))


def _results():
    world, own = world_size(), rank()
    rows = torch.arange(own * 3.0, dtype=torch.float64).view(own, 3)  # rank 0 has none
    expected = torch.cat([torch.arange(r * 3.0, dtype=torch.float64).view(r, 3) for r in range(world)])
    assert torch.equal(gather_result(rows.requires_grad_()), expected)
    assert not gather_result(rows).requires_grad
    strided = torch.arange(8).view(4, 2).mT[:, ::2] + own
    assert not strided.is_contiguous()
    assert torch.equal(gather_result(strided), torch.cat([strided - own + r for r in range(world)]))
    assert gather_result(torch.tensor(own % 2 == 1)).tolist() == [r % 2 == 1 for r in range(world)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_of_any_length(ranks, size):
    ranks(size).run(_results)

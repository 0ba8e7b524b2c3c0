"""Exchanges by way of the host, which ``make gpu`` uses between ranks of one GPU: tried with tensors of the CPU."""

import pytest
import torch
import torch.distributed as dist

from tests import staged_gloo
from tests.methods import pair_runs
from tests.methods.pair_runs import FP32_LIMIT, ROWS, Case


def exchanges():
    """Every collective and message, by way of the host, as one list of what arrives here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, parts = torch.arange(2.0) + 10 * rank, [torch.zeros(2) for _ in range(size)]
    summed, several, sent = own.clone(), [own.clone(), own + 1], own.clone()
    late = dist.all_reduce(summed, async_op=True)
    assert late.wait()
    assert late.get_future().value()[0] is summed
    dist.all_reduce_coalesced(several)
    dist.all_gather(parts, own)
    dist.broadcast(sent, src=1)
    received = torch.zeros(2)
    # Both receive first: whoever waited for it at once would never send.
    messages = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, own, 1 - rank)]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    gathered, scattered, reduced, swapped = torch.zeros(2 * size), torch.zeros(1), own.clone(), torch.zeros(2)
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(scattered, own)
    dist.all_to_all_single(swapped, own)
    dist.reduce(reduced, dst=0)
    collected = [torch.zeros(2) for _ in range(size)]
    dist.gather(own, collected if rank == 0 else None, dst=0)
    handed = torch.zeros(2)
    dist.scatter(handed, parts if rank == 0 else None, src=0)
    every = [summed, *several, *parts, sent, received, gathered, scattered, swapped, handed]
    if rank == 0:
        every += [reduced, *collected]
    return [each.tolist() for each in every]


def exchanges_both_ways():
    staged_gloo.calls.clear()
    plain = exchanges()
    assert not staged_gloo.calls
    with staged_gloo.carried_by_host(staged_gloo.ANY_DEVICE):
        carried = exchanges()
        dist.barrier()
    calls = dict(staged_gloo.calls)
    dist.barrier()
    assert calls == staged_gloo.calls
    assert not staged_gloo._underway
    return plain, carried, calls


def test_all_that_is_sent_arrives(ranks):
    for plain, carried, calls in ranks(2).run(exchanges_both_ways):
        assert carried == plain
        assert {"send", "recv_", "barrier", "_allgather_base_", "_reduce_scatter_base_"} <= calls.keys()


def train(case):
    staged_gloo.calls.clear()
    with staged_gloo.carried_by_host(staged_gloo.ANY_DEVICE):
        return pair_runs.train(case), sum(staged_gloo.calls.values())


def check(ranks, method):
    case = Case((method,))
    answers = ranks(case.world).run(train, case)
    assert pair_runs.worst_difference(case, [own for own, _ in answers]) < FP32_LIMIT + ROWS[method].drift
    assert all(calls > pair_runs.STEPS for _, calls in answers)


@pytest.mark.parametrize("method", ["fsdp", "pipeline_parallel"])
def test_methods_train_over_it(ranks, method):
    check(ranks, method)


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name, row in ROWS.items() if row.axes])
def test_every_method_that_divides_a_model_trains_over_it(ranks, method):
    check(ranks, method)

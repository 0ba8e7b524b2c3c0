from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright import ConfigError, LaunchError
from meshwright.comm import recv_activations, send_activations
from meshwright.runtime import rank, world_size

TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).mT,
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.ones(1, 1, 2, 1, 1, 1, 1, 3, dtype=torch.float16),
    torch.tensor([True, False]),
    torch.arange(4, dtype=torch.int64)[::2],
    torch.empty(0, 5),
]


def _travel():
    for tensor in TENSORS:
        if rank() == 0:
            handle = send_activations(tensor, 1)
            assert not handle.requires_grad
        else:
            received = recv_activations(0)
            assert torch.equal(received, tensor)
            assert received.dtype == tensor.dtype
            assert received.is_contiguous()
            assert not received.requires_grad


def test_shape_and_dtype_travel_along(ranks):
    ranks(2).run(_travel)


def _pipeline(dtype):
    """Each rank multiplies by its number + 2; two micro-batches are under way at once, then both go back."""
    weight = torch.tensor(float(rank() + 2), dtype=dtype, requires_grad=True)
    first, last = rank() == 0, rank() == world_size() - 1
    inputs, ends = [], []
    for batch in range(2):
        x = torch.full((2, 3), batch + 1.0, dtype=dtype).mT.requires_grad_() if first else recv_activations(rank() - 1)
        x.retain_grad()
        y = weight * x
        ends.append(y.sum() if last else send_activations(y, rank() + 1))
        inputs.append(x)
    for end in ends:
        end.backward()
    product = torch.tensor([float(r + 2) for r in range(world_size())]).prod().item()
    # d(sum)/d(weight) = 6 elements * the other weights * (1 + 2)
    assert weight.grad.item() == 6 * 3 * product / (rank() + 2)
    behind = torch.tensor([float(r + 2) for r in range(rank(), world_size())]).prod().item()
    assert all(torch.equal(x.grad, torch.full_like(x, behind)) for x in inputs)


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_travel_back(ranks, size):
    for dtype in (torch.float32, torch.bfloat16):
        ranks(size).run(_pipeline, dtype)


def _added_to_the_loss():
    """The returned zero joins a loss of the sender's own; a scaled loss does not scale the peer's gradient again."""
    if rank() == 0:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        loss = x.sum() + send_activations(3 * x, 1)
        assert loss.item() == 3
        (loss * 10).backward()
        assert x.grad.tolist() == [10 + 3 * 7, 10 + 3 * 7]
    else:
        (recv_activations(0) * 7).sum().backward()


def _within_an_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero"))["data"]
    if rank() < 2:
        send_activations(torch.tensor(rank()), 1, mesh)
    else:
        assert recv_activations(0, mesh).item() == rank() - 2


def _refusals():
    for peer in (rank(), -1, world_size()):
        for call in (lambda peer=peer: send_activations(torch.ones(1), peer), lambda peer=peer: recv_activations(peer)):
            with pytest.raises(ConfigError, match=r"peer is not a rank|cannot send to itself"):
                call()


def _gradient_expected_of_nobody():
    if rank() == 0:
        send_activations(torch.ones(2, requires_grad=True), 1)
    else:
        with torch.no_grad(), pytest.raises(LaunchError, match="received here under no_grad"):
            recv_activations(0)


def _out_of_order():
    """Rank 1 sends an activation where rank 0 expects the gradient of its own, of the same shape."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    x = torch.ones(256, dtype=torch.float32, requires_grad=True)
    if rank() == 0:
        handle = send_activations(x, 1, group)
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closed"):
            handle.backward()
        assert x.grad is None
    else:
        recv_activations(0, comm=group)
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closed"):
            send_activations(torch.zeros(256), 0, group)


def test_an_activation_is_never_taken_for_a_gradient(ranks):
    ranks(2).run(_out_of_order)


def test_the_handle_joins_a_loss(ranks):
    ranks(2).run(_added_to_the_loss)


def test_peers_count_within_the_group(ranks):
    ranks(4).run(_within_an_axis)


def test_peers_that_cannot_be(ranks):
    ranks(1).run(_refusals)
    ranks(2).run(_refusals)


def test_a_gradient_is_expected_under_no_grad(ranks):
    ranks(2).run(_gradient_expected_of_nobody)

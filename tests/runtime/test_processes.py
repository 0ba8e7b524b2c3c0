import pytest
import torch

from meshwright import runtime
from meshwright.errors import DataError


def _mean_of_ranks():
    value = torch.tensor([float(runtime.rank())])
    mean = runtime.sum_loss(value)
    return runtime.rank(), runtime.world_size(), mean.item(), value.item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sum_loss_is_the_mean_and_leaves_its_argument(ranks, size):
    for rank, (seen_rank, seen_world, mean, untouched) in enumerate(ranks(size).run(_mean_of_ranks)):
        assert (seen_rank, seen_world, untouched) == (rank, size, rank)
        assert mean == pytest.approx((size - 1) / 2)


def _fail_on(rank):
    try:
        with runtime.same_on_every_rank():
            if runtime.rank() == rank:
                raise DataError("Bad shard", expected="9", got="8", fix="look")
    except DataError as error:
        return str(error), error.got, error.agreed, getattr(error, "__notes__", [])
    return None


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    answers = ranks(2).run(_fail_on, 1)
    assert {answer[:3] for answer in [tuple(a) for a in answers]} == {
        ("Bad shard. Expected 9. Got 8. What to do: look.", "8", True)
    }
    assert "rank 1" in answers[0][3][0]
    assert ranks(2).run(_fail_on, 7) == [None, None]

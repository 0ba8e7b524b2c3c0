import torch
from hypothesis import given, strategies as st

from meshwright.optim.adam.bucket_update import cut


@given(st.lists(st.integers(0, 5000), max_size=8), st.sampled_from([1, 1024, 1500, 4096, None]))
def test_every_element_is_in_one_piece_in_order_and_no_bucket_is_too_large(sizes, limit):
    parameters = [torch.zeros(size) for size in sizes]
    buckets = cut(parameters, limit)
    found = [(id(p.parameter), i) for bucket in buckets for p in bucket for i in range(p.start, p.stop)]
    assert found == [(id(p), i) for p in parameters for i in range(p.numel())]
    assert all(bucket for bucket in buckets)
    for bucket in buckets:
        assert limit is None or sum(piece.stop - piece.start for piece in bucket) <= max(2048, limit)
        assert all(piece.start % 1024 == 0 for piece in bucket)
        assert all(piece.whole == (piece.stop - piece.start == piece.parameter.numel()) for piece in bucket)
    assert limit is not None or len(buckets) <= 1


def test_a_tensor_with_gaps_stays_whole():
    gaps = torch.zeros(100, 200)[:, :150]
    ((piece,),) = cut([gaps], 1024)
    assert piece.whole
    assert piece.of(gaps) is gaps

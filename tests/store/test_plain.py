import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshwright.errors import CheckpointError
from meshwright.store.entries import from_plain, to_plain

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_values_survive_json(value):
    back = from_plain(json.loads(json.dumps(to_plain(value, "value"))))
    assert back == value
    assert type(back) is type(value)


def test_counters_numpy_numbers_and_tags():
    for value in (Counter({3: 2, 5: 1}), {"__tuple__": [1]}, {"__items__": 1}, {"a": float("-inf")}):
        back = from_plain(json.loads(json.dumps(to_plain(value, "value"))))
        assert back == value
        assert type(back) is type(value)
    assert to_plain(np.int64(3), "value") == 3
    back = from_plain(to_plain(torch.tensor([0.1], dtype=torch.float64), "value"))
    assert back.dtype == torch.float64
    assert back.tolist() == [0.1]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(2), len, b"bytes"])
def test_what_only_pickle_could_keep_is_refused(value):
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] cannot be stored.*never pickle"):
        to_plain({"a": [0, value]}, "extra")

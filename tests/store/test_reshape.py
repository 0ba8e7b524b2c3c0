"""What one strategy saves, every other loads: see reshape_runs.py, and docs/reshape_matrix.md for what came of it."""

import pytest

from tests.store.reshape_matrix import Saved


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"), ranks)


def test_some_checkpoints_load_where_all_is_laid_out_otherwise(saved):
    found = saved.check("pipeline 2, zbv", ["tensor 2, sequence", "zero2, checkpoint"])
    assert all(isinstance(apart, float) for apart in found.values()), found

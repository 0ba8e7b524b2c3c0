"""What one strategy saves, every other loads: see reshape_runs.py, and docs/reshape_matrix.md for what came of it."""

import pytest

from tests.store.reshape_matrix import FIGURES, PAGE, Saved, figures, key, page
from tests.store.reshape_runs import PAIRS, ROWS, family


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"), ranks)


def test_some_checkpoints_load_where_all_is_laid_out_otherwise(saved):
    found = saved.check("pipeline 2, zbv", ["tensor 2, sequence", "zero2, checkpoint"])
    assert all(isinstance(apart, float) for apart in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_every_checkpoint_loads_as_the_page_says(saved, name):
    found = saved.check(name, [source for source, into in PAIRS if into == name])
    told = figures()
    for source, value in found.items():
        page_says = told[key(source, name)]
        assert value == page_says if isinstance(value, str) else isinstance(page_says, float)


def test_the_page_is_what_was_measured():
    assert PAGE.read_text() == page(figures()), "python -m tests.store.reshape_matrix --page writes it"
    assert figures().keys() == {key(*pair) for pair in PAIRS}, f"python -m tests.store.reshape_matrix fills {FIGURES}"
    for source, name in PAIRS:
        apart = figures()[key(source, name)]
        assert isinstance(apart, str) or apart <= ROWS[name].tolerance, (source, name, apart)
    assert sum(family(name) == ("dense", "adamw") for name in ROWS) >= 24

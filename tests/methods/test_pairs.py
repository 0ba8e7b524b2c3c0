"""Every pair of methods: refused by the law, or trained as one plain process trains; see pair_runs.py."""

import pytest

from meshwright.methods import known_methods
from tests.methods.method_matrix import FIGURES, PAGE, figures, key, page
from tests.methods.pair_runs import PAIRS, ROWS, case_of, refusal, train, worst_difference

TRAINED = [pair for pair in PAIRS if refusal(case_of(*pair)) is None]
SHORT = TRAINED[5::42]
"""Some of them, on every run of the tests."""


def cases():
    for pair in TRAINED:
        yield pytest.param(*pair, marks=[] if pair in SHORT else [pytest.mark.long], id="-".join(pair))


@pytest.mark.parametrize(("first", "second"), cases())
def test_a_pair_trains_as_one_process(ranks, first, second):
    case = case_of(first, second)
    limit = case.limit(lambda alone: ranks(1).run(train, alone))
    assert worst_difference(case, ranks(case.world).run(train, case)) <= limit


def test_every_method_is_in_every_pair():
    assert set(ROWS) == {method.method_name for method in known_methods()}
    assert len(PAIRS) == len(ROWS) * (len(ROWS) + 1) // 2


def test_the_page_is_what_the_law_refuses_and_what_was_measured():
    assert PAGE.read_text() == page(figures()), "python -m tests.methods.method_matrix --page writes it"
    for pair in TRAINED:
        assert isinstance(figures().get(key(*pair)), float), f"{pair}: python -m tests.methods.method_matrix runs it"
    assert len(figures()) == len(TRAINED), f"{FIGURES.name} has figures of pairs that are refused"

"""Plain data on a line, and numbers of samples that lie on one."""

import pytest

from meshwright.cost import Op
from meshwright.planner.trace.tracer import NotLinearError, Samples, on_the_line


def test_numbers_go_on_and_all_else_stays():
    first, second = (Op("matmul", 2, 3, 4), ("a", 5)), (Op("matmul", 4, 3, 4), ("a", 8))
    assert on_the_line(first, second, (1, 2), 5) == (Op("matmul", 10, 3, 4), ("a", 17))
    shared = (1, 2)
    kept, again = on_the_line((shared, shared), ((2, 2), (2, 2)), (1, 2), 3)
    assert kept == again == (3, 2)


@pytest.mark.parametrize(
    ("first", "second"), [((1,), (1, 2)), ("a", "b"), (1, True), (1, 2), ((True,), (False,)), (1, None)]
)
def test_what_is_on_no_line(first, second):
    with pytest.raises(NotLinearError):
        on_the_line(first, second, (1, 3), 4)


def test_a_third_size_decides():
    known = Samples()
    for samples in (1, 2, 4):
        assert known.continued("kind", samples) is None
        known.add("kind", samples, (samples * 10 + (samples == 1),))
    assert known.continued("kind", 8) is None  # two make a line, and nothing yet says that there is one
    known.add("kind", 8, (80,))
    assert known.continued("kind", 16) == (160,)
    assert known.continued("kind", 1) is None
    known.add("other", 2, (7,))
    known.add("other", 4, (9,))
    assert known.continued("other", 8) == (13,)  # for the model's other runs lie on their lines


def test_a_bend_is_trusted_by_no_one():
    known = Samples()
    for samples, value in ((2, 4), (4, 16), (8, 64)):
        known.add("kind", samples, (value,))
    assert known.continued("kind", 16) is None
    known.add("other", 2, (4,))
    known.add("other", 4, (8,))
    assert known.continued("other", 8) is None

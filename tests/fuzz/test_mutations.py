"""What changes files for a guided fuzzer never fails itself: each failure would cost it the corpus it has in memory."""

from random import Random

import pytest

from tests.fuzz.mutations import changed
from tests.fuzz.parsers import PARSERS, Trial, write_valid

KINDS = {parser.kind: name for name, parser in PARSERS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_changes_upon_changes_never_fail(tmp_path, kind):
    write_valid(tmp_path)
    valid = Trial(KINDS[kind], tmp_path).valid
    rng, content, different = Random(0), valid, 0
    for number in range(600):
        after = changed(kind, content, rng, lambda part: part[: len(part) // 2] + bytes([rng.randrange(256)]))
        different += after != content
        content = valid if number % 40 == 39 else after
    assert different > 300


def test_numbers_that_no_float_holds_are_multiplied_all_the_same():
    content = b"1" + b"0" * 400
    assert {changed("json", content, Random(number), lambda part: part) for number in range(400)} > {b"-" + content}

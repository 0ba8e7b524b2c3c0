"""Whatever a file holds, reading it ends in a value or in Meshwright's own error, and in nothing else.

``make fuzz`` gives every parser five minutes of hypothesis (``--fuzz-s``) and of atheris; ``make test`` a glance.
"""

import time

import pytest
from hypothesis import Phase, given, seed, settings

from tests.fuzz.inputs import files
from tests.fuzz.parsers import PARSERS, Trial, regressions, write_valid

GLANCE = 12  # examples of each parser in make test
FEW = 4
SLOW = (
    "checkpoint",
    "plans",
    "planned strategy",
    "transformers",
    "published runs",
    "cluster",
    "cluster name",
    "model name",
)
KNOWN = [(name, file) for name in PARSERS for file in regressions(name)]


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A directory with one valid file for every parser."""
    folder = tmp_path_factory.mktemp("valid")
    write_valid(folder)
    return folder


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.timeout(0)
def test_nothing_but_the_documented_error(valid, parser, request):
    trial, duration_s = Trial(parser, valid), request.config.getoption("--fuzz-s")
    examples = 500 if duration_s else FEW if parser in SLOW else GLANCE
    ends_s, number = time.process_time() + duration_s, 0  # pauses do not count

    def tried(content):
        trial(content)

    with trial.restoring():
        while number == 0 or time.process_time() < ends_s:
            number += 1
            options = settings(max_examples=examples, database=None, phases=[Phase.generate, Phase.shrink])
            seed(number)(options(given(files(trial.valid))(tried)))()
    trial.valid_is_read()


@pytest.mark.parametrize(("parser", "file"), KNOWN, ids=lambda each: getattr(each, "name", each))
def test_what_was_found_once_stays_mended(valid, parser, file):
    trial = Trial(parser, valid)
    with trial.restoring():
        trial(file.read_bytes())

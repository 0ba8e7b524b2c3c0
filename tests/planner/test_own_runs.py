"""Models on which no term of a peak was found, too (``benchmarks/own_runs.py`` has every strategy)."""

import pytest
from benchmarks import own_runs

from meshwright.runtime import gather_objects

pytest.importorskip("transformers")


def peaks(model, names):
    subject = own_runs.SUBJECTS[model]
    cases = {name: case for name, case in subject.cases(2, quick=False).items() if name in names}
    return {name: max(gather_objects(own_runs.peak_of(subject, *case))) for name, case in cases.items()}


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=pytest.mark.long if each == "gpt" else ()) for each in sorted(own_runs.SUBJECTS)]
)
def test_state_is_as_predicted_and_so_is_the_peak(ranks, model):
    found = ranks(2).run(peaks, model, ("fsdp", "pipeline 1f1b, 4"))[0]
    assert len(found) == 2
    assert all(abs(predicted / counted - 1) < 0.02 for counted, predicted in found.values()), found


def test_what_a_model_cannot_take_is_left_out():
    missing = {
        (model, world): own_runs.CASES[world].keys() - subject.cases(world, quick=False).keys()
        for model, subject in own_runs.SUBJECTS.items()
        for world in own_runs.CASES
    }
    assert {each: names for each, names in missing.items() if names} == {
        ("qwen2", 4): {"tensor 4"},
        ("vit", 2): {"tensor, sequence"},
    }

"""The pages about upstream test suites say what the recorded runs say."""

import importlib

import pytest
from upstream.page import page, page_path, read_results, results_path

SYSTEMS = ("bmtrain", "colossalai", "atorch", "fairseq")


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_page_is_what_was_recorded(name):
    suite, results = importlib.import_module(f"upstream.{name}").SUITE, read_results(name)
    assert results_path(name).exists()
    assert page_path(name).read_text() == page(suite, results)


@pytest.mark.parametrize("name", SYSTEMS)
def test_nothing_fails_and_every_verdict_has_its_reason(name):
    records = read_results(name)["files"]
    assert [each["file"] for each in records if each["verdict"] == "fails"] == []
    assert [each["file"] for each in records if each["verdict"] != "as it is" and not each["why"]] == []

"""Cases of the random strategies that once went wrong, and what the drawing promises."""

import json
from pathlib import Path

import pytest

from tests.fuzz.strategies import running
from tests.fuzz.strategies.drawing import Case, draw

KEPT = sorted((Path(__file__).parent / "regressions" / "strategies").glob("*.json"))


def test_a_seed_is_one_case():
    cases = [draw(f"{number}.0") for number in range(40)]
    assert cases == [Case.read(json.loads(json.dumps(case.record()))) for case in cases]
    assert len({case.model for case in cases}) > 8
    assert {2, 4} < {case.world for case in cases}


LONG = {  # those of four ranks and more; tests/cost holds the mechanism of the first
    "a_later_stage_runs_what_comes_before_the_blocks", "a_row_layer_recomputed_holds_its_result",
    "a_stage_lets_go_what_lies_behind_its_last_weights",
    "a_ring_holds_what_it_receives", "experts_accumulate_beside_shards", "experts_in_shared_memory",
    "inputs_of_split_layers_let_go", "offload_all_beside_experts", "offload_all_beside_tensor",
    "stages_begin_to_accumulate_one_by_one",
    "whole_gradients_are_reduced_block_by_block",
}  # fmt: skip


@pytest.mark.parametrize(
    "path", [pytest.param(each, id=each.stem, marks=pytest.mark.long if each.stem in LONG else ()) for each in KEPT]
)
def test_what_went_wrong_once(ranks, path):
    case = Case.read(json.loads(path.read_text()))
    trained = ranks(case.world).run(running.train, case)
    assert {each.refused for each in trained} == {""}
    assert running.findings(case, trained) == []


@pytest.mark.long
def test_rounding_is_told_from_wrong_numbers(ranks):
    # T5 on tensor ranks under AdamW: 1.0e-4 apart in float32, 1e-15 in float64.
    case = draw("230.0")
    wide = ranks(case.world).run(running.train_in_float64, case)
    assert running.is_rounding(case, wide)
    wide[0].losses[-1] *= 1 + 1e-7
    assert not running.is_rounding(case, wide)

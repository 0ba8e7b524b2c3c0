"""Published runs: reading tables of them, predicting each, and saying how far off the predictions are."""

from meshwright.planner.published.case import NotCovered, case_of
from meshwright.planner.published.described import Case
from meshwright.planner.published.predict import Prediction, predict_case, predict_row, published_tokens_per_s
from meshwright.planner.published.rows import COLUMNS, Row, read_rows
from meshwright.planner.published.score import Scores, kendall_tau, merged, score

__all__ = [
    "COLUMNS",
    "Case",
    "NotCovered",
    "Prediction",
    "Row",
    "Scores",
    "case_of",
    "kendall_tau",
    "merged",
    "predict_case",
    "predict_row",
    "published_tokens_per_s",
    "read_rows",
    "score",
]

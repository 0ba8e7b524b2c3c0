"""Published runs: read tables of them, predict each, and say how far off the predictions are."""

from published_runs.as_user import Kernels as Kernels
from published_runs.cases import Case as Case, NotCovered as NotCovered, case_of as case_of
from published_runs.scores import (
    Prediction as Prediction,
    Scores as Scores,
    kendall_tau as kendall_tau,
    merged as merged,
    predict_case as predict_case,
    predict_row as predict_row,
    published_tokens_per_s as published_tokens_per_s,
    score as score,
)
from published_runs.table_rows import COLUMNS as COLUMNS, Row as Row, read_rows as read_rows

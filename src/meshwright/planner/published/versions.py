"""What a project did when a table of it was made, where that changed later."""

from __future__ import annotations

import dataclasses

from meshwright.planner.published.conventions import Convention, convention_of
from meshwright.planner.published.rows import Row


def convention_of_row(row: Row) -> Convention:
    """The convention of a row's source, with what a cell or its table's title tells of the version."""
    source = row.source.lower()
    # BMTrain's table compares with DeepSpeed and Megatron-LM, whose rows have a ZeRO stage.
    if "bmtrain" in source and row.text("zero_stage"):
        return dataclasses.replace(convention_of("deepspeed"), batch_of_device=True)
    convention = convention_of(row.source)
    if any(word in source for word in ("llm-foundry", "llmfoundry")):
        return _llm_foundry(row, convention)
    return convention


def _llm_foundry(row: Row, convention: Convention) -> Convention:
    """Its first tables (precision ``bf16``, mode PURE) are of May 2023, with torch 1.13; later ones of torch 2.1.

    Recomputation is not reentrant in any (``submit_benchmarks.py``), but torch stops it at the last saved tensor only
    since 2.1. Mode DEFAULT reduces gradients in fp32. The sweep of January 2024 on 128 H100 and more sets BACKWARD_PRE.
    """
    if "PURE" in row.notes or "amp" not in row.text("precision").lower():
        return dataclasses.replace(convention, reentrant=True)
    large = "large scale" in row.source.lower()
    return dataclasses.replace(convention, reduce="fp32", gathers_ahead=large)

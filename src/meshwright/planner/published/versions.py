"""What a project did when a table of it was made, where that changed later."""

from __future__ import annotations

import dataclasses
import re

from meshwright.planner.published.convention import Convention
from meshwright.planner.published.conventions import convention_of
from meshwright.planner.published.rows import Row

_FUSED_SINCE = 2301  # as arXiv counts: what was written in 2022 trained before FlashAttention (May 2022) was common
_OF_2025 = re.compile(r"(?<![\d.])v?25\.(?:0[1-9]|1[0-2])(?!\d)")
# "recomputation counted" beside TFLOPS; a source that prints both figures says so otherwise (``HFU=``).
_COUNTED = re.compile(
    r"recomput\w* (?:is |are )?counted|(?:count|includ)\w* (?:full )?recomput|with recomputation\b", re.I
)


def convention_of_row(row: Row) -> Convention:
    """The convention of a row's source, with what a cell, a note or its table's title tells of the version."""
    source = row.source.lower()
    # BMTrain's table compares with DeepSpeed and Megatron-LM, whose rows have a ZeRO stage.
    if "bmtrain" in source and row.text("zero_stage"):
        return dataclasses.replace(convention_of("deepspeed"), batch_of_device=True)
    convention = _of_its_year(row, _dated(row, convention_of(row.source)))
    if any(word in source for word in ("llm-foundry", "llmfoundry")):
        return _llm_foundry(row, convention)
    if any(word in source for word in ("bench_cluster", "old_bench")):  # nanotron of July 2024 (``build_model``)
        convention = dataclasses.replace(convention, balances_head="beyond")
    return dataclasses.replace(convention, flops="hardware") if _COUNTED.search(row.notes) else convention


def _dated(row: Row, convention: Convention) -> Convention:
    """Of a project that is not known: its attention, by its article's date. Megatron-LM has no ZeRO 3: it compares."""
    if convention.words and not convention.fused_attention and re.match(r"(?:zero)?\W*3", row.text("zero_stage"), re.I):
        return convention_of("deepspeed")
    found = re.search(r"arxiv\W{0,2}(\d{4})\.\d{4,5}", row.text("source"), re.I)
    early = found is not None and int(found.group(1)) < _FUSED_SINCE
    if not convention.words and (early or "mingpt" in row.text("source").lower()):
        return dataclasses.replace(convention, fused_attention=False)
    return convention


def _of_its_year(row: Row, convention: Convention) -> Convention:
    """NVIDIA's containers are numbered by year and month; Blackwell's first devices came in February 2025."""
    if convention.vendor_attention and _OF_2025.search(row.source):
        return dataclasses.replace(convention, early_on=(*convention.early_on, "B200"))
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

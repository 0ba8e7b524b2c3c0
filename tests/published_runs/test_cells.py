"""Cells as tables spell them, and what a source's name or note tells of how it trained and counted."""

from pathlib import Path

import pytest
from published_runs.cases import rank_memory
from published_runs.conventions import convention_of

from published_runs import NotCovered, Row, case_of, predict_row, read_rows, score

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
CELLS = {
    "source": "a page", "model": "Llama-3-8B", "gpu": "H100", "n_gpus": "64", "zero_stage": "3", "seq": "8192",
    "micro_batch": "1", "global_batch": "64", "precision": "bf16", "ac": "full", "tokens_per_s_per_gpu": "7000",
}  # fmt: skip


def row(**cells):
    return Row(0, {**CELLS, **cells})


@pytest.mark.parametrize(
    ("text", "stage"),
    [("FSDP2", 3), ("ZeRO-1", 1), ("_HYBRID_SHARD_ZERO2", 2), ("os+g", 2), ("P_os", 1), ("MiCS", 3), ("DDP", 0)],
)
def test_zero_stages(text, stage):
    assert case_of(row(zero_stage=text)).zero_stage == stage


@pytest.mark.parametrize(
    ("text", "runs_again"),
    [("gradient checkpointing", True), ("y", True), ("uniform 1", True), ("enabled", True), ("SAC", True),
     ("checkpoint=False", False), ("no recompute", False), ("w/o", False), ("selective-core-attn", False)],
)  # fmt: skip
def test_recomputation(text, runs_again):
    case = case_of(row(ac=text, gpu="H200"))
    assert ("recomputes" in " ".join(case.assumed) or "checkpoint" in case.strategy) == (runs_again)


@pytest.mark.parametrize(("text", "compiled"), [("torch.compile", True), ("on", True), ("no compile", False)])
def test_compilation(text, compiled):
    assert case_of(row(compile=text)).run.impl.compiled is compiled


def test_units_of_figures():
    every = [{"tokens_per_s_per_gpu": "448000 total"}, {"tflops_per_gpu": "0.4 PFLOPS"}, {"tflops_per_gpu": "4e14"},
             {"mfu": "MFU 40.43 %"}, {"mfu": "HFU 53.91 %"}]  # fmt: skip
    found = [predict_row(row(**{"tokens_per_s_per_gpu": "", **cells})) for cells in every]
    assert [round(p.published_tokens_per_s_per_gpu, -2) for p in found] == [7000, 6900, 6900, 6900, 6900]
    for text in ("65536 MiB", "65536", "64 GB"):
        assert predict_row(row(peak_mem_gib=text)).published_peak_bytes == 2**36


def test_lengths_batches_and_devices():
    case = case_of(row(seq="8k", global_batch="4M", n_gpus="8x8"))
    assert (case.shape.seq, case.global_batch, case.cluster.num_devices) == (8192, 488, 64)
    assert case_of(row(n_gpus="8 nodes")).cluster.num_devices == 64


@pytest.mark.parametrize(
    ("model", "layers", "hidden"),
    [("Qwen2.5-7B", 28, 3584), ("TinyLlama 1.1B", 22, 2048), ("gpt2-xl", 48, 1600), ("BLOOM-176B", 70, 14336)],
)
def test_models_by_name(model, layers, hidden):
    shape = case_of(row(model=model, seq="2048")).shape
    assert (shape.layers, shape.hidden) == (layers, hidden)


@pytest.mark.parametrize("model", ["T5-11B", "Mamba-2.8B", "Switch-C"])
def test_what_is_no_decoder_of_equal_blocks_is_not_taken_for_one(model):
    with pytest.raises(NotCovered, match="no decoder of equal blocks"):
        case_of(row(model=model, layers="24", hidden="1024"))


def test_recomputation_that_a_source_or_a_note_counts():
    plain = predict_row(row(tokens_per_s_per_gpu="", tflops_per_gpu="400")).published_tokens_per_s_per_gpu
    for source in ("a page [recomputation counted]", "Megatron-DeepSpeed", "Narayanan et al. 2021"):
        counted = predict_row(row(source=source, tokens_per_s_per_gpu="", tflops_per_gpu="400"))
        assert counted.published_tokens_per_s_per_gpu == pytest.approx(0.75 * plain, rel=0.05)


def test_attention_of_articles_before_it_was_fused():
    assert not case_of(row(source="Zeng et al. arXiv 2210.02414")).run.impl.fused_attention
    assert case_of(row(source="Touvron et al. arXiv 2302.13971")).run.impl.fused_attention


def test_megatron_of_2021_is_predicted_as_it_was_published():
    rows = [each for each in read_rows(DATA / "other_runs.csv") if "2104.04473" in each.source]
    figures = score([each for each in rows if each.text("zero_stage") == "0"][::3]).as_json()
    assert figures["covered"] == figures["rows"] == 6
    assert figures["time_mape"] < 0.03


def test_bridge_moves_as_many_blocks_to_the_host_as_its_recipes():
    wide = {"source": "Megatron-Bridge", "model": "Llama-3-70B", "micro_batch": "2", "global_batch": "256", "ac": ""}
    offloaded = [case_of(row(**wide, precision="FP8", gpu=gpu)) for gpu in ("GB200", "GB300")]
    assert [case.strategy.get("offload").activations for case in offloaded] == [0.5, 0.25]
    assert all(rank_memory(case).fits for case in offloaded)


def test_torchs_stages_keep_buffers():
    cells = {"model": "Llama-3.1-70B", "pp": "8", "tp": "8", "n_gpus": "128", "micro_batch": "8", "global_batch": "16"}
    titan, other = (rank_memory(case_of(row(**cells, source=source))) for source in ("torchtitan", "a page"))
    assert convention_of("torchtitan").keeps_stages
    assert titan.counted_bytes > titan.peak.reserved_bytes
    assert other.counted_bytes < 1.06 * other.peak.reserved_bytes

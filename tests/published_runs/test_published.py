"""The committed figures on published runs hold, and other tables are read with care."""

import json
import re
import statistics
from pathlib import Path
from typing import get_args

import pytest
from benchmarks import published
from benchmarks.fit import cross_validated
from hypothesis import given, settings, strategies as st
from published_runs.cases import rank_memory
from published_runs.conventions import convention_of, convention_of_row
from published_runs.scores import predict_as_user

from meshwright.errors import DataError
from published_runs import COLUMNS, Kernels, NotCovered, Row, case_of, kendall_tau, predict_row, read_rows, score

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
TABLE, OTHERS, LATE = DATA / "published_runs.csv", DATA / "more_runs.csv", DATA / "late_runs.csv"


@pytest.fixture(scope="module")
def scores():
    return score(read_rows(TABLE))


def test_figures_hold(scores):
    figures = scores.as_json()
    assert figures["covered"] == figures["rows"] == 173
    assert figures["time_mape"] < 0.05
    assert figures["step_time_mape"] < 0.038
    assert figures["time_median"] < 0.02
    assert figures["memory_mape"] < 0.05
    assert figures["oom"]["fn"] == 0  # no false "fits"
    assert figures["kendall_tau"] > 0.8
    bmtrain = figures["per_source"]["BMTrain README project README"]["oom"]
    assert bmtrain == {"tp": 17, "fp": 0, "fn": 0, "tn": 11}


@pytest.mark.long
def test_a_source_is_predicted_within_five_percent_by_a_fit_without_it():
    figures = cross_validated(read_rows(TABLE)).as_json()
    assert figures["covered"] == figures["rows"] == 173
    assert figures["step_time_mape"] <= 0.05
    assert figures["step_time_median"] < 0.03
    assert figures["oom"]["fn"] == 0


def test_tables_that_were_not_fitted_are_covered_and_none_falsely_fits():
    figures = score(read_rows(OTHERS)[::20]).as_json()
    assert figures["covered"] == figures["rows"] == 21
    assert figures["time_median"] < 0.12
    assert figures["oom"]["fn"] == 0
    assert figures["oom"]["fp"] <= 2


def test_runs_that_came_last_are_predicted_as_well():
    rows = read_rows(LATE)
    figures = score(rows[::10]).as_json()
    assert figures["covered"] == figures["rows"] == 16
    assert figures["time_mape"] < 0.1
    assert figures["time_median"] < 0.08


# Recorded since formulas cut pipelines by work as our engine does. Of every twentieth row of the second table, taken
# before, the mean grew by 0.001 and the median by 0.016; of these, twice as many, they are 0.004 and 0.010 less than
# they were, and memory 0.035. Of whole tables: docs/predictions.md.
@pytest.mark.parametrize(
    ("table", "every", "in_4_bits", "mean", "median", "memory", "not_fitting"),
    [
        (TABLE, 4, 0, 0.145, 0.11, 0.093, 1),
        (OTHERS, 10, 2, 0.18, 0.164, 0.252, 0),
        (LATE, 10, 0, 0.137, 0.095, None, 1),
    ],
)
def test_what_a_user_gets_is_no_worse_than_recorded(table, every, in_4_bits, mean, median, memory, not_fitting):
    figures = score(read_rows(table)[::every], as_user=True).as_json()
    assert figures["rows"] - figures["covered"] == in_4_bits  # whose products are not predicted
    assert figures["step_time_mape"] < mean
    assert figures["step_time_median"] < median
    assert memory is None or figures["memory_mape"] < memory
    assert figures["oom"]["fp"] <= not_fitting


def test_a_user_says_a_strategy_in_our_own_methods():
    megatron = {"source": "Megatron-LM", "model": "Llama-3-70B", "gpu": "H100-80GB", "n_gpus": "64", "tp": "4"}
    split = {"pp": "4", "zero_stage": "1", "micro_batch": "1", "global_batch": "64", "precision": "fp8", "ac": "none"}
    said = predict_as_user(row(**megatron, **split))
    names = {method.method_name for method in said.case.strategy.methods}
    wanted = {"parallel_mode", "tensor_parallel", "pipeline_parallel", "half", "fp8", "compile", "zero1"}
    assert names == wanted
    assert said.case.strategy.get("tensor_parallel").sequence
    plain = {"zero_stage": "3", "micro_batch": "1", "ac": "full"}
    eager = predict_as_user(row(**megatron, **plain, compile="False"))
    assert "compile" not in eager.case.strategy
    assert eager.case.strategy.get("checkpoint").policy == "full"
    silent, compiled = (predict_as_user(row(**megatron, **plain, compile=said)) for said in ("", "True"))
    assert silent.time == eager.time
    assert compiled.time.step_time_s < eager.time.step_time_s
    assert "compile" in compiled.case.strategy


def test_what_does_not_fit_is_compiled_if_the_row_allows():
    """Blocks of one device that save more than it has where they are not compiled."""
    cells = {"gpu": "A100-80GB", "n_gpus": "8", "zero_stage": "3", "precision": "bf16", "ac": "none"}
    fits = {}
    for said in ("", "False"):
        run = predict_as_user(row(**cells, micro_batch="3", seq="4096", compile=said))
        fits[said] = not run.out_of_memory, "compile" in run.case.strategy
    assert fits == {"": (True, True), "False": (False, False)}


def test_states_are_sharded_over_ranks_that_share_samples():
    """Plan a row whose ranks all share samples: the axis of states alone has one rank there."""
    cells = {"source": "nobody", "gpu": "H100-80GB", "n_gpus": "8", "cp": "8", "zero_stage": "3", "micro_batch": "1"}
    run = predict_as_user(row(**cells, seq="65536", ac="full", compile="True"))
    assert "fsdp" in run.case.strategy
    assert not run.out_of_memory


def test_kernels_of_the_source_slow_down_a_users_strategy_where_they_are_older():
    """Plan runs of H100 with Triton's attention of 2023: the strategies stay the same."""
    rows = [each for each in read_rows(TABLE) if re.search("llm-foundry.*H100", each.source)][::5]
    every = {kernels: score(rows, as_user=True, kernels=kernels) for kernels in get_args(Kernels)}
    assert every["own"].as_json() == score(rows, as_user=True).as_json()
    own, attention, source = ([p.time.step_time_s for p in each.predictions] for each in every.values())
    assert all(ours < theirs for ours, theirs in zip(own, attention, strict=True))
    assert attention != source
    own_error, attention_error, _ = (each.as_json()["step_time_mape"] for each in every.values())
    assert attention_error < own_error / 2
    strategies = [[p.case.strategy for p in each.predictions] for each in every.values()]
    assert strategies[0] == strategies[1] == strategies[2]


def test_tables_and_sources_are_chosen_on_the_command_line(capsys):
    chosen = [str(TABLE), str(OTHERS), "--sources", "^TORCHTITAN.*T[13]$"]
    assert published.main([*chosen, "--as-user", "--kernels", "attention", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == figures["as_user"]["rows"] == 6
    assert all("torchtitan" in source for source in figures["as_user"]["per_source"])
    for wrong, says in ((["--kernels", "source"], "--as-user"), (["--sources", "("], "regular expression")):
        with pytest.raises(SystemExit):
            published.main(wrong)
        assert says in capsys.readouterr().err


def test_products_in_four_bits_are_not_covered():
    megatron = {"source": "Megatron-LM", "model": "Llama-3-70B", "n_gpus": "64", "tp": "4"}
    with pytest.raises(NotCovered, match="4 bits"):
        predict_as_user(row(**megatron, gpu="GB200", precision="NVFP4", micro_batch="1"))


def test_whole_fields_of_strategies_are_predicted_as_well_as_recorded():
    runs = [predict_row(each) for each in read_rows(DATA / "nanotron_runs.csv")]
    peaks = [abs(each.memory.counted_bytes / each.published_peak_bytes - 1) for each in runs]
    assert statistics.mean(peaks) < 0.1
    assert statistics.median(peaks) < 0.06
    figures = [_too_far(each) for each in runs]
    assert statistics.median(figures) < 0.09  # a fifth waits for its cluster
    node = [_too_far(predict_row(each)) for each in read_rows(DATA / "vtrain_runs.csv")]
    assert statistics.mean(node) < 0.09
    assert statistics.median(node) < 0.065


def _too_far(run):
    return abs(run.published_tokens_per_s_per_gpu / run.tokens_per_s_per_gpu - 1)


def test_megatrons_softmax_takes_multiples_of_four_heads_of_samples():
    def of(micro_batch, source="vTrain"):
        cells = {"model": "GPT", "layers": "12", "hidden": "1024", "heads": "16", "seq": "1024", "gpu": "A100-80GB"}
        sizes = {"n_gpus": "8", "tp": "8", "micro_batch": str(micro_batch), "global_batch": "16"}
        return predict_row(row(source=source, **cells, **sizes)).time.step_time_s

    assert of(1) > 2.2 * of(2)  # two heads; half as many micro-batches would take half
    assert of(1, "Megatron-LM") < 2.1 * of(2, "Megatron-LM")


def test_slow_transfers_count_once_for_each_micro_batch_and_less_while_a_pipeline_fills():
    def waits(pipeline, micro_batches):
        source = "nanotron benchmarks_interactive"
        cells = {
            "model": "Llama-8B",
            "gpu": "H100",
            "n_gpus": "512",
            "tp": "8",
            "pp": str(pipeline),
            "micro_batch": "1",
        }
        batch = str(micro_batches * 512 // (8 * pipeline))
        slow, plain = (predict_row(row(source=each, **cells, global_batch=batch)) for each in (source, "nanotron"))
        return (slow.time.step_time_s - plain.time.step_time_s) / 0.29

    assert waits(4, 32) == pytest.approx(4 * 32, rel=0.05)
    assert waits(2, 32) == pytest.approx(2 * 32, rel=0.05)
    assert waits(16, 32) == pytest.approx(4 * 32 + 2 * 12, rel=0.05)


def test_what_a_user_gets_does_not_depend_on_whose_run_it_is():
    cells = {"zero_stage": "3", "micro_batch": "1", "seq": "4096", "ac": "full", "compile": "True", "vocab": "32000"}
    theirs, others = (predict_as_user(row(source=name, **cells)) for name in ("TorchTitan", "nobody"))
    assert theirs.tokens_per_s_per_gpu == others.tokens_per_s_per_gpu
    assert theirs.memory.needed_bytes == others.memory.needed_bytes


def test_strategies_of_one_cell_are_told_apart():
    speeds = {"1": "4000", "2": "3500", "4": "3000", "8": "900"}
    rows = [
        Row(
            index,
            {**row(seq="4096", global_batch="64", micro_batch="1").cells, "tp": tp, "tokens_per_s_per_gpu": speed},
        )
        for index, (tp, speed) in enumerate(speeds.items())
    ]
    cells = score(rows).as_json()["cells"]
    assert (cells["cells"], cells["fastest_rows"]) == (1, 1)
    assert cells["kendall_tau"] == 1.0
    assert cells["regret_median"] == 0.0
    assert cells["regret_within_5_percent"] == 1.0


def test_json_has_the_agreed_keys(scores):
    figures = json.loads(json.dumps(scores.as_json(), allow_nan=False))
    errors = {f"{of}_{name}" for of in ("time", "step_time", "memory") for name in ("mape", "median")}
    keys = {"rows", "covered", *errors, "oom", "kendall_tau"}
    assert keys | {"per_source", "worst"} <= figures.keys()
    assert all(set(own) == keys for own in figures["per_source"].values())
    assert all({"row", "predicted", "published"} <= each.keys() for each in figures["worst"])
    assert sum(own["rows"] for own in figures["per_source"].values()) == figures["rows"]


def row(**cells):
    usual = {"source": "somewhere", "model": "Llama-2-7B", "gpu": "A100-SXM4-80GB", "n_gpus": "8"}
    return Row(0, {**usual, **cells})


def test_what_a_table_leaves_out_is_assumed_and_said():
    prediction = predict_row(row(seq="4096"))
    assert any("layers 32" in said for said in prediction.case.assumed)
    assert prediction.case.shape.num_parameters == pytest.approx(6.74e9, rel=0.01)
    assert prediction.published_tokens_per_s_per_gpu is None
    assert prediction.published_out_of_memory is None


def test_spellings():
    assert predict_row(row(n_gpus=" 1,024 ", zero_stage="ZeRO-3", precision="BF16")).case.cluster.num_devices == 1024
    assert predict_row(row(precision="FP8-hybrid", gpu="h100")).case.run.dtype == "fp8"
    assert predict_row(row(zero_stage="FSDP")).case.strategy.get("fsdp") is not None
    assert predict_row(row(ac="Full")).case.strategy.get("checkpoint") is not None
    assert predict_row(row(ac="none")).case.strategy.get("checkpoint") is None
    assert predict_row(row(mfu="45 %")).published_tokens_per_s_per_gpu == pytest.approx(
        predict_row(row(mfu="0.45")).published_tokens_per_s_per_gpu
    )
    assert predict_row(row(precision="NVFP4", gpu="DGX-GB200")).case.run.dtype == "fp4"
    assert predict_row(row(ac="selective op")).case.strategy.get("checkpoint") is not None
    assert predict_row(row(seq="8192", global_batch="4M tokens")).case.global_batch == 488
    assert predict_row(row(zero_stage="optim_grads_params")).case.zero_stage == 3
    assert row(tokens_per_s_per_gpu="OOM").ran_out_of_memory
    assert row(source="x [GAS=4]").source == "x"


def test_hybrid_sharding_is_within_nodes():
    axes = predict_row(row(zero_stage="HSDP", n_gpus="64")).case.strategy.get("parallel_mode").axes
    assert dict(axes) == {"zero": 8, "data": 8}
    axes = predict_row(row(source="IBM fms-fsdp [HSDP]", zero_stage="3", n_gpus="4")).case.strategy
    assert dict(axes.get("parallel_mode").axes) == {"zero": 4}


@pytest.mark.parametrize(
    ("notes", "stages"),
    [("VP=5", 5), ("vp5", 5), ("virtual pipeline 5", 5), ("v=5", 5), ("Interleaved 1F1B", 2), ("arXiv v3", 1)],
)
def test_stages_of_a_pipelines_ranks(notes, stages):
    cells = {"source": f"somewhere [{notes}]", "model": "Llama-3-70B", "n_gpus": "64", "tp": "8", "pp": "4"}
    strategy = predict_row(row(**cells, global_batch="64")).case.strategy
    assert strategy.get("pipeline_parallel").num_stages_per_rank == (stages if stages > 1 else None)


def test_where_a_table_does_not_say_as_little_is_recomputed_as_fits():
    small = predict_row(row(source="TorchTitan", zero_stage="3", gpu="H200", micro_batch="4"))
    large = predict_row(row(source="TorchTitan", zero_stage="3", gpu="A100-40", micro_batch="4"))
    assert small.case.strategy.get("checkpoint") is None
    assert large.case.strategy.get("checkpoint") is not None
    assert any("recomputes" in said for said in large.case.assumed)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"gpu": "Abacus 9000"}, "Unknown device"),
        ({"gpu": ""}, "no GPU"),
        ({"dp": "3", "tp": "2"}, "6 ranks"),
        ({"tp": "3"}, "do not divide 8"),
        ({"model": "a secret", "layers": ""}, "dimensions"),
        ({"tp": "2", "layers": "2", "hidden": "96", "heads": "3"}, "cannot divide"),
        ({"n_gpus": "", "dp": ""}, "number of GPUs"),
        ({"model": "Qwen3_30B_a3B"}, "mixture of experts"),
        ({"model": "DeepSeekV3 (w/ MTP)"}, "mixture of experts"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(cells, says):
    with pytest.raises(NotCovered, match=says):
        predict_row(row(**cells))
    assert score([row(**cells)]).as_json()["covered"] == 0


CELLS = st.sampled_from(
    ["", "0", "-1", "1", "2", "8", "64", "1e3", "n/a", "nan", "inf", "?", "8k", "7B", "1.5", "H100", "V100", "full",
     "selective", "fp16", "mxfp8", "True", "OOM", "Llama-3-8B", "GPT-3", "12;4", "٣"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(COLUMNS), CELLS))
def test_no_cell_is_an_error(cells):
    figures = score([row(**cells)]).as_json()
    json.dumps(figures, allow_nan=False)
    assert figures["rows"] == 1


def test_rank_correlation_is_within_one_model_and_cluster():
    fast, slow = (row(ac=ac, tokens_per_s_per_gpu=rate) for ac, rate in (("none", "5000"), ("full", "4000")))
    assert kendall_tau([predict_row(fast), predict_row(slow)]) == 1.0
    wrong = [predict_row(row(ac=ac, tokens_per_s_per_gpu=rate)) for ac, rate in (("none", "4000"), ("full", "5000"))]
    assert kendall_tau(wrong) == -1.0
    assert kendall_tau([predict_row(fast), predict_row(row(n_gpus="16", tokens_per_s_per_gpu="1"))]) is None


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no table of published runs"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "absent.csv")
    path.write_text("gpu,model\nA100,Llama-2-7B\n")  # fewer columns, and no final ones
    assert score(read_rows(path)).as_json()["covered"] == 0


def test_conventions_by_source():
    assert convention_of("IBM fms-fsdp README").default_zero == 3
    assert convention_of("DeepSpeed blog").flops == "hardware"
    assert convention_of("a blog").words == ()


def test_versions_of_a_project():
    first = convention_of_row(row(source="llm-foundry A100 40GB", precision="bf16"))
    later = convention_of_row(row(source="llm-foundry A100 80GB", precision="amp_bf16"))
    large = convention_of_row(row(source="llm-foundry H100 (Large Scale, >= 128 GPUs)", precision="amp_bf16"))
    assert (first.reentrant, first.reduce, first.gathers_ahead) == (True, "half", False)
    assert (later.reentrant, later.reduce, later.gathers_ahead) == (False, "fp32", False)
    assert large.gathers_ahead


def test_memory_is_that_of_the_rank_that_the_source_reports():
    cells = {"n_gpus": "16", "pp": "2", "zero_stage": "0", "micro_batch": "1", "global_batch": "64"}
    held = rank_memory(predict_row(row(source="nanotron", **cells)).case)
    assert held.counted_bytes < held.needed_bytes
    assert predict_row(row(gpu="MI300X", source="torchtitan")).memory.counted_bytes == pytest.approx(
        1.05 * predict_row(row(gpu="MI300X", source="torchtitan")).memory.peak.reserved_bytes, rel=1e-6
    )


def test_the_stage_with_most_blocks_sets_the_pace_wherever_it_is():
    described = {"source": "nanotron", "model": "Llama-80B", "gpu": "H100", "n_gpus": "256", "tp": "4", "pp": "16"}
    shape = {"layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "64", "ffn": "28672", "seq": "4096"}
    case = predict_row(row(**described, **shape, micro_batch="1", global_batch="256")).case
    blocks = [sum(block.count for block in step.blocks if block.name != "outside") for step in case.steps]
    assert sum(blocks) == 80
    assert sorted(set(blocks)) == [3, 5, 6]  # the head spares the last stage some, which others take


def test_nemotron_4_has_no_gate_and_a_head_of_its_own():
    cells = {"gpu": "H100", "n_gpus": "8", "layers": "32", "hidden": "6144", "heads": "48", "kv_heads": "8"}
    cells |= {"ffn": "24576", "vocab": "256000", "seq": "4096", "micro_batch": "1", "zero_stage": "1"}
    shape = predict_row(Row(0, {**cells, "source": "NeMo", "model": "Nemotron-4-15B"})).case.shape
    assert (shape.gated, shape.is_tied) == (False, False)
    assert shape.num_parameters == pytest.approx(15.6e9, rel=0.01)
    assert predict_row(Row(0, {**cells, "source": "NeMo", "model": "Llama-3.1-Nemotron"})).case.shape.gated


def test_ranks_that_divide_a_sample_reduce_its_gradients_once():
    cells = {"source": "NeMo", "model": "Llama-3.1-8B", "gpu": "H100", "n_gpus": "8", "cp": "2", "dp": "4"}
    cells |= {"zero_stage": "1", "micro_batch": "1", "seq": "8192"}
    case = predict_row(Row(0, cells)).case
    gradients = [each for each in case.steps[0].traffic if each.hidden and each.moment == "backward"]
    assert [(each.kind, each.axis) for each in gradients] == [("reduce_scatter", "zero")]
    assert dict(case.steps[0].axes)["zero"] == 8  # the four that take samples of their own, twice


def test_hybrid_sharding_over_as_many_as_a_note_says():
    cells = {"model": "Llama-2-7B", "gpu": "H100", "n_gpus": "256", "zero_stage": "FSDP", "micro_batch": "1"}
    case = predict_row(Row(0, {**cells, "source": "somebody [HSDP 128]"})).case
    assert dict(case.steps[0].axes) == {"zero": 128, "data": 2}


@pytest.mark.parametrize(
    ("source", "precision", "scaling", "casts_weights"),
    [
        ("Megatron-Bridge 26.06", "FP8", "current", False),
        ("Megatron-Bridge 26.06", "MXFP8", "blocks", False),
        ("Megatron-Bridge 26.06", "NVFP4", "nvfp4", False),
        ("NeMo 24.07", "fp8", "delayed", False),
        ("llm-foundry", "amp_fp8", "delayed", True),
        ("torchtitan", "float8-tensorwise", "tensorwise", False),
        ("torchtitan", "float8-rowwise", "rowwise", True),
        ("torchao", "mxfp8_cublas", "mxfp8", True),
    ],
)
def test_how_projects_scale_narrow_products(source, precision, scaling, casts_weights):
    run = case_of(row(source=source, precision=precision, gpu="GB200")).run
    assert (run.impl.scaling, run.impl.casts_weights) == (scaling, casts_weights)


def test_as_many_stages_as_blocks_and_two_more_stay_interleaved():
    cells = {"layers": "126", "hidden": "16384", "heads": "128", "n_gpus": "256", "tp": "4", "pp": "16", "dp": "4"}
    case = case_of(row(source="Megatron-Bridge [VP=8]", **cells, micro_batch="1", global_batch="1536", gpu="GB200"))
    assert case.strategy.get("pipeline_parallel").num_stages_per_rank == 7


@pytest.mark.parametrize(
    ("source", "early"),
    [
        ("Megatron-Bridge performance summary 25.09", True), ("dgxc-benchmarking v25.05.05 NeMo", True),
        ("Megatron-Bridge performance summary 26.02", False), ("dgxc-benchmarking v24.11.1 NeMo", False),
        ("Megatron-Bridge of 125.09 runs", False), ("torchtitan 25.09", True), ("nanotron 25.09", False),
    ],
)  # fmt: skip
def test_nvidias_containers_of_2025_did_not_know_blackwell_well(source, early):
    assert ("B200" in convention_of_row(row(source=source)).early_on) == early

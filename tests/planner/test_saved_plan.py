"""What a plan saves is trained as it was predicted."""

import pytest

import meshwright as mw


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "wishes", "says"),
    [
        ("llama-3-8b", "h100x8", 64, [], "gradient_accumulation"),
        pytest.param(
            "gpt-3-6.7b",
            "a100-40x16",
            64,
            [("parallel_mode", {"pipeline": 4})],
            "pipeline_parallel",
            marks=pytest.mark.long,
        ),
        ("gpt2", "h100x2", 2, [], None),
    ],
)
def test_a_saved_plan_says_how_its_batch_is_cut(tmp_path, model, cluster, batch, wishes, says):
    others = ["compile", "context_parallel", "half", "offload", "sequence_parallel"]  # not what this is about
    (best,) = mw.plan(model, cluster, global_batch=batch, included=wishes, excluded=others, top=1)
    assert (best.step.num_micro_batches > 1) == (says is not None)
    best.save(tmp_path / "best.json")
    (again,) = mw.plan(model, cluster, global_batch=batch, strategy=str(tmp_path / "best.json"))
    if says is not None:
        assert again.strategy.get(says).num_micro_batches == best.step.num_micro_batches
    assert again.complete_strategy == best.complete_strategy
    assert again.forecast.time.step_time_s == best.forecast.time.step_time_s
    assert again.needed_bytes == best.needed_bytes

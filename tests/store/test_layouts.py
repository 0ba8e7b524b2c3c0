"""A run that is saved in one layout and loaded in another goes on as if nothing had happened."""

import pytest
import torch

from tests.store.runs import load_and_go_on, save_and_go_on

PAIRS = [
    (("plain", 1), ("fsdp", 2)),
    (("ddp", 2), ("plain", 1)),
    pytest.param(("fsdp", 2), ("fsdp", 4), marks=pytest.mark.long),
    (("fsdp", 4), ("hsdp", 4)),
    (("hsdp", 4), ("fsdp", 2)),
    pytest.param(("fsdp", 4), ("ddp", 2), marks=pytest.mark.long),  # fsdp is left, and ddp loaded, by the others
    pytest.param(("hsdp", 4), ("plain", 1), marks=pytest.mark.long),
]


def _check(ranks, directory, before, after, tolerance=1e-5, saved=None, loaded=None):
    (layout, size), (new_layout, new_size) = before, after
    expected = ranks(size).run(save_and_go_on, directory, layout, **(saved or {}))[0]
    losses = ranks(new_size).run(
        load_and_go_on, directory, new_layout, **(loaded if loaded is not None else saved or {})
    )
    assert losses[0] == pytest.approx(expected, abs=tolerance)
    # The tolerance says something only if the run is still moving by far more.
    assert max(expected) - min(expected) > 100 * tolerance


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_run_goes_on_in_another_layout(ranks, tmp_path, before, after):
    _check(ranks, tmp_path, before, after)


# Kinds of state: none, one tensor, several of two shapes and types; others of these kinds in the long run.
@pytest.mark.parametrize(
    "optimizer",
    ["fused", "momentum", "sgd", "nadam"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("amsgrad", "adagrad", "rmsprop", "asgd")],
)
def test_every_optimizer_goes_on_where_it_stopped(ranks, tmp_path, optimizer):
    _check(ranks, tmp_path, ("fsdp", 2), ("plain", 1), saved={"optimizer": optimizer})


def test_fused_state_loads_into_shards_that_compute_otherwise(ranks, tmp_path):
    _check(ranks, tmp_path, ("ddp", 2), ("fsdp", 2), saved={"optimizer": "fused"}, loaded={"optimizer": "adamw"})


MASTER = {"dtype": torch.bfloat16, "master": True}


def test_master_weights_and_loss_scale_go_on(ranks, tmp_path):
    # bf16 gradients are rounded differently by another number of ranks; in the same layout nothing is.
    _check(ranks, tmp_path, ("fsdp", 2), ("fsdp", 2), saved={**MASTER, "scaler": True}, tolerance=1e-7)


def test_master_weights_go_on_in_another_layout(ranks, tmp_path):
    _check(ranks, tmp_path, ("fsdp", 4), ("plain", 1), saved=MASTER, tolerance=5e-3)

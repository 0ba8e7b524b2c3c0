"""Ranks that do not start alike are named before anything is changed."""

import contextlib
import io

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import LaunchError, ModelError
from meshwright.training import accelerate as start_checks
from tests import tiny

UNSYNCED = ("fsdp", {"sync_module_states": False})


def _accelerate(strategy):
    torch.manual_seed(0)
    model = tiny.Mlp()
    before = model.last.weight.detach().clone()
    if mw.rank() == 1:
        with torch.no_grad():
            model.last.weight[0, 0] += 2**-20
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        result = mw.accelerate(
            model, torch.optim.SGD, None, lambda x, out: out.mean(), strategy=strategy, optim_args={"lr": 0.1},
            sample_batch=torch.ones(4, 7),
        )  # fmt: skip
    found = dict(result.model.named_parameters())
    weight = next(value for name, value in found.items() if name.endswith("last.weight"))
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return torch.equal(whole, before), said.getvalue()


def _unlike():
    with pytest.raises(ModelError, match="nothing in the strategy makes them equal") as caught:
        _accelerate([UNSYNCED])
    assert caught.value.agreed
    taken = [_accelerate(strategy) for strategy in ([], ["fsdp"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_checks, "own_versions", lambda: f"version {mw.rank()}")
        with pytest.raises(LaunchError, match="installed code") as other:
            start_checks.check_alike("same", "same")
    with pytest.raises(LaunchError, match="model differs") as model:
        mw.accelerate(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2 + mw.rank())), strategy=[])
    with pytest.raises(LaunchError, match="model differs") as longer:
        mw.accelerate(torch.nn.Linear(3, 4, bias=mw.rank() == 0), strategy=[])
    return str(caught.value), taken, str(other.value), str(model.value), str(longer.value)


def test_ranks_that_do_not_start_alike(ranks):
    answers = ranks(2).run(_unlike)
    for differ, taken, code, model, longer in answers:
        assert "Expected 1.weight (2, 4) torch.float32 (rank 0). Got 1.weight (3, 4) torch.float32 (rank 1)" in model
        assert "Expected bias (4,) torch.float32 (rank 0). Got no further parameter (rank 1)" in longer
        assert "last.weight on ranks 0, 1, of which no majority holds the same" in differ
        assert all(equal for equal, _ in taken)
        assert "Expected version 0 (rank 0)" in code
        assert "version 1 (rank 1)" in code
    for _, said in answers[0][1]:
        assert "the weights differ between ranks: last.weight" in said
        assert "those of rank 0 are taken over" in said


def _renormed():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, max_norm=1.0), torch.nn.Linear(4, 3))
    optimizer = (torch.optim.SGD, None, lambda x, out: out.mean())
    given = {"strategy": [], "optim_args": {"lr": 0.1}, "sample_batch": torch.ones(4, 7, dtype=torch.long)}
    with pytest.raises(ModelError, match="0 changes its weights in forward: max_norm") as caught:
        mw.accelerate(model, *optimizer, **given)
    assert caught.value.agreed
    model[0].max_norm = None
    mw.accelerate(model, *optimizer, **given)


def test_replicas_whose_forward_changes_weights_by_their_own_samples_are_refused(ranks):
    """Weights of replicas would part without a word: every rank scales the rows that it looks up."""
    ranks(2).run(_renormed)


def on_meta_alone():
    with torch.device("meta" if mw.rank() == 1 else "cpu"):
        model = nn.Linear(3, 3)
    with pytest.raises(mw.MeshwrightError) as caught:
        mw.accelerate(model, torch.optim.SGD, strategy=["fsdp"], sample_batch=torch.ones(2, 3))
    return str(caught.value)


def test_a_model_on_meta_on_one_rank_alone_is_refused(ranks):
    texts = ranks(2).run(on_meta_alone)
    assert texts[0] == texts[1]
    assert "How the model gets its values" in texts[0]

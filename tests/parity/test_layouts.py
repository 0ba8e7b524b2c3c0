"""What ranks of tensor and pipeline axes hold, and what they save for other layouts."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests.parity import models, runs
from tests.parity.layouts import LAYOUTS, mesh, scheduled

LAYERS = 4


def held(name, layout):
    """This rank's parameters outside the blocks, bytes of all it has, and of what is split: here, and whole."""
    case = LAYOUTS[layout]
    result = runs.accelerated(name, case.layers, case.strategy, case.micro_batches, "sgd")
    runs.check_state(result, ("parameters", "buffers"))  # predicted exactly
    model = result.model
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    outside = {key for key, _ in model.named_parameters() if ".layers." not in key}
    bytes_here = measured_state(model, None)["parameters"]
    return outside, bytes_here, sum(p.to_local().nbytes for p in split), sum(p.numel() for p in split) * 4


def test_a_pipeline_divides_the_blocks(ranks):
    every = {key: p.nbytes for key, p in models.build("llama", LAYERS).named_parameters()}
    blocks = sum(size for key, size in every.items() if ".layers." in key)
    needed = [{"model.embed_tokens.weight"}, set(), set(), {"model.norm.weight", "lm_head.weight"}]
    for (outside, bytes_here, *_), names in zip(ranks(4).run(held, "llama", "pipeline 4, 1f1b"), needed, strict=True):
        assert outside == names
        assert bytes_here == blocks // 4 + sum(every[name] for name in names)


def test_a_tensor_axis_divides_its_layers(ranks):
    whole = sum(p.nbytes for p in models.build("llama", LAYERS).parameters())
    for _, bytes_here, split_here, split in ranks(2).run(held, "llama", "tensor 2"):
        assert split_here * 2 == split
        assert bytes_here == whole - split_here
        assert bytes_here < 0.52 * whole  # norms alone stay


def save_and_go_on(directory):
    """Three steps of tensor 2 x pipeline 2, stored in both ways; then what follows, here and in shards."""
    strategy = [mesh(tensor=2, pipeline=2), "tensor_parallel", scheduled("1f1b")]
    saved = runs.accelerated("plain", LAYERS, strategy, 2, "adamw")
    batches = list(saved.dataloader)[:6]
    for batch in batches[:3]:
        saved.step(batch)
    CheckpointStore(directory).save(TrainingState(saved.model, saved.optim, step=3))
    mw.save(saved.model, directory / "model.pt")
    expected = [saved.step(batch).loss.item() for batch in batches[3:]]
    shards = runs.accelerated("plain", LAYERS, ["fsdp"], 1, "adamw")
    own = list(shards.dataloader)[:6]
    shards.step(own[0])  # what is loaded replaces weights and states that have moved
    CheckpointStore(directory).load(TrainingState(shards.model, shards.optim))
    in_shards = [shards.step(batch).loss.item() for batch in own[3:]]
    mw.load(saved.model, directory / "model.pt")  # three steps back
    return expected, in_shards, saved.evaluate(batches[3]).item()


@pytest.mark.long
def test_tensor_and_pipeline_axes_load_into_shards_and_into_plain_torch(ranks, tmp_path):
    results = ranks(4).run(save_and_go_on, tmp_path)
    expected, into_shards, again = results[0]
    assert all(result == results[0] for result in results)
    assert into_shards == pytest.approx(expected, rel=1e-5)
    assert again == pytest.approx(expected[0], rel=1e-5)
    assert max(expected) - min(expected) > 1e-3

    model, batches = models.build("plain", LAYERS), runs.batches()
    optim = torch.optim.AdamW(model.parameters(), **runs.OPTIMIZERS["adamw"][1])
    CheckpointStore(tmp_path).load(TrainingState(model, optim))
    assert losses(model, optim, batches[3:6]) == pytest.approx(expected, rel=1e-5)
    other = models.build("plain", LAYERS)
    assert not other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)).missing_keys
    with torch.no_grad():
        assert models.loss_func(batches[3], other(batches[3])).item() == pytest.approx(expected[0], rel=1e-5)


def losses(model, optim, batches):
    """Of a loop in plain torch."""
    found = []
    for ids in batches:
        optim.zero_grad()
        loss = models.loss_func(ids, model(ids))
        loss.backward()
        optim.step()
        found.append(loss.item())
    return found

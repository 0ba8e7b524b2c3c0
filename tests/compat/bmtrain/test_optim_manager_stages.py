"""An OptimManager over the stages of a pipeline: one norm, one scale, one decision, one state dict."""

import pytest
import torch

import meshwright as mw
from meshwright.compat.bmtrain.optim_manager import OptimManager
from meshwright.errors import CheckpointError
from tests import tiny
from tests.methods.pipeline_runs import Poison, batches, build
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights

STEPS, CLIP = 10, 0.5


def managed(model):
    """Two optimizers by a rule that holds on every rank, one with a scheduler."""
    manager = OptimManager(loss_scale=2.0**10, loss_scale_steps=None)
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    sgd = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    manager.add_optimizer(sgd, torch.optim.lr_scheduler.StepLR(sgd, 3, 0.7))
    manager.add_optimizer(torch.optim.SGD([p for p in parameters if p.dim() <= 1], lr=0.05, momentum=0.9))
    return manager


def steps(manager, loss_of, first, last):
    norms = []
    groups = [group for optimizer in manager.optimizers for group in optimizer.param_groups]
    for ids in batches()[first:last]:
        manager.zero_grad()
        for part in ids.chunk(2):  # accumulated without a word: tied parameters are summed over stages twice
            manager.backward(loss_of(part) / 2)
        norms.append(manager.clip_grad_norm(groups, CLIP).item())
        manager.step()
    return norms


def job_of(name, mesh, *methods):
    return mw.accelerate(
        build(name), None, tiny.Tokens(), tiny.loss_func, strategy=[("parallel_mode", mesh), *methods],
        prepare_input=tiny.prepare_for("llama"), model_input_format="unpack_dict", dataloader_args={"batch_size": 8},
        num_micro_batches=4,
    )  # fmt: skip


def loss_of(job):
    def loss(ids):
        inputs = job.prepare_input(ids, job.device)
        return job.loss_func(inputs, job.model(**inputs))

    return loss


def plain_run(name):
    model = build(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    manager = managed(model)

    def loss(ids):
        return tiny.loss_func({"input_ids": ids}, model(input_ids=ids))

    half = steps(manager, loss, 0, STEPS // 2)
    state = manager.state_dict()
    saved = [{key: value["momentum_buffer"].clone() for key, value in o["state"].items()} for o in state["optimizers"]]
    norms = half + steps(manager, loss, STEPS // 2, STEPS)
    return norms, saved, before, {key: p.detach() for key, p in model.named_parameters()}


def run(folder, name, mesh, other, *methods):
    """Norms, gathered states after half of the steps, and the weights of a job of another layout that went on."""
    job = job_of(name, mesh, *methods)
    manager = managed(job.model)
    norms = steps(manager, loss_of(job), 0, STEPS // 2)
    state = manager.state_dict(gather_opt=True)
    skipped = overflow(job, manager)
    follower = job_of(name, *other)
    follow = managed(follower.model)
    follow.load_state_dict(state)
    mw.save(job.model, folder / "weights.pt")
    mw.load(follower.model, folder / "weights.pt")
    norms += steps(follow, loss_of(follower), STEPS // 2, STEPS)
    first, second = state["optimizers"]
    lacking = {**state, "optimizers": [{**first, "param_groups": [{"params": [0]}]}, second]}
    with pytest.raises(CheckpointError, match="not for these parameters"):
        follow.load_state_dict(lacking)
    return norms, state, skipped, whole_weights(follower.model)


def overflow(job, manager):
    """One stage's gradients overflow: whether weights stayed, on every rank; and the scale."""
    before = whole_weights(job.model)
    hook = None
    if job.mesh.get_local_rank("pipeline") == 0:
        weight = next(p for name, p in job.model.named_parameters() if ".0." in name)
        hook = weight.register_hook(Poison())
    manager.zero_grad()
    manager.backward(loss_of(job)(batches()[0]))
    manager.step()
    if hook is not None:
        hook.remove()
    kept = all(torch.equal(before[name], now) for name, now in whole_weights(job.model).items())
    return manager.step_was_skipped, kept, manager.loss_scale


def check(results, name):
    norms, saved, before, after = plain_run(name)
    weights = {}
    for rank, (own_norms, state, skipped, own) in enumerate(results):
        assert own_norms == pytest.approx(norms, rel=1e-5)
        assert skipped == (True, True, 2.0**10)
        assert bool(state["optimizers"][0]["state"]) == (rank == 0)
        weights |= own
    for mine, theirs in zip(results[0][1]["optimizers"], saved, strict=True):
        assert mine["state"].keys() == theirs.keys()
        assert mine["param_groups"][0]["params"] == list(theirs)
        for key, wanted in theirs.items():
            torch.testing.assert_close(mine["state"][key]["momentum_buffer"], wanted, rtol=1e-4, atol=1e-6)
    assert weights.keys() == after.keys()
    check_weights(weights, before, after)


def test_stages_decide_together(ranks, tmp_path):
    other = ({"pipeline": 2}, ("pipeline_parallel", {"schedule": "zbv"}))
    check(ranks(2).run(run, tmp_path, "tied", {"pipeline": 2}, other, "pipeline_parallel"), "tied")


@pytest.mark.long
def test_stages_of_tensor_shards_decide_together(ranks, tmp_path):
    mesh = {"tensor": 2, "pipeline": 2}
    other = ({"tensor": 2, "data": 2}, "tensor_parallel")  # each shard is on two ranks, which its mesh does not tell
    check(ranks(4).run(run, tmp_path, "gpt2", mesh, other, "pipeline_parallel", "tensor_parallel"), "gpt2")  # fused

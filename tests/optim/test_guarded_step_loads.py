"""Weights that are loaded after ``accelerate`` stay: a step that moves nothing leaves them as they are in the file."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.optim import AdamOptimizer, GuardedOptimizer, MasterWeights
from meshwright.optim.loaded_weights import follow_loads
from meshwright.runtime import gather_objects
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny

REPLICAS = ("parallel_mode", {"replica": 2})
DILOCO = {"rule": "diloco", "sync_every": 2}


def loss_func(inputs, output):
    return (output - inputs[:, :3]).square().mean()


def accelerate(strategy, optim_func=torch.optim.AdamW):
    torch.manual_seed(3)
    job = mw.accelerate(
        tiny.Mlp(), optim_func, None, loss_func, strategy=strategy, optim_args={"lr": 1e-2, "weight_decay": 0.0},
        sample_batch=torch.randn(4, 7),
    )  # fmt: skip
    return job, functools.partial(job.step, torch.randn(4, 7) + job.replica)


def whole(model):
    inner = getattr(model, "module", model)
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in inner.state_dict().items()
    }


def stand_still(job):
    for group in job.optim.param_groups:
        group["lr"] = 0.0


def is_kept(job, step, wanted):
    """Whether the weights are those of the file, rounded to the model's type, and still are after steps."""
    seen = []
    for _ in range(3):
        now = whole(job.model)
        seen.append(all(torch.equal(now[name], wanted[name].to(now[name].dtype)) for name in wanted))
        step()
    return all(seen)


def loaded(folder, strategy):
    """By ``load`` and by ``load_state_dict``, after a step that made copies of other weights."""
    torch.manual_seed(5)
    wanted = tiny.Mlp().state_dict()
    if mw.rank() == 0:
        torch.save(wanted, folder / "weights.pt")
    mw.synchronize()
    job, step = accelerate(strategy)
    step()
    stand_still(job)
    mw.load(job.model, folder / "weights.pt")
    by_file = is_kept(job, step, wanted)
    job, step = accelerate(strategy)
    halved = {name: value / 2 for name, value in job.model.state_dict().items()}
    wanted = {name: value / 2 for name, value in whole(job.model).items()}
    step()
    stand_still(job)
    job.model.load_state_dict(halved)
    return by_file, is_kept(job, step, wanted)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["fsdp", ("offload", "optimizer")], marks=pytest.mark.long),
        ["fsdp", ("offload", "all")],
        ["parallel_mode", ("half", "bf16")],
        ["fsdp", ("half", "bf16")],
        pytest.param(["zero1", ("half", "bf16")], marks=pytest.mark.long),
        ["parallel_mode", ("half", "bf16"), ("offload", "optimizer")],
        [REPLICAS, ("outer", DILOCO)],
        [REPLICAS, ("half", "bf16"), ("outer", {**DILOCO, "split": True})],
    ],
    ids=str,
)
def test_loaded_weights_stay(ranks, tmp_path, strategy):
    assert ranks(2).run(loaded, tmp_path, strategy) == [(True, True)] * 2


def loaded_in_part():
    """Into one module, of a half model and of replicas in the middle of a block."""
    job, step = accelerate(["parallel_mode", ("half", "bf16")])
    step()
    stand_still(job)
    new = {name: torch.ones_like(value) for name, value in job.model.module.last.state_dict().items()}
    wanted = whole(job.model) | {f"last.{name}": value for name, value in new.items()}
    masters = {parameter: master.clone() for parameter, master in job.optim.master.of.items()}
    job.model.module.last.load_state_dict(new)
    own = set(job.model.module.last.parameters())
    finer = all(torch.equal(job.optim.master.of[p], master) for p, master in masters.items() if p not in own)
    half = is_kept(job, step, wanted)
    job, step = accelerate([REPLICAS, ("outer", {**DILOCO, "sync_every": 3})])
    step()  # replicas differ now
    stand_still(job)
    first = gather_objects(whole(job.model))[0]
    job.model.last.load_state_dict(new)
    step()
    return finer, half, is_kept(job, step, first | {f"last.{name}": value for name, value in new.items()})


def test_a_module_may_be_loaded_alone(ranks):
    assert ranks(2).run(loaded_in_part) == [(True, True, True)] * 2


def loaded_from_a_checkpoint(folder):
    """The model alone, by a store whose state names no optimizer; and everything by hand, in the middle of a block."""
    job, step = accelerate(["fsdp", ("offload", "optimizer")])
    wanted, store = whole(job.model), CheckpointStore(folder)
    store.save(TrainingState(job.model))
    step()
    store.load(TrainingState(job.model))
    stand_still(job)
    alone = is_kept(job, step, wanted)
    after = []
    for loads in ([], ["model", "optim"], ["optim", "model"]):
        job, step = accelerate([REPLICAS, ("outer", {**DILOCO, "sync_every": 3})])
        step()
        own = {"model": {name: value.clone() for name, value in job.model.state_dict().items()}}
        own["optim"] = copy.deepcopy(job.optim.state_dict())
        if loads:
            step()
        for part in loads:
            getattr(job, part).load_state_dict(own[part])
        for _ in range(3):
            step()
        after.append(whole(job.model))
    return alone, all(torch.equal(each[name], after[0][name]) for each in after for name in each)


def test_a_checkpoint_of_the_model_alone_and_one_by_hand(ranks, tmp_path):
    assert ranks(2).run(loaded_from_a_checkpoint, tmp_path) == [(True, True)] * 2


def test_masters_in_states_follow_and_copies_of_the_model_do_not():
    model = nn.Linear(3, 2).bfloat16()
    optim = AdamOptimizer(model.parameters(), lr=0.0)
    follow_loads(model, optim)
    twin = copy.deepcopy(model)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    before = [state["master"].clone() for state in optim.state.values()]
    twin.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert all(map(torch.equal, before, (state["master"] for state in optim.state.values())))
    model.load_state_dict(twin.state_dict())
    optim.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    del optim
    pickle.loads(pickle.dumps(model)).load_state_dict(twin.state_dict())


def test_an_optimizer_without_copies_leaves_the_model_as_it_is():
    model = nn.Linear(3, 2)
    follow_loads(model, torch.optim.AdamW(model.parameters()))
    assert not model._load_state_dict_post_hooks
    masters = MasterWeights(model.half().parameters())
    follow_loads(model, GuardedOptimizer(masters.optimizer(torch.optim.AdamW, model.parameters()), master=masters))
    assert len(model._load_state_dict_post_hooks) == 1


def masters_of_a_file(folder):
    torch.manual_seed(5)
    wanted = tiny.Mlp().state_dict()
    if mw.rank() == 0:
        torch.save(wanted, folder / "weights.pt")
    mw.synchronize()
    job, _ = accelerate(["parallel_mode", ("half", "bf16")])
    mw.load(job.model, folder / "weights.pt")
    masters = job.optim.master.of
    inner = getattr(job.model, "module", job.model)
    return all(torch.equal(masters[each], wanted[name]) for name, each in inner.named_parameters())


def test_masters_take_over_what_half_precision_cannot_hold(ranks, tmp_path):
    assert ranks(2).run(masters_of_a_file, tmp_path) == [True, True]

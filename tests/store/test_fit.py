"""Checkpoints and models, optimizers, precisions that do or do not fit each other."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright import runtime
from meshwright.errors import CheckpointError
from meshwright.lr_scheduler import warmup_decay
from meshwright.optim import GuardedOptimizer
from meshwright.store import CheckpointStore, TrainingState
from meshwright.store.entries import model_entries
from tests.store.runs import Net, build, same_everywhere, train, wrap


def _state(model, make=None):
    return TrainingState(model, make(model.parameters()) if make else None)


def _roundtrip(directory, state, other):
    CheckpointStore(directory).save(state)
    return CheckpointStore(directory).load(other)


NAMES = {
    "module.weight", "module.bias", "norm.weight", "norm.bias", "narrow.weight", "narrow.bias", "down.weight",
    "into.weight", "frozen", "offset",
}  # fmt: skip


def _entry_names(layout):
    return set(model_entries(wrap(Net(), layout)).tensors)


def test_names_are_those_of_the_plain_model(ranks):
    assert _entry_names("plain") == NAMES
    assert [ranks(1).run(_entry_names, layout)[0] for layout in ("ddp", "fsdp")] == [NAMES, NAMES]
    assert set(model_entries(torch.compile(Net())).tensors) == NAMES
    wrapped = Net()
    wrapped.module = torch.compile(checkpoint_wrapper(wrapped.module))
    assert set(model_entries(wrapped).tensors) == NAMES


def _misfit(directory, save):
    sizes = (4, 6) if save else (4, 5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(*sizes), nn.BatchNorm1d(2) if save else nn.LSTM(2, 1))
    with torch.no_grad():
        before = [p.fill_(2.0).clone() for p in model.parameters()]
    if save:
        return CheckpointStore(directory).save(_state(model))
    try:
        CheckpointStore(directory).load(_state(wrap(model, "ddp")))
    except CheckpointError as error:
        untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return same_everywhere((str(error), untouched))


def test_all_bad_entries_are_named_at_once_on_every_rank(ranks, tmp_path):
    ranks(2).run(_misfit, tmp_path, True)
    text, untouched = ranks(2).run(_misfit, tmp_path, False)[0]
    assert untouched
    assert "missing: 2.bias_hh_l0, 2.bias_ih_l0, 2.weight_hh_l0, 2.weight_ih_l0;" in text
    assert "unknown: 2.bias, 2.num_batches_tracked, 2.running_mean, 2.running_var, 2.weight;" in text
    assert "misshapen: 1.weight (float32[6, 4] instead of float32[5, 4]), 1.bias (float32[6]" in text


def _sharded_after_forward(directory):
    state = build("fsdp")
    state.model(torch.ones(1, 7))  # the root now holds the gathered weights
    CheckpointStore(directory).save(state)
    other = build("fsdp", seed=1)
    other.model(torch.ones(1, 7))
    CheckpointStore(directory).load(other)
    x = torch.rand(3, 7)
    return torch.equal(state.model(x), other.model(x))


def test_weights_that_are_gathered_are_saved_and_loaded_as_shards(ranks, tmp_path):
    assert ranks(2).run(_sharded_after_forward, tmp_path) == [True, True]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    state, other = build("plain"), build("plain", seed=1)
    _roundtrip(tmp_path, state, other)
    assert other.model.out.weight is other.model.into.weight
    assert torch.equal(other.model.out.weight, state.model.into.weight)


def test_memory_shared_by_two_parameters_and_odd_strides(tmp_path):
    def make():
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(2, 3, 3)])
        model[1].weight.data = model[0].weight.data
        return model.to(memory_format=torch.channels_last)

    one, two = make(), make()
    _roundtrip(tmp_path, _state(one, torch.optim.Adam), _state(two, torch.optim.Adam))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert two[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_empty_tensors_and_types(tmp_path):
    def make(fill):
        model = nn.Module()
        for index, dtype in enumerate((torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)):
            model.register_buffer(f"b{index}", torch.full((2, 3), fill).to(dtype))
        model.register_buffer("empty", torch.zeros(0, 5))
        model.register_buffer("scalar", torch.tensor(float(fill)))
        return model

    one, two = make(1), make(0)
    _roundtrip(tmp_path, _state(one), _state(two))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), two.buffers(), strict=True))
    two.b0 = two.b0.long()
    with pytest.raises(CheckpointError, match=r"b0 \(float64\[2, 3\] instead of int64"):
        CheckpointStore(tmp_path).load(_state(two))


class _Counting(nn.Linear):
    def __init__(self, seen):
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_of_modules(tmp_path):
    one, two = nn.Sequential(_Counting((1, 2))), nn.Sequential(_Counting(()))
    _roundtrip(tmp_path, _state(one), _state(two))
    assert two[0].seen == (1, 2)
    with pytest.raises(CheckpointError, match=r"0\._extra_state\['seen'\] cannot be stored.*builtins\.set"):
        CheckpointStore(tmp_path / "b").save(_state(nn.Sequential(_Counting({1}))))
    assert not list((tmp_path / "b").iterdir())


def test_an_optimizer_before_its_first_step(tmp_path):
    fresh, stepped = build("plain"), build("plain", seed=1)
    train(stepped, 2)
    weights = [p.detach().clone() for p in fresh.model.parameters()]
    _roundtrip(tmp_path, fresh, stepped)
    assert not stepped.optim.state
    assert train(fresh, 5) == train(stepped, 5)
    assert not torch.equal(weights[-1], list(fresh.model.parameters())[-1])


def test_masters_are_the_model_and_load_into_fp32_and_back(tmp_path):
    half = build("plain", dtype=torch.bfloat16, master=True)
    train(half, 3)
    full = build("plain", seed=1)
    _roundtrip(tmp_path / "a", half, full)
    again = build("plain", seed=1, dtype=torch.bfloat16, master=True)
    _roundtrip(tmp_path / "b", full, again)
    masters = half.optim.master.of
    for saved, fp32, loaded in zip(
        half.model.parameters(), full.model.parameters(), again.model.parameters(), strict=True
    ):
        master = masters.get(saved, saved)
        assert torch.equal(fp32, master.float())
        assert torch.equal(loaded, saved)
        if saved.requires_grad:
            assert torch.equal(again.optim.master.of[loaded], master)
            for key, value in half.optim.inner.state[master].items():
                assert torch.equal(full.optim.state[fp32][key], value)
                assert torch.equal(again.optim.inner.state[again.optim.master.of[loaded]][key], value)
    assert train(half, 5) == train(again, 5)


def test_states_follow_the_precision_of_their_parameter(tmp_path):
    full = build("plain")
    train(full, 2)
    half = build("plain", "fused", dtype=torch.bfloat16)
    _roundtrip(tmp_path, full, half)
    state = next(iter(half.optim.state.values()))
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
    train(half, 1)  # the fused CPU kernel refuses mixed types


def test_the_loss_scale(tmp_path):
    one = build("plain", dtype=torch.bfloat16, master=True, scaler=True)
    train(one, 3)
    two = build("plain", dtype=torch.bfloat16, master=True, scaler=True)
    _roundtrip(tmp_path, one, two)
    assert two.optim.scaler.state_dict() == one.optim.scaler.state_dict()
    assert one.optim.scaler.get_scale() == 2.0**9
    assert one.optim.scaler.state_dict()["_growth_tracker"] == 1


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25)))
    _roundtrip(tmp_path, state, TrainingState(other, torch.optim.SGD(other.parameters(), lr=rate)))
    assert rate.item() == 0.25
    plain = torch.optim.SGD(other.parameters(), lr=0.5)
    CheckpointStore(tmp_path).load(TrainingState(other, plain))
    assert plain.param_groups[0]["lr"] == 0.25
    assert isinstance(plain.param_groups[0]["lr"], float)


def test_optimizers_that_do_not_fit(tmp_path):
    state = build("plain")
    CheckpointStore(tmp_path).save(state)
    store, model = CheckpointStore(tmp_path), Net()
    trained = [p for p in model.parameters() if p.requires_grad]

    def refused(optimizer, match):
        with pytest.raises(CheckpointError, match=match):
            store.load(TrainingState(model, optimizer))

    refused(torch.optim.SGD(trained), "another optimizer. Expected SGD. Got AdamW")
    refused(torch.optim.AdamW(trained), "other parameter groups")
    refused(torch.optim.AdamW([*trained, model.frozen]), "missing: frozen; not wanted: none")
    refused(torch.optim.AdamW(trained[1:]), r"not wanted: module\.weight")
    refused(torch.optim.AdamW(nn.Linear(2, 3).parameters()), r"not in the model.*2 others, of shapes \(3, 2\), \(3,\)")


def test_groups_may_be_split_and_names_given(tmp_path):
    state = build("plain")
    train(state, 2)
    CheckpointStore(tmp_path).save(state)
    other = Net()
    singly = [{"params": [pair]} for pair in other.named_parameters() if pair[1].requires_grad]
    optim = torch.optim.AdamW(singly, lr=9.0)
    CheckpointStore(tmp_path).load(TrainingState(other, optim))
    rates = {group["param_names"][0]: group["lr"] for group in optim.param_groups}
    assert rates["norm.bias"] == state.optim.param_groups[1]["lr"]
    assert rates["norm.weight"] == state.optim.param_groups[0]["lr"]


class _RowMeans(torch.optim.Optimizer):
    """Keeps one number per row, sharded like the rows: only it knows how a fresh state is laid out."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def empty_state(self, parameter):
        return {"rows": parameter.detach().sum(dim=1) if parameter.dim() == 2 else parameter.detach().clone()}


def _row_means(directory, save):
    torch.manual_seed(0 if save else 1)
    model = wrap(nn.Linear(3, 5), "fsdp")
    optim = _RowMeans(model.parameters())
    if save:
        for parameter in model.parameters():
            optim.state[parameter] = {**optim.empty_state(parameter), "seen": 7}
        CheckpointStore(directory).save(TrainingState(model, optim))
    else:
        CheckpointStore(directory).load(TrainingState(model, optim))
    state = optim.state[next(iter(model.parameters()))]
    return state["rows"].full_tensor().tolist(), state["rows"].placements[0].is_shard(), state["seen"]


def test_states_with_shards_of_their_own(ranks, tmp_path):
    saved = ranks(4).run(_row_means, tmp_path, True)[0]
    assert ranks(2).run(_row_means, tmp_path, False) == [saved, saved]
    assert saved[1:] == (True, 7)


def test_a_guarded_optimizer_is_its_inner_one(tmp_path):
    state = build("plain")
    train(state, 2)
    other = build("plain", seed=1)
    guarded = GuardedOptimizer(other.optim, skip_nonfinite=True)
    _roundtrip(tmp_path, state, TrainingState(other.model, guarded, other.lr_scheduler))
    assert train(state, 3) == train(TrainingState(other.model, guarded, other.lr_scheduler, step=2), 3)
    assert runtime.world_size() == 1


@pytest.mark.parametrize("lr", [0.4, torch.tensor(0.4)], ids=["number", "tensor"])
def test_a_longer_schedule_holds_from_the_first_step_after_resuming(tmp_path, lr):
    def scheduled(num_steps):
        model = nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters(), lr=lr if isinstance(lr, float) else lr.clone())
        scheduler = warmup_decay(optim, num_steps=num_steps, warmup_steps=1, min_lr_ratio=0.1)
        return TrainingState(model, optim, scheduler)

    def go_on(state, steps):
        rates = []
        for _ in range(steps):
            rates.append(float(state.optim.param_groups[0]["lr"]))
            state.model(torch.ones(1, 3)).sum().backward()
            state.optim.step()
            state.lr_scheduler.step()
        return rates

    longer = go_on(scheduled(9), 9)
    state = scheduled(4)
    shorter = go_on(state, 4)
    same, resumed = scheduled(4), scheduled(9)
    _roundtrip(tmp_path, state, same)
    CheckpointStore(tmp_path).load(resumed)
    assert resumed.lr_scheduler.get_last_lr()[0] == pytest.approx(longer[4])
    assert go_on(resumed, 5) == longer[4:]
    assert go_on(same, 2) == go_on(state, 2) != shorter[:2]


def test_another_scheduler_is_refused(tmp_path):
    state = build("plain")
    CheckpointStore(tmp_path).save(state)
    state.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(state.optim, 10)
    with pytest.raises(CheckpointError, match=r"Expected CosineAnnealingLR\. Got MultiStepLR"):
        CheckpointStore(tmp_path).load(state)

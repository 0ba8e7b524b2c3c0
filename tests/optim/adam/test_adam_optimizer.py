import copy
import pickle

import pytest
import torch
from torch import nn

from meshwright import CheckpointError, ConfigError, ModelError
from meshwright.optim import AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, MasterWeights
from meshwright.store import CheckpointStore, TrainingState
from tests.optim.helpers import equal, give_gradients, loss_of, net, train, whole

BOTH = [AdamOptimizer, AdamOffloadOptimizer]
HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("optimizer", BOTH)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(("rule", "theirs"), [("decoupled", torch.optim.AdamW), ("coupled", torch.optim.Adam)])
def test_an_fp32_step_is_that_of_torch_bit_for_bit(optimizer, scale, rule, theirs):
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": True}
    reference, model = net(), net()
    expected = train(reference, theirs(reference.parameters(), fused=True, **options))
    optim = optimizer(model.parameters(), weight_decay_rule=rule, **options)
    assert equal(train(model, optim, scale=scale), expected)


@pytest.mark.parametrize("optimizer", BOTH)
@pytest.mark.parametrize("dtype", HALF)
def test_a_half_step_is_that_of_fp32_master_weights_rounded(optimizer, dtype):
    reference, model = net(dtype), net(dtype)
    master = MasterWeights(reference.parameters())
    inner = master.optimizer(
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True), reference.parameters()
    )
    optim = optimizer(model.parameters(), lr=0.02, weight_decay=0.1, bucket_elements=1)
    for step in range(12):
        for each in (reference, model):
            loss_of(each, step).backward()
        master.collect_gradients()
        inner.step()
        master.write_back()
        optim.step(scale=1.0)
        optim.zero_grad()
        assert equal(whole(model), whole(reference))
    for parameter, copied in master.of.items():
        index = [p is parameter for p in reference.parameters()].index(True)
        ours = optim.state[list(model.parameters())[index]]
        assert torch.equal(ours["master"], copied)
        assert {ours[name].dtype for name in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}


def test_the_fallback_without_fused_kernels_agrees(monkeypatch):
    reference, model = net(), net()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.1))
    monkeypatch.setattr("meshwright.optim.adam.adam_rule._FUSED_DEVICES", ())
    found = train(model, AdamOptimizer(model.parameters(), lr=0.02, weight_decay=0.1), scale=8.0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("rule", ["decoupled", "coupled", "bmtrain"])
def test_one_decay_rule_for_all_types_and_bmtrains_by_name(dtype, rule):
    """After one step with gradient 0, decoupled decay has shrunk the weight by lr * wd, coupled by lr."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optim = AdamOptimizer([weight], lr=0.25, weight_decay=0.5, weight_decay_rule=rule)
    weight.grad = torch.zeros_like(weight)
    optim.step()
    decoupled = rule == "decoupled" or (rule == "bmtrain" and dtype != torch.float32)
    assert weight.float().tolist() == pytest.approx([0.875 if decoupled else 0.75] * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_steps_gather_moments_and_change_no_weight(dtype):
    held, free = net(dtype), net(dtype)
    optim, plain = AdamOptimizer(held.parameters(), lr=0.05, hold_steps=3), AdamOptimizer(free.parameters(), lr=0.0)
    before = whole(held)
    assert equal(train(held, optim, steps=3), before)
    train(free, plain, steps=3)
    for ours, theirs in zip(held.parameters(), free.parameters(), strict=True):
        assert torch.equal(optim.state[ours]["exp_avg"], plain.state[theirs]["exp_avg"])
    assert not equal(train(held, optim, steps=1, start=3), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_that_fused_kernels_get_wrong(dtype):
    """Transposed weights, gaps in memory, gradients laid out otherwise: torch's fused AdamW updates wrong elements."""
    torch.manual_seed(0)
    base = torch.randn(40, 60).to(dtype)
    makers = [lambda: base.clone().t(), lambda: base.clone()[:, ::2], lambda: base.clone()]
    for make in makers:
        ours, plain = nn.Parameter(make()), nn.Parameter(make().float().contiguous())
        optim = AdamOptimizer([ours], lr=0.1, bucket_elements=1024)
        reference = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0)
        for _ in range(2):
            gradient = torch.randn(ours.t().shape).to(dtype).t()
            ours.grad, plain.grad = gradient.clone(), gradient.float()
            optim.step()
            reference.step()
        torch.testing.assert_close(ours.float(), plain, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)


def test_a_layout_that_changes_between_steps_is_followed():
    """Weights that are turned in memory, and states loaded in another order than the weight's."""
    torch.manual_seed(0)
    ours, plain = (nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optim, reference = AdamOptimizer([ours], lr=0.1), torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0, fused=True)
    for step in range(4):
        gradient = torch.randn(4, 6)
        ours.grad, plain.grad = gradient, gradient.clone()
        if step == 1:
            ours.data = ours.data.t().contiguous().t()
            ours.grad = gradient.t().contiguous().t()
        if step == 2:
            state = optim.state_dict()
            for name in ("exp_avg", "exp_avg_sq"):
                state["state"][0][name] = state["state"][0][name].contiguous()
            optim.load_state_dict(state)
        optim.step()
        reference.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_parameters_without_a_gradient_rest_and_keep_their_own_count():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    alone = nn.Parameter(torch.ones(3))
    optim, reference = (
        AdamOptimizer([first, second], lr=0.1),
        torch.optim.AdamW([alone], lr=0.1, weight_decay=0.0, fused=True),
    )
    for step in range(4):
        first.grad = torch.ones(3)
        second.grad = alone.grad = torch.ones(3) if step != 1 else None
        before = second.detach().clone()
        optim.step()
        reference.step()
        assert torch.equal(second, before) == (step == 1)
    assert torch.equal(second, alone)
    assert (int(optim.state[first]["step"]), int(optim.state[second]["step"])) == (4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_is_bit_equal_whatever_it_was_built_with(dtype):
    model = net(dtype)
    optim = AdamOptimizer(model.parameters(), lr=0.02, weight_decay=0.1, hold_steps=2)
    train(model, optim, steps=5)
    saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
    expected = train(model, optim, start=5)
    again = net(dtype, seed=4)
    other = AdamOffloadOptimizer(again.parameters(), lr=0.5, betas=(0.1, 0.2), eps=1.0, weight_decay_rule="coupled")
    train(again, other, steps=2)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert equal(train(again, other, start=5), expected)
    assert equal(train(model, optim, start=17), train(again, other, start=17))  # no shared tensors


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_goes_on_by_itself(copied):
    model = net(torch.bfloat16)
    train(model, optim := AdamOffloadOptimizer(model.parameters(), lr=0.02, record_delta=True), steps=2)
    again, other = copied((model, optim))
    assert other.record_delta
    assert equal(train(again, other, start=2), train(model, optim, start=2))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_steps_are_counted_in_fp32_whatever_torchs_default_type_is(default):
    """bfloat16 counts to 256, and corrections of the bias would stop there."""
    results, before = [], torch.get_default_dtype()
    for dtype in (torch.float32, default):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float32))
        try:
            torch.set_default_dtype(dtype)
            optimizer = AdamOptimizer([weight], lr=0.1)
            for step in range(260):
                weight.grad = torch.full((3,), 1.0 + step % 3, dtype=torch.float32)
                optimizer.step(scale=3.0)
        finally:
            torch.set_default_dtype(before)
        assert (optimizer.state[weight]["step"].dtype, int(optimizer.state[weight]["step"])) == (torch.float32, 260)
        results.append(weight)
    assert torch.equal(*results)


def test_states_of_torchs_adamw_go_both_ways():
    theirs, ours = net(), net()
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True)
    train(theirs, reference, steps=3)
    ours.load_state_dict(theirs.state_dict())
    optim = AdamOptimizer(ours.parameters())
    optim.load_state_dict(reference.state_dict())
    assert optim.param_groups[0]["weight_decay"] == 0.01
    assert equal(train(ours, optim, start=3), train(theirs, reference, start=3))
    back = net()
    back.load_state_dict(ours.state_dict())
    resumed = torch.optim.AdamW(back.parameters(), fused=True)
    resumed.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert equal(train(back, resumed, start=15), train(ours, optim, start=15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checkpoint_store_takes_adam_and_offload_for_each_other(tmp_path, dtype):
    model = net(dtype)
    optim = AdamOptimizer(model.parameters(), lr=0.02)
    train(model, optim, steps=3)
    CheckpointStore(tmp_path).save(TrainingState(model, optim, step=3))
    expected = train(model, optim, start=3)
    again = net(dtype, seed=4)
    state = TrainingState(again, AdamOffloadOptimizer(again.parameters(), lr=0.5))
    CheckpointStore(tmp_path).load(state)
    assert equal(train(again, state.optim, start=3), expected)


def test_an_fp32_run_goes_on_in_bf16_with_fp32_states(tmp_path):
    model = net()
    train(model, optim := AdamOptimizer(model.parameters(), lr=0.02), steps=3)
    CheckpointStore(tmp_path).save(TrainingState(model, optim, step=3))
    half = net(torch.bfloat16)
    state = TrainingState(half, AdamOptimizer(half.parameters(), lr=0.02))
    CheckpointStore(tmp_path).load(state)
    train(half, state.optim, steps=1, start=3)
    for parameter in half.parameters():
        kept = state.optim.state[parameter]
        assert {kept[name].dtype for name in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}
        assert int(kept["step"]) == 4


def test_weights_changed_by_other_means_are_taken_over_when_asked():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optim = AdamOptimizer([weight], lr=0.0)
    weight.grad = torch.zeros_like(weight)
    optim.step()
    with torch.no_grad():
        weight.fill_(5.0)
    optim.refresh_master()
    optim.step()
    assert weight.tolist() == [5.0] * 3


def test_a_closure_is_called_with_gradients():
    weight = nn.Parameter(torch.ones(3))
    optim = AdamOptimizer([weight], lr=0.1)

    def closure():
        optim.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optim.step(closure).item() == 3
    assert weight.tolist() == pytest.approx([0.9] * 3)


def delta_of(optim, parameters, decay, before):
    values = []
    for parameter, old in zip(parameters, before, strict=True):
        state, (b1, b2) = optim.state[parameter], optim.defaults["betas"]
        m, v = (state[name] for name in ("exp_avg", "exp_avg_sq"))
        m, v, t = (
            (m.full_tensor(), v.full_tensor(), int(state["step"]))
            if hasattr(m, "full_tensor")
            else (m, v, int(state["step"]))
        )
        values.append((m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8) + decay * old.float()).flatten())
    return torch.cat(values).double()


def recorded_delta(sharded):
    model = net(sharded=sharded)
    model.whole = nn.Parameter(torch.full((11,), 5.0))  # plain, beside shards
    optim = AdamOptimizer(model.parameters(), lr=0.02, weight_decay=0.1, record_delta=True)
    for step in range(3):
        before = whole(model)
        give_gradients(model, step)
        optim.step()
    expected = delta_of(optim, list(model.parameters()), 0.1, before)
    assert optim.get_avg_delta() == pytest.approx(expected.mean().item(), rel=1e-5)
    assert optim.get_var_delta() == pytest.approx(expected.var(unbiased=False).item(), rel=1e-5)
    return optim.get_avg_delta(), optim.get_var_delta()


def recorded_deltas():
    """Shards of a model, and a whole one that every rank has."""
    return recorded_delta(sharded=True), recorded_delta(sharded=False)


def test_the_recorded_delta_is_that_of_whole_tensors_on_any_number_of_ranks(ranks):
    alone = recorded_delta(sharded=False)
    for found in ranks(2).run(recorded_deltas):
        for each in found:
            assert each == pytest.approx(alone, rel=1e-5)
    with pytest.raises(ConfigError, match="record_delta=True"):
        AdamOptimizer([nn.Parameter(torch.ones(1))]).get_avg_delta()


def test_arguments_by_position_stand_as_in_bmtrain():
    optim = AdamOffloadOptimizer([nn.Parameter(torch.ones(1))], 0.1, (0.8, 0.9), 1e-6, 0.2, 3, True)
    assert optim.record_delta
    assert optim.param_groups[0].items() >= {"weight_decay": 0.2, "hold_steps": 3, "lr": 0.1, "eps": 1e-6}.items()


def sharded_training():
    """fp32 through FSDP2 with real gradients; bf16 masters with given ones, which no reduction has rounded."""
    found = {}
    for kind in BOTH:
        model = net(sharded=True)
        found["fp32", kind.__name__] = train(model, kind(model.parameters(), lr=0.02, weight_decay=0.1), steps=10)
        model = net(torch.bfloat16, sharded=True)
        optim = kind(model.parameters(), lr=0.02, weight_decay=0.1)
        for step in range(10):
            give_gradients(model, step)
            optim.step()
        masters = [optim.state[parameter]["master"] for parameter in model.parameters()]
        masters = [getattr(master, "full_tensor", lambda m=master: m)() for master in masters]
        assert equal(whole(model), [master.bfloat16() for master in masters])
        found["bf16", kind.__name__] = masters
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_and_empty_shards_train_like_one_process(ranks, world):
    alone = sharded_training()
    for found in ranks(world).run(sharded_training):
        for (dtype, kind), weights in found.items():
            assert equal(weights, found[dtype, "AdamOptimizer"])
            for ours, theirs in zip(weights, alone[dtype, kind], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": float("nan")}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)},
     {"hold_steps": -1}, {"weight_decay_rule": "decoupeld"}, {"bucket_elements": 0}],
)  # fmt: skip
def test_hyperparameters_out_of_range(bad):
    with pytest.raises(ConfigError, match=r"Expected.*Got.*What to do"):
        AdamOptimizer([nn.Parameter(torch.ones(1))], **bad)


def test_states_of_another_kind_are_refused():
    weight = nn.Parameter(torch.ones(8))
    others, optim = AdamW8bit([weight], min_8bit_size=1), AdamOptimizer([weight])
    weight.grad = torch.ones(8)
    others.step()
    with pytest.raises(CheckpointError, match=r"not those of an Adam.*Got .*exp_avg_codes"):
        optim.load_state_dict(others.state_dict())
    assert not optim.state
    optim.state[weight] = dict(others.state[weight])  # as one's own code may
    with pytest.raises(ModelError, match=r"not those of an Adam.*Got .*exp_avg_codes"):
        optim.step()


def test_what_adam_cannot_update_is_refused_and_changes_nothing():
    with pytest.raises(ModelError, match=r"float64.*What to do"):
        AdamOptimizer([nn.Parameter(torch.ones(1, dtype=torch.float64))])
    embedding, dense = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2))
    optim = AdamOptimizer([dense, embedding.weight], lr=1.0)
    (embedding(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(ModelError, match="sparse"):
        optim.step()
    assert dense.tolist() == [1.0, 1.0]
    assert not optim.state
    embedding.weight.grad = None
    with pytest.raises(ConfigError, match="scale"):
        optim.step(scale=0.0)
    optim.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="amsgrad"):
        optim.step()

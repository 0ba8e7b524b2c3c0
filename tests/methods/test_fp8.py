"""fp8 as a method: every layout against one process, predictions against what is held and sent, and what is refused."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import meshwright as mw
from meshwright.cost import find_device, memory
from meshwright.methods import Fp8
from meshwright.methods.fp8 import choose_layers, require_layers
from meshwright.nn.fp8 import Fp8Layer
from meshwright.store import CheckpointStore, TrainingState
from tests.methods.test_traffic import Counter

STEPS = 11
BATCH = torch.randn(STEPS, 16, 7, generator=torch.Generator().manual_seed(5))


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return x + super().forward(x)


class Mlp(nn.Module):
    """Blocks whose dims fit, between layers whose dims do not."""

    def __init__(self, depth=2):
        super().__init__()
        self.first, self.last = nn.Linear(7, 32), nn.Linear(32, 3)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def as_conv1d(model):
    """The same model with weights (in, out), as GPT-2 has them."""
    for block in model.layers:
        for index in (1, 3):
            linear, made = block[index], Conv1D(block[index].out_features, block[index].in_features)
            made.weight.data, made.bias.data = linear.weight.data.t().contiguous(), linear.bias.data
            block[index] = made
    return model


def fp8(**keys):
    history = {"amax_history_len": 4} if "recipe" not in keys else {}
    return "fp8", {"emulate": True, **history, **keys}


def build(strategy, micro=1, change=None):
    torch.manual_seed(1)
    model = Mlp() if change is None else change(Mlp())
    return mw.accelerate(
        model, torch.optim.AdamW, None, lambda x, output: (output.float() - x[:, :3].float().sin()).square().mean(),
        strategy=strategy, optim_args={"lr": 3e-3}, num_micro_batches=micro, sample_batch=BATCH[0], batch_size=16,
    )  # fmt: skip


def own_part(result, step):
    rows = 16 // result.num_replicas
    return BATCH[step][result.replica * rows :][:rows].clone()


def scales(model):
    return [m.fp8_scale.view(torch.float32).tolist() for m in model.modules() if isinstance(m, Fp8Layer)]


def train(strategy, micro=1, change=None):
    """Losses and scales of a run, and in what predictions differ from what is held and sent."""
    result = build(strategy, micro, change)
    losses = [result.step(own_part(result, step)).loss.item() for step in range(STEPS - 2)]
    with Counter() as counter:
        losses.append(result.step(own_part(result, STEPS - 2)).loss.item())
    step, measured = result.measured_step(own_part(result, STEPS - 1))
    predicted = memory(result.plan.step, result._job.coordinate)
    if micro > 1:
        del measured["activations"]  # a view of the batch, all of which the model's first layer keeps
    wrong = [
        f"{kind}: {getattr(predicted, kind)} {size}"
        for kind, size in measured.items()
        if getattr(predicted, kind) != size
    ]
    sent = {}
    for traffic in result.plan.step.traffic:
        sent[traffic.kind] = sent.get(traffic.kind, 0) + traffic.bytes_per_step
    wrong += [f"sent: {sent} {counter.bytes}"] if sent != counter.bytes else []
    return [*losses, step.loss.item()], scales(result.model), wrong


def train_all(runs):
    return [train(*run) for run in runs]


@pytest.fixture(scope="module")
def alone(ranks):
    """One process: without fp8, with it."""
    return ranks(1).run(train_all, [([],), ([fp8()],)])[0]


def of_two_replicas(scales):
    """Each averages its loss over half the samples: the gradients that it casts are twice as large."""
    of_input, of_weight, of_gradient = scales
    return [of_input, of_weight, of_gradient / 2]


REENTRANT = ("checkpoint", {"no_reentrant": False, "wrap_class": "Block"})
LAYOUTS = [
    ([fp8()],), ([fp8(), "fsdp"],), ([fp8(), "fsdp", "checkpoint"], 2), ([fp8(), REENTRANT],),
]  # fmt: skip
MORE_LAYOUTS = [
    ([fp8(), "checkpoint"],),
    ([fp8()], 2),
    ([fp8(), "zero1"], 2),
    ([fp8(), "zero2"],),
    ([fp8(), "zero2", REENTRANT], 2),
]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.long)], ids=["some", "more"])
def test_every_layout_trains_as_one_process_does(ranks, alone, layouts):
    (plain, _, _), (expected, expected_scales, wrong) = alone
    assert wrong == []
    assert expected == pytest.approx(plain, rel=3e-2)  # what 8 bits change
    assert expected != pytest.approx(plain, rel=1e-3)
    first, second = ranks(2).run(train_all, layouts)
    for layout, one, other in zip(layouts, first, second, strict=True):
        assert one == other, layout
        losses, found, wrong = one
        assert wrong == [], layout
        assert losses == pytest.approx(expected, rel=1e-5), layout
        for mine, theirs in zip(found, expected_scales, strict=True):
            assert mine == pytest.approx(of_two_replicas(theirs), rel=1e-5), layout


@pytest.mark.long
def test_half_precision_and_scales_that_each_rank_keeps_to_itself(ranks, alone):
    runs = [([fp8(), "fsdp", ("amp_native", "bf16")],), ([fp8(), ("half", "bf16")],), ([fp8(reduce_amax=False)],)]
    (plain, _, _), (expected, expected_scales, _) = alone
    first, second = ranks(2).run(train_all, runs)
    for losses, found, _ in first[:2]:
        assert losses == pytest.approx(plain, rel=6e-2)
        for mine, theirs in zip(found, expected_scales, strict=True):
            assert mine == pytest.approx(of_two_replicas(theirs), rel=0.2)
    assert first[:2] == second[:2]
    assert [run[2] for run in first] == [[]] * 3
    assert first[2][0] != pytest.approx(expected, rel=1e-3)
    assert first[2][1] != second[2][1]


@pytest.mark.long
def test_over_tensor_and_pipeline_axes(ranks, alone):
    tensor, pipeline = ("parallel_mode", {"tensor": 2, "data": 1}), ("parallel_mode", {"pipeline": 2, "data": 1})
    expected, expected_scales, _ = alone[1]
    runs = [([fp8(), "tensor_parallel", tensor],), ([fp8(), "pipeline_parallel", pipeline], 2)]
    both = ranks(2).run(train_all, runs)
    for found in both:
        assert found[0][0] == pytest.approx(expected, rel=1e-5)
        assert found[1][0] == pytest.approx(expected, rel=1e-5)
        assert found[0][2] == []
    for mine, theirs in zip([*both[0][1][1], *both[1][1][1]], expected_scales, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)  # the stages' layers in a row


def test_recipes_of_torchao(ranks, alone):
    runs = [
        ([fp8(recipe="tensorwise"), "fsdp"],),
        ([fp8(recipe="tensorwise", all_gather=True), "fsdp"],),
        ([fp8(recipe="rowwise"), ("amp_native", "bf16")],),
        ([fp8(recipe="mxfp8"), "fsdp"], 2),
    ]
    first, second = ranks(2).run(train_all, runs)
    assert first == second
    for run, (losses, _, wrong) in zip(runs, first, strict=True):
        assert losses == pytest.approx(alone[0][0], rel=6e-2), run
        assert wrong == [] or "amp_native" in str(run), run
    assert first[0][0] == first[1][0]  # the same scale, whether cast before or after the gather
    assert first[0][0] != first[3][0]


TENSOR = ("parallel_mode", {"tensor": 2, "data": 1})
OF_GPT2 = [[fp8()], [fp8(recipe="tensorwise"), "fsdp"]]
MORE_OF_GPT2 = [[fp8(), "fsdp"], [fp8(), "tensor_parallel", TENSOR], [fp8(recipe="rowwise")]]


@pytest.mark.parametrize(
    "strategies", [OF_GPT2, pytest.param(MORE_OF_GPT2, marks=pytest.mark.long)], ids=["some", "more"]
)
def test_layers_of_gpt2(ranks, strategies):
    """Weights (in, out) give what their transposes give, under every recipe, sharded, whole and split."""
    runs = [(each, 1, change) for each in strategies for change in (None, as_conv1d)]
    found = ranks(2).run(train_all, runs)[0]
    for strategy, (losses, known, _), (theirs, others, wrong) in zip(strategies, found[::2], found[1::2], strict=True):
        assert theirs == pytest.approx(losses, rel=1e-6), strategy
        assert others == [pytest.approx(each, rel=1e-6) for each in known], strategy
        assert wrong == [], strategy


def gathers_of_gpt2():
    with pytest.raises(mw.StrategyError, match="layers of class Conv1D: layers"):
        build([fp8(recipe="tensorwise", all_gather=True), "fsdp"], change=as_conv1d)


def test_layers_of_gpt2_are_not_gathered_in_8_bits(ranks):
    ranks(2).run(gathers_of_gpt2)


def test_layers_of_gpt2_that_would_have_to_be_copied_stay_as_they_are():
    method = Fp8(recipe="mxfp8")
    choice = method.choice(as_conv1d(Mlp()), 1)
    assert choice.transposed == ["layers.0.1", "layers.0.3", "layers.1.1", "layers.1.3"]
    with pytest.raises(mw.ModelError, match="of class Conv1D, whose weights mxfp8 would have to copy"):
        require_layers(choice, 32)


def stop_and_go_on(directory):
    def goes_on(result, steps):
        return [result.step(own_part(result, step)).loss.item() for step in steps]

    result = build([fp8(interval=2), "fsdp"])
    state, store = TrainingState(result.model, result.optim), CheckpointStore(directory)
    goes_on(result, range(3))
    store.save(state)
    expected = goes_on(result, range(3, 6))
    other = build([fp8(interval=2), "fsdp"])
    goes_on(other, range(5, 7))  # elsewhere
    store.load(TrainingState(other.model, other.optim))
    found = goes_on(other, range(3, 6))
    own = [{k: v for k, v in each.model.state_dict().items() if "fp8" in k} for each in (result, other)]
    return expected == found, len(own[0]), all(torch.equal(own[0][key], own[1][key]) for key in own[0])


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(ranks, tmp_path):
    assert ranks(2).run(stop_and_go_on, tmp_path) == [(True, 4 * 3, True)] * 2


def with_and_without(directory):
    runs = {name: build(strategy) for name, strategy in (("with", [fp8()]), ("without", []))}
    found = []
    for name, other in (("with", "without"), ("without", "with")):
        result, store = runs[name], CheckpointStore(directory / name)
        result.step(own_part(result, 0))
        store.save(TrainingState(result.model, result.optim))
        mw.save(result.model, directory / f"{name}.pt")
        strategy = [fp8()] if other == "with" else []
        fresh, from_file = build(strategy), build(strategy)
        store.load(TrainingState(fresh.model, fresh.optim))
        mw.load(from_file.model, directory / f"{name}.pt")
        want = result.model.last.weight
        found += [torch.equal(each.model.last.weight, want) for each in (fresh, from_file)]
        found.append(not any(map(any, scales(fresh.model))))
        fresh.step(own_part(fresh, 1))
    return found


@pytest.mark.long
def test_fp8_may_come_and_go_between_checkpoints(ranks, tmp_path):
    assert ranks(1).run(with_and_without, tmp_path) == [[True] * 6]


def overflow_on_one_rank():
    result = build([fp8(), ("half", "fp16")])
    while result.step(own_part(result, 0)).skipped:  # the first loss scale may be too large
        pass
    before, bad = scales(result.model), own_part(result, 1)
    bad *= float("inf") if mw.rank() == 1 else 1.0
    assert result.step(bad).skipped
    assert scales(result.model) == before
    assert not result.step(own_part(result, 2)).skipped
    return scales(result.model)


def forgotten_scales():
    """Whether torchao's scales are there after a step, and not after other weights were loaded."""
    result = build([fp8(recipe="tensorwise", all_gather=True), "fsdp"])
    result.step(own_part(result, 0))
    weight = result.model.layers[0][1].weight._local_tensor
    known = weight._precomputed_scale is not None
    result.model.load_state_dict({key: value.clone() for key, value in result.model.state_dict().items()})
    return known, weight._precomputed_scale is None


def overflow_and_loading():
    return overflow_on_one_rank(), forgotten_scales()


def test_skipped_steps_and_loaded_weights(ranks):
    (scales, forgotten), (same_scales, _) = ranks(2).run(overflow_and_loading)
    assert scales == same_scales
    assert all(0 < scale < float("inf") for layer in scales for scale in layer)
    assert forgotten == (True, True)


def low_rank():
    """peft's layers around frozen ones: these multiply in 8 bits."""
    import peft

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["1"]))
    result = mw.accelerate(
        model, torch.optim.AdamW, None, lambda x, out: (out - 1).square().mean(), strategy=[fp8()],
        optim_args={"lr": 0.1}, sample_batch=BATCH[0],
    )  # fmt: skip
    losses = [result.step(BATCH[0].clone()).loss.item() for _ in range(8)]
    return losses[-1] / losses[0], len(scales(result.model)), result.plan.step.fp8_flops


def test_around_frozen_weights_of_peft(ranks):
    ((ratio, layers, flops),) = ranks(1).run(low_rank)
    assert ratio < 0.8
    assert layers == 1
    assert flops == 2 * 16 * 32 * 32  # of 16 rows; nothing before the layer trains, and its own weights are frozen


def dry_and_evaluated():
    result, other = build([fp8()]), build([fp8()])
    result.dry_run(own_part(result, 3))
    for step in range(3):
        result.evaluate(own_part(result, 9))
        assert result.step(own_part(result, step)).loss == other.step(own_part(other, step)).loss
    return scales(result.model) == scales(other.model)


def test_a_dry_run_and_evaluation_leave_no_trace(ranks):
    assert ranks(1).run(dry_and_evaluated) == [True]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.lm_head(hidden)


def said_of(*strategies):
    """What the user is told, or what is refused."""
    found = []
    for strategy in strategies:
        try:
            result = mw.accelerate(Tied(), torch.optim.SGD, strategy=strategy, optim_args={"lr": 0.1})
            found.append("; ".join((*result.plan.notices, *result._job.notices)))
        except mw.MeshwrightError as error:
            found.append(str(error))
    return found


def test_what_is_said_and_refused(ranks):
    said = ranks(1).run(
        said_of,
        ["fp8"],
        [fp8(verbose=True)],
        [fp8(exclude="lm_head", verbose=True)],
        [fp8(include=("layers.1",), verbose=True)],
        [fp8(include=("nothing",))],
        [fp8(recipe="tensorwise", all_gather=True)],
        [fp8(recipe="tensorwise", all_gather=True, include=("lm_head", "layers")), "fsdp"],
        [fp8(include=("lm_head",), verbose=True)],
    )[0]
    assert said[0].count("fp8") == 1
    assert "fp8 is ignored: a CPU has no 8-bit matrix products" in said[0]
    assert "2 of 3 linear layers" in said[1]
    assert "in 8 bits: layers.0, layers.1" in said[1]
    assert "lm_head predicts the vocabulary, and stays as it is" in said[1]
    assert "in 8 bits: lm_head" in said[7]
    assert "multiplying it in 8 bits hurts convergence" in said[7]
    assert "2 of 3" in said[2]
    assert "predicts" not in said[2]
    assert "in 8 bits: layers.1" in said[3]
    assert "3 left out by include and exclude" in said[4]
    assert "needs zero1 or zero2 or fsdp: no other method gathers weights" in said[5]
    assert "tied weights: lm_head" in said[6]


def test_layers_of_low_rank_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(256, 16), nn.Linear(16, 256), nn.Linear(256, 256))
    choice = choose_layers(model, None, None, 16)
    assert (choice.low_rank, [*choice.layers]) == (["0", "1"], ["2"])
    assert [*choose_layers(model, ("0", "1"), None, 16).layers] == ["0", "1"]
    with pytest.raises(mw.ModelError, match="0, 1, which include must name"):
        require_layers(choose_layers(model[:2], None, None, 16), 16)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recipe": "rowwise", "margin": 2}, "no history"),
        ({"all_gather": True}, "all_gather"),
        ({"recipe": "int8"}, "recipe"),
        ({"fp8_format": "E5M2"}, "fp8_format"),
        ({"interval": 0}, "interval"),
        ({"amax_history_len": 0}, "amax_history_len"),
        ({"use_te": False}, "use_te"),
    ],
)
def test_bad_keys(keys, named):
    with pytest.raises(mw.StrategyError, match=named):
        Fp8.parse(keys)


def test_short_forms_and_the_way_through_json():
    assert Fp8.parse("tensorwise").recipe == "tensorwise"
    strategy = mw.Strategy([("fp8", {"include": ["layers"], "recipe": "rowwise"}), "fsdp"])
    assert mw.Strategy(strategy.to_json()) == strategy
    assert strategy.get("fp8").include == ("layers",)


@pytest.mark.parametrize(
    ("capability", "recipe", "works"),
    [((8, 0), "delayed", False), ((8, 9), "delayed", True), ((9, 0), "mxfp8", False), ((10, 0), "mxfp8", True)],
)
def test_it_is_left_out_where_the_hardware_lacks_it(monkeypatch, capability, recipe, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    said = Fp8(recipe=recipe).left_out_on(torch.device("cuda"))
    assert said is None if works else f"fp8 is ignored: NVIDIA X has compute capability {capability[0]}." in said
    assert Fp8(recipe=recipe, emulate=True).left_out_on(torch.device("cuda")) is None


def test_peaks_in_8_bits():
    assert find_device("NVIDIA H100 80GB HBM3").fp8_flops_per_s == pytest.approx(2 * 989.4e12, rel=1e-3)
    assert find_device("NVIDIA A100-SXM4-80GB").fp8_flops_per_s is None


def test_a_missing_library_is_named(monkeypatch):
    from meshwright.methods import fp8_torchao as torchao_layers

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(torchao_layers.importlib, "import_module", absent)
    with pytest.raises(mw.StrategyError, match=r"meshwright\[fp8\]"):
        torchao_layers.require_torchao("mxfp8")

"""zero1, zero2 and fsdp beyond plain parity: units, ignored classes, LoRA, precision, and what they refuse."""

import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import meshwright as mw
from meshwright.cost import memory
from meshwright.methods import Fsdp
from meshwright.methods.zero_config import choose_units, units_of
from meshwright.planner import measured_state
from tests import tiny

BATCH = torch.randn(8, 7, generator=torch.Generator().manual_seed(5))


def loss_func(inputs, output):
    return output.float().square().mean()


def part(rank, world):
    return BATCH[rank * 8 // world : (rank + 1) * 8 // world]


def build(freeze=False):
    torch.manual_seed(1)
    model = tiny.Mlp()
    if freeze:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name or "last" in name)
    return model


def listed_again(freeze=False):
    """Two blocks, of which one runs three times, as ALBERT's do."""
    model = build(freeze)
    one, two, _ = model.layers
    model.layers = nn.ModuleList([one, two, one, one])
    return model


def train(strategy, freeze=False, steps=10, build=build, **options):
    result = mw.accelerate(
        build(freeze), torch.optim.SGD, None, loss_func, strategy=strategy, sample_batch=BATCH[:2],
        optim_args={"lr": 0.1, "momentum": 0.9}, batch_size=8, **options,
    )  # fmt: skip
    for _ in range(steps):
        result.step(part(mw.rank(), mw.world_size()))
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured_state(result.model, result.optim).items():
        assert getattr(predicted, kind) == size, kind
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in result.model.named_parameters()
    }


def plain_training(freeze=False, build=build):
    model = build(freeze)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        optim.zero_grad()
        loss_func(None, model(BATCH)).backward()
        optim.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "strategy", [["zero1"], pytest.param(["zero2"], marks=pytest.mark.long), ["fsdp", "checkpoint"]], ids=str
)
def test_a_block_that_is_listed_several_times(ranks, strategy):
    before, expected = dict(listed_again().named_parameters()), plain_training(build=listed_again)
    (trained, _) = ranks(2).run(train, strategy, build=listed_again, num_micro_batches=2)
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        assert (trained[name] - value).norm() < 1e-5 * (value - before[name]).norm()


UNITS = [
    {"atorch_wrap_cls": ("Sequential",)},
    {"atorch_wrap_cls": (nn.Linear,)},
    {"atorch_size_based_min_num_params": 150},
    {"atorch_ignored_cls": ("Sequential",)},
    {"forward_prefetch": False, "sync_module_states": False},
]

SHORT = {2: {(0, 0), (1, 2), (2, 1), (3, 0), (4, 2)}, 4: {(1, 0)}}  # rows of UNITS, columns of methods


@pytest.mark.parametrize(
    ("keys", "method", "world"),
    [
        # Every choice on 2 ranks, and one on 4; all combinations in the long run.
        pytest.param(keys, method, world, marks=[] if (row, column) in SHORT[world] else [pytest.mark.long])
        for row, keys in enumerate(UNITS)
        for column, method in enumerate(["zero1", "zero2", "fsdp"])
        for world in (2, 4)
    ],
    ids=str,
)
def test_every_choice_of_units_trains_alike(ranks, world, method, keys):
    expected, before = plain_training(), dict(build().named_parameters())
    moved = torch.stack([(expected[n] - before[n]).norm() for n in expected]).norm()
    for weights in ranks(world).run(train, [(method, keys)]):
        apart = torch.stack([(weights[n] - expected[n]).norm() for n in expected]).norm()
        assert apart < 1e-5 * moved


@pytest.mark.parametrize("outmost", [True, False])
def test_frozen_weights_stay_and_the_rest_trains_alike(ranks, outmost):
    expected, before = plain_training(freeze=True), dict(build().named_parameters())
    for weights in ranks(2).run(train, [("fsdp", {"wrap_trainable_outmost": outmost})], True):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-7)
            assert torch.equal(value, before[name]) == (not expected[name].requires_grad)


def train_by_hand(strategy, between, own_optimizer=False):
    """A loop that runs the model between backward and update."""
    result = mw.accelerate(
        build(), None if own_optimizer else torch.optim.AdamW, None, loss_func, strategy=strategy,
        sample_batch=BATCH[:2], **({} if own_optimizer else {"optim_args": {"lr": 0.01}}),
    )  # fmt: skip
    optim = torch.optim.AdamW(result.model.parameters(), lr=0.01) if own_optimizer else result.optim
    own = part(mw.rank(), mw.world_size())
    for _ in range(10):
        optim.zero_grad()
        result.loss_func(own, result.model(own)).backward()
        with between():
            result.model(own)
        optim.step()
    return [p.full_tensor().detach() for p in result.model.parameters()]


NOT_RESHARDED = ("fsdp", {"reshard_after_forward": False})


@pytest.mark.parametrize(
    ("strategy", "between", "own_optimizer"),
    [
        (["zero1"], torch.no_grad, False),
        (["zero2"], torch.enable_grad, True),
        ([NOT_RESHARDED], torch.inference_mode, False),
        pytest.param(["fsdp"], torch.enable_grad, False, marks=pytest.mark.long),
        (["zero2", ("offload", "optimizer")], torch.no_grad, False),
        pytest.param(["zero1", ("half", "fp16")], torch.no_grad, False, marks=pytest.mark.long),
        pytest.param([NOT_RESHARDED], torch.no_grad, True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_forward_between_backward_and_update_changes_nothing(ranks, strategy, between, own_optimizer):
    model = build()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(10):
        optim.zero_grad()
        loss_func(None, model(BATCH)).backward()
        optim.step()
    tolerance = 1e-6 if "half" not in str(strategy) else 1e-2
    for weights in ranks(2).run(train_by_hand, strategy, between, own_optimizer):
        for value, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(value.float(), expected.detach(), rtol=0, atol=tolerance)


class Lora(nn.Module):
    """A frozen linear layer with a small trainable detour, as peft builds it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(13, 13)
        self.lora_a, self.lora_b = nn.Linear(13, 2, bias=False), nn.Linear(2, 13, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def lora_groups(outmost):
    model = build()
    model.layers = nn.ModuleList(Lora() for _ in range(3))
    model.first.requires_grad_(False)
    result = mw.accelerate(
        model, torch.optim.SGD, None, loss_func, strategy=[("fsdp", {"wrap_trainable_outmost": outmost})],
        optim_args={"lr": 0.1},
    )  # fmt: skip
    result.step(part(mw.rank(), 2))
    return sum(isinstance(module, FSDPModule) for module in result.model.modules())


def test_trainable_modules_are_gathered_as_one_group(ranks):
    assert ranks(2).run(lora_groups, True) == [4 + 7] * 2  # blocks and root, and every module of the one group
    assert ranks(2).run(lora_groups, False) == [4] * 2


def gathered_dtypes(keys):
    seen = []
    model = build()
    model.first.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    result = mw.accelerate(model, torch.optim.SGD, None, loss_func, strategy=[("zero2", keys), ("amp_native", "bf16")],
                           optim_args={"lr": 0.1})  # fmt: skip
    result.step(part(mw.rank(), 2))
    return seen[0], next(result.model.parameters()).dtype


def test_precision_of_gathered_parameters(ranks):
    assert ranks(2).run(gathered_dtypes, {}) == [(torch.bfloat16, torch.float32)] * 2
    keys = {"mixed_precision": {"param_dtype": torch.float32}}
    assert ranks(2).run(gathered_dtypes, keys) == [(torch.float32, torch.float32)] * 2


def differing_start():
    torch.manual_seed(mw.rank())
    result = mw.accelerate(tiny.Mlp(), strategy=["fsdp"])
    return next(result.model.parameters()).full_tensor().detach()


def test_ranks_that_start_from_different_weights_take_those_of_rank_0(ranks):
    torch.manual_seed(0)
    expected = next(tiny.Mlp().parameters())
    for first in ranks(2).run(differing_start):
        assert torch.equal(first, expected)


class Refused(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if kind == "tied":
            self.layers[1].weight = self.layers[0].weight
        if kind == "dtypes":
            self.layers[0].bias.data = self.layers[0].bias.data.bfloat16()
        if kind == "sparse":
            self.table = nn.EmbeddingBag(5, 4, sparse=True)


@pytest.mark.parametrize(
    ("kind", "said"), [("tied", "shared between"), ("dtypes", "different dtypes"), ("sparse", "sparse gradients")]
)
def test_what_cannot_be_sharded_is_refused(kind, said):
    with pytest.raises(mw.ModelError, match=said) as caught:
        choose_units(Fsdp(), Refused(kind))
    assert "What to do" in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": "fp32", "buffer_dtype": torch.float32},
        torch.distributed.fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_precision_as_fsdp1_takes_it(asked):
    method = mw.Strategy([("fsdp", {"mixed_precision": asked})]).get("fsdp")
    assert method.mixed_precision.model_dump() == {
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "buffer_dtype": "fp32",
    }
    assert any("buffer_dtype changes nothing" in said for said in method.notices())
    for wrong, said in (
        ({"param_typ": "bf16"}, r"fsdp\.mixed_precision has no config key 'param_typ' \(did you mean 'param_dtype'"),
        (torch.distributed.fsdp.MixedPrecisionPolicy(output_dtype=torch.float32), "without output_dtype"),
    ):
        with pytest.raises(mw.StrategyError, match=said):
            mw.Strategy([("fsdp", {"mixed_precision": wrong})])


def test_units_by_size_are_the_smallest_that_are_large_enough():
    model = tiny.Mlp()
    units = choose_units(Fsdp(atorch_size_based_min_num_params=100), model)
    assert sorted(path for path, _ in units.modules) == ["first", "layers.0.0", "layers.1.0", "layers.2.0"]


class WithWhole(nn.Module):
    """A scalar as CLIP's temperature, a parameter without elements, a transposed one, and batch normalisation."""

    def __init__(self, norm=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(2))
        if not norm:
            self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.last = nn.Linear(7, 3)
        self.last.weight = nn.Parameter(torch.randn(7, 3).t())
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.no_prompt = nn.Parameter(torch.zeros(0, 7))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(torch.cat([x, self.no_prompt])) * self.temperature.exp()


def train_whole(strategy, optimizer, norm):
    torch.manual_seed(1)
    model = WithWhole(norm)
    batch = part(mw.rank(), mw.world_size()) if not norm else BATCH  # running statistics are a rank's own
    result = mw.accelerate(model, optimizer, None, loss_func, strategy=strategy, sample_batch=BATCH[:2],
                           optim_args={"lr": 0.05}, batch_size=8 if not norm else 8 * mw.world_size())  # fmt: skip
    for _ in range(4):
        _, measured = result.measured_step(batch)
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured.items():
        assert kind == "activations" or getattr(predicted, kind) == size, kind
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in (*result.model.named_parameters(), *result.model.named_buffers())
    }


def plain_whole(optimizer, norm, autocast):
    torch.manual_seed(1)
    model = WithWhole(norm)
    optim = optimizer(model.parameters(), lr=0.05)
    for _ in range(4):
        optim.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_func(None, model(BATCH))
        loss.backward()
        optim.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("method", ["zero2", pytest.param("zero1", marks=pytest.mark.long), "fsdp"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, pytest.param(torch.optim.SGD, marks=pytest.mark.long)])
def test_scalars_stay_whole_and_train_alike(ranks, method, optimizer):
    expected = plain_whole(optimizer, norm=False, autocast=False)
    for weights in ranks(2).run(train_whole, [method], optimizer, False):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [pytest.param("zero1", marks=pytest.mark.long), "fsdp"])
def test_batch_norm_trains_sharded_in_amp_as_one_process_does(ranks, method):
    expected = plain_whole(torch.optim.SGD, norm=True, autocast=True)
    for weights in ranks(2).run(train_whole, [method, ("amp_native", "bf16")], torch.optim.SGD, True):
        for name, value in weights.items():
            assert value.dtype == expected[name].dtype
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


def test_only_in_half_does_batch_norm_stay_whole():
    units, in_half = (choose_units(Fsdp(), WithWhole(), in_half=each) for each in (False, True))
    assert sorted(parameter.shape for parameter in units.kept) == [(), (0, 7)]
    assert len(in_half.kept) == 2 + 2 * 2


def test_what_stays_whole_does_not_go_beside_a_pipeline():
    with pytest.raises(mw.ModelError, match="stay whole") as caught:
        units_of(Fsdp(), WithWhole(norm=False), mw.Strategy(["fsdp"]), {"pipeline": 2, "zero": 2})
    assert "temperature" in str(caught.value)


class Dropping(tiny.Mlp):
    config = types.SimpleNamespace(layerdrop=0.1, decoder_layerdrop=0.0)


def notices(strategy):
    return mw.accelerate(Dropping(), None, None, None, strategy=strategy)._job.notices


def test_layerdrop_of_transformers_models_is_named_when_they_are_sharded(ranks):
    (told,), _ = ranks(2).run(notices, ["zero2"])
    assert "zero2: config.layerdrop=0.1 leaves out layers at random" in told
    assert ranks(2).run(notices, ["parallel_mode"]) == [[], []]

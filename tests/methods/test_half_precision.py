"""amp_native and half: scaling, skipping together, master weights, dtypes."""

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from tests import tiny

LAYOUTS = [[], ["zero1"], ["zero2"], ["fsdp"]]


def weights(model):
    return torch.cat(
        [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in model.parameters()]
    )


def overflow_on_one_rank(strategy):
    torch.manual_seed(0)
    result = mw.accelerate(
        tiny.Mlp(), torch.optim.AdamW, None, lambda x, y: y.float().square().mean(), strategy=strategy,
        optim_args={"lr": 0.01},
    )  # fmt: skip
    good = torch.ones(2, 7)
    bad = good * (float("inf") if mw.rank() == 1 else 1.0)
    while result.step(good).skipped:  # the first loss scale may be too large
        pass
    before, scale = weights(result.model), result.optim.scaler.get_scale() if result.optim.scaler else None
    assert result.step(bad).skipped
    assert torch.equal(weights(result.model), before)
    after_scale = result.optim.scaler.get_scale() if result.optim.scaler else None
    assert not result.step(good).skipped
    assert not torch.equal(weights(result.model), before)
    return after_scale / scale if scale else None


OVERFLOWS = [
    ("amp_native", 0.5),
    (("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True}), None),
    (("half", "fp16"), 0.5),
]


@pytest.mark.parametrize(
    ("precision", "halved", "layout"),
    [
        # Every precision and every layout; all combinations in the long run.
        pytest.param(*overflow, layout, marks=[] if column in (row, 3 * (row == 0)) else [pytest.mark.long])
        for row, overflow in enumerate(OVERFLOWS)
        for column, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, layout, precision, halved):
    assert ranks(2).run(overflow_on_one_rank, [*layout, precision]) == [halved] * 2


def state_bytes(strategy):
    result = mw.accelerate(
        tiny.build("llama"), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func, strategy=strategy,
        prepare_input=tiny.prepare_for("llama"), model_input_format="unpack_dict", optim_args={"lr": 1e-3},
        dataloader_args={"batch_size": 8},
    )  # fmt: skip
    for batch in result.dataloader:
        step, measured = result.measured_step(batch)
        if not step.skipped:
            break
    predicted = memory(result.plan.step, result._job.coordinate)
    return [(kind, getattr(predicted, kind), size) for kind, size in measured.items() if kind != "activations"]


WHOLE = ("fsdp", {"atorch_ignored_cls": ("LlamaRMSNorm", torch.nn.Linear)})


def test_what_stays_whole_beside_shards_is_in_half_with_masters_as_predicted(ranks):
    for found in ranks(2).run(state_bytes, [WHOLE, ("half", "bf16"), "checkpoint"]):
        sizes = {kind: size for kind, _, size in found}
        assert sizes["master"] > 0
        for kind, predicted, measured in found:
            assert predicted == measured, kind


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        # Every layout with masters, and the two that differ most with the others; all of both in the long run.
        pytest.param(layout, keys, marks=[] if row == 0 or layout in ([], ["fsdp"]) else pytest.mark.long)
        for row, keys in enumerate([{"dtype": "bf16"}, {"dtype": "bf16", "master_weights": False}, {}])
        for layout in LAYOUTS
    ],
    ids=str,
)
def test_predicted_bytes_of_half_are_those_held(ranks, layout, keys):
    for found in ranks(2).run(state_bytes, [*layout, ("half", keys)]):
        for kind, predicted, measured in found:
            assert predicted == measured, kind


def state_of_half_models(strategy, optimizers):
    found = []
    for optimizer in optimizers:
        result = mw.accelerate(
            tiny.Mlp().bfloat16(), optimizer, strategy=strategy, optim_args={"lr": 1e-3},
            loss_func=lambda x, y: y.float().square().mean(),
        )  # fmt: skip
        _, measured = result.measured_step(torch.ones(2, 7, dtype=torch.bfloat16))
        predicted = memory(result.plan.step, result._job.coordinate)
        found += [(kind, getattr(predicted, kind), size) for kind, size in measured.items() if kind != "activations"]
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        [("half", "bf16")],
        [("half", {"dtype": "bf16", "master_weights": False})],
        pytest.param(["fsdp", ("half", "bf16")], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_predicted_bytes_are_those_held_of_a_model_that_is_in_half_precision(ranks, strategy):
    for kind, predicted, measured in ranks(1).run(state_of_half_models, strategy, [torch.optim.AdamW, mw.optim.Lamb])[
        0
    ]:
        assert predicted == measured, kind


def losses(strategy, lr):
    result = mw.accelerate(
        tiny.build("plain"), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func, strategy=strategy,
        optim_args={"lr": lr}, dataloader_args={"batch_size": 8},
    )  # fmt: skip
    found = [result.step(batch) for batch in result.dataloader]
    dtypes = {str(p.dtype) for p in result.model.parameters()}
    return [step.loss.item() for step in found], dtypes, found[0].loss.dtype


@pytest.fixture(scope="module")
def fp32_losses(ranks):
    return ranks(1).run(losses, [], 3e-3)[0][0]


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        # Every layout once; every precision on all of them in the long run.
        pytest.param(precision, layout, marks=[] if layout in short else [pytest.mark.long])
        for precision, short in (
            (("half", "bf16"), ([], ["zero2"])),
            (("half", "fp16"), ()),
            (("amp_native", "fp16"), (["zero1"], ["fsdp"])),
        )
        for layout in LAYOUTS
    ],
    ids=str,
)
def test_half_precision_follows_the_loss_curve_of_fp32(ranks, fp32_losses, layout, precision):
    for found, dtypes, loss_dtype in ranks(2).run(losses, [*layout, precision], 3e-3):
        assert found == pytest.approx(fp32_losses, rel=1e-2)
        assert loss_dtype == torch.float32
        half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision[1]]
        assert dtypes == {half if precision[0] == "half" and not layout else "torch.float32"}


@pytest.mark.parametrize("method", ["zero2", "fsdp"])
def test_layers_left_whole_follow_the_loss_curve_too(ranks, fp32_losses, method):
    for found, dtypes, _ in ranks(2).run(
        losses, [(method, {"atorch_ignored_cls": (torch.nn.Linear,)}), ("half", "fp16")], 3e-3
    ):
        assert found == pytest.approx(fp32_losses, rel=1e-2)
        assert dtypes == {"torch.float16", "torch.float32"}


def test_without_master_weights_small_updates_are_lost(ranks):
    with_master = ranks(1).run(losses, [("half", "bf16")], 1e-5)[0][0]
    without = ranks(1).run(losses, [("half", {"dtype": "bf16", "master_weights": False})], 1e-5)[0][0]
    expected = ranks(1).run(losses, [], 1e-5)[0][0]

    def apart(found):
        return sum(abs(a - b) for a, b in zip(found, expected, strict=True))

    assert apart(with_master) < apart(without)


def without_loss_func():
    result = mw.accelerate(tiny.build("gpt2"), torch.optim.SGD, strategy=["amp_native"], optim_args={"lr": 0.1},
                           model_input_format="unpack_dict")  # fmt: skip
    ids = torch.arange(8).reshape(2, 4)
    return result.step({"input_ids": ids, "labels": ids}).loss.item()


def test_fp16_scales_the_loss_that_the_model_itself_returns(ranks):
    assert ranks(1).run(without_loss_func)[0] == pytest.approx(4.1, abs=0.5)

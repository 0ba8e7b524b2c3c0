import copy
import dataclasses
import gc
import pickle
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import Strategy
from meshwright.optim import Adafactor
from meshwright.runtime import processes
from meshwright.strategy.value import METHOD_CONFIGS
from tests import tiny

LR = {"lr": 0.1, "momentum": 0.9}
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def accelerate(strategy=None, model=None, **changes):
    arguments = {
        "optim_func": torch.optim.SGD, "optim_args": LR, "dataset": tiny.Tokens(), "loss_func": tiny.loss_func,
        "dataloader_args": {"batch_size": 8}, "strategy": strategy,
    }  # fmt: skip
    return mw.accelerate(model or tiny.build("plain"), **{**arguments, **changes})


def weights(model):
    return torch.cat(
        [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in model.parameters()]
    )


def step_and_loop(strategy, micro):
    data = tiny.Tokens(40)  # five steps: what is equal to the bit needs no more
    by_step = accelerate(strategy, dataset=data, max_grad_norm=0.5, num_micro_batches=micro)
    norms = [by_step.step(batch).grad_norm.item() for batch in by_step.dataloader]
    by_hand = accelerate(strategy, dataset=data)
    model, optim, dataloader, loss_func, prepare_input, args = by_hand
    assert not any(args.values())
    for batch, expected in zip(dataloader, norms, strict=True):
        optim.zero_grad()
        parts = batch.chunk(micro)
        for part in parts[:-1]:
            with by_hand.no_sync():
                inputs = prepare_input(part, by_hand.device)
                (loss_func(inputs, model(inputs)) / micro).backward()
        inputs = prepare_input(parts[-1], by_hand.device)
        (loss_func(inputs, model(inputs)) / micro).backward()
        norm = mw.clip_grad_norm(model, 0.5)
        assert norm.item() == expected
        optim.step()
    return torch.equal(weights(by_step.model), weights(model)), expected


STRATEGIES = [
    [],
    ["zero1"],
    ["zero2", ("amp_native", "bf16")],
    ["fsdp", "checkpoint"],
    ["amp_native"],
    [("half", "bf16")],
    [("half", "fp16"), "fsdp"],
]


@pytest.mark.parametrize(
    ("strategy", "micro"),
    [
        # The four that differ most once, with micro-batches or without; all of both in the long run.
        pytest.param(
            strategy, micro, marks=[] if (row, micro) in {(0, 1), (2, 1), (3, 2), (6, 2)} else [pytest.mark.long]
        )
        for row, strategy in enumerate(STRATEGIES)
        for micro in (1, 2)
    ],
    ids=str,
)
def test_the_loop_written_by_hand_and_step_give_identical_weights(ranks, strategy, micro):
    for identical, _ in ranks(2).run(step_and_loop, strategy, micro):
        assert identical


def losses(strategy, micro, world_of_one=False):
    result = accelerate(strategy, num_micro_batches=micro)
    return [result.step(batch).loss.item() for batch in result.dataloader]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param([], marks=pytest.mark.long),
        ["zero1"],  # accumulates whole gradients, as data parallelism does
        pytest.param(["zero2"], marks=pytest.mark.long),
        ["fsdp"],
    ],
    ids=str,
)
def test_micro_batches_change_nothing(ranks, strategy):
    expected = ranks(1).run(losses, [], 1)[0]
    for found in ranks(2).run(losses, strategy, 4):
        assert found == pytest.approx(expected, rel=1e-5)


def dropout_masks():
    model = tiny.plain(dropout=0.5)
    result = accelerate([], model=model)
    return torch.rand(4).tolist(), weights(result.model).sum().item()


def test_replicas_start_equal_and_draw_different_dropout(ranks):
    (first, weight), (second, other_weight) = ranks(2).run(dropout_masks)
    assert weight == other_weight
    assert first != second


def auto(**arguments):
    arguments = {"optim_args": LR, "dataloader_args": {"batch_size": 8}, **arguments}
    return mw.auto_accelerate(tiny.build("plain"), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, **arguments)


def seed_api(directory):
    path = f"{directory}/strategy.json"
    status, result, best = auto(
        load_strategy=["parallel_mode", ("amp_native", "bf16"), "zero2"], save_strategy_to_file=path
    )
    assert status is True
    assert Strategy(path) == best == result.strategy
    assert best.get("parallel_mode").axes == (("data", 2),)
    result.step(next(iter(result.dataloader)))
    again, _, loaded = auto(load_strategy=path)
    assert again
    assert loaded == best
    assert auto(load_strategy=pickle.dumps(["zero2"])) == (False, None, None)
    assert auto(load_strategy=["zero2", "fsdp"]) == (False, None, None)
    assert auto(load_strategy=["zero2"], finetune_strategy=True)[2].names == ("parallel_mode", "zero2")
    named = ["zero2", ("grad_clip", 0.5), ("checkpoint", ("Block",)), ("ema", {"decay": 0.99})]
    assert auto(load_strategy=named, finetune_strategy=True)[2].without("parallel_mode") == Strategy(named)
    assert auto(included=[("half", "fp16")])[2].get("half").dtype == "fp16"
    assert auto(time_limit=-1) == (False, None, None)
    assert auto(load_strategy=path, loss_weight="labels") == (False, None, None)
    assert auto(load_strategy=path, save_strategy_to_file="/no/such/folder/s.json") == (False, None, None)
    with pytest.raises(TypeError, match="did you mean 'verbose'"):
        auto(verbos=True)
    return True


def test_the_api_of_the_seed(ranks, tmp_path):
    assert all(ranks(2).run(seed_api, str(tmp_path)))


def test_the_signature_is_that_of_the_seed_in_its_order():
    import inspect

    names = list(inspect.signature(mw.auto_accelerate).parameters)
    assert names == [
        "model", "optim_func", "dataset", "loss_func", "prepare_input", "model_input_format", "optim_args",
        "optim_param_func", "dataloader_args", "distributed_sampler_cls", "excluded", "included", "load_strategy",
        "lr_scheduler_cls", "lr_scheduler_args", "finetune_strategy", "save_strategy_to_file", "kargs",
    ]  # fmt: skip


def choices():
    def chosen(limit, **arguments):
        return accelerate(memory_limit=limit, model=tiny.plain(num_layers=6), **arguments).strategy.names

    data, zero2, fsdp, recompute = (
        accelerate(["parallel_mode", *methods], model=tiny.plain(num_layers=6)).plan.memory.total
        for methods in ([], ["zero2"], ["fsdp"], ["fsdp", "checkpoint"])
    )
    assert data > zero2 > fsdp > recompute
    assert chosen(data) == ("parallel_mode",)
    assert chosen(data - 1) == ("parallel_mode", "zero2")
    assert chosen(zero2 - 1) == ("parallel_mode", "fsdp")
    assert chosen(fsdp - 1) == ("parallel_mode", "fsdp", "checkpoint")
    assert chosen(data, excluded=["zero2"], included=["checkpoint"]) == ("parallel_mode", "checkpoint")
    assert "zero1" in chosen(data, included=["zero1"])
    for half in ("amp_native", "half"):  # fp16, their own default, is what CPUs are slow in
        chose = accelerate(memory_limit=data, model=tiny.plain(num_layers=6), included=[half]).strategy
        assert chose.get(half).dtype == "bf16"
    with pytest.raises(mw.StrategyError, match=r"No strategy fits.*Expected at most.*smallest.*What to do"):
        chosen(recompute - 1)
    with pytest.raises(mw.StrategyError, match="did you mean 'zero"):
        chosen(data, excluded=["zero"])
    with pytest.raises(mw.StrategyError, match="No strategy is left"):
        chosen(data, excluded=["parallel_mode"])
    return True


def test_the_first_strategy_that_fits_is_chosen(ranks):
    assert all(ranks(2).run(choices))


def dry_run(strategy):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    result = mw.accelerate(
        model, torch.optim.SGD, None, lambda x, y: y.sum(), strategy=strategy, optim_args=LR,
        sample_batch=torch.randn(8, 4), dry_run=True,
    )  # fmt: skip
    inner = getattr(result.model, "module", result.model)
    for name, tensor in inner.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, before[name]), name
    assert all(p.grad is None for p in inner.parameters())
    return True


@pytest.mark.parametrize("strategy", [[], ["fsdp"]], ids=str)
def test_a_dry_run_changes_nothing(ranks, strategy):
    assert all(ranks(2).run(dry_run, strategy))


class Unset(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def bad_calls():
    cases = [
        ({"dataloader_args": {"batch_size": 7}}, "multiple of 2"),
        ({"dataset": tiny.Tokens(0)}, "empty"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))}, "half on meta"),
        ({"model": nn.Sequential(Unset()).to("meta")}, "0.scale"),
        ({"model": lambda: 3}, "returns no module"),
        ({"model": nn.parallel.DistributedDataParallel(tiny.build("plain"))}, "already distributed"),
        ({"model": print}, "returns no module"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))}, "1 (SyncBatchNorm) on cpu"),
        ({"model": nn.Sequential(nn.LazyLinear(2))}, "no parameters yet"),
        ({"optim_func": torch.optim.LBFGS, "optim_args": None}, "needs a closure"),
        ({"model_input_format": "unpack"}, "unpack_dict"),
        ({"optim_args": {"learning_rate": 1}}, "unknown key 'learning_rate'"),
        ({"optim_func": lambda params: 3, "optim_args": None}, "did not return an optimizer"),
        ({"num_micro_batches": 0}, "1 or more"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"dry_run": True, "dataset": None}, "needs data"),
        ({"optim_func": None, "lr_scheduler_cls": print}, "needs an optimizer"),
        ({"lr_scheduler_cls": PLATEAU}, "with a validation loss"),
        ({"lr_scheduler_cls": lambda optim: PLATEAU(optim)}, "with a validation loss"),
        (
            {
                "optim_func": Adafactor,
                "optim_args": {},
                "lr_scheduler_cls": torch.optim.lr_scheduler.StepLR,
                "lr_scheduler_args": {"step_size": 1},
            },
            "relative_step=False",
        ),
        ({"strategy": ["zero2"], "optim_args": {**LR, "fused": True}}, "fused SGD cannot"),
        ({"strategy": [("checkpoint", "Blok")]}, "did you mean 'Block'"),
        ({"strategy": [("fsdp", {"atorch_wrap_cls": "GPT2Block"})]}, "no module of class 'GPT2Block'"),
        ({"strategy": [("fsdp", {"reshard_after_forward": 3})]}, "divisor of 2"),
    ]
    texts = []
    for changes, _ in cases:
        with pytest.raises(mw.MeshwrightError) as caught:
            accelerate(**changes)
        texts.append(str(caught.value))
    return texts, [said for _, said in cases]


def test_bad_calls_raise_one_paragraph_on_every_rank(ranks):
    (texts, said), (others, _) = ranks(2).run(bad_calls)
    assert texts == others
    for text, part in zip(texts, said, strict=True):
        assert part in text
        assert "\n" not in text


def twice():
    model = tiny.build("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHOD_CONFIGS["grad_clip"], "check", refuse)
        with pytest.raises(mw.ModelError, match="on purpose"):
            accelerate(["grad_clip"], model=model)
    accelerate(model=model)  # a check has failed, and nothing was changed
    with pytest.raises(mw.ModelError, match=r"accelerated before.*What to do: build the model anew"):
        accelerate(model=model)
    return True


def refuse(*_):
    raise mw.ModelError("on purpose")


def test_a_model_is_accelerated_once(ranks):
    assert all(ranks(2).run(twice))


def differing(what):
    sizes = {"num_layers": 2 + (mw.rank() if what == "model" else 0)}
    strategy = ["zero2"] if what == "strategy" and mw.rank() else []
    with pytest.raises(mw.LaunchError, match=r"differs between ranks.*Expected.*rank 0.*Got.*rank 1"):
        accelerate(strategy, model=tiny.plain(**sizes))
    return True


@pytest.mark.parametrize("what", ["model", "strategy"])
def test_ranks_that_differ_are_told_so_at_the_start(ranks, what):
    assert all(ranks(2).run(differing, what))


def only_the_model():
    result = mw.accelerate(tiny.build("plain"), strategy=["fsdp"])
    assert result.optim is result.dataloader is result.loss_func is None
    assert result.model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, tiny.VOCAB)
    with pytest.raises(mw.ConfigError, match="no optimizer"):
        result.step(torch.zeros(1, 4, dtype=torch.long))
    result = mw.accelerate(tiny.build("plain"), torch.optim.SGD, strategy=[])
    with pytest.raises(mw.ConfigError, match="no loss"):
        result.step(torch.zeros(1, 4, dtype=torch.long))
    return True


def test_a_model_alone_and_what_is_missing_then(ranks):
    assert all(ranks(1).run(only_the_model))


def schedules_groups_and_evaluation(strategy):
    result = accelerate(
        strategy, lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, lr_scheduler_args={"step_size": 1, "gamma": 0.5},
        optim_param_func=lambda model: [
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 1.0},
            {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
        ],
    )  # fmt: skip
    batch = next(iter(result.dataloader))
    before = result.evaluate(batch)
    loss = result.step(batch).loss
    assert [group["lr"] for group in result.optim.param_groups] == [0.5, 0.05]
    after = result.evaluate(batch)
    assert after < before
    return before.item() == pytest.approx(loss.item(), rel=1e-5), result.step(batch).loss.item() == pytest.approx(
        after.item()
    )


@pytest.mark.parametrize("strategy", [[], ["zero2"], ["fsdp"]], ids=str)
def test_schedules_parameter_groups_and_evaluation(ranks, strategy):
    for same_before, same_after in ranks(2).run(schedules_groups_and_evaluation, strategy):
        assert same_before
        assert same_after


def planned_on_hosts_of(ranks_of_a_host):
    """Whether a plan takes ranks to share memory."""
    mw.init_distributed()
    told = dataclasses.replace(processes.settings(), local_world_size=ranks_of_a_host)
    with mock.patch.object(processes, "_settings", told):
        return accelerate(["fsdp"]).plan.step.shards_in_memory


def test_ranks_of_several_hosts_are_not_planned_as_those_of_one(ranks):
    for on_one, on_two in zip(*(ranks(2).run(planned_on_hosts_of, number) for number in (2, 1)), strict=True):
        assert on_one
        assert not on_two


def freed():
    result = mw.accelerate(tiny.build("plain"), torch.optim.SGD, strategy=[], optim_args={"lr": 0.1})
    gone = weakref.ref(result.model)
    del result
    gc.collect()
    return gone() is None


def test_a_model_is_freed_with_its_last_reference(ranks):
    assert ranks(1).run(freed) == [True]

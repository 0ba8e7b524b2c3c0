"""An optimizer built over the plain model: the same object goes on over the model as applied."""

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.optim import AdamOptimizer
from meshwright.training.built_optimizer import BuiltOptimizer
from tests import tiny

ARGS = {"lr": 0.1, "momentum": 0.9}


def losses(optim, strategy, model, **changes):
    result = mw.accelerate(
        model, optim, tiny.Tokens(32), tiny.loss_func, strategy=strategy, dataloader_args={"batch_size": 8}, **changes
    )
    return [result.step(batch).loss.item() for batch in result.dataloader], result


def goes_on():
    for strategy in ([], ["zero1"], ["fsdp", ("half", "bf16")], [("half", "bf16")]):
        expected, _ = losses(torch.optim.SGD, strategy, tiny.build("plain"), optim_args=ARGS)
        model = tiny.build("plain")
        optim = torch.optim.SGD(model.named_parameters(), **ARGS)
        groups = optim.param_groups[0]
        found, result = losses(optim, strategy, model)
        assert found == expected
        assert getattr(result.optim, "inner", result.optim) is optim
        assert optim.param_groups[0] is groups
        assert len(optim.state) == len(groups["params"]) == len(groups["param_names"])
    model = tiny.build("plain")
    with pytest.raises(mw.ConfigError, match="optim_args is given beside"):
        losses(torch.optim.SGD(model.parameters()), [], model, optim_args=ARGS)
    with pytest.raises(mw.ConfigError, match="unknown key 'bucket_cap'"):
        losses(torch.optim.SGD(model.parameters()), [], model, ddp_options={"bucket_cap": 1})
    assert losses(torch.optim.SGD(model.parameters()), [], model)[0]
    return True


def test_it_trains_as_one_that_is_built_afterwards(ranks):
    assert all(ranks(2).run(goes_on))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, AdamOptimizer])
def test_the_probe_leaves_the_optimizer_alone(kind):
    model = tiny.Mlp()
    optim = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
    built = BuiltOptimizer(optim, model)
    twin = built.probe([torch.nn.Parameter(torch.ones(3))])
    assert type(twin) is kind
    assert twin.param_groups[0]["lr"] == 0.1
    assert not optim.state
    assert len(optim.param_groups[0]["params"]) == len(list(model.parameters()))
    assert schedule.optimizer is optim


def grouped():
    found = []
    for frozen in (False, True):
        model = tiny.Mlp()
        one, *others = model.parameters()
        one.requires_grad_(not frozen)
        groups = [{"params": [one], "amsgrad": True}, {"params": others[1:]}]  # the first of the others is in none
        optim = torch.optim.AdamW(groups, lr=1e-3)
        result = mw.accelerate(
            model, optim, None, lambda inputs, output: output.square().mean(), strategy=["fsdp"], batch_size=8,
            sample_batch=torch.randn(2, 7),
        )  # fmt: skip
        _, measured = result.measured_step(torch.randn(4, 7))
        found.append((memory(result.plan.step, result._job.coordinate).optimizer, measured["optimizer"]))
    return found


def test_groups_are_planned_by_their_own_hyperparameters(ranks):
    for found in ranks(2).run(grouped):
        assert all(predicted == measured for predicted, measured in found)
        assert found[0][0] > found[1][0] > 0


def test_an_optimizer_whose_constructor_makes_states_is_not_probed():
    class Needy(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"step": torch.zeros(()), "half": torch.full_like(parameter, 0.5)}

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= self.state[parameter]["half"]

    model, other = tiny.Mlp(), tiny.Mlp()
    built = BuiltOptimizer(Needy(model.parameters()), model)
    assert built.probe is None
    optim = built.take(built.groups(other))
    assert list(optim.state) == list(other.parameters())
    before = other.last.bias.detach().clone()
    optim.step()
    assert torch.equal(other.last.bias, before - 0.5)


def test_tied_and_frozen_parameters_and_some_of_them():
    model = tiny.build("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    model.transformer.wpe.weight.requires_grad_(False)
    optim = torch.optim.SGD([{"params": [model.lm_head.weight], "lr": 1.0}], lr=0.1)
    built = BuiltOptimizer(optim, model)
    other = tiny.build("gpt2", seed=5)
    assert built.take(built.groups(other)) is optim
    assert optim.param_groups[0]["params"] == [other.transformer.wte.weight]
    assert optim.param_groups[0]["lr"] == 1.0


class Stateful(torch.optim.SGD):
    """Keeps what only its constructor makes."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.kept = [torch.ones_like(parameter) for group in self.param_groups for parameter in group["params"]]

    def step(self):
        for kept, parameter in zip(self.kept, self.param_groups[0]["params"], strict=True):
            parameter.data -= 0.1 * kept


def _gaps():
    model = tiny.Mlp()
    told = mw.accelerate(model, Stateful(model.parameters()), strategy=[]).plan.gaps
    other = tiny.Mlp()
    return told, mw.accelerate(other, AdamOptimizer(other.parameters()), strategy=[]).plan.gaps


def test_a_prediction_without_the_optimizer_says_so(ranks):
    told, other = ranks(1).run(_gaps)[0]
    assert any("optimizer state is not predicted" in gap and "Stateful" in gap for gap in told)
    assert not any("optimizer state" in gap for gap in other)

"""Arguments of a wrong kind are named before anything is done."""

import pytest
import torch
from torch.utils.data import DataLoader

from meshwright.errors import ConfigError, ModelError
from meshwright.nn.batches import first_loss
from meshwright.training.request import Request, check_keywords, check_kinds


def check_optimizer(given):
    check_keywords("optim_args", torch.optim.AdamW, given)


def check_schedule(given):
    check_keywords("lr_scheduler_args", torch.optim.lr_scheduler.OneCycleLR, given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim_func", "adamw"), ("loss_func", "mse"), ("lr_scheduler_cls", "cosine"), ("max_grad_norm", "1"),
        ("num_micro_batches", 2.0), ("num_micro_batches", True), ("batch_size", "4"), ("dataset", DataLoader([1, 2])),
        ("excluded", "fsdp"), ("loss_weight", "labels"), ("loss_func", torch.nn.CrossEntropyLoss()),
        ("loss_func", torch.nn.functional.cross_entropy), ("loss_func", torch.nn.MSELoss),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} is of a wrong kind.*Got {type(value).__name__}"):
        check_kinds({name: value})


def test_values_of_the_right_kind_pass():
    model = torch.nn.Linear(2, 2)
    check_kinds({"optim_func": torch.optim.SGD(model.parameters()), "loss_func": None, "dataset": [1], "other": "x"})
    for loss_func in (lambda inputs, output: output.sum(), torch.nn.MSELoss(), torch.nn.functional.l1_loss, model):
        check_kinds({"loss_func": loss_func})
    check_kinds({"optim_func": torch.optim.SGD, "max_grad_norm": 1, "num_micro_batches": 2, "batch_size": None})


@pytest.mark.parametrize("loss", [None, 1.0, {"loss": torch.ones(())}, torch.ones(2), (), (None, torch.ones(()))])
def test_what_is_no_loss_is_named(loss):
    with pytest.raises(ModelError, match="returned no loss"):
        first_loss(loss)


def test_a_loss_may_stand_first():
    assert first_loss((torch.ones(1), {"more": 2})) == 1


@pytest.mark.parametrize(
    ("check", "given", "said"),
    [
        (check_optimizer, {"lr": "1e-3"}, "optim_args has a value for 'lr'.*str '1e-3'"),
        (check_optimizer, {"betas": 0.9, "lr": 0.1}, "optim_args has a value for 'betas'"),
        (check_schedule, {"max_lr": 0.1, "total_step": 3}, r"unknown key 'total_step' \(did you mean 'total_steps'"),
        (check_schedule, {"total_steps": 3}, "lr_scheduler_args does not fit OneCycleLR: missing.*'max_lr'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(check, given, said):
    with pytest.raises(ConfigError, match=said):
        check(given)


def test_arguments_that_fit_pass():
    check_optimizer({"lr": 1e-3, "betas": (0.9, 0.99)})
    check_optimizer({"lr": -1.0})  # torch says that itself
    check_schedule({"max_lr": 0.1, "total_steps": 3})


class Given:
    """In the place of a request: a sample, or what reading it raises."""

    def __init__(self, sample):
        self.sample = sample

    def sample_of(self, number):
        if isinstance(self.sample, Exception):
            raise self.sample
        return self.sample


@pytest.mark.parametrize(
    ("sample", "pins"),
    [
        ({"ids": torch.ones(2), "length": 3}, True),
        ([torch.ones(2), torch.ones(2, device="meta")], False),
        (torch.eye(2).to_sparse(), False),
        (None, False),  # a stream
        (OSError("no such file"), False),
    ],
)
def test_batches_for_a_gpu_are_pinned_where_they_can_be(sample, pins):
    assert Request._pins(Given(sample), torch.device("cuda")) == pins
    assert not Request._pins(Given(sample), torch.device("cpu"))

"""Ranks that would train differently, and parameters that came too late, are named before weights are wrong."""

import functools

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

import meshwright as mw
from meshwright import LaunchError, ModelError
from meshwright.methods.job import KnownParameters
from meshwright.runtime.agreement import value_text
from meshwright.store.entries import unwrapped
from tests import tiny

SAMPLE = torch.ones(4, 7)


def square(inputs, output):
    return output.square().mean()


def accelerate(strategy=(), optimizer=torch.optim.SGD, dataset=None, **keys):
    torch.manual_seed(0)
    keys = {"optim_args": {"lr": 0.1}, "sample_batch": SAMPLE} | keys
    return mw.accelerate(tiny.Mlp(), optimizer, dataset, square, strategy=list(strategy), **keys)


def unlike(name):
    """What two ranks are told that differ in one thing."""
    own = mw.rank()

    def built(parameters):
        return torch.optim.SGD([{"params": list(parameters), "lr": 0.1 + own}], lr=0.1)

    keys = {
        "optim_args": {"optim_args": {"lr": 0.1 * (1 + own)}},
        "optimizer": {"optimizer": [torch.optim.SGD, torch.optim.Adagrad][own]},
        "closure": {"optimizer": built, "optim_args": None},
        "schedule": {"lr_scheduler_cls": StepLR, "lr_scheduler_args": {"step_size": 3 + own}},
        "dataset": {"dataset": [torch.ones(7)] * (8 + own)},
        "seed": {"dataset": [torch.ones(7)] * 8, "sampler_seed": own},
        "norm": {"max_grad_norm": [None, 1.0][own]},
    }[name]
    with pytest.raises(LaunchError) as caught:
        accelerate(["fsdp"] if name == "closure" else [], **keys)
    assert caught.value.agreed
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "what", "got"),
    [
        ("optim_args", "The optimizer", "{'lr': 0.2} (rank 1)"),
        ("optimizer", "The optimizer", "Adagrad with {'lr': 0.1} (rank 1)"),
        ("closure", "The optimizer", "'lr': 1.1"),
        ("schedule", "The learning-rate schedule", "StepLR with {'step_size': 4} (rank 1)"),
        ("dataset", "The length of the data", "list of 9 samples, none (rank 1)"),
        ("seed", "The order of the data", "'seed': 1"),
        ("norm", "An argument of accelerate", "'max_grad_norm': 1.0"),
    ],
)
def test_ranks_that_are_told_different_things_do_not_start(ranks, name, what, got):
    for said in ranks(2).run(unlike, name):
        assert said.startswith(f"{what} differs between ranks.")
        assert got in said


def alike():
    """Functions, tensors and objects that are equal on every rank, at other places in memory."""
    job = accelerate(
        optimizer=functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1)), optim_args={"weight_decay": 0.5},
        lr_scheduler_cls=LambdaLR, lr_scheduler_args={"lr_lambda": lambda step: 1.0},
        dataset=[torch.ones(7)] * 8, dataloader_args={"sampler": torch.utils.data.SequentialSampler(range(8))},
    )  # fmt: skip
    return job.step(SAMPLE).loss.item()


def test_equal_functions_and_objects_are_equal(ranks):
    one, other = ranks(2).run(alike)
    assert one == other


def test_the_text_of_a_value_does_not_depend_on_its_address():
    def function():
        return None

    assert value_text({"b": [function, {2, 1}], "a": torch.tensor(0.5)}) == (
        "{'a': 0.5, 'b': [tests.training.test_alike."
        "test_the_text_of_a_value_does_not_depend_on_its_address.<locals>.function, {1, 2}]}"
    )
    assert value_text(object()) == "<object object>"
    assert value_text(torch.device("cuda", 3)) == "cuda"
    assert value_text(torch.zeros(40)) == "a tensor of shape (40,)"


def changed(strategy, by_hand):
    """What is said of a layer that is replaced after two steps, and the weights before and after."""
    job = accelerate(strategy, torch.optim.AdamW)
    for _ in range(2):
        job.step(SAMPLE)
    model = unwrapped(job.model)
    model.last = torch.nn.Linear(model.last.in_features, model.last.out_features)
    before = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    if by_hand:
        job.optim.zero_grad()
        square(None, job.model(SAMPLE)).backward()
    with pytest.raises(ModelError, match="has changed since accelerate") as caught:
        job.optim.step() if by_hand else job.step(SAMPLE)
    after = {name: value.detach() for name, value in job.model.named_parameters()}
    same = all(torch.equal(_local(after[name]), _local(value)) for name, value in before.items())
    return str(caught.value), same


def _local(value):
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("strategy", [[], ["zero1"], ["fsdp"], [("offload", "optimizer"), "zero2"]])
def test_a_layer_that_is_replaced_later_is_named(ranks, strategy, by_hand):
    for said, same in ranks(2).run(changed, strategy, by_hand):
        assert "Got last.weight of shape (3, 13), put into the model later" in said
        assert same


def resized():
    job = accelerate(optimizer=torch.optim.AdamW)
    job.step(SAMPLE)
    last = unwrapped(job.model).last
    last.weight.data = torch.ones(5, 13)  # as transformers' resize_token_embeddings does
    last.bias.data = torch.ones(5)
    with pytest.raises(ModelError) as caught:
        job.step(SAMPLE)
    return str(caught.value)


def test_a_layer_that_is_resized_later_is_named(ranks):
    for size in (1, 2):
        for said in ranks(size).run(resized):
            assert "Expected last.weight of shape (3, 13), as in accelerate. Got last.weight of shape (5, 13)" in said


def test_one_process_may_give_its_optimizer_what_came_later():
    model = tiny.Mlp()
    check = KnownParameters(model)
    model.last = torch.nn.Linear(model.last.in_features, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(SAMPLE).sum().backward()
    with pytest.raises(ModelError):
        check()
    check.follow(optimizer)
    check()


def gathered_meanwhile():
    """A forward for a metric between backward and update leaves gathered weights in the model."""
    job = accelerate(["zero2"])
    for _ in range(3):
        job.optim.zero_grad()
        square(None, job.model(SAMPLE)).backward()
        with torch.no_grad():
            job.model(SAMPLE)
        job.optim.step()
        with torch.no_grad():
            job.model(SAMPLE)
        job.step(SAMPLE)
    return True


def test_gathered_weights_are_no_strangers(ranks):
    assert all(ranks(2).run(gathered_meanwhile))


IDS = torch.ones(4, tiny.SEQ_LEN, dtype=torch.long)
TENSOR = [("parallel_mode", {"tensor": 2}), "tensor_parallel"]
PIPELINE = [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"]


def counted(strategy, keys):
    """Samples of a predicted micro-batch, and predicted and measured bytes of activations."""
    job = mw.accelerate(
        tiny.build("plain"), torch.optim.SGD, None, tiny.loss_func, strategy=strategy, optim_args={"lr": 0.1},
        sample_batch=IDS, **keys,
    )  # fmt: skip
    _, measured = job.measured_step(IDS)
    return job.plan.micro_batch, job.plan.memory.activations, measured["activations"]


@pytest.mark.parametrize(
    ("strategy", "keys", "samples"),
    [
        ([], {}, 4), (["fsdp"], {}, 4), (TENSOR, {}, 4), (PIPELINE, {}, 2), ([], {"batch_size": 8}, 4),
        (TENSOR, {"num_micro_batches": 2}, 2),
    ],
)  # fmt: skip
def test_a_sample_batch_is_what_one_replica_takes(ranks, strategy, keys, samples):
    found = ranks(2).run(counted, strategy, keys)
    assert [each[0] for each in found] == [samples] * 2
    if samples == len(IDS):  # as the whole batch is one micro-batch, nothing is a view
        assert all(predicted == measured for _, predicted, measured in found)


def counted_of_dataset():
    job = mw.accelerate(
        tiny.build("plain"), torch.optim.SGD, tiny.Tokens(8), tiny.loss_func, strategy=TENSOR, optim_args={"lr": 0.1}
    )
    return job.plan.micro_batch, len(next(iter(job.dataloader)))


def test_a_dataset_without_a_batch_size_is_counted_by_replicas_too(ranks):
    assert ranks(2).run(counted_of_dataset) == [(1, 1)] * 2

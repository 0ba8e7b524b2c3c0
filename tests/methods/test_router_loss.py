"""The loss for balance that transformers' mixtures have, where ranks divide tokens: the mean of the ranks' own."""

import pytest
import torch

import meshwright as mw
from tests import tiny
from tests.methods import expert_runs
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights
from tests.parity.layouts import SEQUENCE

WEIGHT, STEPS = 0.5, 4
IDS = torch.arange(STEPS * 4 * tiny.SEQ_LEN).view(STEPS, 4, -1) * 7 % 61


def build(name):
    model = expert_runs.build(name)
    model.config.output_router_logits = True
    return model


def loss_func(inputs, output):
    return tiny.loss_func(inputs, output) + WEIGHT * output.aux_loss


def train(name, strategy):
    result = mw.accelerate(
        build(name), torch.optim.SGD, None, loss_func, strategy=strategy, optim_args={"lr": 0.1, "momentum": 0.9},
        prepare_input=lambda ids, device: {"input_ids": ids}, model_input_format="unpack_dict", sample_batch=IDS[0, :1],
    )  # fmt: skip
    for ids in IDS:
        result.step(ids.chunk(result.num_replicas)[result.replica])
    return whole_weights(result.model)


def aux_loss(logits, parts):
    """The mean of the losses of parts of the tokens, each with its own logits of every layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    pieces = [
        tuple(each.unflatten(0, (-1, tiny.SEQ_LEN)).chunk(parts)[part].flatten(0, 1) for each in logits)
        for part in range(parts)
    ]
    return sum(load_balancing_loss_func(each, expert_runs.EXPERTS, expert_runs.TOP_K) for each in pieces) / parts


def reference(name, parts):
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for ids in IDS:
        optim.zero_grad()
        output = model(input_ids=ids)
        loss = tiny.loss_func({"input_ids": ids}, output)
        (loss + WEIGHT * aux_loss(output.router_logits, parts)).backward()
        optim.step()
    return before, {key: value.detach() for key, value in model.named_parameters()}


CASES = {
    "expert": (2, {"expert": 2}, [], 2),
    "data": (4, {"expert": 2, "data": 2}, [], 4),
    "tensor": (4, {"tensor": 2, "expert": 2}, ["tensor_parallel"], 2),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "expert" else pytest.mark.long) for c in CASES])
def test_the_loss_is_the_mean_of_the_ranks_own(ranks, case):
    world, mesh, methods, parts = CASES[case]
    results = ranks(world).run(train, "mixtral", [("parallel_mode", mesh), "expert_parallel", *methods])
    before, expected = reference("mixtral", parts)
    check_weights({key: value for result in results for key, value in result.items()}, before, expected)


def refused():
    said = []
    for axis, method in (("tensor", SEQUENCE), ("sequence", "sequence_parallel")):
        try:
            train("mixtral", [("parallel_mode", {axis: 2, "expert": 2}), "expert_parallel", method])
        except mw.ModelError as error:
            said.append(str(error))
    return said


def test_it_is_refused_where_ranks_have_parts_of_a_sample(ranks):
    for said in ranks(4).run(refused):
        assert len(said) == 2
        assert all("the routers' loss over all tokens" in each for each in said), said

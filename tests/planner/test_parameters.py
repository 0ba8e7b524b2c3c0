from dataclasses import replace

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import ConfigError, Strategy
from meshwright.cost import make_cluster
from meshwright.planner import OptimizerProbe, describe_blocks, measured_state, plan_table
from meshwright.planner.workload import ModuleModel
from tests import tiny

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize(("optim_class", "args"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_predicted_optimizer_bytes_are_those_held(optim_class, args):
    model = tiny.Mlp()
    states_of = OptimizerProbe(lambda params: optim_class(params, **args), torch.device("cpu"))
    predicted = 0
    for block in describe_blocks(model, states_of):
        for parameter in block.parameters:
            sizes = [
                s.itemsize * int(torch.tensor([parameter.shape[d] for d in s.dims]).prod()) for s in parameter.states
            ]
            predicted += block.count * sum(sizes)
    optimizer = optim_class(model.parameters(), **args)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert predicted == measured_state(model, optimizer)["optimizer"]


def test_each_group_keeps_what_its_own_hyperparameters_ask_for():
    one, two, three, four = (nn.Parameter(torch.ones(4, 4)) for _ in range(4))
    betas = [0.9, 0.99]  # a list has no hash
    groups = [
        {"params": [one], "amsgrad": True, "betas": betas},
        {"params": [("named", two)], "lr": torch.tensor(0.1)},
        {"params": three},
    ]
    states_of = OptimizerProbe(torch.optim.AdamW, torch.device("cpu"), groups)
    assert [len(states_of(each)) for each in (one, two, three, four)] == [4, 3, 3, 0]
    assert groups[0]["betas"] is betas
    assert groups[0].keys() == {"params", "amsgrad", "betas"}


CUDA = torch.device("cuda")  # torch's choice for it is known without one
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.1}


@pytest.mark.parametrize(
    ("optim_class", "args", "device", "together", "apart"),
    [
        (torch.optim.AdamW, {}, CUDA, 1, 0),
        (torch.optim.AdamW, {"fused": True}, CUDA, 0, 0),
        (torch.optim.AdamW, {"foreach": False}, CUDA, 0, 3),  # of the tensor before, too
        (torch.optim.SGD, {"lr": 0.1}, CUDA, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}, CUDA, 1, 0),
        (torch.optim.Adagrad, {}, CUDA, 2, 0),
        (torch.optim.Rprop, {}, CUDA, 1, 1.25),  # masks have one byte
        (torch.optim.AdamW, {}, torch.device("cpu"), 0, 0),
        (torch.optim.AdamW, {"foreach": True}, torch.device("cpu"), 1, 0),
        (mw.optim.AdamW8bit, {}, CUDA, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "fused": True}, CUDA, 1, 0),
    ],
)
def test_what_is_held_for_a_moment(optim_class, args, device, together, apart):
    probe = OptimizerProbe(lambda params: optim_class(params, **args), device)
    found = probe.updating(nn.Parameter(torch.ones(8, 8)))
    assert sum(each.itemsize for each in (found.together if found else ())) == 4 * together
    assert sum(each.itemsize for each in (found.apart if found else ())) == 4 * apart


@pytest.mark.parametrize(
    ("optim_class", "args", "strategy", "held"),
    [
        (torch.optim.AdamW, {}, ["zero1"], False),
        (torch.optim.SGD, MOMENTUM, [], False),
        (torch.optim.SGD, MOMENTUM, ["zero1"], True),  # torch's fused kernel has no rule for DTensors
        (torch.optim.SGD, MOMENTUM, [("parallel_mode", {"tensor": 2}), "tensor_parallel"], True),
        (torch.optim.Adagrad, {}, [], True),
    ],
)
def test_plans_for_gpus_take_fused_kernels_where_a_run_takes_them(optim_class, args, strategy, held):
    groups = None if not args else lambda model: [{"params": list(model.parameters()), **args}]
    model = ModuleModel("tiny", tiny.plain(), tiny.Tokens().ids[:2], tiny.loss_func, optim_func=optim_class)
    subject = replace(model.subject(make_cluster("H100", 2), 4, None), optim_param_func=groups)
    assert (subject.plan(Strategy(strategy)).memory.updating > 0) is held


@pytest.mark.parametrize(
    ("args", "device", "operators"),
    [
        ({"foreach": False}, CUDA, 8),  # decay, two moments (three), a root, a quotient, epsilon, and the step
        ({"foreach": False, "weight_decay": 0.0}, CUDA, 7),
        ({}, CUDA, 0),
        ({"fused": True}, CUDA, 0),
        ({"foreach": False}, torch.device("cpu"), 0),
    ],
)
def test_operators_that_run_for_each_parameter(args, device, operators):
    found = OptimizerProbe(lambda params: torch.optim.AdamW(params, **args), device).updating(
        nn.Parameter(torch.ones(8))
    )
    assert (found.operators if found else 0) == operators


def test_groups_hold_theirs_one_after_the_other():
    one, two, three = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    groups = [{"params": [one]}, {"params": [two], "fused": True}, {"params": [three]}]
    probe = OptimizerProbe(torch.optim.AdamW, CUDA, groups)
    assert [found and found.group for found in map(probe.updating, (one, two, three))] == [0, None, 2]


def test_repeated_blocks_are_described_once_and_tied_weights_counted_once():
    blocks = describe_blocks(tiny.build("gpt2"), lambda parameter: ())
    assert [(block.name.rsplit(".", 1)[-1], block.count) for block in blocks] == [("GPT2Block", 2), ("outside", 1)]
    total = sum(block.count * p.numel for block in blocks for p in block.parameters)
    assert total == sum(p.numel() for p in tiny.build("gpt2").parameters())


def test_the_probe_leaves_no_trace():
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    OptimizerProbe(lambda params: torch.optim.SGD(params, lr=torch.rand(1).item()), torch.device("cpu"))(
        nn.Parameter(torch.ones(2))
    )
    assert torch.rand(1) == expected


def test_what_is_no_optimizer():
    with pytest.raises(ConfigError, match=r"did not return an optimizer.*Expected.*Got int"):
        OptimizerProbe(lambda params: 3, torch.device("cpu"))(nn.Parameter(torch.ones(2)))


def test_the_table_shows_every_class():
    import io

    from rich.console import Console

    from meshwright import Strategy
    from meshwright.planner import Workload

    workload = Workload(
        tiny.Mlp(), torch.device("cpu"), None, lambda n: None, lambda m, x: None, 8, 1, 4, 3, limit_bytes=10_000
    )
    plan = workload.plan(Strategy(["fsdp"]))
    console = Console(file=io.StringIO(), width=100)
    console.print(plan_table(plan, {"parameters": 1536}))
    text = console.file.getvalue()
    for word in (
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "buffers",
        "unknown",
        "1.50 KiB",
        "limit",
    ):
        assert word in text
    assert any("no sample" in gap for gap in plan.gaps)


def test_a_model_that_cannot_be_traced_is_planned_without_activations():
    from meshwright import Strategy
    from meshwright.planner import Workload

    def forward(model, inputs):
        return model(inputs).sum() if model(inputs).sum().item() > 0 else None

    workload = Workload(
        tiny.Mlp(), torch.device("cpu"), None, lambda n: torch.ones(n, 7), forward, 8, 1, 1, 3, limit_bytes=None
    )
    plan = workload.plan(Strategy())
    assert plan.memory.activations is None
    assert any("while tracing" in gap for gap in plan.gaps)

import pytest
import torch
from torch import nn

from meshwright import ConfigError
from meshwright.planner import describe_blocks, measured_state, plan_table, probe_optimizer
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
    states_of = probe_optimizer(lambda params: optim_class(params, **args), torch.device("cpu"))
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
    states_of = probe_optimizer(torch.optim.AdamW, torch.device("cpu"), groups)
    assert [len(states_of(each)) for each in (one, two, three, four)] == [4, 3, 3, 0]
    assert groups[0]["betas"] is betas
    assert groups[0].keys() == {"params", "amsgrad", "betas"}


def test_repeated_blocks_are_described_once_and_tied_weights_counted_once():
    blocks = describe_blocks(tiny.build("gpt2"), lambda parameter: ())
    assert [(block.name.rsplit(".", 1)[-1], block.count) for block in blocks] == [("GPT2Block", 2), ("outside", 1)]
    total = sum(block.count * p.numel for block in blocks for p in block.parameters)
    assert total == sum(p.numel() for p in tiny.build("gpt2").parameters())


def test_the_probe_leaves_no_trace():
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    probe_optimizer(lambda params: torch.optim.SGD(params, lr=torch.rand(1).item()), torch.device("cpu"))(
        nn.Parameter(torch.ones(2))
    )
    assert torch.rand(1) == expected


def test_what_is_no_optimizer():
    with pytest.raises(ConfigError, match=r"did not return an optimizer.*Expected.*Got int"):
        probe_optimizer(lambda params: 3, torch.device("cpu"))(nn.Parameter(torch.ones(2)))


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

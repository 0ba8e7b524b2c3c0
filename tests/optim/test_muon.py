import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.muon import Muon, muon_param_groups
from meshwright.optim.muon.newton_schulz import orthogonalised
from tests.optim.sharded.layouts import (
    SHAPES,
    gradients,
    layouts_of,
    plain,
    relative_differences,
    start_values,
    trained,
)
from tests.optim.sharded.test_owners import Collectives

MATRICES = {"wide": (6, 20), "tall": (33, 16), "again": (6, 20), "square": (12, 12), "row": (1, 9)}
OPTIONS = {
    "default": {},
    "plain momentum": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
}


def groups_of(parameters, **options):
    hidden = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    rest = [parameter for parameter in parameters.values() if parameter.ndim == 1]
    return [{"params": hidden, **options}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]


def build(parameters, **options):
    return Muon(groups_of(parameters, **options), lr=0.02)


def torch_muon(parameters, **options):
    return torch.optim.Muon(list(parameters.values()), lr=0.02, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_torch(options):
    """In bfloat16, the type of torch's iteration, bit for bit."""
    expected, _ = trained(lambda p: torch_muon(p, **options), plain, shapes=MATRICES, steps=10)
    ours, _ = trained(
        lambda p: Muon(list(p.values()), lr=0.02, ns_dtype=torch.bfloat16, **options), plain, shapes=MATRICES, steps=10
    )
    for name in MATRICES:
        assert torch.equal(ours[name], expected[name]), name
        assert torch.equal(ours[f"{name}.momentum_buffer"], expected[f"{name}.momentum_buffer"]), name


def test_fp32_iteration_is_the_formula():
    """Against the same iteration in fp64, through singular values: each is mapped by the polynomial, five times."""
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in MATRICES.values()]
    for matrix, result in zip(matrices, orthogonalised(matrices, (3.4445, -4.775, 2.0315), 5, 1e-7), strict=True):
        u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        assert torch.allclose(result.double(), u @ s.diag() @ v, atol=2e-5)


def test_rest_is_adamw():
    shapes = {"bias": (16,), "embedding": (8, 4)}
    expected, _ = trained(
        lambda p: torch.optim.AdamW(list(p.values()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        plain,
        shapes=shapes,
    )
    ours, _ = trained(lambda p: Muon(list(p.values()), lr=1e-2, algorithm="adamw"), plain, shapes=shapes)
    assert all(torch.equal(ours[name], expected[name]) for name in shapes)


def test_stacks_and_fused_weights_are_matrices_apart():
    """A stack equals its matrices one by one; a fused weight its parts, also of unequal sizes and along columns."""

    def separate(parameters):
        return Muon(list(parameters.values()), lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    whole = {"w": (12, 5)}
    cases = [
        ({"split": 3}, lambda w: list(w.split(4, 0)), lambda parts: torch.cat(parts, 0)),
        ({"split": (6, 2, 4)}, lambda w: list(w.split((6, 2, 4), 0)), lambda parts: torch.cat(parts, 0)),
        ({"split": (2, 3), "split_dim": -1}, lambda w: list(w.split((2, 3), 1)), lambda parts: torch.cat(parts, 1)),
    ]
    for options, cut, join in cases:
        result = stepped(start_values(whole)["w"], gradients(1, whole)["w"], separate, options)
        parts = zip(cut(start_values(whole)["w"]), cut(gradients(1, whole)["w"]), strict=True)
        expected = join([stepped(weight, gradient, separate, {}) for weight, gradient in parts])
        assert torch.allclose(result, expected, atol=1e-6), options
    stack = {"experts": (4, 6, 10)}
    values, gradient = start_values(stack)["experts"], gradients(1, stack)["experts"]
    expected = torch.stack([stepped(w, g, separate, {}) for w, g in zip(values, gradient, strict=True)])
    assert torch.allclose(stepped(values, gradient, separate, {}), expected, atol=1e-6)


def stepped(weight, gradient, make, options):
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    optimizer = make({"w": parameter})
    optimizer.param_groups[0].update(options)
    optimizer.step()
    return parameter.detach()


def on_every_layout():
    """The farthest any layout is from one process; with the parts of fused weights as well; then a resumed run."""
    start, worst = start_values(), {}
    three = dict.fromkeys(SHAPES, None)
    for options in ({}, {"split": (1,), "split_dim": -2}):
        del options, three
        break
    expected, one = trained(build, plain, steps=8)
    for layout, place in layouts_of(dist.get_world_size()).items():
        result, _ = trained(build, place, steps=8)
        worst[layout] = max(relative_differences(result, expected, start).values())
    return worst


def two_ranks():
    return on_every_layout(), half_precision(), resumed(), replicas(), traffic()


def half_precision():
    """bfloat16 weights by a master, or rounded at random; the iteration in bfloat16."""
    place = layouts_of(2)["fsdp"]
    answers = {}
    for options in ({"half_update": "master"}, {"half_update": "stochastic"}):

        def made(parameters, options=options):
            return build(parameters, ns_dtype=torch.bfloat16, **options)

        expected, _ = trained(made, plain, steps=4, dtype=torch.bfloat16)
        result, _ = trained(made, place, steps=4, dtype=torch.bfloat16)
        start = {name: value.bfloat16() for name, value in start_values().items()}
        differences = relative_differences(result, expected, start)
        answers[options["half_update"]] = max(value for name, value in differences.items() if name in start)
    return answers


def resumed():
    """Four steps on one layout, saved, four more on another: as eight steps."""
    layouts = layouts_of(2)
    expected, _ = trained(build, plain, steps=8)
    first, optimizer = trained(build, layouts["fsdp"], steps=4)
    saved = [optimizer.state_dict(gather=True)]
    dist.broadcast_object_list(saved, src=0)
    place = layouts["tensor, row"]
    parameters = {name: nn.Parameter(place(name, first[name])) for name in SHAPES}
    second = build(parameters)
    second.load_state_dict(saved[0])
    for step in range(5, 9):
        for name, whole in gradients(step).items():
            parameters[name].grad = place(name, whole)
        second.step()
    result = {
        name: parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in parameters.items()
    }
    return max(relative_differences(result, expected, start_values()).values())


def replicas():
    """Plain parameters on ranks that know of each other: bit for bit as alone, from one exchange."""

    def shared(parameters):
        optimizer = build(parameters)
        optimizer.setup_distributed(dp_group=dist.group.WORLD)
        return optimizer

    expected, _ = trained(build, plain, steps=2)
    with Collectives() as calls:
        result, _ = trained(shared, plain, steps=2)
    return all(torch.equal(result[name], expected[name]) for name in expected), calls.counts


def traffic():
    """Collectives of a step with 10 and with 300 matrices."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("zero",))
    counted = []
    for number in (10, 300):
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = Muon(parameters)
        with Collectives() as calls:
            optimizer.step()
        counted.append(calls.counts)
    return counted


def test_two_ranks(ranks):
    for worst, half, resumed_difference, (same, calls), counted in ranks(2).run(two_ranks):
        print(worst, half, resumed_difference)
        assert all(value < 1e-5 for value in worst.values()), worst
        assert half["master"] < 1e-2
        assert half["stochastic"] < 0.5
        assert resumed_difference < 1e-5
        assert same
        assert calls == {"all_to_all_single": 2, "all_reduce": 0}
        assert counted[0] == counted[1] == {"all_to_all_single": 2, "all_reduce": 1}


def test_four_ranks(ranks):
    for worst in ranks(4).run(on_every_layout):
        print(worst)
        assert all(value < 1e-5 for value in worst.values()), worst

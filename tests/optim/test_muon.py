import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.muon import Muon, muon_param_groups, orthogonalised
from tests.optim.helpers import give_gradients, net, whole
from tests.optim.sharded.collectives import Collectives
from tests.optim.sharded.layouts import (
    SHAPES,
    gradients,
    layouts_of,
    plain,
    relative_differences,
    start_values,
    trained,
    whole_result,
)

MATRICES = {"wide": (6, 20), "tall": (33, 16), "again": (6, 20), "square": (12, 12), "row": (1, 9)}
OPTIONS = {
    "default": {},
    "plain momentum": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
}


def groups_of(parameters, **options):
    """Vectors to AdamW; two of the matrices are fused ones."""
    groups = [{"params": [], **options} for _ in range(3)]
    groups[1]["split"] = 3
    groups[2]["split"] = (3, 30)  # matrices with different ratios of the learning rate
    groups.append({"params": [], "algorithm": "adamw", "lr": 1e-3})
    for name, parameter in parameters.items():
        number = 3 if parameter.ndim == 1 else ("wide", "tall").index(name) + 1 if name in ("wide", "tall") else 0
        groups[number]["params"].append(parameter)
    return [group for group in groups if group["params"]]


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


def test_no_wide_copies_of_half_gradients():
    """What an update holds while owners work is held for all parameters at once."""
    held = []

    class Watched(Muon):
        def update(self, chunk):
            held.extend(tensor.dtype for tensor in (*chunk.gradients, *chunk.weights))
            yield from super().update(chunk)

    trained(lambda p: Watched(list(p.values())), plain, shapes={"w": (4, 3)}, steps=1, dtype=torch.bfloat16)
    assert held == [torch.bfloat16, torch.float32]


def test_rest_is_adamw():
    shapes = {"bias": (16,), "embedding": (8, 4)}
    expected, _ = trained(
        lambda p: torch.optim.AdamW(list(p.values()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        plain,
        shapes=shapes,
    )
    ours, _ = trained(lambda p: Muon(list(p.values()), lr=1e-2, algorithm="adamw"), plain, shapes=shapes)
    assert all(torch.equal(ours[name], expected[name]) for name in shapes)


def test_adamw_of_weights_in_another_order_of_memory():
    """Transposed, and convolutions in channels_last: the kernel walks through memory."""
    torch.manual_seed(0)
    start = [torch.randn(6, 10), torch.randn(5, 4, 3, 2)]
    changes = [lambda value: value.t().contiguous().t(), lambda value: value.to(memory_format=torch.channels_last)]
    results = []
    for orders in ([torch.Tensor.contiguous] * 2, changes):
        weights = [nn.Parameter(order(value.clone())) for order, value in zip(orders, start, strict=True)]
        optimizer = Muon(weights[:1], lr=0.02, algorithm="adamw")
        optimizer.add_param_group({"params": weights[1:]})
        for step in range(5):
            for weight in weights:
                gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
                weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
        results.append(weights)
    assert not any(weight.is_contiguous() for weight in results[1])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_stacks_and_fused_weights_are_matrices_apart():
    """A stack equals its matrices one by one; a fused weight its parts, also of unequal sizes and along columns."""

    def separate(parameters):
        return Muon(list(parameters.values()), lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    fused = {"w": (12, 5)}
    cases = [
        ({"split": 3}, lambda w: list(w.split(4, 0)), lambda parts: torch.cat(parts, 0)),
        ({"split": (6, 2, 4)}, lambda w: list(w.split((6, 2, 4), 0)), lambda parts: torch.cat(parts, 0)),
        ({"split": (2, 3), "split_dim": -1}, lambda w: list(w.split((2, 3), 1)), lambda parts: torch.cat(parts, 1)),
    ]
    for options, cut, join in cases:
        result = stepped(start_values(fused)["w"], gradients(1, fused)["w"], separate, options)
        parts = zip(cut(start_values(fused)["w"]), cut(gradients(1, fused)["w"]), strict=True)
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
    """How far each layout is from one process."""
    start, worst = start_values(), {}
    expected, _ = trained(build, plain, steps=5)
    for layout, place in layouts_of(dist.get_world_size()).items():
        result, _ = trained(build, place, steps=5)
        worst[layout] = max(relative_differences(result, expected, start).values())
    return worst


def two_ranks():
    return {**on_every_layout(), "fsdp model": fsdp_model()}, half_precision(), resumed(), replicas(), traffic()


def fsdp_model():
    """A module sharded by FSDP2, its groups made by name."""
    models = [net(sharded=sharded) for sharded in (False, True)]
    start = whole(models[0])
    for model in models:
        optimizer = Muon(muon_param_groups(model, adamw_names=["last.*"], muon={"lr": 0.02}), lr=1e-3)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
    expected, result, start = (dict(enumerate(values)) for values in (whole(models[0]), whole(models[1]), start))
    return max(relative_differences(result, expected, start).values())


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
        for name, gradient in gradients(step).items():
            parameters[name].grad = place(name, gradient)
        second.step()
    return max(relative_differences(whole_result(parameters, second), expected, start_values()).values())


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
        parameters = [nn.Parameter(distribute_tensor(torch.ones(2, 1), mesh, [Shard(0)])) for _ in range(number)]
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
        assert half["stochastic"] < 0.2  # other random bits: rounding errors of bfloat16
        assert resumed_difference < 1e-5
        assert same
        assert calls == {"all_to_all_single": 2, "all_reduce": 0}
        assert counted[0] == counted[1] == {"all_to_all_single": 2, "all_reduce": 1}


def test_four_ranks(ranks):
    for worst in ranks(4).run(on_every_layout):
        print(worst)
        assert all(value < 1e-5 for value in worst.values()), worst


class Decoder(nn.Module):
    """Positions as wide as the model, an output head of its own, stacks of experts."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.patch_embed = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unembedder = nn.Linear(8, 50)


def hidden_names(model, **options):
    muon, adamw = muon_param_groups(model, **options)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (muon["algorithm"], adamw["algorithm"]) == ("muon", "adamw")
    trained_names = [names[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(trained_names) == sorted(names[id(p)] for group in (muon, adamw) for p in group["params"])
    return {names[id(parameter)] for parameter in muon["params"]}


def test_groups_of_a_model():
    model = Decoder()
    assert hidden_names(model) == {"layers.0.weight", "experts"}
    assert hidden_names(model, adamw_names=["exp*"]) == {"layers.0.weight"}
    muon, adamw = muon_param_groups(model, muon={"lr": 0.02, "split": 2}, adamw={"lr": 1e-3})
    assert (muon["lr"], muon["split"], adamw["lr"]) == (0.02, 2, 1e-3)
    assert [group["algorithm"] for group in muon_param_groups(nn.LayerNorm(3))] == ["adamw"]
    with pytest.raises(ConfigError, match="classifier"):
        muon_param_groups(model, adamw_names=["classifier*"])


def test_groups_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=8))
        llama = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=16, vocab_size=50,
                num_key_value_heads=1, tie_word_embeddings=False,
            )
        )  # fmt: skip
    assert {name.split(".h.0.")[1] for name in hidden_names(gpt2)} == {
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    }  # fmt: skip
    assert {name.split("layers.0.")[1] for name in hidden_names(llama)} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


BAD = {
    "algorithm": "sgd", "momentum": 1.0, "ns_steps": 0, "ns_coefficients": (1, 2), "adjust_lr_fn": "rms", "lr": -1.0,
    "ns_dtype": torch.float16, "split": 0, "split_dim": 0, "betas": (0.9,), "adamw_eps": -1e-8,
}  # fmt: skip


def test_bad_input():
    matrix = nn.Parameter(torch.ones(4, 3))
    for name, value in BAD.items():
        with pytest.raises(ConfigError, match=name):
            Muon([matrix], **{name: value})
    for options, parameter in (
        ({}, torch.ones(3)),
        ({}, torch.ones(2, 2, 3, 3)),
        ({"split": 3}, matrix),
        ({"split": (3, 2)}, matrix),
    ):
        with pytest.raises(ModelError):
            Muon([parameter], **options)

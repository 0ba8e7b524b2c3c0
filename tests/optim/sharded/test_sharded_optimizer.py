"""What the core does for every optimizer on it, shown by LAMB and Adafactor."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.adafactor import Adafactor
from meshwright.optim.came import CAME
from meshwright.optim.lamb import Lamb
from meshwright.optim.muon import Muon
from tests.optim.sharded.layouts import full, gradients, layouts_of, plain, start_values, trained, whole_result

KINDS = {
    "lamb": lambda values: Lamb(values, lr=0.1),
    "adafactor": lambda values: Adafactor(values, beta1=0.9, eps=(1e-30, 3.0)),
}


def parameters_on(place):
    parameters = {name: place(name, whole) for name, whole in start_values().items()}
    return {name: torch.nn.Parameter(value) for name, value in parameters.items() if value is not None}


def give(parameters, place, step, leave_out=()):
    for name, whole in gradients(step).items():
        if name in parameters:
            gradient = place(name, whole)  # collective: also where it is left out
            parameters[name].grad = None if name in leave_out else gradient


def states_of(parameters, optimizer):
    return {name: set(optimizer.state.get(parameter, ())) for name, parameter in parameters.items()}


def missing_on_all(kind):
    """A parameter without a gradient on any rank keeps weight and states; the others move as they do alone."""
    world = dist.get_world_size()
    results = []
    for place in (plain, layouts_of(world)["fsdp"]):
        parameters = parameters_on(place)
        optimizer = KINDS[kind](list(parameters.values()))
        for step, leave_out in enumerate((("tall",), (), ("tall", "bias"))):
            before = whole_result(parameters, optimizer)
            give(parameters, place, step, leave_out)
            optimizer.step()
            after = whole_result(parameters, optimizer)
            for name in leave_out:
                kept = [key for key in before if key.split(".")[0] == name]
                assert kept, name
                assert all(torch.equal(after[key], before[key]) for key in kept), name
            if step == 0:
                assert not states_of(parameters, optimizer)["tall"]
        results.append(after)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7)


def missing_on_one(kind):
    """A gradient on one rank only is an error on both, and nothing has moved; the next whole step works."""
    place = layouts_of(2)["fsdp"]
    parameters = parameters_on(place)
    optimizer = KINDS[kind](list(parameters.values()))
    give(parameters, place, 0)
    optimizer.step()
    for lacking in (("wide",), ("short", "experts")):
        before = whole_result(parameters, optimizer)
        give(parameters, place, 1, lacking if dist.get_rank() == 1 else ())
        with pytest.raises(ModelError, match="gradient on some ranks only"):
            optimizer.step()
        after = whole_result(parameters, optimizer)
        assert all(torch.equal(after[name], before[name]) for name in start_values())
        assert {optimizer.state[parameter]["step"] for parameter in parameters.values()} == {1}
    give(parameters, place, 1)
    optimizer.step()


def redistributed_gradients(kind):
    """Gradients laid out otherwise than their parameters are brought to them."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for placement in (Shard(0), Replicate(), Shard(1)):
        weight = torch.nn.Parameter(distribute_tensor(start_values()["tall"], mesh, [Shard(0)]))
        optimizer = KINDS[kind]([weight])
        weight.grad = distribute_tensor(gradients(0)["tall"], mesh, [placement])
        optimizer.step()
        results.append(full(weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def resumed(kind, path, steps):
    """Goes on from what rank 0 saved of the weights and of the optimizer, on this world's layout."""
    saved = torch.load(path)
    place = layouts_of(dist.get_world_size())["fsdp"]
    parameters = parameters_on(lambda name, whole: place(name, saved[0][name]))
    optimizer = KINDS[kind](list(parameters.values()))
    optimizer.load_state_dict(saved[1])
    for step in steps:
        give(parameters, place, step)
        optimizer.step()
    return {name: value.numpy() for name, value in whole_result(parameters, optimizer).items()}


def saved_and_gone_on(kind, path):
    """Saves weights and gathered states halfway; returns where ten more steps lead."""
    place = layouts_of(dist.get_world_size())["tensor row x fsdp"]
    parameters = parameters_on(place)
    optimizer = KINDS[kind](list(parameters.values()))
    for step in range(5):
        give(parameters, place, step)
        optimizer.step()
    weights = {name: full(parameter) for name, parameter in parameters.items()}
    states = optimizer.state_dict(gather=True)
    if dist.get_rank() == 0:
        torch.save((weights, states), path)
    for step in range(5, 15):
        give(parameters, place, step)
        optimizer.step()
    return {name: value.numpy() for name, value in whole_result(parameters, optimizer).items()}


def bfloat16(kind):
    """Masters are the weights of fp32 and weights are masters rounded; random rounding ends nearby without masters."""
    expected, _ = trained(lambda named: KINDS[kind](list(named.values())), in_steps_of_bfloat16, steps=10)
    found = {}
    for half_update in ("master", "stochastic"):

        def build(named, half_update=half_update):
            optimizer = KINDS[kind](named.values())
            optimizer.param_groups[0]["half_update"] = half_update
            return optimizer

        result, optimizer = trained(build, layouts_of(2)["fsdp"], steps=10, dtype=torch.bfloat16)
        masters = ["master" in state for state in optimizer.state.values()]
        assert all(masters) if half_update == "master" else not any(masters)
        if half_update == "master":
            assert all(torch.equal(result[name], result[f"{name}.master"].bfloat16()) for name in start_values())
            result = {name: result[f"{name}.master"] for name in start_values()}
        found[half_update] = apart_of_moved(result, expected)
    replicated, _ = trained(build, layouts_of(2)["ddp"], steps=3, dtype=torch.bfloat16)
    return found, {name: value.float().numpy() for name, value in replicated.items()}


def in_steps_of_bfloat16(name, whole):
    return whole.bfloat16().float()


def apart_of_moved(result, expected):
    """The distance between two results over the distance moved, of all weights as one vector."""
    start = {name: in_steps_of_bfloat16(name, whole) for name, whole in start_values().items()}
    moved = sum((expected[name] - start[name]).square().sum() for name in start)
    apart = sum((result[name].float() - expected[name]).square().sum() for name in start)
    return (apart / moved).sqrt().item()


def on_two_ranks(kind):
    missing_on_all(kind)
    missing_on_one(kind)
    redistributed_gradients(kind)
    return bfloat16(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_missing_misplaced_and_half(ranks, kind):
    (found, first), (_, second) = ranks(2).run(on_two_ranks, kind)
    assert found["master"] < 1e-5, found
    assert found["stochastic"] < 0.1, found
    assert all((second[name] == value).all() for name, value in first.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_gathered_state_goes_on_in_another_world(ranks, kind, tmp_path):
    expected = ranks(4).run(saved_and_gone_on, kind, tmp_path / "saved")[0]
    start = start_values()
    for found in ranks(2).run(resumed, kind, tmp_path / "saved", range(5, 15)):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)
    assert len(expected) > len(start)


def test_small_steps_survive_stochastic_rounding_on_average():
    """200 000 equal weights take a step of a tenth of the distance between two bfloat16 numbers."""
    weight = torch.nn.Parameter(torch.ones(200_000, dtype=torch.bfloat16))
    optimizer = Adafactor([weight], lr=2**-8 / 10, relative_step=False, scale_parameter=False, half_update="stochastic")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    values = weight.double()
    assert set(values.tolist()) == {1.0, 1 - 2**-8}
    moved = (1 - values.mean()).item()
    deviation = 2**-8 * (0.1 * 0.9 / len(values)) ** 0.5
    assert abs(moved - 2**-8 / 10) < 5 * deviation
    optimizer.step()
    assert abs((1 - weight.double().mean()).item() - 2 * 2**-8 / 10) < 5 * 2 * deviation


def test_refuses_sparse_gradients_and_other_types():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Adafactor([weight])
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ModelError, match="sparse"):
        optimizer.step()
    with pytest.raises(ModelError, match="float64"):
        Adafactor([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
    with pytest.raises(ModelError, match="float16"):
        Adafactor([torch.nn.Parameter(torch.ones(2, dtype=torch.float16))], half_update="stochastic")
    with pytest.raises(ConfigError, match="half_update"):
        Lamb([weight], half_update="nearest")


def test_a_parameter_may_be_replaced_or_retyped_between_steps():
    start = torch.arange(1.0, 7).view(2, 3)
    results = []
    for moves in (False, True):
        weight = torch.nn.Parameter(start.clone())
        optimizer = KINDS["adafactor"]([weight])
        for step in range(4):
            if moves and step == 2:
                weight.data = weight.data.clone()
                optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].double()
            weight.grad = torch.full((2, 3), 1.0 + step)
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("build", [*KINDS.values(), lambda values: CAME(values, lr=0.1), Muon])
def test_empty_parameters_rest(build):
    empty, other = (torch.nn.Parameter(torch.ones(size)) for size in ((0, 4), (3, 4)))
    optimizer = build([empty, other])
    for _ in range(2):
        empty.grad, other.grad = torch.ones(0, 4), torch.ones(3, 4)
        optimizer.step()
    assert other.isfinite().all()
    assert not torch.equal(other, torch.ones(3, 4))


def test_a_failed_group_is_not_added():
    optimizer = Adafactor([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="weight_decay"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1


def test_copies_step_on_their_own():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Adafactor([weight])
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.grad = torch.ones(2, 2)
    twin.step()
    assert not torch.equal(other, weight)
    optimizer.step(lambda: None)
    assert torch.equal(other, weight)

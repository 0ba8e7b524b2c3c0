import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshwright.optim.galore_projection as projection_module
from meshwright.errors import ModelError, NonFiniteError
from meshwright.optim.galore import GaLoreAdamW, GaLoreAdamW8bit
from tests.optim.galore.helpers import SHAPES, builder, groups, seeded
from tests.optim.sharded.collectives import Collectives
from tests.optim.sharded.layouts import full, gradients, layouts_of, plain, relative_differences, start_values, trained

GAP = 3


def mesh_of_two():
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("zero",))


def split(*shape, number=1):
    return [nn.Parameter(distribute_tensor(seeded(*shape), mesh_of_two(), [Shard(0)])) for _ in range(number)]


def give(parameters, step=0):
    for parameter in parameters:
        parameter.grad = distribute_tensor(seeded(*parameter.shape, seed=step), mesh_of_two(), [Shard(0)])


def traffic():
    """Collectives of five steps: tall matrices contract a whole dim, wide ones the split one."""
    counted = []
    for number in (5, 50):
        parameters = split(4, 3, number=number) + split(3, 4, number=number)
        optimizer = GaLoreAdamW([{"params": parameters, "rank": 2, "update_proj_gap": GAP}])
        steps = []
        for step in range(5):
            give(parameters, step)
            with Collectives() as calls:
                optimizer.step()
            steps.append((calls.counts["all_to_all_single"], calls.counts["all_reduce"]))
        counted.append(steps)
    return counted


def replicas_share():
    """Decompositions on this rank, alone and with the other; the numbers are the same."""
    counts, results = [], []
    real = projection_module.leading_vectors
    for group in (None, dist.group.WORLD):
        calls = []

        def counted(*args, calls=calls):
            calls.append(1)
            return real(*args)

        def build(parameters, group=group):
            optimizer = builder()(parameters)
            optimizer.setup_distributed(None, group)
            return optimizer

        projection_module.leading_vectors = counted
        try:
            result, _ = trained(build, plain, steps=2, shapes=SHAPES)
        finally:
            projection_module.leading_vectors = real
        counts.append(len(calls))
        results.append(result)
    return counts, max(relative_differences(*results[::-1], start_values(SHAPES)).values())


def gradient_on_one_rank():
    """An error on both ranks, in a step with decompositions and in one without, and the next step works."""
    moved = []
    for shape in ((6, 4), (4, 6)):
        (parameter,) = split(*shape)
        optimizer = GaLoreAdamW([{"params": [parameter], "rank": 2, "update_proj_gap": 2}])
        for step in range(2):
            before = full(parameter)
            give([parameter], step)
            if dist.get_rank():
                parameter.grad = None
            with pytest.raises(ModelError, match="some ranks only"):
                optimizer.step()
            moved.append(not torch.equal(full(parameter), before))
            give([parameter], step)
            optimizer.step()
    return moved


def not_finite_on_one_rank():
    """The first gradient has an infinity in one shard: an error on both ranks."""
    for shape in ((6, 4), (4, 6)):
        (parameter,) = split(*shape)
        optimizer = GaLoreAdamW([{"params": [parameter], "rank": 2}])
        give([parameter])
        if dist.get_rank():
            parameter.grad.to_local()[0, 0] = torch.inf
        with pytest.raises(NonFiniteError):
            optimizer.step()


def resumed():
    """Steps after a checkpoint: on the layout where it was made, and on another."""
    layouts, start = layouts_of(2), start_values(SHAPES)
    make = builder(GaLoreAdamW8bit, min_8bit_size=16)
    expected, _ = trained(make, layouts["fsdp"], steps=8, shapes=SHAPES)
    middle, optimizer = trained(make, layouts["fsdp"], steps=4, shapes=SHAPES)
    saved = optimizer.state_dict(gather=True)
    answers = {}
    for name in ("fsdp", "tensor, row"):
        place = layouts[name]
        parameters = {key: nn.Parameter(place(key, middle[key])) for key in SHAPES}
        optimizer = GaLoreAdamW8bit(groups(parameters), lr=5e-2, weight_decay=0.1, min_8bit_size=16)
        optimizer.load_state_dict(saved)
        for step in range(5, 9):
            for key, whole in gradients(step, SHAPES).items():
                parameters[key].grad = place(key, whole)
            optimizer.step()
        result = {key: full(value) for key, value in parameters.items()}
        for key, parameter in parameters.items():
            states = {state: value for state, value in optimizer.state[parameter].items() if state != "step"}
            result.update({f"{key}.{state}": full(value) for state, value in states.items()})
        flips = sum((result[key] != expected[key]).sum().item() for key in expected if "codes" in key)
        values = {key: value for key, value in result.items() if "codes" not in key}
        answers[name] = max(relative_differences(values, expected, start).values()), flips
    return answers


def two_ranks():
    return traffic(), replicas_share(), gradient_on_one_rank(), not_finite_on_one_rank(), resumed()


def test_two_ranks(ranks):
    for counted, shared, moved, _, answers in ranks(2).run(two_ranks):
        # One exchange there and one back when projectors are renewed; in the first step one all-reduce tells of
        # failures. Else one all-reduce, with the votes on gradients and the projected gradients of wide matrices.
        renewal, other = (2, 2), (0, 1)
        assert counted[0] == counted[1]
        assert counted[0] == [(2, 3), other, other, renewal, other]
        (alone, together), difference = shared
        assert alone == 12  # seven matrices, one of them on both sides, and four in a stack
        assert 0 < together < alone
        assert difference == 0
        assert moved == [False] * 4
        assert answers["fsdp"] == (0, 0)
        difference, flips = answers["tensor, row"]
        assert difference < 1e-5
        assert flips == 0

import torch
from hypothesis import given, strategies as st

from meshwright.cost import Block, Parameter, Placement, StateTensor, Step, building, local_shape, memory, names_class
from meshwright.cost.step_time import DRAWN_PER_S


@given(st.integers(1, 40), st.integers(1, 9))
def test_shards_are_cut_as_torch_chunk_does(rows, parts):
    chunks = torch.ones(rows, 2).chunk(parts)
    for index in range(parts):
        expected = tuple(chunks[index].shape) if index < len(chunks) else (0, 2)
        assert local_shape((rows, 2), parts, index) == expected


def step(**changes):
    weight = Parameter("weight", (5, 3), 4, states=(StateTensor((0, 1), 4), StateTensor((), 4), StateTensor((1,), 4)))
    frozen = Parameter("frozen", (8,), 4, trainable=False)
    blocks = (Block("Block", 3, (weight,)), Block("outside", 1, (frozen,)))
    return Step(blocks=blocks, axes=(("zero", 2),), **changes)


def test_bytes_by_class():
    whole = memory(step())
    assert whole.parameters == 3 * 60 + 32
    assert whole.gradients == 3 * 60
    assert whole.optimizer == 3 * (60 + 4 + 12)
    assert whole.activations is None
    assert whole.total == whole.parameters + whole.gradients + whole.optimizer


def test_shards_add_up_to_the_whole_and_the_first_is_the_largest():
    sharded = step(parameters=Placement("zero"), gradients=Placement("zero"), optimizer=Placement("zero"))
    first, second = (memory(sharded, {"zero": index}) for index in range(2))
    assert first.parameters + second.parameters == memory(step()).parameters
    assert first.gradients == 3 * 36
    assert first.total >= second.total


def test_class_names():
    assert names_class("Block", ["models.gpt.Block"])
    assert names_class("models.gpt.Block", ["models.gpt.Block"])
    assert not names_class("other.Block", ["models.gpt.Block"])
    assert names_class("__main__.Block", ["models.gpt.Block"])
    assert names_class("models.gpt.Block", ["__main__.Block"])
    assert not names_class("Bloc", ["models.gpt.Block"])


def test_building_needs_a_shard_and_one_whole_tensor():
    placed = {name: Placement("zero") for name in ("parameters", "gradients", "optimizer")}
    built = building([step(**placed)], ranks_per_host=2, disk_bytes_per_s=1e3)
    assert built.device_bytes == 3 * 36 + 16
    assert (built.host_bytes_initialised, built.host_bytes_read) == (60, 36)
    assert (built.ordinary_host_bytes, built.ranks_per_host) == (3 * 60 + 32, 2)
    assert (built.read_bytes_per_host, built.read_s) == (212, 0.212)
    assert (built.num_drawn, built.draw_s) == (53, 53 / DRAWN_PER_S)


def test_building_on_a_host_adds_the_tensor_to_the_shard():
    built = building([step(on_cpu=True, parameters=Placement("zero"))])
    assert built.device_bytes == 0
    assert built.host_bytes_initialised == 3 * 36 + 16 + 60
    assert built.read_s is None

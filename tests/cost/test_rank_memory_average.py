"""What a moving average of the weights costs: bytes where the weights are, and reading and writing them."""

from types import SimpleNamespace

import pytest

from meshwright.cost import Average, Block, Offloaded, Parameter, Placement, Step, memory
from meshwright.cost.device_time import update_s

ROWS, COLUMNS, COUNT = 6, 10, 3
WEIGHT = Parameter("weight", (ROWS, COLUMNS), 2)
STEP = Step(
    blocks=(Block("block", COUNT, (WEIGHT, Parameter("frozen", (7,), 4, trainable=False))),), axes=(("zero", 2),)
)
NUMEL = ROWS * COLUMNS * COUNT


@pytest.mark.parametrize(("itemsize", "per_element"), [(None, 4), (2, 2)])
def test_it_is_sharded_as_the_weights(itemsize, per_element):
    step = STEP.replace(average=Average(itemsize))
    assert memory(step).average == NUMEL * per_element
    assert memory(step).total - memory(STEP).total == NUMEL * per_element
    sharded = step.replace(shard_axis="zero", parameters=Placement("zero"))
    assert memory(sharded).average == NUMEL * per_element // 2


def test_it_is_on_the_host_where_the_optimizer_is():
    step = STEP.replace(average=Average(), offloaded=Offloaded(optimizer=2 / 3))
    assert (memory(step).average, memory(step).host_average) == (NUMEL * 4 // 3, NUMEL * 8 // 3)


def test_updates_read_weights_and_average_and_write_the_average():
    machine = SimpleNamespace(bytes_per_s=1.0, efficiency=SimpleNamespace(update=1.0))
    more = update_s(STEP.replace(average=Average()), machine) - update_s(STEP, machine)
    assert more == NUMEL * (2 + 2 * 4)
    rarely = update_s(STEP.replace(average=Average(every=10)), machine) - update_s(STEP, machine)
    assert rarely == pytest.approx(more / 10, abs=COUNT)

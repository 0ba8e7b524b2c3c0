"""Seconds of an update that its launches bind."""

import pytest

from meshwright.cost import Block, Op, Parameter, Step, Updating, find_cluster, simulate
from meshwright.cost.calibration import fitted
from meshwright.methods import AmpNative

LAUNCH_S = fitted().constants.operator_s


def step_of(num_parameters: int, *, operators: int = 9, rows: int = 16) -> Step:
    parameters = tuple(
        Parameter(str(number), (8, 8), 4, updating=Updating((), (), operators=operators))
        for number in range(num_parameters)
    )
    op = Op("matmul", rows, 4096, 4096, traced=True)
    return Step((Block("block", 1, parameters, ops=(op,)),), axes=())


def update_s(step: Step) -> float:
    return simulate(step, find_cluster("v100x1")).update_s


def test_the_host_launches_each_parameter_by_itself():
    waits = AmpNative.model_validate({"dtype": "fp16"}).cost(step_of(400))
    assert waits.waits_to_update
    assert update_s(waits) == pytest.approx(400 * 9 * LAUNCH_S)
    assert update_s(AmpNative.model_validate({"dtype": "fp16"}).cost(step_of(400, operators=0))) < 1e-4


def test_a_host_that_does_not_wait_is_ahead_by_what_backward_takes_longer_than_its_launches():
    short, long = update_s(step_of(400)), update_s(step_of(400, rows=2**17))
    assert short == pytest.approx(400 * 9 * LAUNCH_S, rel=0.02)
    assert long < 0.5 * short

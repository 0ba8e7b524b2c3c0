"""Schedulers that take their state over, and the rates of the very next step."""

import copy

import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR

from meshwright.compat.bmtrain.lr_schedules import Cosine
from meshwright.store.scheduler_file import restore_scheduler

SCHEDULES = {
    "chain": lambda optim: ChainedScheduler([Cosine(optim, 0.1, 2, 9), ExponentialLR(optim, 0.5)]),
    "lambda": lambda optim: LambdaLR(optim, lambda step: 1 / (1 + step)),
}


def test_the_first_step_after_a_resume_has_the_rate_of_the_run_that_goes_on():
    for build in SCHEDULES.values():
        optim = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        schedule = build(optim)
        for _ in range(4):
            optim.step()
            schedule.step()
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        resumed = build(other)
        other.load_state_dict(optim.state_dict())
        restore_scheduler(resumed, copy.deepcopy(schedule.state_dict()))
        for _ in range(3):
            assert other.param_groups[0]["lr"] == optim.param_groups[0]["lr"] > 0
            for optimizer, schedules in ((optim, schedule), (other, resumed)):
                optimizer.step()
                schedules.step()

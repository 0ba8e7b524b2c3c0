"""Importing meshwright is a part of every rank's start: what training does not need waits until it is asked for."""

import subprocess
import sys

LATE = (
    "meshwright.methods.tensor.split_search",
    "meshwright.methods.pipeline.execution",
    "meshwright.methods.zero",
    "meshwright.optim.outer.outer_optimizer",
    "meshwright.optim.sharded.sharded_optimizer",
    "meshwright.store.checkpoints",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.elastic.agent.server.api",
    "rich.table",
    "meshwright.compat.bmtrain",
    "meshwright.compat.colossalai",
    "meshwright.planner.plan_request",
    "meshwright.planner.measure",
)
PROGRAM = f"""
import sys
import meshwright as mw
print("torch" in sys.modules)
import gc, torch
before = sum(each["collections"] for each in gc.get_stats())
mw.accelerate, torch._dynamo.config
print(sum(each["collections"] for each in gc.get_stats()) - before)
print(mw.accelerate.__name__, [name for name in {LATE!r} if name in sys.modules])
print([name for name in mw.__all__ if not hasattr(mw, name)])
print(mw.plan.__module__, mw.launch.__module__, mw.booster.__name__)
"""


def test_importing_leaves_what_training_does_not_need_and_looks_for_no_garbage():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    has_torch, collections, *others = printed.splitlines()
    assert has_torch == "False"
    assert int(collections) <= 2  # before the first module, and behind
    assert others == [
        "accelerate []",
        "[]",
        "meshwright.planner.plan_request meshwright.compat.colossalai.environment meshwright.compat.colossalai",
    ]

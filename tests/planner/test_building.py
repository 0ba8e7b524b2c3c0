"""What plans say of building a model."""

import dataclasses

import pytest
import torch
from rich.console import Console

from meshwright.cost import Link, find_cluster, memory
from meshwright.planner import ModuleModel, PlanRequest, plan_table
from meshwright.planner.explain import Why, plan_entry, reasons
from meshwright.planner.plans import building_rows
from meshwright.planner.workload import token_batch
from meshwright.strategy import Strategy
from tests.methods import expert_runs
from tests.tiny import SEQ_LEN, hf_gpt2, hf_llama

NODE = find_cluster("h100x4")


def plan_of(build, *methods, cluster=NODE, axes=()):
    with torch.device("meta"):
        model = build()
    mode = [("parallel_mode", {"axes": list(axes)})] if axes else []
    ids = token_batch(SEQ_LEN)
    batch = ids if build is listed else {"input_ids": ids, "labels": ids}
    subject = ModuleModel("tiny", model, batch, None, None if build is listed else "unpack_dict", seq=SEQ_LEN)
    request = PlanRequest(subject, cluster, 8)
    return request.planned([Strategy([*mode, *methods])]).plans[0], model


def listed():
    return expert_runs.Net("listed")


def stacked():
    return expert_runs.hf("mixtral", 2)


LAYOUTS = {
    "data": ((), ()),
    "fsdp": ((), ("fsdp",)),
    "hsdp": ((("zero", 2), ("data", 2)), ("fsdp",)),
    "tensor": ((("tensor", 2), ("zero", 2)), ("tensor_parallel", "fsdp")),
    "pipeline": ((("pipeline", 2), ("data", 2)), ("pipeline_parallel",)),
    "half": ((), ("fsdp", "half")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [hf_gpt2, hf_llama])
def test_the_whole_model_is_the_same_under_every_layout(build, layout):
    """GPT-2 ties its embeddings, which two stages of a pipeline then hold."""
    axes, methods = LAYOUTS[layout]
    plan, model = plan_of(build, *methods, axes=axes)
    built = plan.building
    parameters, buffers = list(model.parameters()), list(model.buffers())
    assert built.num_drawn == sum(p.numel() for p in parameters)
    assert built.ordinary_host_bytes == sum(each.nbytes for each in (*parameters, *buffers))
    held = [memory(step) for step in plan.steps or (plan.step,)]
    assert built.device_bytes == max(each.parameters + each.buffers for each in held)
    assert built.host_bytes_initialised == max(p.nbytes for p in parameters)
    assert built.ranks_per_host == 4


@pytest.mark.parametrize("build", [stacked, listed])
@pytest.mark.parametrize("axes", [(("expert", 2), ("data", 2)), (("expert", 4),)])
def test_divided_experts_count_once(build, axes):
    plan, model = plan_of(build, "expert_parallel", axes=axes)
    assert plan.building.num_drawn == sum(p.numel() for p in model.parameters())
    assert plan.building.device_bytes < 0.9 * plan.building.ordinary_host_bytes


def test_reading_takes_the_bytes_that_a_host_needs_at_its_disks_speed():
    """Two nodes of two devices: the ranks of a node need half of the model, or all of it."""
    cluster = dataclasses.replace(NODE, devices_per_node=2, disk=Link(1e6, 0.0))
    sharded, model = plan_of(hf_llama, "fsdp", cluster=cluster)
    whole = sum(p.nbytes for p in model.parameters())
    assert whole / 2 <= sharded.building.read_bytes_per_host < 0.52 * whole
    assert sharded.building.read_s == sharded.building.read_bytes_per_host / 2e6
    assert plan_of(hf_llama, cluster=cluster)[0].building.read_bytes_per_host == whole


def test_the_table_the_reasons_and_the_document_tell_it():
    plan, _ = plan_of(hf_llama, "fsdp")
    labels = [label for label, _ in building_rows(plan)]
    assert len(labels) == 6
    console = Console(width=160, record=True)
    console.print(plan_table(plan), plan_table(plan, {"parameters": 1}))
    console.print(reasons(Why((), (), (), ()), building=plan))
    text = console.export_text()
    assert all(text.count(label) == 2 for label in labels)  # what has been measured has been built
    assert plan_entry(plan)["building"]["num_drawn"] == plan.building.num_drawn

"""A pass without data beside real ones: operations as torch counts them, and a few blocks that stand for all."""

import dataclasses
import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost import pass_flops
from meshwright.planner.trace.aten_kernels import FlopCount
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.repeated_blocks import find_repeated
from tests.counted_flops import UNKNOWN
from tests.planner.trace.models import BLOCKS, FAMILIES


@functools.cache
def profiled(name):
    make, inputs_of, forward = FAMILIES[name]
    torch.manual_seed(0)
    model = make()
    return model, Pass(model, inputs_of(3), forward)


SHORT = ("llama", "vit", "mixtral")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in FAMILIES])
def test_operations_are_those_torch_counts_and_a_few_blocks_stand_for_all(name):
    model, one = profiled(name)
    whole = one.predict()
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        loss = one.forward(model, one.inputs)
        forward = counter.get_total_flops()
        loss.backward()
    ops = [op for ops in (*whole.ops.by_path.values(), whole.ops.outside, whole.ops.behind) for op in ops]
    counted = [pass_flops(dataclasses.replace(op, causal=False)) for op in ops]  # torch counts all scores
    assert (sum(f for f, _ in counted), sum(b for _, b in counted)) == (forward, counter.get_total_flops() - forward)
    assert whole.flops == sum(sum(pass_flops(op)) for op in ops)
    repeated = find_repeated(model)
    assert len(whole.ops.by_path) == len(repeated.blocks) == BLOCKS
    assert (len(repeated.few), len(repeated.more)) == (4, 5)
    few = one.predict_repeated(repeated, check=name == "llama")
    assert few.agrees(whole)
    assert few.activations.saved_bytes == whole.activations.saved_bytes > 0
    ((_, holder),) = repeated.lists
    assert len(list(holder)) == BLOCKS  # the list is whole again


def test_the_garbage_collector_changes_no_prediction():
    _, one = profiled("mixtral")
    thresholds = gc.get_threshold()
    seldom = one.predict()
    gc.collect()
    gc.freeze()
    try:
        for often in ((1, 1, 1), (3, 2, 2), (200, 1, 1)):
            gc.collect()  # next to nothing is old beside what is frozen: whole collections come as often as asked for
            gc.set_threshold(*often)
            assert one.predict() == seldom
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_attention_with_fewer_keys_than_queries_is_counted_by_its_queries():
    query, key, value = (torch.empty(2, heads, 16, 8, device="meta") for heads in (6, 2, 2))
    with FlopCount() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    assert counter.total == 2 * (2 * 2 * 6 * 16 * 16 * 8)


def test_attention_of_cpus_is_counted_as_that_of_gpus():
    query, key, value = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (6, 2, 2))
    with FlopCount() as counter:
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        product = 2 * 2 * 6 * 16 * 16 * 8
        assert counter.total == 2 * product
        out.sum().backward()
    assert counter.total == (2 + 5) * product  # scores anew, and two gradients of each product

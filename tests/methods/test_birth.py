"""Birth of models on meta: which part of a tensor a rank holds, and what memory it takes meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshwright as mw
from meshwright.errors import ModelError
from meshwright.methods.birth import birth_of, index_along, part_of_tensor
from meshwright.nn import RankOrder
from meshwright.nn.initial_values import record
from meshwright.optim import local_tensor
from meshwright.runtime.torch_internals.dtensor import StridedShard

MIB = 2**20


# --- Parts of tensors


def parts(placements, shape, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("zero", "tensor"))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    laid_out = whole if order is None else order.to_ranks(whole)
    tensor = distribute_tensor(laid_out, mesh, placements, src_data_rank=None)
    found = whole
    for dim, part in enumerate(part_of_tensor(tensor, order, index_along)):
        positions = torch.arange(part.start, part.stop) if isinstance(part, slice) else part
        found = found.index_select(dim, positions)
    return torch.equal(found, local_tensor(tensor))


@pytest.mark.parametrize("shape", [(12, 8), (7, 8), (1, 8), (3, 8)])
@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ((Shard(0), Replicate()), None),
        ((Replicate(), Shard(1)), None),
        ((Shard(0), Shard(1)), None),
        ((Shard(0), Shard(1)), RankOrder(1, (4, 2, 2), 2)),
    ],
    ids=str,
)
def test_parts_are_those_of_the_layout(shape, placements, order, ranks):
    assert all(ranks(4).run(parts, placements, shape, order))


@pytest.mark.parametrize("order", [None, RankOrder(0, (4, 4, 4), 2)], ids=str)
def test_parts_of_rows_that_are_sharded_twice(order, ranks):
    placements = (StridedShard(0, split_factor=2), Shard(0))
    assert all(ranks(4).run(parts, placements, (12, 8), order))


# --- Memory


def peak_at_birth(folder, strategy, build=None):
    """Memory above what the process had and its own part of the model, in MiB; that part; and the whole model."""
    build = build or llama
    with torch.device("meta"):
        build()  # imports
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    torch.manual_seed(0)
    sample = {"input_ids": torch.zeros(4, 8, dtype=torch.long)}
    result = mw.accelerate(
        build, torch.optim.AdamW, None, lambda _, output: output.logits.float().mean(), strategy=strategy,
        sample_batch=sample, model_input_format="unpack_dict", weights=folder,
    )  # fmt: skip
    peak = status("VmHWM") - before
    own = sum(local_tensor(parameter).nbytes for parameter in result.model.parameters())
    whole = sum(parameter.nbytes for parameter in result.model.parameters())
    return (peak - own) / MIB, own / MIB, whole / MIB


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=2000, use_cache=False))


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_needs_its_part_and_a_block(ranks, tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="100MB")
    tensor = [("parallel_mode", {"tensor": 2, "zero": 2}), "tensor_parallel", "fsdp"]
    for folder, strategy in ((None, ["fsdp"]), (str(tmp_path), ["fsdp"]), (str(tmp_path), tensor)):
        for beyond, own, whole in ranks(4).run(peak_at_birth, folder, strategy):
            assert own < 0.3 * whole
            assert beyond < 45 + 60, (folder, strategy, beyond, own, whole)


# --- What has no values


def test_what_nothing_initialises_is_named_with_the_ways_out():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    for given in (record(lambda: nn.Sequential(nn.Linear(2, 2), Raw())), None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), Raw())
        model, values = given or (model, None)
        with pytest.raises(ModelError, match=r"1\.scale.*function that builds.*weights=.*reset_parameters"):
            birth_of(model, values, None)


def test_a_model_with_values_is_not_born():
    assert birth_of(nn.Linear(2, 2), None, None) is None
    assert not isinstance(nn.Linear(2, 2).weight, DTensor)

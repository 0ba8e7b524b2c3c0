"""Values that follow from stored ones, read by parts: bases in 4 bits, DoRA's magnitudes; what a rank holds."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import meshwright as mw
from meshwright.cli.adapters import with_adapters
from meshwright.cli.train_config import AdapterTable
from meshwright.nn.four_bit import FourBitLinear
from meshwright.store import derived_tensors
from meshwright.store.derived_tensors import FourBitBytes, Norms
from meshwright.store.stored_tensors import SafetensorsFile, join_files
from tests.methods import test_birth

SHAPES = [(7, 64), (5, 100), (3, 33), (64, 65), (1, 1)]
CUTS = (0, 1, 3, 17, 64, 100, 333, 1000, 10**6)


def stored(folder, value):
    save_file({"value": value}, str(folder / "value.safetensors"))
    return join_files([SafetensorsFile(folder / "value.safetensors")])["value"]


def parts(tensor, dtype):
    """Read a tensor of one dim in pieces of many sizes, and put them together."""
    (size,) = tensor.shape
    cuts = sorted({min(cut, size) for cut in CUTS})
    return torch.cat([tensor.read((slice(a, b),), dtype) for a, b in zip(cuts, [*cuts[1:], size], strict=True)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_in_four_bits_are_those_of_the_whole(tmp_path, monkeypatch, shape, dtype):
    pytest.importorskip("bitsandbytes")
    import bitsandbytes  # noqa: F401 - registers its operators

    monkeypatch.setattr(derived_tensors, "_PIECE", 128)
    linear = nn.Linear(shape[1], shape[0], bias=False)
    tensor = FourBitBytes(stored(tmp_path, linear.weight.detach()), dtype)
    assert torch.equal(parts(tensor, torch.uint8), FourBitLinear(linear.to(dtype)).weight)
    with torch.device("meta"):
        assert tensor.shape == FourBitLinear(nn.Linear(shape[1], shape[0])).weight.shape


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_of_norms_are_those_of_the_whole(tmp_path, monkeypatch, shape, along):
    monkeypatch.setattr(derived_tensors, "_PIECE", 128)
    value = torch.randn(shape)
    tensor = Norms(stored(tmp_path, value), along, torch.float32)
    assert torch.allclose(parts(tensor, torch.float32), torch.linalg.norm(value, dim=along), rtol=1e-6)


# --- What a rank holds


def peak_of_adapters(folder, table):
    """Memory above what the process had and its own part of the model, in MiB; that part; and the whole."""

    def build():
        return with_adapters(test_birth.llama(), table)

    return test_birth.peak_at_birth(folder, ["fsdp"], build)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("table", [AdapterTable(r=4, dora=True), AdapterTable(r=4, bits=4)], ids=["dora", "four bits"])
def test_a_rank_needs_its_part_of_a_base_and_some_megabytes(ranks, tmp_path, table):
    pytest.importorskip("peft")
    if table.bits is not None:
        pytest.importorskip("bitsandbytes")
    model = test_birth.llama()
    base = sum(parameter.nbytes for parameter in model.parameters()) / test_birth.MIB
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    for beyond, own, whole in ranks(2).run(peak_of_adapters, str(tmp_path), table):
        assert own < 0.52 * whole
        assert beyond < 60 < base / 2, (beyond, own, whole, base)
        assert table.bits is None or whole < 0.35 * base


def in_four_bits(folder):
    """Losses of five steps over a base in 4 bits that was built whole, and of one that was born sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.arange(64).reshape(4, 16) % 60
    losses, weights = [], []
    for is_born in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig.from_pretrained(folder)

        def build(is_born=is_born, config=config):
            model = LlamaForCausalLM(config) if is_born else LlamaForCausalLM.from_pretrained(folder)
            torch.manual_seed(6)  # of the adapters
            return with_adapters(model, AdapterTable(r=2, bits=4))

        job = mw.accelerate(
            build if is_born else build(), torch.optim.AdamW, [{"input_ids": row, "labels": row} for row in ids],
            strategy=["fsdp"], weights=folder if is_born else None, optim_args={"lr": 1e-2},
            model_input_format="unpack_dict", dataloader_args={"batch_size": 4},
        )  # fmt: skip
        weights.append({name: p.full_tensor().clone() for name, p in job.model.named_parameters()})
        losses.append([float(job.step(next(iter(job.dataloader))).loss) for _ in range(5)])
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert losses[0] == losses[1]
    return losses[0]


def test_a_base_in_four_bits_is_born_sharded_with_the_values_of_a_whole_one(ranks, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    from tests import tiny

    tiny.hf_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    losses = ranks(2).run(in_four_bits, str(tmp_path))[0]
    assert losses[-1] < losses[0]

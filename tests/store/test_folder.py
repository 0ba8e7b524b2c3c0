"""Folders of safetensors with an index, beside what the booster's tests show of them."""

import json

import pytest
import torch

import meshwright as mw
from meshwright.store import load, save_folder
from meshwright.store.folder import read_folder, write_folder
from tests import tiny


def in_pieces(folder):
    tensors = {"a": torch.arange(4.0), "big": torch.arange(40.0), "b": torch.arange(4.0), "c": torch.arange(3.0)}
    write_folder(tensors, folder / "cut", "model", shard_bytes=32, metadata={"kind": 1})
    files = json.loads((folder / "cut" / "model.safetensors.index.json").read_text())["weight_map"]
    assert [files[name][6:11] for name in tensors] == ["00001", "00002", "00003", "00003"]
    found, metadata = read_folder(folder / "cut")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert metadata == {"total_size": 4 * 51, "kind": 1}
    write_folder({"a": tensors["a"]}, folder / "cut", "model", shard_bytes=32, metadata={})
    assert sorted(path.name for path in (folder / "cut").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    return True


def test_files_are_cut_by_size_and_replaced(ranks, tmp_path):
    assert all(ranks(1).run(in_pieces, tmp_path))


def with_transformers(folder):
    from transformers import GPT2LMHeadModel

    ours, theirs = folder / "ours", folder / "theirs"
    model = tiny.build("gpt2")
    save_folder(model, ours, shard_bytes=2**13)
    read = GPT2LMHeadModel.from_pretrained(ours)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))
    assert (ours / "generation_config.json").is_file()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    model.save_pretrained(theirs, max_shard_size="8KB")
    other = tiny.build("gpt2", seed=9)
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    load(other, theirs)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    (theirs / "more.safetensors.index.json").write_text("{}")
    with pytest.raises(mw.CheckpointError, match="more than one index"):
        load(other, theirs)
    return True


def test_transformers_reads_ours_and_we_read_theirs(ranks, tmp_path):
    assert all(ranks(1).run(with_transformers, tmp_path))

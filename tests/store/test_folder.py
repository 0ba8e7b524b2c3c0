"""Folders of safetensors with an index, beside what the booster's tests show of them."""

import json
import resource

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshwright as mw
from meshwright import runtime
from meshwright.store import folder as place, load, save_folder, wait_for_saves
from meshwright.store.folder import read_folder, write_folder
from meshwright.store.tensor_files import write_beside
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


def write_and_wait(tensors, folder, shard_bytes, non_blocking):
    write_folder(tensors, folder, "model", shard_bytes=shard_bytes, metadata={}, non_blocking=non_blocking)
    wait_for_saves()


def by_all_ranks(folder):
    """Ranks take turns with the files; one that cannot write leaves the earlier folder as it was, on all of them."""
    sizes = (4, 40, 5, 6, 7, 40, 3)
    tensors = {f"t{number}": torch.arange(float(size)) + number for number, size in enumerate(sizes)}
    mesh = init_device_mesh("cpu", (runtime.world_size(),))
    laid = {
        name: distribute_tensor(each, mesh, [Shard(0)]) if len(each) > 4 else each for name, each in tensors.items()
    }
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            place, "write_beside", lambda path, content: written.append(path.name) or write_beside(path, content)
        )
        (folder / "model.safetensors").touch() if runtime.rank() == 0 else None  # an earlier one, which would win
        write_folder(laid, folder, "model", shard_bytes=64, metadata={})
        mine, written[:] = [name for name in written if name.startswith("model-")], []
        every = [name for names in runtime.gather_objects(mine) for name in names]
        assert len(every) == len(set(every)) == 6
        assert 0 < len(mine) < 6
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert sorted(before) == [*sorted(every), "model.safetensors.index.json"]
        for non_blocking in (False, True):
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if runtime.rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
            with pytest.raises(mw.CheckpointError, match=r"was not written.*File too large"):
                write_and_wait({name: each + 1 for name, each in laid.items()}, folder, 32, non_blocking)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            runtime.wait_for_all_ranks("test")
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            runtime.wait_for_all_ranks("go on")
    found, _ = read_folder(folder)
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    write_and_wait(laid, folder, 2**20, non_blocking=True)
    runtime.wait_for_all_ranks("test")
    found, _ = read_folder(folder)
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    return sorted(path.name for path in folder.iterdir())


def test_all_ranks_write(ranks, tmp_path):
    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert ranks(2).run(by_all_ranks, tmp_path) == [names] * 2


def with_own_disks(folder):
    tensors = {f"t{number}": torch.arange(5.0) + number for number in range(4)}
    own = folder / f"host-{runtime.rank()}"
    own.mkdir()
    write_folder(tensors, own / "model", "model", shard_bytes=20, metadata={})
    return sorted(path.name for path in own.rglob("*"))


def test_hosts_with_disks_of_their_own(ranks, tmp_path):
    """The folder is whole where rank 0 is."""
    first, second = ranks(2).run(with_own_disks, tmp_path)
    assert len(first) == 6
    assert second == []
    assert read_folder(tmp_path / "host-0" / "model")[0].keys() == {"t0", "t1", "t2", "t3"}


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


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "more").mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "more" / "chat_template.jinja").write_text("hello")


def with_a_tokenizer(folder):
    model = tiny.build("llama")
    for non_blocking in (False, True):
        out = folder / str(non_blocking)
        save_folder(model, out, shard_bytes=2**13, non_blocking=non_blocking, tokenizer=Tokenizer())
        wait_for_saves()
    return True


def test_a_tokenizer_lies_beside(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    assert all(ranks(2).run(with_a_tokenizer, tmp_path))
    for out in tmp_path.iterdir():
        others = sorted(str(path.relative_to(out)) for path in out.rglob("*") if not path.match("model-*"))
        names = ["config.json", "generation_config.json", "model.safetensors.index.json", "more"]
        assert others == [*names, "more/chat_template.jinja", "tokenizer.json"]
        tokens = torch.arange(10)[None]
        logits = [m.eval()(tokens).logits for m in (tiny.build("llama"), AutoModelForCausalLM.from_pretrained(out))]
        assert torch.equal(*logits)


def test_transformers_reads_ours_and_we_read_theirs(ranks, tmp_path):
    assert all(ranks(1).run(with_transformers, tmp_path))

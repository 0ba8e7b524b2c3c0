"""``save`` and ``load``: one ordinary file, whatever holds the model."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwright as bmt
from meshwright import CheckpointError, runtime
from meshwright.store import save_folder, save_optimizer, tensor_files as file_format, tensor_files as writer
from tests import tiny
from tests.compat.bmtrain.seed_models import FORMS, build, full, weights

SUFFIXES = [".pt", ".safetensors"]


def _saved(form, path):
    model = build(form)
    bmt.save(model, path)


def _loaded(form, path, seed=99):
    model = build(form, seed=seed)
    found = bmt.load(model, path)
    assert found == ([], [])
    return weights(model)


@pytest.mark.parametrize("suffix", [pytest.param(SUFFIXES[0], marks=pytest.mark.long), *SUFFIXES[1:]])
def test_all_forms_and_rank_counts_exchange_one_file(ranks, tmp_path, suffix):
    plain = build("plain")
    expected = dict(plain.state_dict())
    files = {
        (form, world): tmp_path / f"{form}-{world}{suffix}"
        for form, world in zip(FORMS, (1, 2, 4, 2, 4, 1), strict=True)
    }
    for (form, world), path in files.items():
        ranks(world).run(_saved, form, path)
        found = load_file(path) if suffix == ".safetensors" else torch.load(path)
        assert set(found) == set(expected), form
        assert all(torch.equal(found[name], value) for name, value in expected.items()), form
        build("plain", seed=99).load_state_dict(found)  # strict
    theirs = tmp_path / f"theirs{suffix}"
    file_format.write_file(theirs, expected)
    for form, world in (("plain", 2), ("wrapped", 4), ("list", 2), ("blocks", 1), ("zero2", 4)):
        for found in ranks(world).run(_loaded, form, theirs):
            assert all(torch.equal(found[name], expected[name]) for name in found), form


def _state_dicts(path):
    """``load_state_dict`` takes full tensors and shards, and ``state_dict`` gives the plain names and values."""
    expected = torch.load(path)
    for form in (*FORMS, "wrapped"):
        model = build(form, seed=99)
        assert set(model.state_dict()) == set(expected)
        model.load_state_dict(expected)
        assert all(torch.equal(full(value), expected[name]) for name, value in model.state_dict().items())
        other = build(form, seed=98)
        other.load_state_dict(model.state_dict())
        assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())
        wrong = dict(expected) | {"embed.weight": torch.ones(3, 3)}
        with pytest.raises(RuntimeError, match=r"embed\.weight"):
            model.load_state_dict(wrong)


def test_load_state_dict_of_plain_torch(ranks, tmp_path):
    torch.save(build("plain").state_dict(), tmp_path / "plain.pt")
    ranks(2).run(_state_dicts, tmp_path / "plain.pt")


def _accelerated(path):
    def built(strategy, seed):
        torch.manual_seed(seed)
        return bmt.accelerate(tiny.Mlp(), torch.optim.SGD, strategy=strategy, optim_args={"lr": 0.1}).model

    for strategy in ("zero2", "fsdp", "parallel_mode"):
        model = built([strategy] if strategy != "parallel_mode" else [("parallel_mode", ([("data", 2)], None))], 1)
        bmt.save(model, path)
        torch.manual_seed(1)
        expected = tiny.Mlp().state_dict()
        found = torch.load(path) if runtime.rank() == 0 else expected
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        other = built(["fsdp"], 7)
        bmt.load(other, path)
        assert all(torch.equal(full(value), expected[name]) for name, value in other.state_dict().items())


def test_models_of_accelerate(ranks, tmp_path):
    ranks(2).run(_accelerated, tmp_path / "model.pt")


class Everything(nn.Module):
    """Ties, buffers of several types, one that is not saved, an extra state, half precision."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()
        self.tied = self.one
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.note = {"version": 3}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def _everything(path):
    def built(wrap):
        torch.manual_seed(0)
        model = Everything()
        return bmt.BMTrainModelWrapper(model) if wrap else model

    model = built(True)
    model.count.fill_(8)
    model.note = {"version": 4}
    bmt.save(model, path)
    plain = built(False)
    plain.load_state_dict(torch.load(path))
    assert (plain.count.item(), plain.note) == (8, {"version": 4})
    assert all(torch.equal(full(model.state_dict()[name]), value) for name, value in plain.one.named_parameters("one"))
    again = built(True)
    bmt.load(again, path)
    assert (again.count.item(), again.note) == (8, {"version": 4})
    with pytest.raises(CheckpointError, match="_extra_state"):
        bmt.save(model, path.with_suffix(".safetensors"))
    assert not path.with_suffix(".safetensors").exists()


def test_everything_a_model_holds(ranks, tmp_path):
    ranks(2).run(_everything, tmp_path / "model.pt")


def test_tied_tensors_are_all_in_safetensors(tmp_path):
    shared = torch.ones(2)
    file_format.write_file(tmp_path / "tied.safetensors", {"a": shared, "b": shared})
    assert set(load_file(tmp_path / "tied.safetensors")) == {"a", "b"}


def _error(model, path, **options):
    before = weights(model)
    with pytest.raises(CheckpointError) as caught:
        bmt.load(model, path, **options)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    return str(caught.value)


def _mismatches(folder):
    model = build("list")
    for path, words in (
        (folder / "absent.pt", ("absent.pt", "cannot be read")),
        (folder / "damaged.pt", ("damaged.pt", "cannot be read")),
        (folder / "damaged.safetensors", ("damaged.safetensors", "cannot be read")),
        (folder / "list.pt", ("no state dict", "list")),
        (folder / "code.pt", ("could run code", "threading.Thread")),
        (
            folder / "other.pt",
            (
                "embed.bias: (8,) in the file, (10,) in the model",
                "missing: gain",
                "unexpected: more",
                "nothing was loaded",
            ),
        ),
    ):
        message = _error(model, path)
        assert all(word in message for word in words), message
    assert "(8,)" in _error(model, folder / "other.pt", strict=False)
    loose = bmt.load(model, folder / "loose.pt", strict=False)
    assert loose == (["gain"], ["more"])
    assert full(model.state_dict()["embed.bias"]).eq(7).all()


def test_files_that_do_not_fit(ranks, tmp_path):
    state = build("plain").state_dict()
    del state["gain"]
    state["more"] = torch.ones(1)
    torch.save({**state, "embed.bias": torch.full((10,), 7.0)}, tmp_path / "loose.pt")
    torch.save({**state, "embed.bias": torch.ones(8)}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"code": threading.Thread}, tmp_path / "code.pt")
    whole = (tmp_path / "other.pt").read_bytes()
    (tmp_path / "damaged.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "damaged.safetensors").write_bytes(b"\x20" + bytes(7) + b"{")
    ranks(2).run(_mismatches, tmp_path)


def _unwritable(folder):
    model = build("list")
    (folder / "file").touch()
    for path in (folder / "file" / "model.pt", folder):
        with pytest.raises(CheckpointError):
            bmt.save(model, path)
    return sorted(path.name for path in folder.iterdir())


def test_places_that_cannot_be_written(ranks, tmp_path):
    assert ranks(2).run(_unwritable, tmp_path) == [["file"]] * 2


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "model.safetensors", tmp_path / "model.safetensors"
    target.write_bytes(b"before")
    link.symlink_to(target)
    writer.put_in_place(writer.write_beside(link, {"x": torch.ones(100)}), link)
    assert link.is_symlink()
    assert target.stat().st_size > 100
    assert [each.name for each in (tmp_path / "disk").iterdir()] == [target.name]


def _save_optimizer(model, path):
    save_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, path, non_blocking=True)


_SAVES = [
    (lambda *given: bmt.save(*given, non_blocking=True), "next.pt"),
    (lambda *given: save_folder(*given, non_blocking=True), "next"),
    (_save_optimizer, "optimizer.pt"),
]


def _background(folder):
    """The file holds what the model was when it was saved, and a failure is told at the next chance."""
    model = build("list")
    before = weights(model)
    bmt.save(model, folder / "model.pt", non_blocking=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bmt.wait_for_saves()
    bmt.synchronize()
    found = torch.load(folder / "model.pt")
    assert all(torch.equal(found[name], value) for name, value in before.items())
    if runtime.rank() == 0:
        (folder / "model.pt.d").mkdir()
    for save, name in _SAVES:
        if runtime.rank() == 0:
            writer.write_later(folder / "model.pt.d", {"x": torch.ones(1)})
        warns = pytest.warns(UserWarning, match=r"failed, and this one is written at once: .*model\.pt\.d")
        with warns if runtime.rank() == 0 else contextlib.nullcontext():
            save(model, folder / name)
        assert (folder / name).exists()
    if runtime.rank() == 0:
        writer.write_later(folder / "model.pt.d", {"x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"model\.pt\.d"):
        bmt.load(model, folder / "next.pt")


def test_saving_in_the_background(ranks, tmp_path):
    ranks(2).run(_background, tmp_path)


SCRIPT = """
import sys, torch, meshwright as bmt
bmt.init_distributed(backend="gloo")
model = bmt.BMTrainModelWrapper(torch.nn.Linear(1000, 1000))
bmt.save(model, sys.argv[1], non_blocking=True)
"""


def test_the_end_of_the_program_waits(tmp_path):
    path = tmp_path / "model.pt"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", SCRIPT, path], check=True, env=environment, timeout=200)
    assert torch.load(path)["weight"].shape == (1000, 1000)

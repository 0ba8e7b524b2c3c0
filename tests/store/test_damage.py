"""Every damage to a checkpoint is found before anything is changed."""

import json
import random
import shutil

import pytest

from meshwright.errors import CheckpointError
from meshwright.store import CheckpointStore
from tests.store.runs import build, same_everywhere, train


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    state = build("plain")
    train(state, 1)
    return CheckpointStore(tmp_path_factory.mktemp("good")).save(state)


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / checkpoint.name)


def _refused(path, match=None):
    state = build("plain", seed=1)
    before = [value.clone() for value in state.model.state_dict().values()]
    with pytest.raises(CheckpointError, match=match):
        CheckpointStore(path.parent).load(state, path)
    assert all(a.equal(b) for a, b in zip(before, state.model.state_dict().values(), strict=True))
    assert not state.optim.state
    assert state.step == 0


def _files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_is_found(copy, seed):
    rng = random.Random(seed)
    file = rng.choice(_files(copy))
    content = bytearray(file.read_bytes())
    if seed % 3 == 0:
        content = content[: rng.randrange(len(content))]
    elif seed % 3 == 1:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        content.insert(rng.randrange(len(content) + 1), rng.randrange(256))
    file.write_bytes(content)
    _refused(copy)


def test_every_byte_of_the_manifest_counts(copy):
    from meshwright.store.manifest import verify as _verify

    manifest = copy / "manifest.json"
    content = manifest.read_bytes()
    _verify(copy)
    for index in range(len(content)):
        manifest.write_bytes(content[:index] + bytes([content[index] ^ (1 << index % 8)]) + content[index + 1 :])
        with pytest.raises(CheckpointError):
            _verify(copy)


@pytest.mark.parametrize("index", range(3))
def test_a_missing_file_is_named(copy, index):
    file = [file for file in _files(copy) if file.name != "manifest.json"][index]
    file.unlink()
    _refused(copy, rf"missing: (tensors/)?{file.name}")


def test_a_file_that_nobody_vouches_for_is_refused(copy):
    shutil.copy(copy / "rng-00000.safetensors", copy / "tensors" / "more.safetensors")
    _refused(copy, "not in the manifest: tensors/more.safetensors")


def _rewrite_manifest(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("digest", None)  # as the first version wrote it
    change(manifest)
    manifest["files"] = dict(sorted(manifest["files"].items()))
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "tensors/../../outside", "..", "a\\..\\b", "C:x", ""])
def test_a_name_that_leaves_the_directory_is_refused(copy, name):
    (copy.parent / "outside").write_text("x")
    _rewrite_manifest(copy, lambda manifest: manifest["files"].update({name: {"size": 1, "sha256": "0"}}))
    _refused(copy, "outside of the checkpoint")


def test_a_link_that_leaves_the_directory_is_refused(copy):
    (copy / "state.json").rename(copy.parent / "state.json")
    (copy / "state.json").symlink_to(copy.parent / "state.json")
    _refused(copy, "outside of the checkpoint")


def test_unknown_schemas_are_refused(copy):
    from meshwright.store.manifest import describe

    state = copy / "state.json"
    state.write_text(state.read_text().replace('"schema": 1', '"schema": 7'))
    entry = describe(state)._asdict()
    _rewrite_manifest(copy, lambda manifest: manifest["files"].update({"state.json": entry}))
    _refused(copy, r"state.json is of an unknown schema. Expected 1. Got 7")
    _rewrite_manifest(copy, lambda manifest: manifest.update(schema=2))
    _refused(copy, r"manifest.json is of an unknown schema. Expected 1. Got 2")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}', "\ufffd", '{"schema": 1, "step": "3"}'])
def test_a_record_that_is_not_one_is_refused(copy, content):
    from meshwright.store.manifest import describe

    (copy / "state.json").write_text(content)
    entry = describe(copy / "state.json")._asdict()
    _rewrite_manifest(copy, lambda manifest: manifest["files"].update({"state.json": entry}))
    _refused(copy, "state.json cannot be read")


def _load_damaged(directory):
    try:
        CheckpointStore(directory).load(build("fsdp"))
    except CheckpointError as error:
        return same_everywhere(str(error))
    return None


def test_damage_is_an_error_on_every_rank(ranks, copy):
    file = next((copy / "tensors").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert file.name in ranks(2).run(_load_damaged, copy.parent)[0]

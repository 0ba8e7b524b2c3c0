"""Where the shards of a checkpoint lie, who writes them, and what a rank opens and is told to find its own."""

import itertools
import json
import time
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright import runtime
from meshwright.errors import CheckpointError
from meshwright.runtime.torch_internals.dtensor import StridedShard
from meshwright.store import CheckpointStore, TrainingState, checkpoints, manifest, shards
from meshwright.store.manifest import describe, write_manifest
from meshwright.store.shards import Layout, own_box, plan_shards, save_shards, shard_file
from meshwright.store.stored_shards import load_shards, open_shards
from tests.store.counting import counting
from tests.store.runs import build, load_and_go_on, same_everywhere, save_and_go_on, train


def _whole(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(("cuts", "shape"), [
    ((), (3, 2)), ((), ()), (((0, 4),), (7, 3)), (((0, 4),), (2, 3)), (((0, 2), (0, 3)), (7, 2)),
    (((1, 3), (0, 2)), (5, 8)), (((0, 3), (1, 2), (0, 2)), (11, 3)), (((0, 4),), (0, 3)),
])  # fmt: skip
def test_a_box_is_found_in_the_parts_that_hold_it(cuts, shape):
    num_parts = torch.Size([parts for _, parts in cuts]).numel()
    layout, whole = Layout(cuts, tuple(range(num_parts))), torch.zeros(shape)
    for number in range(num_parts):
        at, size = layout.part(number, shape)
        whole[tuple(slice(a, a + b) for a, b in zip(at, size, strict=True))] += 1
    assert torch.equal(whole, torch.ones(shape)), "every element is in one part"
    for start in itertools.product(*(range(0, size, 2) for size in shape)):
        sizes = [min(3, size - first) for first, size in zip(start, shape, strict=True)]
        given = dict(layout.parts_in(shape, start, sizes))
        touched = {
            shard_file(number): (at, size)
            for number in range(num_parts)
            if all(
                b and a < first + length and first < a + b
                for a, b, first, length in zip(*layout.part(number, shape), start, sizes, strict=True)
            )
            for at, size in [layout.part(number, shape)]
        }
        assert given == touched


def _in_layouts(folder):
    """Tensors over meshes of all kinds, with the whole values that they must have."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("zero", "tensor"))
    columns = world["tensor"]
    odd = _whole(7, 5)
    rows = odd.chunk(2)[world.get_local_rank("tensor")].chunk(2)[world.get_local_rank("zero")]
    twice = DTensor.from_local(
        rows, world, (StridedShard(0, split_factor=2), Shard(0)), run_check=False, shape=odd.shape, stride=(5, 1)
    )
    return {
        "plain": _whole(3, 3),
        "nothing": torch.tensor(2.0),
        "rows": distribute_tensor(odd, world, (Shard(0), Replicate())),
        "both": distribute_tensor(_whole(4, 9), world, (Shard(1), Shard(0))),
        "twice": twice,
        "replicated": distribute_tensor(_whole(2, 5), world, (Replicate(), Replicate())),
        "columns": distribute_tensor(_whole(3, 5), columns, (Shard(1),)),
        "empty": distribute_tensor(_whole(1, 2), world, (Shard(0), Shard(0))),
        **({"alone": _whole(2, 2)} if runtime.rank() == 3 else {}),
    }


def _save_and_fill(folder):
    tensors = _in_layouts(folder)
    save_shards(tensors, folder / "a")
    with mock.patch.object(shards, "_LEAST_BYTES", 1):
        save_shards(tensors, folder / "b")
    for each in ("a", "b"):
        stored = open_shards(folder / each)
        targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_shards(targets, folder / each, stored)
        assert all(torch.equal(_local(targets[name]), _local(tensors[name])) for name in tensors)
        wholes = {name: torch.zeros(each.shape) for name, each in stored.items()}
        load_shards(wholes, folder / each)
        assert torch.equal(wholes["twice"], _whole(7, 5))
        assert torch.equal(wholes["both"], _whole(4, 9))
        assert torch.equal(wholes["columns"], _whole(3, 5))
        assert torch.equal(wholes["alone"], _whole(2, 2))
    return True


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_tensors_of_all_layouts_are_written_once_and_read_anywhere(ranks, tmp_path):
    assert all(ranks(4).run(_save_and_fill, tmp_path))
    for folder in (tmp_path / "a", tmp_path / "b"):
        files = {path.name: safetensors.torch.load_file(path) for path in folder.glob("*.safetensors")}
        elements = {}
        for held in files.values():
            for name, tensor in held.items():
                elements[name] = elements.get(name, 0) + tensor.numel()
        assert elements == {
            "plain": 9, "nothing": 1, "rows": 35, "both": 36, "twice": 35, "replicated": 10, "columns": 15, "empty": 2,
            "alone": 4,
        }  # fmt: skip
    assert "plain" not in safetensors.torch.load_file(tmp_path / "a" / shard_file(1)), "small replicas are not spread"


def _read_by_torch(folder):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    wanted = {"twice": torch.zeros(7, 5), "columns": torch.zeros(3, 5), "nothing": torch.zeros(())}
    load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))
    return torch.equal(wanted["twice"], _whole(7, 5)) and torch.equal(wanted["columns"], _whole(3, 5))


def test_torchs_own_reader_reads_the_files(ranks, tmp_path):
    assert all(ranks(4).run(_save_and_fill, tmp_path))
    assert all(ranks(1).run(_read_by_torch, tmp_path / "b"))


def _spread(layout):
    state = build(layout)
    tensors = {f"model.{name}": each for name, each in state.model.state_dict(keep_vars=True).items()}
    with mock.patch.object(shards, "_LEAST_BYTES", 1):
        index = plan_shards(tensors)
    sizes = dict.fromkeys(range(runtime.world_size()), 0)
    for _, shape, number in index.tensors.values():
        layout = index.layouts[number]
        for part, file in enumerate(layout.files):
            sizes[file] += torch.Size(layout.part(part, shape)[1]).numel()
    return same_everywhere((sorted(sizes.values()), index))[0], sum(each.numel() for each in tensors.values())


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_replicas_are_written_once_and_evenly(ranks, layout):
    sizes, total = ranks(4).run(_spread, layout)[0]
    assert sum(sizes) == total
    assert sizes[0] > 0
    assert sizes[-1] < 2 * total / 4


def _counted(directory, into):
    state = build("fsdp")
    train(state, 1)
    with counting(directory) as saved:
        CheckpointStore(directory).save(state)
    with counting(directory) as loaded:
        CheckpointStore(directory).load(build(into, seed=1))
    return saved, loaded


@pytest.mark.parametrize("into", ["fsdp", "ddp"])
def test_a_rank_opens_the_files_that_hold_its_slices(ranks, tmp_path, into):
    counts = ranks(4).run(_counted, tmp_path, into)
    for number, (saved, loaded) in enumerate(counts):
        # What all ranks hold whole, such as counts of steps, is in the first file.
        own = {shard_file(0), shard_file(number)} if into == "fsdp" else {shard_file(each) for each in range(4)}
        shared = {"manifest.json", "state.json", "shards.json"} if number == 0 else set()
        assert loaded.files <= own | shared | {"rng-00000.safetensors"}
        assert saved.files <= {shard_file(number)} | shared | {"rng-00000.safetensors"}
        assert saved.listed == loaded.listed == 0 or number == 0
        assert saved.received_bytes == 0 or number == 0


def _received(directory):
    _, loaded = _counted(directory / str(runtime.world_size()), "fsdp")
    return loaded.received_bytes


def test_what_a_rank_is_told_does_not_grow_with_the_ranks(ranks, tmp_path):
    two, four = (max(ranks(size).run(_received, tmp_path)) for size in (2, 4))
    assert four < 1.1 * two
    files = [path.name for path in (tmp_path / "4").rglob("*") if path.is_file()]
    assert sorted(files) == sorted([
        *(shard_file(number) for number in range(4)), "manifest.json", "rng-00000.safetensors", "shards.json",
        "state.json",
    ])  # fmt: skip


def _draws_again(directory):
    state = build("ddp")
    runtime.seed_replica(3, runtime.rank())
    with mock.patch.object(checkpoints, "_RANKS_PER_FILE", 2):
        CheckpointStore(directory).save(state)
    drawn = torch.rand(3)
    assert CheckpointStore(directory).load(state).rng_restored
    return torch.equal(drawn, torch.rand(3)), drawn[0].item()


def test_generators_of_neighbours_are_in_one_file(ranks, tmp_path):
    answers = ranks(3).run(_draws_again, tmp_path)
    assert all(same for same, _ in answers)
    assert len({first for _, first in answers}) == 3
    names = sorted(path.name for path in tmp_path.rglob("rng-*"))
    assert names == ["rng-00000.safetensors", "rng-00002.safetensors"]


def _as_of_before(path):
    """Rewrites a checkpoint as it was before there was an index, with generators in a file per rank."""
    (path / "tensors" / "shards.json").unlink()
    states = safetensors.torch.load_file(path / "rng-00000.safetensors")
    (path / "rng-00000.safetensors").unlink()
    record = json.loads((path / "state.json").read_text())
    del record["ranks_per_rng_file"]
    (path / "state.json").write_text(json.dumps(record))
    for number in range(record["world_size"]):
        own = {name.partition(".")[2]: each for name, each in states.items() if name.startswith(f"{number}.")}
        (path / f"rng-{number:05d}.safetensors").write_bytes(safetensors.torch.save(own))
    (path / "manifest.json").unlink()
    names = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    write_manifest(path, {name: describe(path / name) for name in names})


def _resumes(directory, layout):
    info = CheckpointStore(directory).load(build(layout, seed=1))
    return info.rng_restored, load_and_go_on(directory, layout)


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "fsdp"), (1, "plain"), *(pytest.param(*each, marks=pytest.mark.long) for each in ((4, "hsdp"), (2, "ddp")))],
)
def test_checkpoints_of_before_are_read(ranks, tmp_path, size, layout):
    losses = ranks(2).run(save_and_go_on, tmp_path, "fsdp")[0]
    _as_of_before(tmp_path / "step-00000003")
    restored, resumed = ranks(size).run(_resumes, tmp_path, layout)[0]
    assert restored == (size == 2)
    assert resumed == pytest.approx(losses, rel=1e-5)
    assert (size, layout) != (2, "fsdp") or resumed == losses


def _shown_late(directory, seconds):
    state = build("fsdp")
    CheckpointStore(directory).save(state)
    late, real, end = shard_file(1), Path.exists, time.monotonic() + seconds

    def exists(path, **options):
        return real(path, **options) and not (path.name == late and time.monotonic() < end)

    def is_file(path, **options):
        return exists(path) and not path.is_dir()

    with mock.patch.object(manifest, "_PATIENCE_S", 1.0):
        if runtime.rank() == 1:  # another host, to which the file system shows it late
            with mock.patch.object(Path, "exists", exists), mock.patch.object(Path, "is_file", is_file):
                return _outcome(CheckpointStore(directory).load, build("fsdp", seed=1))
        return _outcome(CheckpointStore(directory).load, build("fsdp", seed=1))


def _outcome(call, *args):
    try:
        return call(*args).step
    except CheckpointError as error:
        return str(error)


def test_a_file_that_is_shown_late_is_waited_for_and_named_in_the_end(ranks, tmp_path):
    assert ranks(2).run(_shown_late, tmp_path / "late", 0.3) == [0, 0]
    for error in ranks(2).run(_shown_late, tmp_path / "never", 1e9):
        assert f"missing: tensors/{shard_file(1)}" in error


def _not_shown_to_rank_0(directory):
    real = manifest._names_below
    hidden = f"tensors/{shard_file(1)}"

    def names_below(folder):
        return real(folder) - {hidden}

    with mock.patch.object(manifest, "_PATIENCE_S", 0.1), mock.patch.object(manifest, "_names_below", names_below):
        return _outcome(lambda state: CheckpointStore(directory).save(state), build("fsdp"))


def test_a_save_names_the_file_that_rank_0_does_not_see(ranks, tmp_path):
    for error in ranks(2).run(_not_shown_to_rank_0, tmp_path):
        assert f"not seen on rank 0: tensors/{shard_file(1)}" in error
    assert not list(tmp_path.glob("step-*"))


def test_an_index_that_contradicts_its_files_is_an_error(tmp_path):
    torch.manual_seed(0)
    path = CheckpointStore(tmp_path).save(TrainingState(torch.nn.Linear(2, 2)))
    index = path / "tensors" / "shards.json"
    good = json.loads(index.read_text())
    for change in (
        lambda found: found["tensors"]["model.weight"].__setitem__(0, "float64"),
        lambda found: found["tensors"]["model.weight"].__setitem__(2, 9),
        lambda found: found["layouts"][0].update(files=[1]),
        lambda found: found["layouts"][0].update(files=[0, 1]),
        lambda found: found["layouts"][0].update(cuts=[[0, 0]]),
        lambda found: found["tensors"].pop("model.bias"),
        lambda found: found.update(schema=2),
    ):
        found = json.loads(json.dumps(good))
        change(found)
        index.write_text(json.dumps(found))
        (path / "manifest.json").unlink()
        names = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
        write_manifest(path, {name: describe(path / name) for name in names})
        with pytest.raises(CheckpointError):
            CheckpointStore(tmp_path).load(TrainingState(torch.nn.Linear(2, 2)), path)


def _oddly_sharded():
    mesh = init_device_mesh("cpu", (2,))
    odd = DTensor.from_local(
        torch.zeros(1 + runtime.rank()), mesh, (Shard(0),), run_check=False, shape=(3,), stride=(1,)
    )
    try:
        own_box(odd)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_shard_of_another_size_than_its_placements_say_is_refused(ranks):
    for error in ranks(2).run(_oddly_sharded):
        assert "not sharded as its placements say" in error


def _index_bytes(monkeypatch, num_ranks):
    meshes = shards._Meshes()
    meshes.ranks = [list(range(num_ranks))]
    spot = shards._Spot("float32", (2 * num_ranks, 4), 0, (num_ranks,), ((0, 0),))
    monkeypatch.setattr(shards, "world_size", lambda: num_ranks)
    monkeypatch.setattr(shards, "_spots", lambda _: ({f"layers.{n}.weight": spot for n in range(2000)}, meshes))
    index = plan_shards({})
    assert {len(each.files) for each in index.layouts} == {num_ranks}
    return len(index.to_json())


def test_the_index_grows_with_tensors_and_ranks_and_not_with_their_product(monkeypatch):
    few, many = (_index_bytes(monkeypatch, number) for number in (64, 16384))
    assert many - few < 16 * 16384

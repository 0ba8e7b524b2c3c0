import os
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import runtime
from meshwright.errors import DataError, LaunchError
from meshwright.runtime import processes
from meshwright.runtime.torch_internals import c10d
from tests.pool import free_port, leave_world


def _mean_of_ranks():
    value = torch.tensor([float(runtime.rank())])
    mean = runtime.sum_loss(value)
    return runtime.rank(), runtime.world_size(), mean.item(), value.item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sum_loss_is_the_mean_and_leaves_its_argument(ranks, size):
    for rank, (seen_rank, seen_world, mean, untouched) in enumerate(ranks(size).run(_mean_of_ranks)):
        assert (seen_rank, seen_world, untouched) == (rank, size, rank)
        assert mean == pytest.approx((size - 1) / 2)


def _meshes_of_two_worlds(ports):
    """Whether a sum of DTensors lies on the mesh of its own world, of two worlds one after the other."""
    found = []
    for port, extra_groups in zip(ports, (0, 3), strict=True):
        leave_world(port)
        runtime.init_distributed(backend="gloo")
        for _ in range(extra_groups):  # so that groups have other names
            torch.distributed.new_group()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
        total = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]) + 1
        found.append((total.device_mesh is mesh, total.full_tensor().sum().item()))
    return found


def test_a_second_world_computes_on_its_own_meshes(ranks):
    assert ranks(2).run(_meshes_of_two_worlds, (free_port(), free_port())) == [[(True, 36.0)] * 2] * 2


def _fail_on(rank):
    try:
        with runtime.same_on_every_rank():
            if runtime.rank() == rank:
                raise DataError("Bad shard", expected="9", got="8", fix="look")
    except DataError as error:
        return str(error), error.got, error.agreed, getattr(error, "__notes__", [])
    return None


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    answers = ranks(2).run(_fail_on, 1)
    assert {answer[:3] for answer in [tuple(a) for a in answers]} == {
        ("Bad shard. Expected 9. Got 8. What to do: look.", "8", True)
    }
    assert "rank 1" in answers[0][3][0]
    assert ranks(2).run(_fail_on, 7) == [None, None]


def _gather_from(failing):
    def build():
        if runtime.rank() == failing:
            raise DataError("Bad shard", expected="9", got="8", fix="look")
        return runtime.rank() * 10

    if failing is None:
        return runtime.gather_from(build)
    with pytest.raises(DataError, match="Bad shard") as caught:
        runtime.gather_from(build)
    return caught.value.agreed


def test_what_is_built_on_every_rank_is_gathered_or_its_error_raised_on_all(ranks):
    assert ranks(2).run(_gather_from, None) == [[0, 10], [0, 10]]
    assert ranks(2).run(_gather_from, 1) == [True, True]


def _second_call():
    runtime.init_distributed(backend="gloo", timeout_s=120.0)
    runtime.init_distributed("env://", 0, pipe_size=-1, tp_size=-1, backend="gloo", timeout_s=120.0)  # BMTrain's
    with pytest.raises(LaunchError, match=r"called twice.*Expected.*seed=0.*Got.*seed=5"):
        runtime.init_distributed(seed=5, backend="gloo")
    return True


def test_a_second_call_must_agree_with_the_first(ranks):
    assert ranks(1).run(_second_call) == [True]


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_method": "tcp://localhost:1"},
        {"zero_level": 4},
        {"pipe_size": 2},
        {"pipe_size": -2},
        {"tp_size": 0},
        {"tp_size": 2},
        {"num_micro_batches": 0},
        {"timeout_s": 0},
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(LaunchError, match=r"Expected .*Got"):
        runtime.init_distributed(**arguments)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("value", "written"), [(5, "seed=5"), ("gloo", "backend='gloo'")])
def test_what_is_meant_by_a_value_in_the_place_of_init_method(value, written):
    with pytest.raises(LaunchError, match=f"write {written}"):
        runtime.init_distributed(value)


def test_half_an_environment_is_named(monkeypatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match=r"Got RANK without WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*torchrun"):
        runtime.init_distributed(backend="gloo")


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", ""), ("MASTER_PORT", "abc"), ("LOCAL_RANK", "q")])
def test_a_variable_that_is_no_number_is_named(monkeypatch, name, value):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    for each, text in (environment | {name: value}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises(LaunchError, match=f"{name} is no number.*Got '{value}'.*torchrun"):
        runtime.init_distributed(backend="gloo")


SCRIPT = """
import os, torch, meshwright as mw
mw.init_distributed(seed=1)
mean = mw.sum_loss(torch.tensor(float(mw.rank())))
line = f"rank {mw.rank()} of {mw.world_size()} mean {mean.item()} draw {torch.rand(1).item():.6f}"
os.write(1, (line + chr(10)).encode())  # whole: the ranks share one pipe
"""


@pytest.mark.parametrize(
    ("starter", "size"),
    [
        ([], 1),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], 2, marks=pytest.mark.long
        ),
        pytest.param(
            ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port())],
            2,
            marks=pytest.mark.long,
        ),
    ],
    ids=["nothing", "torchrun", "launch"],
)
def test_every_way_to_start(tmp_path, starter, size):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *starter, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split(" draw")[0] for line in lines] == [
        f"rank {r} of {size} mean {(size - 1) / 2}" for r in range(size)
    ]
    assert len({line.split("draw ")[1] for line in lines}) == 1  # models are made equal


def _fail_alone():
    try:
        if runtime.rank() == 1:
            raise ValueError("on one rank")
    except ValueError:
        runtime.shutdown_distributed()  # as in a ``finally``; rank 0 may be in any collective
    return torch.distributed.is_initialized()


def test_a_rank_that_fails_alone_waits_for_nobody(ranks):
    assert ranks(2).run(_fail_alone) == [True, True]


def _outlive_the_group():
    group = torch.distributed.new_group(backend="gloo")
    with runtime.agreeing_over(group):
        before = runtime.gather_objects(runtime.rank())
        torch.distributed.destroy_process_group(group)
        with pytest.raises(LaunchError, match="left each other before a save in the background"):
            runtime.gather_objects(1)
        return before, (runtime.rank(), runtime.world_size())


def test_a_thread_that_outlives_its_group_does_not_go_on_alone(ranks):
    assert ranks(2).run(_outlive_the_group) == [([0, 1], (0, 2)), ([0, 1], (1, 2))]


# --- [Note: groups by split], with stand-ins for NCCL.

CUDA = torch.device("cuda", 3)
JOINED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def _begun(monkeypatch, backend, device, **environment):
    """The device that a rank binds, of two worlds that it begins one after the other."""
    bound = []
    for name, value in {**JOINED, **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "_has_begun", False)
    monkeypatch.setattr(processes, "launchers_store", lambda *_: None)
    monkeypatch.setattr(processes, "meet", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **options: bound.append(options["device_id"]))
    for _ in range(2):
        processes._join_world(backend, device, 10.0)
    return bound


def test_the_device_is_bound_where_nccl_can_split(monkeypatch):
    assert _begun(monkeypatch, None, CUDA) == [CUDA, None]  # pytorch#192109: only the first
    assert _begun(monkeypatch, "nccl", CUDA) == [CUDA, None]
    assert _begun(monkeypatch, "gloo", torch.device("cpu")) == [None, None]
    assert _begun(monkeypatch, None, CUDA, WORLD_SIZE="1", RANK="0") == [None, None]
    assert _begun(monkeypatch, None, CUDA, MESHWRIGHT_BIND_DEVICE="0") == [None, None]


def _split_groups():
    """Groups of a bound world: all in one split, or by their members alone without one."""
    split, made, world = [], [], torch.distributed.group.WORLD
    make = torch.distributed.new_group

    def splitting(split_ranks):
        split.append(split_ranks)
        return "own"

    def making(ranks, **options):
        made.append((list(ranks), world.bound_device_id))
        return make(ranks, **options)

    world.bound_device_id = CUDA
    with mock.patch.object(torch.distributed, "split_group", splitting):
        own = runtime.make_groups([(0, 2), (1, 3)])
    with mock.patch.object(torch.distributed, "new_group", making):
        alone = runtime.make_group([runtime.rank()], use_local_synchronization=True)
    found = own, split, made, alone.size(), world.bound_device_id
    world.bound_device_id = None
    return found


def test_one_split_makes_all_groups_of_a_bound_world(ranks):
    for rank, found in enumerate(ranks(4).run(_split_groups)):
        assert found == ("own", [[[0, 2], [1, 3]]], [([rank], None)], 1, CUDA)


def _parts_of_the_world():
    group = runtime.make_groups([(0, 3), (1, 2)])
    total = torch.tensor([10 ** runtime.rank()])
    torch.distributed.all_reduce(total, group=group)
    mesh = runtime.build_mesh([("zero", 2), ("data", 2)], None, "cpu")
    along = {axes: runtime.groups_along(mesh, axes) for axes in (("zero",), ("data",), ("data", "zero"))}
    return total.item(), along, runtime.mesh_of_parts(mesh, ["zero"], 1).mesh.tolist()


def test_parts_of_the_world(ranks):
    along = {("zero",): [(0, 1), (2, 3)], ("data",): [(0, 2), (1, 3)], ("data", "zero"): [(0, 1, 2, 3)]}
    for rank, found in enumerate(ranks(4).run(_parts_of_the_world)):
        assert found == (1001 if rank in (0, 3) else 110, along, [[0], [1], [2], [3]])


def _limits_of_groups():
    world = torch.distributed.group.WORLD
    before = c10d.timeout_of(world)
    c10d.set_timeout(timedelta(seconds=2.5), world)
    mesh = runtime.build_mesh([("zero", 2), ("data", 2)], None, "cpu")
    groups = [mesh.get_group("zero"), mesh.get_group("data"), runtime.mesh_of_parts(mesh, ["zero"], 2).get_group(1)]
    groups += [runtime.make_group([0, 1, 2]), runtime.make_groups([(0, 3), (1, 2)])]
    limits = [c10d.timeout_of(group) for group in groups if isinstance(group, torch.distributed.ProcessGroup)]
    begun, error = time.monotonic(), None
    try:
        if runtime.rank() != 0:
            torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group("zero"))
    except RuntimeError as caught:
        error = str(caught)
    waited = time.monotonic() - begun
    c10d.set_timeout(before, world)
    torch.distributed.barrier()
    return limits, error, waited


def test_groups_have_the_limit_of_the_world(ranks):
    answers = ranks(4).run(_limits_of_groups)
    for rank, (limits, error, waited) in enumerate(answers):
        assert limits == [timedelta(seconds=2.5)] * (5 if rank < 3 else 4)
        if rank == 1:  # rank 0 shares its line of the mesh, and does not come
            assert error is not None
            assert waited < 20

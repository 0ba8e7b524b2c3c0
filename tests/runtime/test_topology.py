"""The process grid of ``init_distributed(tp_size=)``, and what ``config`` says of it."""

import dataclasses
from unittest import mock

import pytest
import torch

import meshwright.runtime as runtime
from meshwright.errors import ConfigError, LaunchError
from meshwright.methods.comm import Comm
from meshwright.planner.measure import calibrate
from meshwright.runtime import processes
from tests.compat.bmtrain.tensor_models import tensor_groups


def _grid_with_stages():
    """Stages of tensor groups: what all stages hold is spread over all of them, the rest over a stage's ranks."""
    with tensor_groups(2, pipe_size=2):
        place, rank = runtime.tensor_rank(), runtime.rank()
        assert runtime.process_grid().mesh.tolist() == [[[0, 1]], [[2, 3]]]
        assert runtime.parameter_mesh().mesh.tolist() == [[0, 1], [2, 3]]
        assert runtime.zero_mesh().mesh.tolist() == [place, place + 2] == runtime.pipeline_mesh().mesh.tolist()
        assert runtime.stage_axes().parameters.mesh.tolist() == [[rank - place, rank - place + 1]]
        assert runtime.stage_axes().zero.mesh.tolist() == [rank]
        assert (runtime.config["pipe_rank"], runtime.config["tp_zero_rank"]) == (rank // 2, rank // 2)
        topology = runtime.config["topology"]
        places = [(topology.get_group_id(kind), topology.get_group_rank(kind)) for kind in ("pipe", "zero", "tp")]
        assert places == [(rank % 2, rank // 2), (0, rank), (rank // 2, rank % 2)]
        assert (topology.get_group_id("tp_zero"), topology.get_group_rank("tp_zero")) == (rank % 2, rank // 2)
        assert (topology.rank, topology.stages) == (rank, 2)
        assert (topology.stage_id, topology.pipe_idx, topology.tp_id, topology.tp_idx) == (
            rank // 2, rank % 2, rank % 2, rank // 2,
        )  # fmt: skip
        assert (topology.pp_zero_idx, topology.pp_zero_id) == (rank // 2, rank % 2)
        assert (topology.pp_tp_zero_idx, topology.pp_tp_zero_id) == (rank, 0)
        assert runtime.config["pipe_enabled"]
        with pytest.raises(ConfigError, match="did you mean 'tp_zero'"):
            topology.get_group_rank("tp_zeros")
    with pytest.raises(LaunchError, match="pipe_size \\* tp_size"), tensor_groups(2, pipe_size=4):
        pass


def _grid():
    _grid_with_stages()
    with tensor_groups(2):
        grid = runtime.process_grid()
        assert runtime.process_grid() is grid
        assert runtime.parameter_mesh() is runtime.parameter_mesh()
        assert runtime.zero_mesh().mesh.tolist() == [runtime.tensor_rank(), runtime.tensor_rank() + 2]
        kept = [key for key in runtime.config if not key.endswith(("comm", "stream")) and key != "topology"]
        config = {key: runtime.config[key] for key in kept}
        comms = [runtime.config[key].get_group().size() for key in ("tp_comm", "tp_zero_comm", "zero_comm", "comm")]
        mean = runtime.sum_loss(torch.tensor([float(runtime.rank())]), comm=runtime.config["tp_zero_comm"])
        assert mean.item() == runtime.tensor_rank() + 1
        return grid.mesh_dim_names, grid.mesh.tolist(), grid.get_coordinate(), config, comms


def test_tensor_ranks_are_neighbours(ranks):
    for rank, (names, mesh, coordinate, config, comms) in enumerate(ranks(4).run(_grid)):
        assert names == ("pipeline", "zero", "tensor")
        assert mesh == [[[0, 1], [2, 3]]]
        assert tuple(coordinate) == (0, rank // 2, rank % 2)
        assert comms == [2, 2, 4, 4]
        assert config == {
            "initialized": True, "rank": rank, "world_size": 4, "local_rank": rank, "local_size": 4,
            "zero_level": 3, "zero_size": 4, "zero_rank": rank, "pipe_size": 1, "pipe_rank": 0, "micros": 1,
            "tp_size": 2, "tp_rank": rank % 2, "tp_zero_size": 2, "tp_zero_rank": rank // 2, "pipe_enabled": False,
        }  # fmt: skip


def _without_groups():
    assert runtime.parameter_mesh().mesh_dim_names == ("zero",)
    assert runtime.process_grid().mesh.tolist() == [[[0], [1]]]
    return runtime.config["tp_size"], runtime.config["tp_zero_rank"]


def test_without_tensor_groups_every_rank_is_a_replica(ranks):
    assert ranks(2).run(_without_groups) == [(1, 0), (1, 1)]


def test_a_key_of_bmtrains_that_is_not_here():
    assert "load_event" not in runtime.config
    assert runtime.config.get("load_event") is None
    with pytest.raises(KeyError, match=r"no such key. Expected one of initialized, rank.* Got 'load_event'. What"):
        runtime.config["load_event"]


def _streams():
    for name in ("calc_stream", "load_stream", "barrier_stream"):
        assert name in runtime.config
        runtime.config[name].wait_stream(runtime.config["calc_stream"])


def test_bmtrains_streams_are_the_one_that_computes(ranks):
    ranks(1).run(_streams)


def _uneven():
    """Two ranks, of which the first has a neighbour on its host that the second does not know."""
    own = dataclasses.replace(runtime.settings(), local_world_size=2 - runtime.rank())
    with mock.patch.object(processes, "_settings", own):
        calls = [lambda: Comm(hierarchical="auto").apply(None), lambda: calibrate(scale=0.01)]
        texts = []
        for call in calls:
            with pytest.raises(LaunchError) as caught:
                call()
            texts.append(str(caught.value))
    assert runtime.ranks_per_host("nothing") == 2
    return texts


def test_what_needs_equally_many_ranks_on_each_host_says_so_on_every_rank(ranks):
    for texts in ranks(2).run(_uneven):
        for text in texts:
            assert "The number of ranks on a host differs between ranks" in text
            assert "2 (rank 0)" in text
            assert "1 (rank 1)" in text
            assert "start equally many processes on every machine" in text

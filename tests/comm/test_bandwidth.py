import contextlib
import io
import statistics

import pytest
import torch
import torch.distributed as dist

from meshwright import ConfigError, LaunchError
from meshwright.comm import BENCHMARK_OPS, benchmark_collectives, benchmark_sizes
from meshwright.comm.bandwidth import bus_factor
from meshwright.compat.bmtrain import benchmark
from meshwright.runtime import rank, world_size


def test_sizes_double():
    assert benchmark_sizes(1024, 5000) == [1024, 2048, 4096]
    assert benchmark_sizes(3, 3) == [3]
    assert benchmark_sizes(3, 96)[-1] == 96
    with pytest.raises(ConfigError, match=r"1 <= min_bytes <= max_bytes. Got 8 to 4"):
        benchmark_sizes(8, 4)


@pytest.mark.parametrize(
    ("op", "factors"),
    [("all_gather", (0.5, 0.875)), ("reduce_scatter", (0.5, 0.875)), ("all_reduce", (1, 1.75)), ("send_recv", (1, 1))],
)
def test_bus_factors_are_those_of_nccl_tests(op, factors):
    assert (bus_factor(op, 2), bus_factor(op, 8)) == factors


@pytest.mark.parametrize("arguments", [{"ops": ["all_gathr"]}, {"iterations": 0}, {"warmup": -1}], ids=str)
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(ConfigError, match=r"Expected .*Got .*What to do"):
        benchmark_collectives(**arguments)


def _measure(dtype):
    told = []
    # Three of four ranks where there are four: the last has no neighbour, and the message does not divide.
    members = list(range(min(world_size(), 3)))
    group = dist.new_group(members)
    if rank() not in members:
        return None
    measured = benchmark_collectives(
        min_bytes=1000, max_bytes=4000, dtype=dtype, iterations=3, warmup=1, group=group, on_measurement=told.append
    )
    assert told == measured
    assert [each.op for each in measured] == [op for op in BENCHMARK_OPS for _ in range(3)]
    for each in measured:
        assert (each.num_ranks, each.iterations, each.dtype) == (len(members), 3, str(dtype).split(".")[1])
        assert each.size_bytes % (len(members) * dtype.itemsize) == 0
        assert 0 < each.min_time_s <= each.time_s <= each.max_time_s < 10
        assert each.algorithm_bandwidth_bytes_per_s == pytest.approx(each.size_bytes / each.time_s)
        factor = bus_factor(each.op, len(members))
        assert each.bus_bandwidth_bytes_per_s == pytest.approx(factor * each.algorithm_bandwidth_bytes_per_s)
    return measured


@pytest.mark.parametrize(("size", "dtype", "sizes"), [(2, torch.float32, [1000, 2000, 4000]),
                                                      (4, torch.bfloat16, [1002, 2004, 4002])])  # fmt: skip
def test_measurements(ranks, size, dtype, sizes):
    first, second, *_ = ranks(size).run(_measure, dtype)
    assert first == second  # every rank knows the slowest's times
    assert [each.size_bytes for each in first] == sizes * len(BENCHMARK_OPS)


def _alone():
    with pytest.raises(LaunchError, match=r"nobody to communicate with. Expected 2 ranks or more. Got 1"):
        benchmark_collectives()


def test_one_rank_has_nobody_to_talk_to(ranks):
    ranks(1).run(_alone)


def _print():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for function in (benchmark.all_gather, benchmark.reduce_scatter, benchmark.send_recv, benchmark.all_reduce):
            (measured,) = function(min_bytes=2048, max_bytes=2048, iterations=1, warmup=0)
            assert measured.op == function.__name__
            assert measured.time_s == statistics.median([measured.min_time_s, measured.max_time_s])
    return text.getvalue()


def test_bmtrains_functions_print_a_table_on_rank_0(ranks):
    shown, silent = ranks(2).run(_print)
    assert silent == ""
    assert shown.count("Collectives on 2 ranks, float32, median of 1") == 4
    assert shown.count("2.00 KiB") == 4
    assert "bus GB/s" in shown

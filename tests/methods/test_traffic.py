"""The twins in communication: what ``cost`` predicts is what ``apply`` sends, counted in the running step."""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.nn.host_exchange import HostGathers, HostReductions
from meshwright.training import accelerated as batch_mean
from tests import tiny

KINDS = {
    "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather", "all_reduce": "all_reduce", "alltoall_base_": "all_to_all",
    "send": "send",
}  # fmt: skip


class Counter(TorchDispatchMode):
    """Adds up the whole tensor's bytes of collectives, but for numbers: the norm, the loss and what goes with it.

    What ranks hand on through memory that they share counts as what it stands for.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self._silent = {}, False

    def __enter__(self):
        tell, ask, reduce = HostGathers._announce, HostGathers._oldest_in_use_of_all, HostReductions.reduce

        def tell_of(gathers, num_bytes):
            if gathers._places and gathers._places[-1].number == gathers._number:  # there is room: no other gather
                self._add("all_gather", num_bytes)
            return self._silently(tell, gathers, num_bytes)

        def reduce_all(reductions, output):
            self._add("all_to_all", output.nbytes * reductions.num_ranks)
            return self._silently(reduce, reductions, output)

        self._patches = [
            *(
                mock.patch.object(batch_mean, name, functools.partial(self._silently, getattr(batch_mean, name)))
                for name in ("mean_over", "sum_over")
            ),
            mock.patch.object(HostGathers, "_announce", tell_of),
            mock.patch.object(HostGathers, "_oldest_in_use_of_all", lambda gathers: self._silently(ask, gathers)),
            mock.patch.object(HostReductions, "reduce", reduce_all),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*error)

    def _silently(self, function, *args):
        self._silent = True
        try:
            return function(*args)
        finally:
            self._silent = False

    def _add(self, kind, size):
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives on local tensors come by next
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            tensors = args[0] if isinstance(args[0], list) else [args[1] if "scatter" in name else args[0]]
            size = sum(t.nbytes for t in tensors) * (args[1] if name == "all_gather_into_tensor" else 1)
            if size > 8 and not self._silent:
                self._add(KINDS[name], size)
        return func(*args, **(kwargs or {}))


def count(strategy, micro, several_times=False):
    torch.manual_seed(0)
    model = tiny.Mlp()
    if several_times:
        one, two, _ = model.layers
        model.layers = torch.nn.ModuleList([one, two, one, one])
    result = mw.accelerate(
        model, torch.optim.SGD, None, lambda x, out: out.float().square().mean(), strategy=strategy,
        optim_args={"lr": 0.1}, num_micro_batches=micro, sample_batch=torch.ones(2, 7), batch_size=16,
    )  # fmt: skip
    result.step(torch.ones(8, 7))
    with Counter() as counter:
        result.step(torch.ones(8, 7))
    predicted = {}
    for traffic in result.plan.step.traffic:
        predicted[traffic.kind] = predicted.get(traffic.kind, 0) + traffic.bytes_per_step
    return counter.bytes, predicted


STRATEGIES = [
    [],
    ["zero1"],
    ["zero2"],
    ["fsdp"],
    ["fsdp", "checkpoint"],
    ["fsdp", ("amp_native", "bf16")],
    ["zero2", ("half", "bf16")],
    [("half", "bf16")],
    [("fsdp", {"mixed_precision": {"param_dtype": "bf16"}})],
    [("fsdp", {"atorch_ignored_cls": ("Sequential",)})],
]


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_predicted_bytes_are_sent(ranks, strategy, micro):
    for sent, predicted in ranks(2).run(count, strategy, micro):
        assert sent == predicted


@pytest.mark.parametrize("method", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.long), 2])
def test_blocks_that_are_listed_several_times_are_sent_as_often(ranks, method, micro):
    for sent, predicted in ranks(2).run(count, [method], micro, several_times=True):
        assert sent == predicted


@pytest.mark.parametrize("method", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.long), 2])
def test_predicted_bytes_are_sent_over_two_axes(ranks, method, micro):
    strategy = [method, ("parallel_mode", {"zero": 2, "data": 2})]
    for sent, predicted in ranks(4).run(count, strategy, micro):
        assert sent == predicted

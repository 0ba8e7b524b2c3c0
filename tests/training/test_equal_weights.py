"""Weights that ranks hold equal already are not sent again; those that differ become rank 0's, in a few messages."""

import contextlib
import io
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.methods import gradient_averaging, register_replace_pair
from meshwright.methods.replace.user_pairs import _PAIRS
from meshwright.store.entries import unwrapped
from tests import tiny
from tests.methods.split_runs import whole_weights

LAYOUTS = {
    "data": [],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "hsdp": [("parallel_mode", {"data": 2, "zero": 2}), "fsdp"],
    "tensor": [("parallel_mode", {"tensor": 2}), "tensor_parallel"],
    "pipeline": [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
}
IDS = torch.ones(4, tiny.SEQ_LEN, dtype=torch.long)


class Broadcasts(TorchDispatchMode):
    """The sizes in bytes of all broadcasts, those of DDP's engine included."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "broadcast_":
            self.sizes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


class Model(tiny.gpt2.GPT2):
    """With buffers that are saved or not, repeat an element or are lazily conjugate, and a transposed weight."""

    def __init__(self):
        super().__init__(vocab_size=tiny.VOCAB, seq_len=tiny.SEQ_LEN, dim=20, num_layers=4, num_heads=2, dropout=0.0)
        self.register_buffer("saved", torch.arange(5))
        self.register_buffer("repeated", torch.ones(1).expand(3), persistent=False)
        self.register_buffer("conjugate", torch.full((3,), 1 + 1j).conj(), persistent=False)
        self.register_buffer("unsaved", torch.linspace(0, 1, 7, dtype=torch.float64), persistent=False)
        for block in self.blocks[:1]:
            weight = next(module for module in block.modules() if isinstance(module, torch.nn.Linear)).weight
            weight.data = weight.data.t().contiguous().t()


def change(model, names):
    """Change one element of each named tensor, on rank 1 only."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in names if mw.rank() == 1 else ():
        with torch.no_grad():
            tensors[name][(-1,) * tensors[name].ndim] += 1


def started(layout, names, message_bytes=2**26):
    """Return the broadcasts of a start, what was said, and whether rank 0's values are in all of the model."""
    torch.manual_seed(0)
    model = Model()
    expected = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    change(model, names)
    said = io.StringIO()
    patch = mock.patch.object(gradient_averaging, "_MESSAGE_BYTES", message_bytes)
    with Broadcasts() as found, contextlib.redirect_stderr(said), patch:
        job = mw.accelerate(
            model, torch.optim.SGD, None, tiny.loss_func, strategy=LAYOUTS[layout], optim_args={"lr": 0.1},
            sample_batch=IDS, num_micro_batches=2 if layout == "pipeline" else 1,
        )  # fmt: skip
    held = whole_weights(unwrapped(job.model)) | dict(model.named_buffers())
    same = all(torch.equal(value, expected[name]) for name, value in held.items())
    # A plan travels in two broadcasts, of its size and of its bytes, whatever the number of parameters.
    return found.sizes[2:], said.getvalue(), same


def size(layout):
    return 4 if layout == "hsdp" else 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_weights_are_not_sent(ranks, layout):
    for sizes, said, same in ranks(size(layout)).run(started, layout, []):
        assert sizes == []
        assert same
        assert "differ" not in said


NAMES = ("blocks.2.mlp.up.weight", "saved", "unsaved", "repeated", "conjugate")


def cases():
    """Every layout and every name once; all of them with ``--parity=all``."""
    for row, layout in enumerate(LAYOUTS):
        for column, name in enumerate(NAMES):
            yield pytest.param(layout, name, marks=() if row % len(NAMES) == column else pytest.mark.long)


@pytest.mark.parametrize(("layout", "name"), cases())
def test_those_that_differ_become_those_of_rank_0(ranks, layout, name):
    answers = ranks(size(layout)).run(started, layout, [name])
    for sizes, _, same in answers:
        assert len(sizes) == 1
        assert same
    assert f"the weights differ between ranks: {name} on rank" in answers[0][1]
    assert "those of rank 0 are taken over" in answers[0][1]


def test_messages_are_of_bounded_size(ranks):
    for sizes, _, same in ranks(2).run(started, "fsdp", ["saved"], 4096):
        assert max(sizes) <= 4096
        assert sum(sizes) > 4 * 4096
        assert len(sizes) < 2 * sum(sizes) / 4096 + 1
        assert same


class Drawn(torch.nn.Linear):
    """A layer with a weight that the source does not have."""

    @classmethod
    def from_module(cls, source):
        made = cls(source.in_features, source.out_features)
        made.weight, made.bias = source.weight, source.bias
        made.factor = torch.nn.Parameter(torch.rand(source.out_features))
        made.drawn = made.factor.detach().clone()
        return made

    def forward(self, x):
        return super().forward(x) * self.factor


def replaced():
    torch.manual_seed(0)
    model = tiny.Mlp()
    torch.manual_seed(mw.rank())
    with Broadcasts() as found, mock.patch.dict(_PAIRS):
        register_replace_pair("drawn", pair_cls=(torch.nn.Linear, Drawn))
        job = mw.accelerate(
            model, torch.optim.SGD, None, lambda x, out: out.mean(), strategy=["fsdp", ("module_replace", "drawn")],
            optim_args={"lr": 0.1}, sample_batch=torch.ones(4, 7),
        )  # fmt: skip
    first = job.model.first
    return found.sizes[2:], first.factor.full_tensor().tolist(), first.drawn.tolist()


def test_weights_that_a_pair_draws_anew_are_those_of_rank_0(ranks):
    (sizes, held, drawn), (_, other_held, other_drawn) = ranks(2).run(replaced)
    assert sizes == [(13 * 4 + 3) * 4]
    assert held == other_held == drawn != other_drawn


def unlike_buffers():
    model = tiny.Mlp()
    model.register_buffer("seen", torch.zeros(3 + mw.rank()))
    with pytest.raises(mw.LaunchError, match="The model differs between ranks") as caught:
        mw.accelerate(model, strategy=[])
    return str(caught.value)


def test_buffers_of_other_shapes_are_another_model(ranks):
    for said in ranks(2).run(unlike_buffers):
        assert (
            "Expected seen (3,) torch.float32, a buffer (rank 0). Got seen (4,) torch.float32, a buffer (rank 1)"
            in said
        )


def sparse():
    model = tiny.Mlp()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(mw.ModelError, match="is sparse") as caught:
        mw.accelerate(model, strategy=[])
    return str(caught.value)


def test_sparse_tensors_are_refused(ranks):
    for said in ranks(2).run(sparse):
        assert "Got graph (torch.sparse_coo)" in said


def on_meta():
    with torch.device("meta"):
        model = tiny.Mlp()
    with Broadcasts() as found:
        gradient_averaging.broadcast_states(model, torch.device("cpu"))
        difference = mw.runtime.difference_between_ranks(dict(model.named_parameters()))
    return found.sizes, difference


def test_models_without_values_are_neither_compared_nor_sent(ranks):
    assert ranks(2).run(on_meta) == [([], None)] * 2

"""Fused recurrent layers are counted as the products that they are."""

import pytest
import torch
from torch import nn

from meshwright.planner.trace.aten_kernels import kernels_of
from meshwright.planner.trace.fake_pass import Pass

SAMPLES, LENGTH, WIDTH, HIDDEN = 3, 7, 12, 16


def dims(ops):
    return [(op.kind, op.m, op.n, op.k, op.batch) for op in ops]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_operations_of_an_lstm(given, dtype):
    model = nn.LSTM(WIDTH, HIDDEN, batch_first=True, **given)
    one = Pass(model, torch.ones(SAMPLES, LENGTH, WIDTH), lambda m, x: m(x)[0].float().sum(), param_dtype=dtype)
    directions = 2 if "bidirectional" in given else 1
    inputs = [WIDTH, *[HIDDEN * directions] * (model.num_layers - 1)]
    forward = sum(2 * SAMPLES * LENGTH * 4 * HIDDEN * (each + HIDDEN) for each in inputs) * directions
    # CPUs without AVX-512 run bf16 step by step, without gradients of the input and of the first state.
    unfused = dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    states = 2 * SAMPLES * 4 * HIDDEN * HIDDEN * model.num_layers * directions
    missing = 2 * SAMPLES * LENGTH * 4 * HIDDEN * WIDTH * directions + states if unfused else 0
    assert one.predict().flops == 3 * forward - missing


def weights(count, gates):
    inputs = [WIDTH, HIDDEN][:count]
    return [
        w for k in inputs for w in (torch.ones(gates * HIDDEN, k), torch.ones(gates * HIDDEN, HIDDEN), torch.ones(4))
    ]


@pytest.mark.parametrize("batch_first", [True, False])
def test_those_of_cudnn(batch_first):
    shape = (SAMPLES, LENGTH, WIDTH) if batch_first else (LENGTH, SAMPLES, WIDTH)
    operators, given, whole = torch.ops.aten, torch.ones(shape), (HIDDEN, 0, 2, batch_first, 0.0, True, False, [], None)
    forward = kernels_of(operators._cudnn_rnn.default, (given, weights(2, 3), 3, None, given, None, 3, *whole), {}, ())
    tokens, rows = SAMPLES * LENGTH, 3 * HIDDEN
    state = ("matmul", SAMPLES, rows, HIDDEN, LENGTH)
    expected = [("matmul", tokens, rows, WIDTH, 1), state, ("matmul", tokens, rows, HIDDEN, 1), state]
    assert dims(forward) == expected
    args = (given, weights(2, 3), 3, given, given, None, given, given, None, None, 3, *whole[:-1])
    assert dims(kernels_of(operators._cudnn_rnn_backward.default, args, {}, ())) == expected * 2


def test_packed_sequences_of_cudnn():
    packed, sizes = torch.ones(9, WIDTH), [3, 3, 2, 1]
    args = (packed, weights(1, 1), 3, None, packed, None, 0, HIDDEN, 0, 1, False, 0.0, True, False, sizes, None)
    first, second = kernels_of(torch.ops.aten._cudnn_rnn.default, args, {}, ())
    assert (first.m, second.m, second.batch) == (8, 2, 4)  # as if all were as long

"""What torch's counter of floating-point operations lacks, for passes on CPUs."""

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count


def _attention(query, key, value, *args, out_shape=None, **kwargs):
    return sdpa_flop_count(query, *_all_heads(query, key, value))


def _attention_backward(gradient, query, key, value, *args, out_shape=None, **kwargs):
    return sdpa_backward_flop_count(gradient, query, *_all_heads(query, key, value))


def _all_heads(query, *grouped):
    """torch 2.11 counts no attention with fewer keys than queries."""
    return [torch.Size((shape[0], query[1], *shape[2:])) for shape in grouped]


def _grouped(left, right, *args, out_shape=None, **kwargs):
    """Every row meets one matrix; of the gradient of the matrices, every pair of columns meets over all rows."""
    return 2 * left[0] * left[1] * right[-1]


# What torch's counter does not know: the CPU's own attention, and products of groups.
UNKNOWN = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped,
}

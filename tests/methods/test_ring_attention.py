"""Attention in a ring against attention in one piece, in fp64; the ranks are threads that hand tensors on in memory."""

import queue
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw
from meshwright.methods.tokens import ring_attention
from meshwright.methods.tokens.attention_calls import attention_with_sinks
from meshwright.methods.tokens.context_parallel import ContextRanks
from meshwright.methods.tokens.token_order import TokenOrder, causal_table, mask_table, view_of
from meshwright.runtime.torch_internals.operators import flash_attention_on_cpu, flash_attention_on_cpu_backward

RANKS, TOKENS, FEATURES = 3, 12, 5
CPU = torch.device("cpu")
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()


class InMemory(ContextRanks):
    """One of the ranks; what it sends goes into the next one's queue."""

    def __init__(self, index, balance, queues):
        self.order = TokenOrder("context_parallel", RANKS, index, balance)
        self._queues = queues

    def pass_on(self, tensors):
        self._queues[(self.order.index + 1) % RANKS].put([tensor.clone() for tensor in tensors])
        return lambda: self._queues[self.order.index].get(timeout=30)


def in_ring(attend, tensors, gradient, *, balance):
    """Output and gradients, put together from those of all ranks, without the padding that uneven parts have."""
    tokens = tensors[0].shape[2]
    queues, found = [queue.Queue() for _ in range(RANKS)], [None] * RANKS

    def work(index):
        ranks = InMemory(index, balance, queues)
        ranks.tokens = tokens
        parts = [ranks.order.part(tensor, 2).requires_grad_() for tensor in tensors]
        out = attend(ranks.attend, *parts)
        out.backward(ranks.order.part(gradient, 2))
        found[index] = [out.detach(), *(part.grad for part in parts)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = TokenOrder("context_parallel", RANKS, 0, balance)
    return [order.in_order(torch.cat(parts, 2), 2)[:, :, :tokens] for parts in zip(*found, strict=True)]


def whole(attend, tensors, gradient, attention=F.scaled_dot_product_attention):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(attention, *leaves)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def masks():
    random = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.5
    random[0, 0, 3] = False  # a query that sees nothing
    padding = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    padding[1, ..., TOKENS - 5 :] = False
    return {
        "window": CAUSAL & ~CAUSAL.tril(-3),
        "left padding": (CAUSAL & torch.arange(TOKENS).ge(5))[None, None],
        "padding": padding,
        "random": random,
        "bias of heads": torch.randn(4, TOKENS, TOKENS, dtype=torch.float64),
        "keys": torch.arange(TOKENS) % 4 != 1,
    }


CASES = {
    "everything": (None, False, 4, FEATURES),
    "causal": (None, True, 4, FEATURES),
    "causal, grouped": (None, True, 2, FEATURES),
    **{name: (mask, False, 1 if name == "random" else 4, 3) for name, mask in masks().items()},
}


def first_tokens(mask, tokens):
    return mask[..., :tokens, :tokens] if mask.dim() > 1 and mask.shape[-2] > 1 else mask[..., :tokens]


@pytest.mark.parametrize("tokens", [TOKENS, 11, 8])  # of 8 the last chunks are all padding
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_blocks_add_up_to_the_whole(case, balance, tokens):
    mask, causal, groups, features = CASES[case]
    mask = None if mask is None else first_tokens(mask, tokens)
    torch.manual_seed(0)
    sizes = [(4, FEATURES), (groups, FEATURES), (groups, features)]
    tensors = [torch.randn(2, heads, tokens, size, dtype=torch.float64) for heads, size in sizes]
    gradient = torch.randn(2, 4, tokens, features, dtype=torch.float64)

    def attend(attention, q, k, v):
        return attention(q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=groups != 4)

    found = in_ring(attend, tensors, gradient, balance=balance)
    for mine, expected in zip(found, whole(attend, tensors, gradient), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)


def with_sinks(query, key, value, mask, causal, sinks):
    """Attention over one more key, whose score is the sink and whose value is zero, in plain mathematics."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * 0.3
    mask = CAUSAL[: query.shape[2], : query.shape[2]] if causal else mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ value


SINKS = {
    **{name: CASES[name][:3] for name in ("everything", "causal, grouped", "window", "random", "bias of heads")},
    "lowest number": (torch.zeros(TOKENS, TOKENS).masked_fill(~CASES["random"][0], torch.finfo().min), False, 2),
}


@pytest.mark.parametrize("ranks", [RANKS, 1])
@pytest.mark.parametrize("case", SINKS)
def test_sinks_join_the_softmax_once(case, ranks):
    (mask, causal, groups), tokens = SINKS[case], 11 if ranks > 1 else TOKENS
    mask = None if mask is None else first_tokens(mask, tokens)
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, tokens, FEATURES, dtype=torch.float64) for heads in (4, groups, groups)]
    gradient, sinks = torch.randn_like(tensors[0]), torch.randn(4, dtype=torch.float64) * 2
    leaves = [each.clone().requires_grad_() for each in (*tensors, sinks)]
    expected = with_sinks(*leaves[:3], mask, causal, leaves[3])
    expected.backward(gradient)
    mine = [sinks.clone().requires_grad_() for _ in range(ranks)]

    def attend(attention, q, k, v):
        return attention(q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=True, sinks=next(own))

    own = iter(mine)
    if ranks > 1:
        found = in_ring(attend, tensors, gradient, balance=True)
    else:
        found = whole(attend, tensors, gradient, attention_with_sinks)
    for ours, right in zip(found, (expected.detach(), *(leaf.grad for leaf in leaves[:3])), strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-13)
    torch.testing.assert_close(sum(each.grad for each in mine), leaves[3].grad, rtol=0, atol=1e-13)


def _on_cpu(*given, scale, last=False, off=0.0):
    """A kernel of cuDNN's or FlashAttention's as torch's CPU computes it; cuDNN's log-sum-exp has a last dim of 1."""
    out, lse = flash_attention_on_cpu(*given[:3], 0.0, given[-1 if last else -2], scale=scale)
    return (out, (lse + off).unsqueeze(-1) if last else lse, None)


def _backward_on_cpu(gradient, query, key, value, out, lse, *rest, scale):
    lse, is_causal = (lse.squeeze(-1), rest[-1]) if lse.dim() == 4 else (lse, rest[5])
    return flash_attention_on_cpu_backward(gradient, query, key, value, out, lse, 0.0, is_causal, scale=scale)


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (0.5, False), (None, False)])
@pytest.mark.parametrize("grouped", [False, True])
def test_cudnn_computes_a_block_only_where_it_says_what_flash_attention_says(monkeypatch, grouped, off, agrees):
    def cudnn(*given, scale):
        if off is None:
            raise RuntimeError("no kernel")
        return _on_cpu(*given, scale=scale, last=True, off=off)

    monkeypatch.setattr(ring_attention, "cudnn_attention", cudnn)
    monkeypatch.setattr(ring_attention, "cudnn_attention_backward", _backward_on_cpu)
    monkeypatch.setattr(ring_attention, "flash_attention", _on_cpu)
    monkeypatch.setattr(ring_attention, "flash_attention_backward", _backward_on_cpu)
    kind = (CPU, torch.bfloat16, 16, grouped)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [ring_attention._cudnn_agrees.__wrapped__(*kind, causal) for causal in (True, False)] == [agrees] * 2
    reason = "" if agrees else "no kernel" if off is None else "its results are others"
    assert [str(each.message).endswith(reason) for each in told if "in place of cuDNN" in str(each.message)] == (
        [] if agrees else [True] * 2
    )


@pytest.mark.parametrize("capability", [8, 9])
def test_cudnn_computes_what_torchs_own_attention_would_compute_with_it(monkeypatch, capability):
    monkeypatch.setattr(ring_attention, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(ring_attention, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(ring_attention, "_cudnn_agrees", lambda *kind: kind == (CPU, torch.bfloat16, 8, True, True))
    query, key = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)

    def takes(dtype=torch.bfloat16, mask=None, causal=True):
        tensors = (each.to(dtype) for each in (query, key, key))
        return ring_attention.Block(*tensors, mask, causal, None)._takes_cudnn()

    assert takes() == (capability >= 9)
    assert not takes(torch.float32)
    assert not takes(mask=torch.zeros(1, 1, 8, 8))
    assert not takes(causal=False)  # whose kernels disagree


def test_sinks_of_minus_infinity_take_nothing_from_queries_that_see_a_key_or_none():
    mask = CASES["random"][0]
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, TOKENS, FEATURES, dtype=torch.float64) for _ in range(3))
    found = attention_with_sinks(query, key, value, mask, sinks=torch.full((4,), -torch.inf, dtype=torch.float64))
    expected = F.scaled_dot_product_attention(query, key, value, mask).nan_to_num()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_half_precision_is_merged_in_fp32():
    """The ring loses no more than one kernel call does."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, TOKENS, 8) for _ in range(3)]
    gradient = torch.randn(2, 4, TOKENS, 8)
    exact = whole(lambda attention, *qkv: attention(*qkv, is_causal=True), tensors, gradient)

    def lost(results):
        return max((mine.float() - right).abs().max().item() for mine, right in zip(results, exact, strict=True))

    low = [tensor.bfloat16() for tensor in tensors]
    leaves = [tensor.clone().requires_grad_() for tensor in low]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(gradient.bfloat16())
    ring = in_ring(lambda attention, *qkv: attention(*qkv, is_causal=True), low, gradient.bfloat16(), balance=True)
    assert all(tensor.dtype == torch.bfloat16 for tensor in ring)
    assert lost(ring) < 1.5 * lost([out.detach(), *(leaf.grad for leaf in leaves)])


def test_balanced_ranks_have_equal_work_and_skip_what_is_masked():
    """Work is the rectangle of queries and keys, halved where it is causal."""

    def work(order, table, *, is_causal):
        views = [view_of(table, order, source, 4, is_causal=is_causal) for source in range(RANKS)]
        return [
            (view.rows.stop - view.rows.start) * (view.columns.stop - view.columns.start) / (1 + view.is_causal)
            for view in views
            if view is not None
        ]

    for index in range(RANKS):
        balanced, plain = (TokenOrder("", RANKS, index, balance) for balance in (True, False))
        assert sum(work(balanced, causal_table(balanced), is_causal=True)) == 8 + 8 + 8
        assert sum(work(plain, causal_table(plain), is_causal=True)) == 8 + 16 * index
        for order in (balanced, plain):
            assert mask_table(CAUSAL[None, None], order) == causal_table(order)
    # Behind a window, far blocks are skipped.
    narrow = mask_table((CAUSAL & ~CAUSAL.tril(-3))[None, None], plain)
    assert len(work(plain, narrow, is_causal=False)) == 2


def test_a_mask_is_looked_at_again_when_it_changes():
    mask, order = CAUSAL.clone(), TokenOrder("", RANKS, 0)
    assert mask_table(mask, order) == ((True, False, False),) == mask_table(mask, order)
    mask[0, TOKENS - 1] = True
    assert mask_table(mask, order) == ((True, False, True),)
    assert mask_table(mask, order.at(1)) == ((True, True, False),)


def test_tokens_come_back_in_order():
    tokens = torch.arange(24).view(2, 12)
    for order in (TokenOrder("", 3, 0, True), TokenOrder("", 3, 0, False), TokenOrder("", 1, 0, True)):
        parts = [order.at(index).part(tokens, 1) for index in range(order.size)]
        assert torch.equal(order.in_order(torch.cat(parts, 1), 1), tokens)
    assert TokenOrder("", 3, 1, True).part(tokens, 1)[0].tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        ({"dropout_p": 0.1}, {}, "dropout in attention"),
        ({"attn_mask": torch.ones(4, 12, requires_grad=True)}, {}, "mask that is trained"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {}, "does not cover all tokens"),
        ({"attn_mask": torch.ones(12, dtype=torch.bool), "is_causal": True}, {}, "both causal and masked"),
        ({}, {"heads": 2}, "do not fit the heads"),
        ({"enable_gqa": True}, {"heads": 3}, "do not fit the heads"),
        ({}, {"tokens": 5}, "not among the tokens"),
    ],
)
def test_other_attention_is_refused(keys, change, words):
    sizes = {"heads": 4, "tokens": 4} | change
    other = torch.ones(1, sizes["heads"], sizes["tokens"], 3)
    with pytest.raises(mw.ModelError, match=words):
        InMemory(0, True, []).attend(torch.ones(1, 4, 4, 3), other, other, **keys)

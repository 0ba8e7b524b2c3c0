"""bf16 attention in fp32 on CPUs: the numbers, what is kept, when it is left alone, and recomputation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.nn import bf16_on_cpu as half_linear
from meshwright.nn.bf16_on_cpu import WideAttention, _WidenedAttention, attends_wide, carried, with_wide_attention

pytestmark = pytest.mark.skipif(not attends_wide(torch.device("cpu")), reason="for x86")
CAUSAL = torch.ones(24, 24).tril().bool()
MASKS = {
    "causal": None,
    "truths": CAUSAL[None, None],
    "added": torch.zeros(24, 24).masked_fill(~CAUSAL, float("-inf")),
}


@pytest.fixture(params=[False, True], ids=["no bf16", "bf16"], autouse=True)
def has_bf16(monkeypatch, request):
    monkeypatch.setattr(half_linear, "has_bf16_products", lambda: request.param)
    return request.param


def given(batch, tokens, heads, width, of_keys=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, tokens, each, width, generator=generator).to(dtype).requires_grad_()
        for each in (heads, of_keys or heads, of_keys or heads)
    ]


def attend(query, key, value, mask=None):
    parts = (each.transpose(1, 2) for each in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def trained(run, leaves, mask, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(attend, *leaves, mask)
    out.float().square().sum().backward()
    return [out.double(), *(leaf.grad.double() for leaf in leaves)]


def plain(forward, *args):
    return forward(*args)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
def test_it_is_as_near_to_the_truth_as_torchs(heads, mask, autocast):
    dtype, sizes = torch.float32 if autocast else torch.bfloat16, (2, 24, heads[0], 16, heads[1])
    exact = trained(plain, given(*sizes), MASKS[mask], False)
    torchs = trained(plain, given(*sizes, dtype=dtype), MASKS[mask], autocast)
    ours = trained(with_wide_attention, given(*sizes, dtype=dtype), MASKS[mask], autocast)
    for true, theirs, own in zip(exact, torchs, ours, strict=True):
        assert (own - true).norm() < 1.05 * (theirs - true).norm() < 0.02 * true.norm()


def test_only_bf16_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with_wide_attention(attend, *given(2, 24, 6, 16, 2, dtype=torch.bfloat16))
    sizes = [each.numel() for each in kept if each.dtype == torch.bfloat16]
    # Keys and values once for the heads that share them.
    assert sorted(sizes) == [2 * 24 * 2 * 16] * 2 + [2 * 24 * 6 * 16] * 2
    assert [each.dtype for each in kept].count(torch.float32) == 1  # sums of scores


def test_what_is_not_bf16_or_not_the_kernels_is_torchs(monkeypatch, has_bf16):
    monkeypatch.setattr(_WidenedAttention, "apply", None)
    query, key, value = (each.transpose(1, 2) for each in given(2, 24, 4, 16, dtype=torch.bfloat16))
    with WideAttention():
        attend(*given(2, 24, 3, 16))
        attend(*given(2, 24, 3, 16, dtype=torch.float64))
        with pytest.raises(RuntimeError):  # torch's error, as heads do not divide
            F.scaled_dot_product_attention(query, key[:, :3], value[:, :3], enable_gqa=True)
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        F.scaled_dot_product_attention(query[0], key[0], value[0])
        F.scaled_dot_product_attention(query, key, value, torch.zeros(24, 24, requires_grad=True))
        if has_bf16:  # long rows are faster there as they are
            attend(*given(1, 300, 1, 8, dtype=torch.bfloat16))


class Recomputed(nn.Module):
    """Attends in its own forward, which runs again in backward, when modes have been left."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return checkpoint(carried(attend), *(x * self.weight,) * 3, use_reentrant=False)


def test_what_runs_again_runs_alike(monkeypatch):
    calls, apply = [], _WidenedAttention.apply
    monkeypatch.setattr(_WidenedAttention, "apply", lambda *args: calls.append(1) or apply(*args))
    model, (x, *_) = Recomputed(), given(2, 24, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = with_wide_attention(model, x).float().square().sum()
    loss.backward()
    assert len(calls) == 2
    assert model.weight.grad.isfinite().all()
    assert carried(attend) is attend


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)


class Recomputing(nn.Module):
    """A model that recomputes its blocks itself, as transformers' do with gradient_checkpointing_enable()."""

    def __init__(self, recomputes):
        super().__init__()
        self.blocks, self.recomputes = nn.ModuleList([Block() for _ in range(2)]), recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def test_a_model_may_recompute_its_blocks_itself():
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        model = Recomputing(recomputes).bfloat16()
        half_linear.widen(model, torch.device("cpu"))
        model(torch.randn(2, 40, 16, dtype=torch.bfloat16)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))

"""A small GPT of parallel layers, in BMTrain's two ways of using them, and the same in plain torch, names and all.

``"split"``: ranks of a tensor group hold parts of dim 0, here the batch, between pairs of layers, as in BMTrain's
example. ``"whole"``: they all hold the same (Shoeybi et al. 2019). Sizes leave uneven shards.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from meshwright import runtime
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.layers import ColumnParallelLinear, RowParallelLinear, VPEmbedding
from meshwright.compat.bmtrain.model_setup import init_parameters
from meshwright.compat.bmtrain.parameter import DistributedParameter
from meshwright.compat.bmtrain.pipeline_block_list import PipelineTransformerBlockList
from meshwright.nn import OpParallelLinear
from meshwright.runtime import processes

VOCABULARY, DIM, HEADS, HIDDEN, LENGTH, LAYERS = 22, 10, 2, 14, 5, 2


@contextlib.contextmanager
def tensor_groups(size, **options):
    """The pool's ranks as if they had called ``init_distributed(tp_size=size, …)``."""
    before, processes._settings = processes._settings, None
    try:
        runtime.init_distributed(backend="gloo", timeout_s=120.0, tp_size=size, **options)
        yield
    finally:
        processes._settings = before


class Attention(DistributedModule):
    def __init__(self, layout):
        super().__init__()
        split, self.layout = layout == "split", layout
        self.project_q, self.project_k, self.project_v = (
            ColumnParallelLinear(DIM, DIM, gather_input=split) for _ in range(3)
        )
        self.project_out = RowParallelLinear(DIM, DIM, all_reduce_output=not split)

    def forward(self, x):
        projections = (self.project_q, self.project_k, self.project_v)
        if self.layout == "split":  # fused, as in BMTrain's example
            weight, bias = (torch.cat([getattr(each, name) for each in projections]) for name in ("weight", "bias"))
            q, k, v = OpParallelLinear.apply(x, weight, bias, True, False, False, None).chunk(3, dim=-1)
        else:
            q, k, v = (projection(x) for projection in projections)
        return self.project_out(attended(q, k, v))


def attended(q, k, v):
    q, k, v = (x.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Layer(DistributedModule):
    def __init__(self, layout):
        super().__init__()
        self.ln_attn, self.attn = nn.LayerNorm(DIM), Attention(layout)
        self.ln_ff = nn.LayerNorm(DIM)
        self.w_in = ColumnParallelLinear(DIM, HIDDEN, gather_input=layout == "split")
        self.w_out = RowParallelLinear(HIDDEN, DIM, all_reduce_output=layout != "split", async_chunks=3)

    def forward(self, x):
        x = x + self.attn(self.ln_attn(x))
        return x + self.w_out(F.gelu(self.w_in(self.ln_ff(x))))


class Gpt(DistributedModule):
    """Takes the token ids (B, T) of a tensor group; returns logits (B, T, words of this rank)."""

    def __init__(self, layout, zero_level):
        super().__init__()
        self.layout = layout
        self.word_emb = VPEmbedding(VOCABULARY, DIM, dtype=torch.float32, init_std=0.3, gather_input=layout == "split")
        self.pos_emb = DistributedParameter(torch.empty(LENGTH, DIM), init_method=nn.init.normal_)
        blocks = [Block(Layer(layout), zero_level=zero_level) for _ in range(LAYERS)]
        self.layers = PipelineTransformerBlockList(blocks)  # of one stage, if nobody asked for more
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        if self.layout == "split":
            ids = ids.chunk(runtime.config["tp_size"])[runtime.config["tp_rank"]]
        x = self.layers(self.word_emb(ids) + self.pos_emb)
        return self.word_emb(self.norm(x), projection=True)


class PlainAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project_q, self.project_k, self.project_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.project_out = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.project_out(attended(self.project_q(x), self.project_k(x), self.project_v(x)))


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_attn, self.attn, self.ln_ff = nn.LayerNorm(DIM), PlainAttention(), nn.LayerNorm(DIM)
        self.w_in, self.w_out = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        x = x + self.attn(self.ln_attn(x))
        return x + self.w_out(F.gelu(self.w_in(self.ln_ff(x))))


class PlainGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_emb = nn.Embedding(VOCABULARY, DIM)
        self.pos_emb = nn.Parameter(torch.empty(LENGTH, DIM))
        self.layers = nn.ModuleList(PlainLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.word_emb(ids) + self.pos_emb
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.word_emb.weight)


def build(layout, zero_level=3):
    torch.manual_seed(3)
    model = Gpt(layout, zero_level)
    init_parameters(model)
    return model


def build_plain():
    """With the values of :func:`build`: init methods are called in the model's order."""
    torch.manual_seed(3)
    model = PlainGpt()
    torch.manual_seed(3)
    nn.init.normal_(model.pos_emb)
    nn.init.normal_(model.word_emb.weight, std=0.3)
    for layer in model.layers:
        for linear in layer.modules():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_normal_(linear.weight)
                nn.init.zeros_(linear.bias)
    return model

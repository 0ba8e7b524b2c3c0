"""Fused parameters and their states: stored in the model's own order, read back into the order of ranks."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.methods import Job
from meshwright.nn import RankOrder, keep_rank_order
from meshwright.optim import Muon
from meshwright.store.entries import check_orders, in_model_order, model_entries, to_rank_order_

ORDER = RankOrder(dim=0, parts=(4, 4, 4), ranks=2)


def fused():
    model = nn.ModuleDict({"qkv": nn.Linear(3, 12, bias=False), "out": nn.Linear(3, 12, bias=False)})
    keep_rank_order(model["qkv"], "weight", ORDER)
    return model


def test_states_follow_their_parameter():
    model = fused()
    entries = model_entries(model)
    lying = {
        "model.qkv.weight": model["qkv"].weight,
        "model.out.weight": model["out"].weight,
        "optim.state.qkv.weight.exp_avg": torch.randn(12, 3),
        "optim.state.qkv.weight.exp_avg_sq_row": torch.randn(12),
        "optim.state.qkv.weight.exp_avg_sq_col": torch.randn(3),
        "optim.state.qkv.weight.step": torch.tensor(3.0),
    }
    stored = in_model_order(entries, lying)
    source = ORDER.source()
    changed = {name for name, tensor in stored.items() if tensor is not lying[name]}
    assert changed == {"model.qkv.weight", *(f"optim.state.qkv.weight.exp_avg{end}" for end in ("", "_sq_row"))}
    for name in changed:
        assert torch.equal(stored[name][source], lying[name])
    filled = {name: stored[name].clone() for name in stored}
    to_rank_order_(entries, filled)
    assert all(torch.equal(filled[name], lying[name]) for name in lying)


def in_eight_bits(shape, parts, ranks, dim):
    """Codes and scales of blocks within rows, of a parameter that is fused along a dim."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    model = nn.ModuleDict({"qkv": module})
    keep_rank_order(module, "weight", RankOrder(dim, parts, ranks))
    blocks = [*shape[:-1], -(-shape[-1] // 256)] if len(shape) > 1 else [-(-shape[0] // 256)]
    name = "optim.state.qkv.weight.exp_avg"
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return model_entries(model), {f"{name}_codes": codes, f"{name}_absmax": torch.rand(blocks)}


def decoded(tensors):
    codes, scales = tensors.values()
    return codes.float() * scales.repeat_interleave(256, dim=-1)[..., : codes.shape[-1]]


@pytest.mark.parametrize(
    ("shape", "parts", "dim"), [((12, 300), (4, 4, 4), 0), ((3, 1536), (512,) * 3, 1), ((2048,), (1024, 512, 512), 0)]
)
def test_blocks_in_eight_bits_follow_where_none_is_torn(shape, parts, dim):
    entries, lying = in_eight_bits(shape, parts, 2, dim)
    stored = in_model_order(entries, lying)
    source = RankOrder(dim, parts, 2).source()
    assert torch.equal(decoded(stored).index_select(dim, source), decoded(lying))
    assert not torch.equal(decoded(stored), decoded(lying))
    filled = {name: tensor.clone() for name, tensor in stored.items()}
    to_rank_order_(entries, filled)
    assert all(torch.equal(filled[name], lying[name]) for name in lying)


def test_what_reaches_across_the_parts_is_refused():
    model = fused()
    codes = {"optim.state.qkv.weight.exp_avg": torch.zeros(12, 3, dtype=torch.uint8)}  # no scales by rows
    with pytest.raises(mw.CheckpointError, match="blocks of quantized values reach across"):
        in_model_order(model_entries(model), codes)
    for shape, parts, dim in (((3, 1200), (400,) * 3, 1), ((1200,), (400,) * 3, 0), ((2, 512, 4), (512,), 1)):
        entries, lying = in_eight_bits(shape, parts, 2, dim)
        with pytest.raises(mw.CheckpointError, match="blocks of quantized values reach across"):
            check_orders(entries, lying)


def test_an_optimizer_that_tells_the_parts_apart_is_refused():
    def job(split):
        return Job(
            fused(), mw.Strategy(), torch.device("cpu"), None, None, is_split=True,
            optim_func=lambda parameters: Muon(parameters, lr=0.1, split=split),
        )  # fmt: skip

    with pytest.raises(mw.ModelError, match=r"parts of a fused projection.*split=3"):
        job(3).build_optimizer()
    assert job(1).build_optimizer() is not None

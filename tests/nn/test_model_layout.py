"""Fused parameters in the order of ranks: the way there and back, and through state dicts."""

import torch
from torch import nn

from meshwright.nn import RankOrder, keep_rank_order, rank_orders

ORDER = RankOrder(dim=0, parts=(8, 4, 4), ranks=2)


def test_each_rank_gets_its_share_of_every_part():
    rows = torch.arange(16)
    lying = ORDER.to_ranks(rows)
    assert lying.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    assert torch.equal(ORDER.to_model(lying), rows)
    matrix = torch.randn(3, 16)
    assert torch.equal(ORDER.to_model(ORDER.to_ranks(matrix, 1), 1), matrix)


def test_state_dicts_have_the_models_own_order():
    layer = nn.Linear(3, 16)
    own = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(ORDER.to_ranks(parameter))
    model = nn.ModuleDict({"qkv": layer, "other": nn.Linear(2, 2)})
    keep_rank_order(layer, "weight", ORDER)
    keep_rank_order(layer, "bias", ORDER)
    assert rank_orders(model) == {id(layer.weight): ORDER, id(layer.bias): ORDER}
    lying = layer.weight.detach().clone()
    assert all(torch.equal(value, own[name]) for name, value in layer.state_dict().items())
    assert torch.equal(model.state_dict()["qkv.weight"], own["weight"])
    assert model.state_dict(keep_vars=True)["qkv.weight"] is layer.weight
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    layer.load_state_dict(own)
    assert torch.equal(layer.weight, lying)
    layer.load_state_dict(layer.state_dict(keep_vars=True))  # the parameters themselves lie as they should
    assert torch.equal(layer.weight, lying)

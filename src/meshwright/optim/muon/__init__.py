"""Muon: steps along orthogonalised momentum, for the matrices of a model; AdamW for the rest."""

from meshwright.optim.muon.optimizer import Muon
from meshwright.optim.muon.param_groups import muon_param_groups

__all__ = ["Muon", "muon_param_groups"]

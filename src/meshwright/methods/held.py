"""Tells optimizers what they cannot see from parameters: which ranks hold them, and in what order."""

from __future__ import annotations

from meshwright.methods.job import Job
from meshwright.nn import part_of_whole, rank_orders
from meshwright.optim import Held, tell_held
from meshwright.store.entries import stored_name, unwrapped


def tell_parameters(job: Job) -> None:
    """Notes it on every parameter, when all methods have changed the model."""
    model = unwrapped(job.model)
    part, orders = part_of_whole(model), rank_orders(model)
    named = {stored_name(name): parameter for name, parameter in model.named_parameters()}
    places = {stored_name(name): place for place, name in enumerate(part.names if part is not None else named)}
    homes = {stored_name(name): ranks for name, ranks in part.homes.items()} if part is not None else {}
    for name, parameter in named.items():
        on, of = (len(homes[name]), part.size) if part is not None else (1, 1)
        tell_held(parameter, Held(places[name], on, of, orders.get(id(parameter))))

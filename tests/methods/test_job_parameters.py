"""``parameters_in`` says what ``model.parameters()`` says, after every change of a model that it has walked before."""

import copy
import gc
import weakref

from torch import nn

from meshwright.methods.job import parameters_in


def same(model):
    return [*map(id, parameters_in(model))] == [*map(id, model.parameters())]


def net():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.LayerNorm(2), nn.Linear(2, 2, bias=False)]))
    model[1][1].weight = model[0].weight  # shared
    model.head = None
    assert same(model)
    return model


def test_modules_and_parameters_that_change_after_the_first_walk():
    model = net()
    model[0].adapter = nn.Linear(2, 1)  # into a module without children
    assert same(model)
    model[1].append(nn.Linear(2, 2))
    assert same(model)
    del model[1][0]
    assert same(model)
    model.head = nn.Linear(2, 2)
    assert same(model)
    for _ in range(20):  # the new one often gets the memory of the old
        model.head = None
        model.head = nn.Linear(2, 2)
        assert same(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.head.bias = None
    assert same(model)
    model[0], model[1] = model[1], model[0]
    assert same(model)


def test_copies_are_walked_anew_and_models_are_freed():
    model = net()
    gone = weakref.ref(net())
    gc.collect()
    assert gone() is None
    other = copy.deepcopy(model)
    assert same(other)
    assert not {*map(id, parameters_in(other))} & {*map(id, parameters_in(model))}
    shared = nn.ModuleList([model, model[0]])
    assert same(shared)

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop, Rprop

from meshwright.optim import step_on_local_tensors

CASES = [
    (AdamW, {"fused": True}),
    (Adam, {"foreach": True, "amsgrad": True}),
    (NAdam, {}),
    (RMSprop, {}),
    (SGD, {"momentum": 0.9}),
]
SHAPES = [(5, 3), (1, 4), (6,)]  # shards of one rank are empty


def recorded(optimizer):
    """Every tensor that the optimizer hands on to its kernels, from now on."""
    collect, seen = optimizer._init_group, []

    def collected(group, *lists):
        found = collect(group, *lists)
        seen.extend(tensor for each in lists for tensor in each)
        return found

    optimizer._init_group = collected
    return seen


def trained(optimizer_class, options, mesh, local):
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)]))
        for shape in SHAPES
    ]
    optimizer = optimizer_class(parameters, lr=0.1, **options)
    if local:
        step_on_local_tensors(optimizer)
    handed_on = recorded(optimizer)
    for _ in range(3):
        for index, parameter in enumerate(parameters):
            value = torch.randn(SHAPES[index], generator=generator)
            gradient = distribute_tensor(value, mesh, [Replicate() if index == 2 else Shard(0)])
            if index == 0:  # unreduced sums are reduced first, as DTensor operations reduce them
                gradient = DTensor.from_local(value / mesh.size(), mesh, [Partial()])
            parameter.grad = gradient
        before = parameters[0]._version
        optimizer.step()
        assert parameters[0]._version > before or not local
    states = [
        value for state in optimizer.state.values() for key, value in state.items() if key not in ("step", "mu_product")
    ]
    assert all(isinstance(value, DTensor) for value in states)
    return [value.full_tensor().clone() for value in (*parameters, *states)], any(
        isinstance(each, DTensor) for each in handed_on
    )


def both():
    mesh = init_device_mesh("cpu", (2,))
    for optimizer_class, options in CASES:
        plain, before = trained(optimizer_class, options, mesh, False)
        local, after = trained(optimizer_class, options, mesh, True)
        for mine, theirs in zip(local, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert before
        assert after == (optimizer_class is SGD), optimizer_class
    # torch has no rule by which its kernel could update DTensors.
    fused, _ = trained(Adagrad, {"fused": True}, mesh, True)
    loop, _ = trained(Adagrad, {}, mesh, False)
    for mine, theirs in zip(fused, loop, strict=True):
        torch.testing.assert_close(mine, theirs)


def with_rprop():
    """Whose update torch has no rule for either."""
    mesh, results = init_device_mesh("cpu", (2,)), []
    for lay_out in (lambda whole: distribute_tensor(whole, mesh, [Shard(0)]), torch.clone):
        weight = torch.nn.Parameter(lay_out(torch.ones(5, 3)))
        optimizer = Rprop([weight], lr=0.1)
        step_on_local_tensors(optimizer)
        for step in range(4):
            weight.grad = lay_out(torch.randn(5, 3, generator=torch.Generator().manual_seed(step)))
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0].full_tensor(), results[1])


def test_rprop_steps_on_shards(ranks):
    ranks(2).run(with_rprop)


def test_kernels_on_shards_do_what_dtensor_operations_do(ranks):
    ranks(2).run(both)


def test_subclasses_are_left_alone():
    class Own(AdamW):
        pass

    optimizer = Own([torch.nn.Parameter(torch.zeros(2))])
    step_on_local_tensors(optimizer)
    assert "_init_group" not in vars(optimizer)

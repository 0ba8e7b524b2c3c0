import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from meshwright import ModelError
from meshwright.optim import clip_grad_norm_, clip_grad_value_, total_norm
from meshwright.optim.dtensors import local_norms

SHAPES = [(7, 5), (1, 3), (16,), (), (3, 4)]
NORMS = [1.0, 2.0, 3.0, float("inf")]


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sharded_norms(mesh_shape, names):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    kinds = [[Replicate()] * (len(names) - 1) + [Shard(0)], [Replicate()] * len(names)]
    mixed = []
    for index, gradient in enumerate(gradients()):
        placements = kinds[0] if gradient.dim() and index % 3 < 2 else kinds[1]
        mixed.append(distribute_tensor(gradient, mesh, placements) if index != 4 else gradient)
    found = [total_norm(mixed, p).item() for p in NORMS]
    parameters = [torch.zeros_like(gradient) for gradient in mixed]
    for parameter, gradient in zip(parameters, mixed, strict=True):
        parameter.grad = gradient
    before = clip_grad_norm_(parameters, 0.5).item()
    return found, before, [(g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for g in mixed]


@pytest.mark.parametrize(
    ("world", "mesh", "names"), [(2, (2,), ("zero",)), (4, (4,), ("zero",)), (4, (2, 2), ("data", "zero"))]
)
def test_norm_and_clip_over_shards_equal_those_of_one_process(ranks, world, mesh, names):
    plain = gradients()
    expected = [torch.linalg.vector_norm(torch.cat([g.flatten() for g in plain]), p).item() for p in NORMS]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in plain]
    for parameter, gradient in zip(parameters, plain, strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for found, before, clipped in ranks(world).run(sharded_norms, mesh, names):
        assert found == pytest.approx(expected, rel=1e-6)
        assert before == pytest.approx(norm.item(), rel=1e-6)
        for mine, theirs in zip(clipped, parameters, strict=True):
            torch.testing.assert_close(mine, theirs.grad)


def test_half_gradients_are_summed_in_fp32():
    gradient = torch.full((100_000,), 1.0, dtype=torch.bfloat16)
    assert total_norm([gradient]).item() == pytest.approx(100_000**0.5, rel=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_long_tensors_are_exact(norm_type, dtype):
    parts = [torch.randn(2**22 + 5).to(dtype), torch.randn(64, 2**12, 16).to(dtype).mT, torch.randn(7).to(dtype)]
    found = local_norms(parts, norm_type)
    expected = [torch.linalg.vector_norm(part.double(), norm_type) for part in parts]
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=5e-7, atol=0.0)
    assert {each.dtype for each in found} == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_small_gradients_are_left_alone_and_none_is_passed_over():
    parameter, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.3, 0.0, 0.4])
    assert clip_grad_norm_([parameter, unused], 10.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.0, 0.4])
    assert clip_grad_norm_([unused], 1.0).item() == 0


def partial_sum():
    mesh = init_device_mesh("cpu", (2,))
    from torch.distributed.tensor import DTensor

    gradient = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ModelError, match=r"partial sum.*Expected.*Got.*What to do"):
        total_norm([gradient])


def test_a_partial_sum_is_refused(ranks):
    ranks(2).run(partial_sum)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_a_norm_that_is_none(bad):
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([torch.nn.Parameter(torch.zeros(1))], bad)


@pytest.mark.parametrize("norm_type", NORMS)
def test_complex_and_sparse_gradients_count_as_the_numbers_they_are(norm_type):
    torch.manual_seed(0)
    turning, table, plain = torch.randn(5, dtype=torch.complex64), torch.randn(4, 3), torch.randn(6)
    rows = torch.tensor([[2, 0, 2, 1]])  # row 2 twice: its gradients add up
    sparse = torch.sparse_coo_tensor(rows, table.clone(), (9, 3))
    parameters = [torch.nn.Parameter(torch.zeros_like(each.to_dense())) for each in (turning, sparse, plain)]
    for parameter, gradient in zip(parameters, (turning.clone(), sparse, plain.clone()), strict=True):
        parameter.grad = gradient
    dense = torch.cat([turning.abs(), sparse.to_dense().flatten(), plain])
    expected = torch.linalg.vector_norm(dense, norm_type)
    torch.testing.assert_close(clip_grad_norm_(parameters, 0.5, norm_type), expected)
    scaled = torch.linalg.vector_norm(torch.cat([p.grad.to_dense().flatten().abs() for p in parameters]), norm_type)
    torch.testing.assert_close(scaled, torch.tensor(0.5), rtol=1e-4, atol=1e-5)


def test_a_sparse_gradient_without_rows_has_no_norm():
    parameter = torch.nn.Parameter(torch.zeros(9, 3))
    parameter.grad = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3), (9, 3))
    assert [clip_grad_norm_([parameter], 0.5, p).item() for p in (2.0, float("inf"))] == [0.0, 0.0]


def clip_values():
    mesh = init_device_mesh("cpu", (2,))
    whole, plain = torch.tensor([-3.0, 0.5, 2.0]), torch.nn.Parameter(torch.zeros(2))
    sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    sharded.grad, plain.grad = distribute_tensor(whole, mesh, [Shard(0)]), torch.tensor([9.0, -9.0])
    clip_grad_value_([sharded, plain, plain, torch.nn.Parameter(torch.zeros(1))], 1.0)
    assert torch.equal(sharded.grad.full_tensor(), whole.clamp(-1, 1))
    assert plain.grad.tolist() == [1, -1]


def test_elements_are_clamped_where_they_are(ranks):
    ranks(2).run(clip_values)
    with pytest.raises(ValueError, match="clip_value"):
        clip_grad_value_([], 0)

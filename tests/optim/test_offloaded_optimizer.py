"""The parts of offload by themselves: any optimizer over copies on the host, and tensors in files."""

import contextlib
import copy
import gc
import os

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.optim import Disk, GuardedOptimizer, HostWeights, Lamb, copies_for
from meshwright.optim.offload_storage import DiskFile
from tests import tiny


class CountingSgd(torch.optim.Optimizer):
    """Counts steps per group, as many optimizers from elsewhere do: a step bucket by bucket would count too many."""

    def __init__(self, params):
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter -= 0.1 / group["count"] * parameter.grad


def offloaded(model, optim_func, params=None, disk=None, offloaded=lambda name: True):
    parameters = list(model.parameters())
    chosen = {parameter for name, parameter in model.named_parameters() if offloaded(name)}
    weights = HostWeights(
        parameters, offloaded=chosen, in_backward=chosen, resident=set(), fp32=False,
        copies=copies_for(torch.device("cpu")), pin_memory=False, disk=disk, bucket_bytes=700,
    )  # fmt: skip
    return GuardedOptimizer(weights.optimizer(optim_func, params or parameters), master=weights)


def train(model, optimizer, steps=4):
    data = torch.randn(steps, 2, 5, 7, generator=torch.Generator().manual_seed(1))
    for parts in data:
        optimizer.zero_grad()
        for rows in parts:  # two micro-batches
            (model(rows) - rows[:, :3]).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def build():
    torch.manual_seed(0)
    return tiny.Mlp()


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "lamb": lambda params: Lamb(params, lr=1e-2),
    "counting": CountingSgd,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_over_some_parameters(name, tmp_path):
    plain = build()
    expected = train(plain, OPTIMIZERS[name](list(plain.parameters())))
    for disk in (None, Disk(tmp_path)):
        model = build()
        groups = [
            {"params": [p for n, p in model.named_parameters() if n.endswith(kind)]} for kind in ("weight", "bias")
        ]
        optimizer = offloaded(model, OPTIMIZERS[name], groups, disk, offloaded=lambda name: "layers.1" not in name)
        torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-6, atol=1e-6)
        assert all(p.grad is None for n, p in model.named_parameters() if "layers.1" not in n)
    if name == "counting":
        assert [group["count"] for group in optimizer.param_groups] == [4, 4]


def test_lbfgs_is_refused():
    with pytest.raises(mw.errors.ConfigError, match="flattens"):
        offloaded(build(), torch.optim.LBFGS)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    offloaded(model, torch.optim.SGD)
    with pytest.raises(mw.errors.ModelError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_state_dicts_go_between_offloaded_and_plain(tmp_path):
    plain = build()
    reference = OPTIMIZERS["adamw"](list(plain.parameters()))
    train(plain, reference)
    model = build()
    model.load_state_dict(plain.state_dict())
    optimizer = offloaded(model, OPTIMIZERS["adamw"], disk=Disk(tmp_path))
    optimizer.load_state_dict({"inner": copy.deepcopy(reference.state_dict()), "scaler": None})
    torch.testing.assert_close(train(model, optimizer), train(plain, reference), rtol=1e-6, atol=1e-6)
    first = optimizer.param_groups[0]["params"][0]
    assert optimizer.inner.is_stored(first, "max_exp_avg_sq")
    assert not optimizer.inner.is_stored(first, "step")


def open_files(folder):
    """How many files in a folder this process has open, with a name or without."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{each}").startswith(f"{folder}/")
    return found


def test_files_have_no_name_unless_kept_and_give_their_room_back(tmp_path):
    likes = [torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(0, 4), torch.empty(4, 6).t()]
    file, tensors = DiskFile.like(tmp_path, likes, keep=False)
    assert not list(tmp_path.iterdir())
    for tensor, like in zip(tensors, likes, strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
        assert not tensor.any()
        tensor.fill_(2)
    file.write_behind()
    file.read_ahead()
    assert all((tensor == 2).all() for tensor in tensors)
    assert open_files(tmp_path) > 0
    del file, tensors, tensor
    gc.collect()
    assert open_files(tmp_path) == 0
    _, kept = DiskFile.like(tmp_path / "", likes, keep=True)
    kept[0].fill_(1)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes()[:30] == torch.ones(15, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_a_full_disk_and_a_folder_that_is_none(tmp_path):
    with pytest.raises(mw.errors.ConfigError, match="another disk"):
        DiskFile(tmp_path, 2**62, keep=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(mw.errors.ConfigError, match="cannot hold them"):
        Disk(tmp_path / "file")

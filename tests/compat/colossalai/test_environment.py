"""The names that ColossalAI's scripts import beside the Booster."""

import importlib
import os
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright
from meshwright.accelerator import get_accelerator
from meshwright.booster.mixed_precision import FP16TorchMixedPrecision, mixed_precision_factory
from meshwright.booster.plugin.dp_plugin_base import DPPluginBase
from meshwright.cluster import DistCoordinator
from meshwright.compat.colossalai import (
    Accelerator,
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    environment,
)
from meshwright.errors import ConfigError, LaunchError
from meshwright.interface import OptimizerWrapper
from meshwright.lazy import LazyInitContext
from meshwright.logging import disable_existing_loggers, get_dist_logger
from tests import tiny

NAMES = {
    "accelerator": "get_accelerator",
    "booster": "Booster",
    "booster.accelerator": "Accelerator",
    "booster.booster": "Booster",
    "booster.mixed_precision": "FP16TorchMixedPrecision BF16MixedPrecision MixedPrecision mixed_precision_factory",
    "booster.plugin": "GeminiPlugin HybridParallelPlugin LowLevelZeroPlugin MoeHybridParallelPlugin Plugin "
    "TorchDDPPlugin TorchFSDPPlugin",
    "booster.plugin.dp_plugin_base": "DPPluginBase",
    "booster.plugin.gemini_plugin": "GeminiPlugin",
    "booster.plugin.hybrid_parallel_plugin": "HybridParallelPlugin",
    "booster.plugin.low_level_zero_plugin": "LowLevelZeroPlugin",
    "booster.plugin.moe_hybrid_parallel_plugin": "HybridParallelPlugin MoeHybridParallelPlugin",
    "booster.plugin.plugin_base": "Plugin",
    "booster.plugin.torch_ddp_plugin": "TorchDDPPlugin",
    "booster.plugin.torch_fsdp_plugin": "TorchFSDPPlugin",
    "cluster": "DistCoordinator",
    "cluster.dist_coordinator": "DistCoordinator",
    "initialize": "launch launch_from_openmpi launch_from_slurm launch_from_torch",
    "interface": "OptimizerWrapper",
    "lazy": "LazyInitContext",
    "lazy.lazy_init": "LazyInitContext",
    "utils": "get_current_device set_seed",
    "logging": "disable_existing_loggers get_dist_logger",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_found_where_colossalai_has_them(module):
    found = importlib.import_module(f"meshwright.{module}")
    for name in NAMES[module].split():
        assert callable(getattr(found, name))


def _on_ranks():
    coordinator = DistCoordinator()
    order = []
    with coordinator.priority_execution(executor_rank=1):
        order.append(coordinator.rank)
    only = coordinator.on_master_only()(lambda value: value + 1)
    coordinator.block_all()
    plugins = [TorchDDPPlugin(), LowLevelZeroPlugin(extra_dp_size=2), GeminiPlugin(), HybridParallelPlugin(tp_size=2)]
    stages = {}
    for style in ("1f1b", "zbv"):
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, num_model_chunks=2, pp_style=style)
        manager = plugin.stage_manager
        stages[style] = (
            plugin.dp_size,
            manager.stage,
            manager.num_stages,
            manager.is_first_stage(),
            manager.is_last_stage(),
            manager.is_last_stage(ignore_chunk=True),
        )
    return {
        "is": (coordinator.is_master(), coordinator.is_last_process(), coordinator.world_size),
        "only": only(1),
        "dp": [plugin.dp_size for plugin in plugins],
        "no pipeline": plugins[-1].stage_manager,
        "stages": stages,
        "device": get_accelerator().get_current_device().type,
    }


def test_coordinator_and_the_places_of_ranks(ranks):
    answers = ranks(4).run(_on_ranks)
    assert [answer["is"] for answer in answers] == [(rank == 0, rank == 3, 4) for rank in range(4)]
    assert [answer["only"] for answer in answers] == [2, None, None, None]
    assert all(answer["dp"] == [4, 4, 4, 2] and answer["no pipeline"] is None for answer in answers)
    ordinary, zbv = ([answer["stages"][style] for answer in answers] for style in ("1f1b", "zbv"))
    # Stages lie inside data parallelism: ranks 0 and 1 are a pipeline.
    assert ordinary == [(2, 0, 2, True, False, False), (2, 1, 2, False, True, True)] * 2
    assert zbv == [(2, 0, 2, True, True, False), (2, 1, 2, False, False, True)] * 2
    assert {answer["device"] for answer in answers} == {"cpu"}


def test_a_coordinator_needs_a_world():
    with (
        mock.patch("torch.distributed.is_initialized", return_value=False),
        pytest.raises(LaunchError, match="DistCoord"),
    ):
        DistCoordinator()


@pytest.mark.parametrize(
    ("call", "variables"),
    [
        (meshwright.launch_from_slurm, {"SLURM_PROCID": "3", "SLURM_NPROCS": "8", "SLURM_LOCALID": "1"}),
        (
            meshwright.launch_from_openmpi,
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        ),
    ],
)
def test_launching_by_slurm_and_openmpi(call, variables):
    with mock.patch.object(environment, "launch") as launched, mock.patch.dict(os.environ, variables):
        call("node0", 29501, seed=7)
    launched.assert_called_once_with(3, 8, "node0", 29501, None, 1, 7, True)
    with mock.patch.dict(os.environ, dict.fromkeys(variables, "")), pytest.raises(LaunchError, match=min(variables)):
        call("node0", 29501)


def test_the_current_device_forwards_to_torch():
    device = get_accelerator()
    assert device.name in ("cpu", "cuda")
    assert device.is_available()
    assert device.communication_backend == ("nccl" if device.name == "cuda" else "gloo")
    device.synchronize()
    device.empty_cache()
    assert device.max_memory_allocated() >= 0
    assert callable(device.current_device)
    with device.autocast(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).to(device.get_current_device())(torch.ones(1, 2)).dtype == torch.bfloat16
    with pytest.raises(AttributeError):
        device.no_such_function()


def test_models_of_a_lazy_context_get_the_values_of_the_ordinary_build():
    torch.manual_seed(1)
    expected = tiny.Mlp()
    torch.manual_seed(1)
    with LazyInitContext(default_device="cuda") as context:
        inside = context.materialize(tiny.Mlp())
    torch.manual_seed(1)
    with LazyInitContext() as context:
        after = tiny.Mlp()
    assert all(parameter.is_meta for parameter in after.parameters())
    for model in (inside, context.materialize(after)):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_loggers_write_on_the_ranks_they_are_told(capfd, tmp_path):
    logger = get_dist_logger("meshwright.tests.logger")
    logger.log_to_file(tmp_path / "logs", suffix="x")
    logger.info("on rank 0", ranks=[0])
    logger.warning("nowhere here", ranks=[1])
    logger.debug("not at this level")
    disable_existing_loggers(include=["meshwright.tests.logger"])
    logger.info("silent by now")
    logger.error("100 % heard")
    written = capfd.readouterr().err
    assert all(text in written for text in ("on rank 0", "100 % heard"))
    assert not any(text in written for text in ("nowhere", "not at this level", "silent"))
    assert "on rank 0" in (tmp_path / "logs" / "rank_0_x.log").read_text()


def test_kinds_of_plugins_and_devices():
    assert all(
        isinstance(plugin, DPPluginBase)
        for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(), GeminiPlugin(), TorchFSDPPlugin())
    )
    assert not isinstance(HybridParallelPlugin(), DPPluginBase)
    assert next(Accelerator("cpu").configure_model(nn.Linear(2, 2)).parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match="no such device"):
        Accelerator("npu")


def _train_mixed(precision):
    torch.manual_seed(1)
    model = tiny.Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.MSELoss()
    if isinstance(precision, str):
        model, optimizer, criterion, *_ = Booster(mixed_precision=precision).boost(model, optimizer, criterion)
    else:
        model, optimizer, criterion = precision.configure(model, optimizer, criterion)
    assert isinstance(optimizer, OptimizerWrapper)
    losses = []
    for step in range(10):
        torch.manual_seed(step)
        inputs = torch.randn(8, 7)
        loss = criterion(model(inputs), inputs[:, :3])
        optimizer.backward(loss)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def _mixed():
    by_name, _ = _train_mixed("fp16")
    by_object, optimizer = _train_mixed(FP16TorchMixedPrecision(init_scale=2.0**8, growth_interval=4))
    bf16 = _train_mixed(mixed_precision_factory("bf16"))[0]
    return by_name, by_object, bf16, optimizer.scaler.get_scale()


def test_precisions_as_objects(ranks):
    ((by_name, by_object, bf16, scale),) = ranks(1).run(_mixed)
    assert scale == 2.0**10  # it has grown after steps 4 and 8
    torch.testing.assert_close(torch.tensor(by_object), torch.tensor(bf16), rtol=2e-2, atol=2e-2)
    assert by_name[-1] < by_name[0]  # its first steps overflow


def test_unknown_precisions_are_refused():
    for name in ("fp16_apex", "fp8"):
        with pytest.raises(ConfigError, match="no such mixed precision"):
            mixed_precision_factory(name)
    with pytest.raises(ConfigError, match="controls the precision"):
        Booster(mixed_precision=FP16TorchMixedPrecision(), plugin=LowLevelZeroPlugin(precision="bf16"))

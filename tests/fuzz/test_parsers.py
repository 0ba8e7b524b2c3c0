"""Whatever a file holds, reading it ends in a value or in Meshwright's own error, and in nothing else.

``make fuzz`` gives every parser five minutes (``--fuzz-s``); ``make test`` a glance.
"""

import json
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from safetensors.torch import save as safetensors_bytes

from meshwright.cli.config_file import read_config
from meshwright.cost import read_cluster
from meshwright.cost.efficiency import fitted, read_calibration, write_calibration
from meshwright.errors import MeshwrightError
from meshwright.store import CheckpointStore
from meshwright.store.choice import damage_of, verify
from meshwright.store.file_format import read_file
from meshwright.store.folder import read_folder
from meshwright.store.manifest import describe, read_manifest, write_manifest
from meshwright.store.optimizer_format import read_optimizer
from meshwright.store.record import read_record
from meshwright.strategy import Strategy
from tests.cli.helpers import CONFIG
from tests.fuzz.inputs import files
from tests.store.runs import build, train

GLANCE = 20  # examples of each parser in make test

CLUSTER = json.dumps(
    {"device": "A100-80GB", "num_devices": 16, "devices_per_node": 8, "intra": {"gbps": 2400, "latency_s": 1e-6},
     "price_per_hour": 2.5}
)  # fmt: skip
OPTIMIZER = {
    "state": {"w": {"exp_avg": torch.ones(2), "step": 1}}, "param_groups": [{"params": ["w"], "lr": 0.1}],
    "master": {"w": torch.ones(2)}, "scaler": None, "kind": "AdamW", "weights": {"w": ([2], "float32")},
}  # fmt: skip


def _checkpoint(directory: Path) -> None:
    """A checkpoint whose manifest vouches for a record that is not one."""
    (directory / "manifest.json").unlink()
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    write_manifest(directory, {name: describe(directory / name) for name in names})
    CheckpointStore(directory.parent).load(build("plain"), directory)


# By name: the file in a directory of valid ones, and what reads it.
PARSERS = {
    "manifest": ("step-00000001/manifest.json", lambda path: read_manifest(path.parent)),
    "damage": ("step-00000001/manifest.json", lambda path: damage_of(path.parent)),
    "record": ("step-00000001/state.json", lambda path: read_record(path.parent)),
    "checkpoint": ("step-00000001/state.json", lambda path: _checkpoint(path.parent)),
    "strategy": ("strategy.json", Strategy),
    "training file": ("train.toml", read_config),
    "cluster": ("cluster.json", read_cluster),
    "calibration": ("calibration.json", lambda path: read_calibration(path.read_text(errors="replace"))),
    "safetensors": ("weights.safetensors", read_file),
    "pt": ("weights.pt", read_file),
    "index": ("folder/model.safetensors.index.json", lambda path: read_folder(path.parent)),
    "optimizer": ("optimizer.pt", read_optimizer),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A directory with one valid file for every parser."""
    folder = tmp_path_factory.mktemp("valid")
    state = build("plain")
    train(state, 1)
    CheckpointStore(folder).save(state)
    weights = {"a": torch.rand(2, 3), "b": torch.ones(4, dtype=torch.int64)}
    torch.save(weights, folder / "weights.pt")
    (folder / "weights.safetensors").write_bytes(safetensors_bytes(weights))
    (folder / "folder").mkdir()
    (folder / "folder" / "part.safetensors").write_bytes(safetensors_bytes(weights))
    index = {"metadata": {"total_size": 56}, "weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
    (folder / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "strategy.json").write_text(Strategy(["fsdp", ("checkpoint", {})]).to_json())
    (folder / "train.toml").write_text(CONFIG)
    (folder / "cluster.json").write_text(CLUSTER)
    (folder / "calibration.json").write_text(write_calibration(fitted()))
    torch.save(OPTIMIZER, folder / "optimizer.pt")
    return folder


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.timeout(0)
def test_nothing_but_the_documented_error(valid, parser, request):
    name, read = PARSERS[parser]
    path, duration_s = valid / name, request.config.getoption("--fuzz-s")
    content = path.read_bytes()
    beside = {other: other.read_bytes() for other in path.parent.glob("*.json")}
    verified = "step-" in name

    def _try(changed: bytes) -> None:
        for other, whole in beside.items():
            other.write_bytes(whole)
        path.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
        except MeshwrightError:
            pass

    ends_s, number = time.monotonic() + duration_s, 0
    try:
        while number == 0 or time.monotonic() < ends_s:
            number += 1
            options = settings(max_examples=GLANCE if duration_s == 0 else 500, database=None,
                               phases=[Phase.generate, Phase.shrink])  # fmt: skip
            seed(number)(options(given(files(content))(_try)))()
    finally:
        for other, whole in beside.items():
            other.write_bytes(whole)
        path.write_bytes(content)
    read(path)  # what is valid is read
    if verified:
        verify(path.parent)

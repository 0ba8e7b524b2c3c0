"""Every parser of data from outside: by name, a valid file for it and what reads that. Both engines use this table."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from published_runs.cases import NotCovered, case_of
from safetensors.torch import save as safetensors_bytes

from meshwright.cli.adapters import read_adapters
from meshwright.cli.checkpoint_tools import list_checkpoints, verify_checkpoints
from meshwright.cli.plan_and_compare import CompareOptions, compare, is_reference
from meshwright.cli.run_display import loss_text, speed_text
from meshwright.cli.run_files import MetricsFile
from meshwright.cli.session import changes, earlier_config
from meshwright.cli.train_options import parse_config, read_config
from meshwright.comm.message_header import Header
from meshwright.compat.bmtrain.lr_schedules import Cosine
from meshwright.cost import find_cluster, read_cluster
from meshwright.cost.calibration import fitted, read_calibration, write_calibration
from meshwright.data.token_files import open_tokens
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.planner import FamilyModel, FamilyWorkload, PlanRequest, parse_family
from meshwright.planner.config_models import transformers_model
from meshwright.runtime.rank_reports import Report, verdict
from meshwright.store import CheckpointStore
from meshwright.store.folder import read_folder
from meshwright.store.manifest import damage_of, describe, read_manifest, read_record, write_manifest
from meshwright.store.optimizer_file import read_optimizer
from meshwright.store.scheduler_file import check_fit, read_scheduler
from meshwright.store.stored_shards import FolderIndex
from meshwright.store.tensor_files import read_file
from meshwright.strategy import Strategy
from published_runs import read_rows
from tests.cli.helpers import CONFIG
from tests.store.runs import build, train

WEIGHTS = {"a": torch.rand(2, 3), "b": torch.ones(4, dtype=torch.int64)}
CLUSTER = {
    "device": "A100-80GB", "num_devices": 16, "devices_per_node": 8, "intra": {"gbps": 2400, "latency_s": 1e-6},
    "price_per_hour": 2.5, "calibration": {
        "devices": {"A100": {"matmul": 0.8}}, "constants": {"gap_s": 3e-6}, "machine": "A100",
        "learned": {"computing": 1.25, "collectives": 0.8, "call_s": 1e-3, "num_runs": 3},
    },
}  # fmt: skip
OPTIMIZER = {
    "state": {"w": {"exp_avg": torch.ones(2), "step": 1}}, "param_groups": [{"params": ["w"], "lr": 0.1}],
    "master": {"w": torch.ones(2)}, "scaler": None, "kind": "AdamW", "weights": {"w": ([2], "float32")},
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1,
    "n_positions": 16, "vocab_size": 32, "activation_function": "gelu_new",
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [{"id": 3, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}  # fmt: skip
EARLIER = parse_config(tomllib.loads(CONFIG), "the training file").model_dump(mode="json")
TABLE = """source,model,layers,hidden,heads,seq,gpu,n_gpus,dp,tp,pp,micro_batch,global_batch,precision,ac,mfu
TorchTitan (v1) [PURE],llama3-8b,,,,8192,H100,8,8,1,1,1,,bf16,selective,
Megatron,gpt 22b,48,6144,64,2048,A100-80GB,8,1,8,1,4,4,fp16,full,41.5%
"""


@dataclass(frozen=True)
class Parser:
    """One parser.

    Args:
        file: In the folder of valid files.
        read: Reads such a file, whatever it holds: a value, or a MeshwrightError.
        kind: How the file is built, for mutations: json, text, pt, safetensors, npy.
        slow_s: Processor time from which on an input is a finding.
    """

    file: str
    read: Callable[[Path], object]
    kind: str = "json"
    slow_s: float = 2.0


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")  # as arguments of a command arrive


def _vouched(directory: Path) -> None:
    """Makes the manifest of a checkpoint vouch for whatever its files are."""
    (directory / "manifest.json").unlink()
    names = [each.relative_to(directory).as_posix() for each in directory.rglob("*") if each.is_file()]
    write_manifest(directory, {name: describe(directory / name) for name in names})


def _checkpoint(path: Path) -> None:
    """A checkpoint whose manifest vouches for a record that is not one."""
    _vouched(path.parent)
    CheckpointStore(path.parent.parent).load(build("plain"), path.parent)


def _listed(path: Path) -> None:
    if path.name == "state.json":
        _vouched(path.parent)
    with contextlib.redirect_stdout(io.StringIO()):
        list_checkpoints(path.parent, as_json=False)
        verify_checkpoints(path.parent, as_json=False)


def _metrics(path: Path) -> None:
    file = MetricsFile(path, 10)
    file.close()
    if file.records:
        loss_text(file.records), speed_text(file.records)


def _planned(model: str, cluster: Any) -> None:
    FamilyWorkload(parse_family(model), cluster, 16).plan(Strategy(["fsdp"]))


def _planned_strategy(path: Path) -> None:
    strategy = Strategy(path)
    str(strategy)
    FamilyWorkload(parse_family("gpt2"), find_cluster("h100x8"), 16).plan(strategy)


def _model(path: Path) -> None:
    if not is_reference(_text(path)):  # those name code, which is not for fuzzing
        _planned(_text(path), find_cluster("h100x8"))


def _table(path: Path) -> None:
    for row in read_rows(path):
        with contextlib.suppress(NotCovered):
            case_of(row)


def _plans(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        compare(CompareOptions((path, path.with_name("plans.json"))))
        compare(CompareOptions((path.with_name("plans.json"), path), as_json=True))


def _scheduler(path: Path) -> None:
    scheduler = _cosine()
    kind, state = read_scheduler(path)
    check_fit(scheduler, kind, state, path)
    scheduler.load_state_dict(state)
    scheduler.step()


def _cosine() -> Cosine:
    return Cosine(torch.optim.SGD([torch.zeros(1)], lr=0.1), start_lr=0.1, warmup_iter=2, end_iter=10)


def _tokens(path: Path) -> None:
    open_tokens(path)[:10].sum()


def _tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(str(path), path.parent)
    tokenizer.decode(tokenizer.encode(b"a b c \xff\n"))


def _earlier(path: Path) -> None:
    changes(earlier_config({"config": path.read_text(errors="replace")}, path), EARLIER)


def _report(path: Path) -> None:
    report = Report.from_json(path.read_bytes())
    str(verdict({0: report, 1: Report(3, 5, "", "train.py:3")}, []))


def _header(path: Path) -> None:
    message = bytearray(path.read_bytes().ljust(256)[:256])
    header = Header.decode(torch.frombuffer(message, dtype=torch.uint8))
    torch.empty(0, dtype=header.torch_dtype)


PARSERS = {
    "strategy": Parser("strategy.json", Strategy),
    "strategy text": Parser("strategy.txt", lambda path: Strategy(_text(path)), "text"),
    "setting": Parser(
        "setting.txt", lambda path: read_config(path.with_name("train.toml"), _text(path).split("\x1f")), "text"
    ),
    "planned strategy": Parser("strategy.json", _planned_strategy),
    "training file": Parser("train.toml", lambda path: json.dumps(read_config(path).model_dump(mode="json")), "text"),
    "cluster": Parser("cluster.json", lambda path: _planned("gpt2", read_cluster(path))),
    "cluster name": Parser("cluster.txt", lambda path: _planned("gpt2", find_cluster(_text(path))), "text"),
    "model name": Parser("model.txt", _model, "text"),
    "calibration": Parser("calibration.json", lambda path: read_calibration(path.read_text(errors="replace"))),
    "published runs": Parser("published.csv", _table, "text", slow_s=10.0),  # eight plans of 10,000 layers take 5 s
    "plans": Parser("other/plans.json", _plans),
    "manifest": Parser("step-00000001/manifest.json", lambda path: read_manifest(path.parent)),
    "damage": Parser("step-00000001/manifest.json", lambda path: damage_of(path.parent)),
    "record": Parser("step-00000001/state.json", lambda path: read_record(path.parent)),
    "checkpoint": Parser("step-00000001/state.json", _checkpoint),
    "shards": Parser("step-00000001/tensors/shards.json", lambda path: FolderIndex.read(path.parent)),
    "checkpoint's shards": Parser("step-00000001/tensors/shards.json", lambda path: _checkpoint(path.parent)),
    "safetensors": Parser("weights.safetensors", read_file, "safetensors"),
    "pt": Parser("weights.pt", read_file, "pt"),
    "index": Parser("folder/model.safetensors.index.json", lambda path: read_folder(path.parent)),
    "optimizer": Parser("optimizer.pt", read_optimizer, "pt"),
    "optimizer folder": Parser("optim/optimizer.safetensors.index.json", lambda path: read_optimizer(path.parent)),
    "scheduler": Parser("scheduler.json", _scheduler),
    "tokens": Parser("tokens.npy", _tokens, "npy"),
    "tokenizer": Parser("tokenizer.json", _tokenizer),
    "metrics": Parser("metrics.jsonl", _metrics, "text"),
    "list": Parser("step-00000001/state.json", _listed),
    "list of sizes": Parser("step-00000001/manifest.json", _listed),
    "adapters": Parser("adapters.json", read_adapters),
    "transformers": Parser("hf/config.json", lambda path: transformers_model(path, 8), slow_s=10.0),  # 2 ms a layer
    "earlier config": Parser("earlier.json", _earlier),
    "header": Parser("header.json", _header),
    "report": Parser("report.json", _report),
}


def write_valid(folder: Path) -> None:
    """One valid file for every parser, by our own writers where there is one."""
    state = build("plain")
    train(state, 1)
    CheckpointStore(folder).save(state)
    for name in ("folder", "other", "hf", "optim"):
        (folder / name).mkdir()
    torch.save(WEIGHTS, folder / "weights.pt")
    torch.save(OPTIMIZER, folder / "optimizer.pt")
    (folder / "weights.safetensors").write_bytes(safetensors_bytes(WEIGHTS))
    (folder / "folder" / "part.safetensors").write_bytes(safetensors_bytes(WEIGHTS))
    (folder / "optim" / "part.safetensors").write_bytes(safetensors_bytes(WEIGHTS))
    np.save(folder / "tokens.npy", np.arange(40, dtype=np.uint16))
    for name, text in _texts().items():
        (folder / name).write_text(text)


def plans_document() -> dict[str, Any]:
    """What ``meshwright plan --json`` prints."""
    asked = PlanRequest(FamilyModel("gpt2", parse_family("gpt2")), find_cluster("a100x8"), 8, strategy=["fsdp"])
    return json.loads(json.dumps(asked.document(asked.found())))


def _texts() -> dict[str, str]:
    index = {"metadata": {"total_size": 56}, "weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
    plans = json.dumps(plans_document() | {"timeline": None})
    schedule = {"format": "meshwright.lr_scheduler", "kind": "Cosine", "state": _cosine().state_dict()}
    record = {"kind": "AdamW", "groups": [{"parameters": ["w"], "values": {"lr": 0.1}}],
              "tensor_keys": {"w": ["exp_avg"]}, "values": {"w": {"step": 1}}}  # fmt: skip
    optimizer = {"record": record, "weights": {"w": [[2], "float32"]}, "scaler": None}
    folder = {"metadata": {"optimizer": optimizer}, "weight_map": dict.fromkeys(WEIGHTS, "part.safetensors")}
    return {
        "optim/optimizer.safetensors.index.json": json.dumps(folder),
        "setting.txt": "optimizer.lr=1e-3\x1fmodel.args.dim=8\x1fdata.source=['a', 'b']",
        "scheduler.json": json.dumps(schedule),
        "folder/model.safetensors.index.json": json.dumps(index),
        "strategy.json": Strategy(["fsdp", ("checkpoint", {})]).to_json(),
        "strategy.txt": "zero2 + amp_native(dtype='bf16') + parallel_mode([('tensor', 2), ('data', 4)])",
        "train.toml": CONFIG,
        "cluster.json": json.dumps(CLUSTER),
        "cluster.txt": "a100-40x8",
        "model.txt": "gpt:layers=24,hidden=1024,heads=16,vocab=50304",
        "calibration.json": write_calibration(fitted()),
        "published.csv": TABLE,
        "plans.json": plans,
        "other/plans.json": plans,
        "tokenizer.json": json.dumps(TOKENIZER),
        "metrics.jsonl": '{"step": 1, "loss": 2.5, "step_time_s": 0.5}\n{"step": 2, "loss": null, "mfu": 0.4}\n',
        "adapters.json": json.dumps({"config": {"r": 8}, "names": {"a": "b"}}),
        "earlier.json": json.dumps(EARLIER),
        "hf/config.json": json.dumps(GPT2),
        "header.json": bytes(Header.of("broadcast(src=0)", torch.ones(2, 3)).encode().tolist()).decode(),
        "report.json": Report(4, 5, "all_reduce", "train.py:12", 0.5, {"0/0/2": (4, 3)}, "nccl:all_reduce 4").to_json(),
    }


def regressions(name: str) -> list[Path]:
    """Inputs that a parser once failed on."""
    return sorted((Path(__file__).parent / "regressions" / name.replace(" ", "_")).glob("*"))


class Trial:
    """Reads changed copies of one parser's file, in a folder of valid ones."""

    def __init__(self, name: str, folder: Path) -> None:
        self.parser = PARSERS[name]
        self.path = folder / self.parser.file
        self.valid = self.path.read_bytes()
        # What reading it may change, too.
        beside = self.path.parent.glob("*.json") if self.path.parent != folder else ()
        self._beside = {other: other.read_bytes() for other in beside}

    def __call__(self, content: bytes) -> None:
        """Raises what reading raises, unless that is a MeshwrightError."""
        for other, whole in self._beside.items():
            other.write_bytes(whole)
        self.path.write_bytes(content)
        with warnings.catch_warnings(), contextlib.suppress(MeshwrightError):
            warnings.simplefilter("ignore")
            self.parser.read(self.path)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Puts the valid files back at the end."""
        try:
            yield
        finally:
            for other, whole in self._beside.items():
                other.write_bytes(whole)
            self.path.write_bytes(self.valid)

    def valid_is_read(self) -> None:
        """Raises when the file that nobody has changed is refused."""
        self.parser.read(self.path)

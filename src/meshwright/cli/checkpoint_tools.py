"""Run ``meshwright checkpoint``: list the checkpoints of a directory, verify them, and export their weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Column, Table

from meshwright.cli.adapters import merged, read_adapters
from meshwright.cli.run_files import ADAPTERS, CHECKPOINTS, CONFIG, MODEL_CONFIG
from meshwright.errors import CheckpointError, readable_bytes
from meshwright.planner.config_models import config_path
from meshwright.runtime import init_distributed, number_from, rank, shutdown_distributed
from meshwright.runtime.terminal import PlainConsole
from meshwright.store.export import export_adapters, export_weights, is_weights_file
from meshwright.store.manifest import (
    MANIFEST,
    RECORD,
    Record,
    complete_checkpoints,
    damage_of,
    newest_valid,
    nothing_valid,
    read_manifest,
    read_record,
)

_FORMATS = ("safetensors", "dcp")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checkpoints_of(directory: Path) -> list[Path]:
    """Return the checkpoints that a path stands for, oldest first."""
    if (directory / MANIFEST).exists() or (directory / RECORD).exists():
        return [directory]
    folder = directory / CHECKPOINTS if (directory / CHECKPOINTS).is_dir() else directory
    found = [path for _, path in complete_checkpoints(folder)]
    if not found:
        raise nothing_valid(folder, [])
    return found


def list_checkpoints(directory: Path, as_json: bool) -> int:
    """Print the complete checkpoints of a run; return the exit status."""
    rows = [_row(path) for path in checkpoints_of(directory)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return 0
    table = Table(Column("checkpoint", no_wrap=True), "step", "samples", "ranks", "size", "strategy")
    for row in rows:
        size = readable_bytes(row["bytes"]) if isinstance(row["bytes"], int) else ""
        counts = [str(row[key]) for key in ("step", "samples_seen", "world_size")]
        table.add_row(Path(str(row["path"])).name, *counts, size, str(row["methods"]))
    PlainConsole(soft_wrap=True).print(table)
    return 0


def _row(path: Path) -> dict[str, object]:
    try:
        size = sum(entry.size for entry in read_manifest(path).values())
        record = read_record(path)
    except CheckpointError as error:
        return {"path": str(path), **dict.fromkeys(("step", "samples_seen", "world_size", "bytes"), "?"),
                "methods": f"damaged: {error}"}  # fmt: skip
    return {
        "path": str(path), "step": record.step, "samples_seen": record.samples_seen, "world_size": record.world_size,
        "bytes": size if size < 2**63 else "?", "methods": _methods(record),
    }  # fmt: skip


def _methods(record: Record) -> str:
    """Return the names of a recorded strategy's methods; empty where it cannot be read."""
    try:
        found = json.loads(record.strategy)["methods"]
        return ", ".join(map(_method_name, found))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return ""


def _method_name(method: Any) -> str:
    if isinstance(method, str):
        return method
    return str(method["name"] if isinstance(method, dict) else method[0])


def verify_checkpoints(directory: Path, as_json: bool) -> int:
    """Print what is damaged in every checkpoint; return the exit status."""
    damage = {str(path): [str(error) for error in damage_of(path)] for path in checkpoints_of(directory)}
    if as_json:
        typer.echo(json.dumps(damage, indent=1))
    else:
        for path, problems in damage.items():
            typer.echo(f"{path}: {' '.join(problems) if problems else 'whole'}")
    return 1 if any(damage.values()) else 0


def export_checkpoint(
    directory: Path, out: Path, dtype: str | None, file_format: str = _FORMATS[0], *, merges: bool = False
) -> int:
    """Write the weights of the newest whole checkpoint, with all ranks of the launch; return the exit status."""
    for option, given, known in (("--dtype", dtype, [*_DTYPES]), ("--format", file_format, [*_FORMATS])):
        if given is not None and given not in known:
            raise CheckpointError(
                f"{option} is not known", expected=", ".join(known), got=given, fix="use one of these"
            )
    if file_format == "dcp" and is_weights_file(out):
        raise CheckpointError(
            "--format dcp writes a folder",
            expected="the name of one",
            got=str(out),
            fix="leave the suffix or --format out",
        )
    if merges:
        return _export_merged(directory, out, dtype)
    if number_from("WORLD_SIZE", 1) > 1:
        init_distributed(backend="gloo")
    path = _newest_whole(checkpoints_of(directory))
    run = _run_of(path)
    if file_format == "dcp":
        weights, kind = export_weights(path, out, dtype=_DTYPES.get(dtype or ""), as_dcp=True), "; for torch's DCP"
    elif (run / ADAPTERS).is_file() and not is_weights_file(out):
        names, adapter_config = read_adapters(run / ADAPTERS)
        weights = export_adapters(path, out, names=names, config=adapter_config, dtype=_DTYPES.get(dtype or ""))
        kind = "; adapters for peft"
    else:
        config_file = run / MODEL_CONFIG
        config = config_file.read_text(encoding="utf-8") if config_file.is_file() else None
        pretrained = _pretrained_folder(run / CONFIG)
        weights = export_weights(
            path, out, dtype=_DTYPES.get(dtype or ""), config=config, pretrained=pretrained if config else None
        )
        kind = "" if config is None or is_weights_file(out) else "; a transformers folder"
    if rank() == 0:
        _say_exported(out, weights, path, kind)
    shutdown_distributed()
    return 0


def _export_merged(directory: Path, out: Path, dtype: str | None) -> int:
    path = _newest_whole(checkpoints_of(directory))
    run = _run_of(path)
    if not (run / ADAPTERS).is_file() or number_from("WORLD_SIZE", 1) > 1:
        raise CheckpointError(
            "--merged merges adapters into their base, on one process",
            expected="a run that trained adapters, without a launcher",
            got=f"{run} without {ADAPTERS}" if not (run / ADAPTERS).is_file() else "several ranks",
            fix="leave --merged out, or name a run with [adapter]",
        )
    names, config = read_adapters(run / ADAPTERS)
    with merged(out, _pretrained_folder(run / CONFIG), _DTYPES.get(dtype or "")) as folder:
        weights = export_adapters(path, folder, names=names, config=config)
    typer.echo(f"{out}: {len(weights)} tensors of adapters of {path}, merged into their base; a transformers folder")
    return 0


def _run_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's run, also where a relative path names less than that."""
    return Path(os.path.abspath(checkpoint)).parent.parent


def _pretrained_folder(run_config: Path) -> Path | None:
    """Return the folder that a run's model came from; None if it is gone, or there was none."""
    try:
        found = json.loads(run_config.read_text(encoding="utf-8"))
        folder, source, weights = Path(found["file"]).parent, found["model"]["source"], found["model"].get("weights")
        candidates = [folder / weights if isinstance(weights, str) else None, config_path(source, folder)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    folders = [path if path.is_dir() else path.parent for path in candidates if path is not None and path.exists()]
    return folders[0] if folders else None


def _say_exported(out: Path, weights: Mapping[str, torch.Tensor], path: Path, kind: str) -> None:
    size = readable_bytes(sum(tensor.numel() * tensor.element_size() for tensor in weights.values()))
    typer.echo(f"{out}: {len(weights)} tensors, {size}, of {path}{kind}")


def _newest_whole(paths: list[Path]) -> Path:
    """Return the newest checkpoint that is whole; report newer ones that are not; collective."""
    path, damaged = newest_valid(paths[::-1])
    if path is None:
        raise damaged[0]
    for error in damaged if rank() == 0 else ():
        typer.echo(f"meshwright: passed over: {error}", err=True)
    return path

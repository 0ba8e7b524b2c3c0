"""``meshwright checkpoint``: what lies in a directory of checkpoints, whether it is whole, and its weights alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Column, Table

from meshwright.cli.failures import exit_status
from meshwright.cli.run_dir import ADAPTERS, CHECKPOINTS, MODEL_CONFIG
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.planner.sizes import readable_bytes
from meshwright.store.choice import complete_checkpoints, damage_of, nothing_valid, verify
from meshwright.store.export import export_adapters, export_weights
from meshwright.store.manifest import MANIFEST, read_manifest
from meshwright.store.record import RECORD, Record, read_record
from meshwright.utils.terminal import PlainConsole

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

checkpoint_app = typer.Typer(help="Checkpoints: list, verify, export.", no_args_is_help=True)
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A run, its checkpoints, or one checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", metavar="", help="Print it as JSON.")]


@checkpoint_app.command("list")
def list_command(directory: _Directory, as_json: _Json = False) -> None:
    """Show the complete checkpoints of a run; the files themselves are not read."""
    raise typer.Exit(exit_status(lambda: _list(directory, as_json)))


@checkpoint_app.command("verify")
def verify_command(directory: _Directory, as_json: _Json = False) -> None:
    """Read every file of every checkpoint and name what is damaged; exit status 1 when something is."""
    raise typer.Exit(exit_status(lambda: _verify(directory, as_json)))


@checkpoint_app.command("export")
def export_command(
    directory: _Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or a file that ends in .safetensors.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="|".join(_DTYPES), help="Type of the weights.", show_default="as saved")
    ] = None,
) -> None:
    """Write the weights of a checkpoint (of a run: the newest that is whole) as safetensors.

    A folder gets a config.json too where the run has trained a transformers model: from_pretrained loads it.
    Of a run that has trained adapters of peft it gets these alone: PeftModel.from_pretrained loads them.
    """
    raise typer.Exit(exit_status(lambda: _export(directory, out, dtype)))


def _found(directory: Path) -> list[Path]:
    """The checkpoints that a path means, oldest first."""
    if (directory / MANIFEST).exists() or (directory / RECORD).exists():
        return [directory]
    folder = directory / CHECKPOINTS if (directory / CHECKPOINTS).is_dir() else directory
    found = [path for _, path in complete_checkpoints(folder)]
    if not found:
        raise nothing_valid(folder, [])
    return found


def _list(directory: Path, as_json: bool) -> int:
    rows = [_row(path) for path in _found(directory)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return 0
    table = Table(Column("checkpoint", no_wrap=True), "step", "samples", "ranks", "size", "strategy")
    for row in rows:
        size = readable_bytes(row["bytes"]) if isinstance(row["bytes"], int) else ""
        told = [str(row[key]) for key in ("step", "samples_seen", "world_size")]
        table.add_row(Path(str(row["path"])).name, *told, size, str(row["methods"]))
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
        "bytes": size, "methods": _methods(record),
    }  # fmt: skip


def _methods(record: Record) -> str:
    """Names in a strategy's JSON, for people; whatever else is recorded there is left out."""
    try:
        found = json.loads(record.strategy)["methods"]
        return ", ".join(each if isinstance(each, str) else str(each[0]) for each in found)
    except (ValueError, KeyError, TypeError, IndexError):
        return ""


def _verify(directory: Path, as_json: bool) -> int:
    damage = {str(path): [str(error) for error in damage_of(path)] for path in _found(directory)}
    if as_json:
        typer.echo(json.dumps(damage, indent=1))
    else:
        for path, problems in damage.items():
            typer.echo(f"{path}: {' '.join(problems) if problems else 'whole'}")
    return 1 if any(damage.values()) else 0


def _export(directory: Path, out: Path, dtype: str | None) -> int:
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError("--dtype is not known", expected=", ".join(_DTYPES), got=dtype, fix="use one of these")
    path = _newest_whole(_found(directory))
    adapters_file = path.parent.parent / ADAPTERS
    if adapters_file.is_file() and not out.suffix:
        adapters = json.loads(adapters_file.read_text(encoding="utf-8"))
        weights = export_adapters(
            path,
            out,
            names=adapters["names"],
            config=json.dumps(adapters["config"], indent=2) + "\n",
            dtype=_DTYPES.get(dtype or ""),
        )
        return _say_exported(out, weights, path, "; adapters for peft")
    config_file = path.parent.parent / MODEL_CONFIG
    config = config_file.read_text(encoding="utf-8") if config_file.is_file() else None
    weights = export_weights(path, out, dtype=_DTYPES.get(dtype or ""), config=config)
    return _say_exported(out, weights, path, "" if config is None or out.suffix else "; a transformers folder")


def _say_exported(out: Path, weights: Mapping[str, torch.Tensor], path: Path, kind: str) -> int:
    size = readable_bytes(sum(tensor.numel() * tensor.element_size() for tensor in weights.values()))
    typer.echo(f"{out}: {len(weights)} tensors, {size}, of {path}{kind}")
    return 0


def _newest_whole(paths: list[Path]) -> Path:
    """The newest checkpoint that is whole; newer ones that are not are told."""
    damaged: list[MeshwrightError] = []
    for path in reversed(paths):
        try:
            verify(path)
        except CheckpointError as error:
            damaged.append(error)
            typer.echo(f"meshwright: passed over: {error}", err=True)
        else:
            return path
    raise damaged[0]

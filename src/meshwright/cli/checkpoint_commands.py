"""The options of ``meshwright checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

checkpoint_app = typer.Typer(help="Checkpoints: list, verify, export.", no_args_is_help=True)
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A run, its checkpoints, or one checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", metavar="", help="Print it as JSON.")]


@checkpoint_app.command("list")
def list_command(directory: _Directory, as_json: _Json = False) -> None:
    """Show the complete checkpoints of a run; the files themselves are not read."""
    from meshwright.cli.checkpoint import list_checkpoints
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: list_checkpoints(directory, as_json)))


@checkpoint_app.command("verify")
def verify_command(directory: _Directory, as_json: _Json = False) -> None:
    """Read every file of every checkpoint and name what is damaged; exit status 1 when something is."""
    from meshwright.cli.checkpoint import verify_checkpoints
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: verify_checkpoints(directory, as_json)))


@checkpoint_app.command("export")
def export_command(
    directory: _Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or a file that ends in .safetensors.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="Type of the weights.", show_default="as saved")
    ] = None,
) -> None:
    """Write the weights of a checkpoint (of a run: the newest that is whole) as safetensors.

    A folder gets a config.json too where the run has trained a transformers model: from_pretrained loads it.
    Of a run that has trained adapters of peft it gets these alone: PeftModel.from_pretrained loads them.
    """
    from meshwright.cli.checkpoint import export_checkpoint
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: export_checkpoint(directory, out, dtype)))

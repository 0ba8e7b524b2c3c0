"""The options of ``meshwright plan`` and ``meshwright compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.errors import ConfigError

_MODEL = "llama-3-8b, gpt:KEY=N,… (layers, hidden, heads, vocab), hf:PATH of a config.json, or MODULE:FUNCTION."
_CLUSTER = "A preset such as h100x64 or a100-40x8, or a cluster file (.toml, .json)."
_BATCH = "Samples of a step, over all devices."
_SEQ = "Tokens of a sample."
_SEQ_DEFAULT = "what the model is known for"
_SAMPLE = "Function that returns a batch, for a MODULE:FUNCTION that takes no token ids."
_LOSS = "Function (input, output) -> loss, for a MODULE:FUNCTION."
_LIMIT = "What tensors may take of a device, such as '40 GiB'."
_TRACEBACK = typer.Option("--traceback", metavar="", help="Show where an error was raised.")


def plan_command(
    model: Annotated[str, typer.Option(metavar="MODEL", help=_MODEL)],
    cluster: Annotated[str, typer.Option(metavar="CLUSTER", help=_CLUSTER)],
    global_batch: Annotated[int, typer.Option(metavar="N", min=1, help=_BATCH)],
    seq: Annotated[int | None, typer.Option(metavar="N", min=1, help=_SEQ, show_default=_SEQ_DEFAULT)] = None,
    strategy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Predict this strategy instead of searching.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Parts into which --strategy cuts a batch.")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="What plans are ranked by: tokens_per_s, price or memory.")
    ] = "tokens_per_s",
    include: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Every plan uses it; repeatable. With keys: 'fsdp(…)'.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="METHOD", help="No plan uses it; repeatable.")] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Plans to show.")] = 10,
    sample: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_SAMPLE)] = None,
    loss: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_LOSS)] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="SIZE", help=_LIMIT)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print everything as JSON instead.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the first plan's step for Perfetto.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the first plan's strategy.")] = None,
    traceback: Annotated[bool, _TRACEBACK] = False,
) -> None:
    """Predict strategies for a model on a cluster that need not be there: memory, time, the best and why."""
    from meshwright.cli.failures import exit_status
    from meshwright.cli.plan import PlanOptions, plan
    from meshwright.cli.plan_options import Subjects

    def command() -> int:
        subjects = Subjects(model, cluster, global_batch, seq, sample, loss, memory_limit)
        included, excluded = tuple(include or ()), tuple(exclude or ())
        options = PlanOptions(
            subjects, strategy, micro_batches, objective, excluded, included, top, as_json, html, trace, save
        )
        return plan(options)

    raise typer.Exit(exit_status(command, show_traceback=traceback))


def compare_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="A B …", help="Strategies, or files of meshwright plan --json.")
    ],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=_MODEL)] = None,
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help=_CLUSTER)] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", min=1, help=_BATCH)] = None,
    seq: Annotated[int | None, typer.Option(metavar="N", min=1, help=_SEQ, show_default=_SEQ_DEFAULT)] = None,
    sample: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_SAMPLE)] = None,
    loss: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_LOSS)] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="SIZE", help=_LIMIT)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print everything as JSON instead.")] = False,
    traceback: Annotated[bool, _TRACEBACK] = False,
) -> None:
    """Compare strategies for one model on one cluster, or plans that were written before."""
    from meshwright.cli.compare import CompareOptions, compare
    from meshwright.cli.failures import exit_status
    from meshwright.cli.plan_options import Subjects

    def command() -> int:
        given = {"--model": model, "--cluster": cluster, "--global-batch": global_batch}
        absent = [option for option, value in given.items() if value is None]
        others = [value for value in (seq, sample, loss, memory_limit) if value is not None]
        if absent and (len(absent) < len(given) or others):
            raise ConfigError(
                "What the strategies are for is said in part",
                expected=f"{', '.join(given)} together, or none of them for files of meshwright plan --json",
                got=f"no {' and no '.join(absent)}",
                fix=f"add {', '.join(absent)}",
            )
        subjects = None
        if model is not None and cluster is not None and global_batch is not None:
            subjects = Subjects(model, cluster, global_batch, seq, sample, loss, memory_limit)
        return compare(CompareOptions(tuple(files), subjects, as_json))

    raise typer.Exit(exit_status(command, show_traceback=traceback))

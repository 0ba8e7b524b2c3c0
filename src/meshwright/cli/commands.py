"""Define the command line: options of every command; commands import what they need when they run."""

from __future__ import annotations

import functools
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

import meshwright
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.cli.bench_comm import BenchOptions
    from meshwright.cli.calibrate_cluster import CalibrateOptions
    from meshwright.cli.eval_and_generate import EvalOptions, GenerateOptions
    from meshwright.cli.train_options import Options

_Options = TypeVar("_Options", "BenchOptions", "CalibrateOptions")
_Trains = TypeVar("_Trains", "EvalOptions", "GenerateOptions")

checkpoint_app = typer.Typer(help="Checkpoints: list, verify, export.", no_args_is_help=True)
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A run, its checkpoints, or one checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", metavar="", help="Print it as JSON.")]
_Traceback = Annotated[bool, typer.Option("--traceback", metavar="", help="Show where an error was raised.")]


@checkpoint_app.command("list")
def list_command(directory: _Directory, as_json: _Json = False) -> None:
    """Show the complete checkpoints of a run; the files themselves are not read."""
    from meshwright.cli.checkpoint_tools import list_checkpoints
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: list_checkpoints(directory, as_json)))


@checkpoint_app.command("verify")
def verify_command(directory: _Directory, as_json: _Json = False) -> None:
    """Read every file of every checkpoint and name what is damaged; exit status 1 when something is."""
    from meshwright.cli.checkpoint_tools import verify_checkpoints
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: verify_checkpoints(directory, as_json)))


@checkpoint_app.command("export")
def export_command(
    directory: _Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or a file that ends in .safetensors.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="Type of the weights.", show_default="as saved")
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", metavar="safetensors|dcp", help="dcp: a folder of torch.distributed.checkpoint.")
    ] = "safetensors",
    is_merged: Annotated[
        bool, typer.Option("--merged", metavar="", help="Merge adapters into their base, on one process.")
    ] = False,
) -> None:
    """Write the weights of a checkpoint (of a run: the newest that is whole) as safetensors.

    With --format dcp, torch.distributed.checkpoint and torchtitan load the folder, and no config lies beside it. If the
    run trained a transformers model, a folder gets a config.json, too: from_pretrained loads it. If the run
    trained adapters of peft, the folder gets these alone: PeftModel.from_pretrained loads them; with --merged it gets
    the base with the adapters merged into it.
    """
    from meshwright.cli.checkpoint_tools import export_checkpoint
    from meshwright.cli.failures import exit_status

    raise typer.Exit(exit_status(lambda: export_checkpoint(directory, out, dtype, file_format, merges=is_merged)))


# --- ``meshwright plan`` and ``meshwright compare``

_MODEL = "llama-3-8b, gpt:KEY=N,… (layers, hidden, heads, vocab), hf:PATH of a config.json, or MODULE:FUNCTION."
_CLUSTER = "A preset such as h100x64 or a100-40x8, or a cluster file (.toml, .json)."
# An option is named after the key of a training file that it sets; words of earlier versions stay.
_SEQ, _BATCH, _MICRO = (
    ("--seq-len", "--seq"),
    ("--batch-size", "--global-batch"),
    ("--num-micro-batches", "--micro-batches"),
)
_BATCH_HELP = "Samples per step, over all devices."
_Seq = Annotated[
    int | None,
    typer.Option(*_SEQ, metavar="N", min=1, help="Tokens per sample.", show_default="the model's own length"),
]
_STRATEGY = "Text such as 'fsdp', or a JSON file."
_SAMPLE = "Function that returns a batch, for a MODULE:FUNCTION that takes no token ids."
_Sample = Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_SAMPLE)]
_LOSS = "Function (input, output) -> loss, for a MODULE:FUNCTION."
_Loss = Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_LOSS)]
_MemoryLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="Usable device memory, such as '40 GiB'.")]
_AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print everything as JSON instead.")]


def plan_command(
    model: Annotated[str, typer.Option(metavar="MODEL", help=_MODEL)],
    cluster: Annotated[str, typer.Option(metavar="CLUSTER", help=_CLUSTER)],
    global_batch: Annotated[int, typer.Option(*_BATCH, metavar="N", min=1, help=_BATCH_HELP)],
    seq: _Seq = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Say what a run of N tokens takes: 15T.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Say what a run of N steps takes.")] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="TEXT|FILE", help=f"Predict it instead of searching. {_STRATEGY}")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(*_MICRO, metavar="N", min=1, help="Parts into which --strategy cuts a batch.")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="What plans are ranked by: tokens_per_s, price or memory.")
    ] = "tokens_per_s",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="Use this method in every plan; repeatable. With keys: 'fsdp(…)'."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Use this method in no plan; repeatable.")
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Plans to show: the best, and the best of each other family.")
    ] = 10,
    sample: _Sample = None,
    loss: _Loss = None,
    lora: Annotated[
        str | None, typer.Option(metavar="r=N,…", help="LoRA adapters around it, in keys of the table adapter: r=16.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="Of parameters: fp32, bf16 or fp16.")] = None,
    memory_limit: _MemoryLimit = None,
    headroom: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of usable memory that plans leave free.", show_default="0.06"),
    ] = None,
    limit_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Processor time of the search; then the best so far counts. 0: no limit.",
            show_default="20",
        ),
    ] = None,
    as_json: _AsJson = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the first plan's step for Perfetto.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the first plan's strategy.")] = None,
    traceback: _Traceback = False,
) -> None:
    """Predict memory and time of strategies for a model on any cluster, rank them, and explain the best."""
    from meshwright.cli.failures import exit_status
    from meshwright.cli.plan_and_compare import PlanOptions, Subjects, plan

    def command() -> int:
        subjects = Subjects(model, cluster, global_batch, seq, sample, loss, memory_limit, lora, dtype)
        options = PlanOptions(
            subjects, strategy, micro_batches, objective, tuple(exclude or ()), tuple(include or ()), top, as_json,
            html, trace, save, headroom, limit_s, tokens, steps,
        )  # fmt: skip
        return plan(options)

    raise typer.Exit(exit_status(command, show_traceback=traceback))


def compare_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="A B …", help="Strategies, or files of meshwright plan --json.")
    ],
    model: Annotated[str | None, typer.Option(metavar="MODEL", help=_MODEL)] = None,
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help=_CLUSTER)] = None,
    global_batch: Annotated[int | None, typer.Option(*_BATCH, metavar="N", min=1, help=_BATCH_HELP)] = None,
    seq: _Seq = None,
    sample: _Sample = None,
    loss: _Loss = None,
    memory_limit: _MemoryLimit = None,
    as_json: _AsJson = False,
    traceback: _Traceback = False,
) -> None:
    """Compare strategies for one model on one cluster, or plans that were written before."""
    from meshwright.cli.failures import exit_status
    from meshwright.cli.plan_and_compare import CompareOptions, Subjects, compare

    def command() -> int:
        given = {"--model": model, "--cluster": cluster, "--batch-size": global_batch}
        absent = [option for option, value in given.items() if value is None]
        others = [value for value in (seq, sample, loss, memory_limit) if value is not None]
        if absent and (len(absent) < len(given) or others):
            raise ConfigError(
                "The options name what the strategies are for only in part",
                expected=f"{', '.join(given)} together, or none of them for files of meshwright plan --json",
                got=f"no {' and no '.join(absent)}",
                fix=f"add {', '.join(absent)}",
            )
        subjects = None
        if model is not None and cluster is not None and global_batch is not None:
            subjects = Subjects(model, cluster, global_batch, seq, sample, loss, memory_limit)
        return compare(CompareOptions(tuple(files), subjects, as_json))

    raise typer.Exit(exit_status(command, show_traceback=traceback))


# --- The program, and the commands that start ranks: ``meshwright train``, ``bench-comm`` and ``calibrate``

_INTERRUPTED = 130  # ``failures.INTERRUPTED``, whose module would slow down --help
_NPROC, _NPROC_HELP = ("--nproc", "--processes"), "Processes on this machine."
_Nproc = Annotated[int | None, typer.Option(*_NPROC, metavar="N", min=1, help=_NPROC_HELP)]
_Strategy = Annotated[str | None, typer.Option(metavar="TEXT|FILE", help=_STRATEGY, show_default="chosen")]
_OPS = "all_gather, reduce_scatter, send_recv, all_reduce, all_to_all"


class _Commands(TyperGroup):
    """Commands that report a Ctrl-C during their imports; once running, each reports it itself."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("meshwright: interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    name="meshwright",
    cls=_Commands,
    help="Plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(checkpoint_app, name="checkpoint")


def main() -> None:
    """Run the program ``meshwright``, which shows errors alone of what other libraries log (``run.log_level``)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    logging.disable(logging.WARNING)
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", category=UserWarning, module=_TALKATIVE)
    command()()


@functools.cache
def command() -> Any:
    """Return the program as click's command, which takes a third of a second to build."""
    return typer.main.get_command(app)


_TALKATIVE = r"(torch|torchao|transformers|peft|datasets|bitsandbytes|deepspeed|accelerate)\b"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(meshwright.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Train(TyperCommand):
    """``meshwright train``, where ``--resume auto`` is ``--set run.resume=auto``: click's flags take no value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        words: list[str] = []
        for word in args:
            if word == "--resume=auto" or (word == "auto" and words[-1:] == ["--resume"]):
                words[len(words) - (word == "auto") :] = ["--set", "run.resume=auto"]
            else:
                words.append(word)
        return super().parse_args(ctx, words)


@app.command("train", cls=_Train)
def train_command(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="Training file.")] = None,
    nproc: _Nproc = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Optimizer steps of the whole run (run.steps).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            metavar="[auto]",
            help="Resume from the newest checkpoint in --out; auto: start if there is none.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Where the run is written.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key of the file; repeatable.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(*_BATCH, metavar="N", min=1, help="Sequences per step, over all processes.")
    ] = None,
    seq: Annotated[int | None, typer.Option(*_SEQ, metavar="N", min=2, help="Tokens per sequence.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(*_MICRO, metavar="N", min=1, help="Parts into which each rank cuts a batch.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="TEXT|FILE", help=_STRATEGY, show_default="the file's")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Restarts of all ranks, from a checkpoint, when one fails."),
    ] = 0,
    min_nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Go on with fewer processes, down to N, when one fails again before a new step.",
            show_default="all",
        ),
    ] = None,
    traceback: _Traceback = False,
    help_config: Annotated[
        bool, typer.Option("--help-config", metavar="", help="Explain every key of FILE.toml and exit.")
    ] = False,
) -> None:
    """Train the model of a training file on all processes, under a given or a chosen strategy."""
    from meshwright.cli.failures import exit_status
    from meshwright.cli.train_config import config_help
    from meshwright.cli.train_options import Options

    if help_config:
        typer.echo(config_help())
        return

    def command() -> int:
        if file is None:
            raise ConfigError(
                "There is nothing to train",
                expected="meshwright train FILE.toml",
                got="no file",
                fix="name a training file; meshwright train --help-config lists its keys",
            )
        set_by = {"run.batch_size": batch_size, "data.seq_len": seq, "run.num_micro_batches": micro_batches}
        every = [*(changes or ()), *(f"{key}={value}" for key, value in set_by.items() if value is not None)]
        options = Options(file, nproc, steps, resume, out, tuple(every), traceback, max_restarts, min_nproc, strategy)
        return _train(options)

    _leave_with(exit_status(command, show_traceback=traceback))


def _train(options: Options) -> int:
    """Train here, or start the ranks that do."""
    from meshwright.cli.run_failures import FewerRanks, check_fewest, teller
    from meshwright.cli.train_options import number_of_processes, preloaded, prepare
    from meshwright.runtime.launch import inside_launcher, start_server, stay_on_this_machine

    if inside_launcher():
        _leave_interrupts_to_the_launcher()
        return _train_here(options)
    nproc = number_of_processes(options.read())
    check_fewest(options, nproc)
    if nproc == 1 and not options.max_restarts:
        stay_on_this_machine()
        return _train_here(options)
    start_server(nproc, preloaded(options))  # it imports meanwhile
    # Report what is wrong with the request once, here, before any rank has started.
    prepared = prepare(options, nproc)
    from meshwright.cli.run_files import default_run_dir

    run_dir = prepared.run_dir or default_run_dir(options.file)
    again = FewerRanks(options, prepared, nproc, run_dir) if options.min_nproc is not None else None
    told = teller(run_dir)
    return _start_ranks(options.arguments(run_dir), nproc, max_restarts=options.max_restarts, tell=told, again=again)


def _train_here(options: Options) -> int:
    from meshwright.cli.train_loop import train

    return train(options)


def _leave_interrupts_to_the_launcher() -> None:
    # The launcher ends all ranks. A rank that waits in a collective would never see a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start_ranks(arguments: list[str], nproc: int, **options: Any) -> int:
    from rich.console import Console

    from meshwright.cli.failures import INTERRUPTED
    from meshwright.cli.train_options import PRELOADED
    from meshwright.runtime.launch import launch

    status = launch(["-m", "meshwright", *arguments], nproc, preload=PRELOADED, **options)
    if status != 0:
        Console().show_cursor(True)  # a rank that was ended while drawing leaves it hidden
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status


@app.command("report")
def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run of meshwright train.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in RUN_DIR")
    ] = None,
    traceback: _Traceback = False,
) -> None:
    """Write a page about a run: loss, speed, failures, and goodput."""
    from meshwright.cli.failures import exit_status
    from meshwright.cli.run_report import report

    raise typer.Exit(exit_status(lambda: report(run_dir, out), show_traceback=traceback))


app.command("plan")(plan_command)
app.command("compare")(compare_command)

_RANKS_DEFAULT = "one per CUDA device, or 2 on the CPU"
_Ranks = Annotated[int | None, typer.Option(*_NPROC, metavar="N", min=1, help=_NPROC_HELP, show_default=_RANKS_DEFAULT)]
_Device = Annotated[str, typer.Option(metavar="auto|cpu", help="Where; auto takes CUDA if there is some.")]


@app.command("bench-comm")
def bench_comm_command(
    ops: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="OP", help=f"{_OPS}; repeatable.", show_default="all"),
    ] = None,
    min_bytes: Annotated[int, typer.Option(metavar="BYTES", help="Smallest message.")] = 2**10,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES", help="Largest message, doubling.", show_default="16 MiB on the CPU, 1 GiB on CUDA"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16", help="Element type.")] = "fp32",
    iterations: Annotated[int, typer.Option(metavar="N", min=1, help="Timings per size; the median counts.")] = 10,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Runs per size before them.")] = 3,
    nproc: _Ranks = None,
    device: _Device = "auto",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the figures as JSON too; - prints it alone.")
    ] = None,
    traceback: _Traceback = False,
) -> None:
    """Measure the bandwidth of collectives between ranks by message size (BMTrain's benchmarks)."""
    from meshwright.cli.bench_comm import BenchOptions, bench_comm
    from meshwright.cli.failures import exit_status

    wanted = tuple(ops or _OPS.split(", "))
    options = BenchOptions(wanted, min_bytes, max_bytes, dtype, iterations, warmup, device, json_file, nproc)
    raise typer.Exit(exit_status(lambda: _on_ranks(options, bench_comm), show_traceback=traceback))


@app.command("calibrate")
def calibrate_command(
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Where to write the cluster.")] = Path("cluster.json"),
    nproc: _Ranks = None,
    device: _Device = "auto",
    clock: Annotated[
        str, typer.Option(metavar="auto|wall|cpu", help="Which clock counts; auto: cpu where others keep it busy.")
    ] = "auto",
    traceback: _Traceback = False,
) -> None:
    """Measure this machine's kernels and links in about a minute, for predictions (use as --cluster FILE.json)."""
    from meshwright.cli.calibrate_cluster import CalibrateOptions, run_calibration
    from meshwright.cli.failures import exit_status

    options = CalibrateOptions(out, nproc, device, clock)
    raise typer.Exit(exit_status(lambda: _on_ranks(options, run_calibration), show_traceback=traceback))


# --- ``meshwright eval`` and ``meshwright generate``

_TRAINED = "A run of meshwright train, one of its checkpoints, or a folder with a model of transformers."
_Trained = Annotated[Path, typer.Argument(metavar="RUN_DIR|FOLDER", help=_TRAINED)]
_Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key of the training file; repeatable."),
]


@app.command("eval")
def eval_command(
    path: _Trained,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="As data.source; repeatable, each with a loss.", show_default="[eval]'s"),
    ] = None,
    seq: Annotated[int | None, typer.Option(*_SEQ, metavar="N", min=2, help="Tokens per sequence.")] = None,
    strategy: _Strategy = None,
    nproc: _Nproc = None,
    changes: _Changes = None,
    as_json: _AsJson = False,
    traceback: _Traceback = False,
) -> None:
    """Compute loss and perplexity of a trained model on every source, the same on any number of ranks."""
    from meshwright.cli.eval_and_generate import EvalOptions, Trained, evaluate
    from meshwright.cli.failures import exit_status

    trained = Trained(path, strategy, nproc, tuple(changes or ()), traceback)
    options = EvalOptions(trained, tuple(data or ()), seq, as_json)
    _leave_with(exit_status(lambda: _here_or_on_ranks(options, evaluate), show_traceback=traceback))


@app.command("generate")
def generate_command(
    path: _Trained,
    prompts: Annotated[list[str], typer.Option("--prompt", metavar="TEXT", help="What to continue; repeatable.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to write.")] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0, help="Of the draw; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", min=0, max=1, help="Share of the likeliest tokens drawn.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the draws.")] = 0,
    template: Annotated[
        bool, typer.Option("--template/--no-template", metavar="", help="Use the tokenizer's chat template, if any.")
    ] = True,
    ema: Annotated[
        bool | None,
        typer.Option(
            "--ema/--no-ema",
            metavar="",
            help="Take the moving average of the weights.",
            show_default="as the run validates",
        ),
    ] = None,
    strategy: _Strategy = None,
    nproc: _Nproc = None,
    changes: _Changes = None,
    as_json: _AsJson = False,
    traceback: _Traceback = False,
) -> None:
    """Write what a trained model says to a prompt, as its user: through the chat template, where there is one."""
    from meshwright.cli.eval_and_generate import GenerateOptions, Trained, generate
    from meshwright.cli.failures import exit_status

    trained = Trained(path, strategy, nproc, tuple(changes or ()), traceback)
    options = GenerateOptions(trained, tuple(prompts), max_new_tokens, temperature, top_p, seed, template, as_json, ema)
    _leave_with(exit_status(lambda: _here_or_on_ranks(options, generate), show_traceback=traceback))


def _here_or_on_ranks(options: _Trains, run: Callable[[_Trains], int]) -> int:
    """Run as one of a launcher's ranks, in this process if one is enough, or on ranks that are started."""
    from meshwright.runtime.launch import inside_launcher, stay_on_this_machine

    if inside_launcher():
        _leave_interrupts_to_the_launcher()
        return run(options)
    nproc = options.num_processes()
    if nproc == 1:
        stay_on_this_machine()
        return run(options)
    return _start_ranks(options.arguments(), nproc)


def _leave_with(status: int) -> NoReturn:
    from meshwright.cli.failures import leave
    from meshwright.runtime.launch import inside_launcher

    if inside_launcher():
        leave(status)
    raise typer.Exit(status)


def _on_ranks(options: _Options, run: Callable[[_Options], None]) -> int:
    """Measure as one of a launcher's ranks, or start the ranks that do."""
    from meshwright.runtime.launch import inside_launcher

    if inside_launcher():
        _leave_interrupts_to_the_launcher()
        run(options)
        return 0
    options.check()
    return _start_ranks(options.arguments(), options.num_processes())


@app.command("methods")
def methods_command(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print it as JSON, with every reason.")] = False,
) -> None:
    """List the methods that a strategy can name: what they do, what they need, what they conflict with."""
    from meshwright.cli.methods import print_methods

    print_methods(as_json=as_json)

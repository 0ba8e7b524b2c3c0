"""Read the training file and command line of ``meshwright train``; find and check everything that they name."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.cli.adapters import check_packages
from meshwright.cli.config_help import HELP, Table, explained
from meshwright.cli.ranks import num_ranks
from meshwright.cli.references import find_modules_beside
from meshwright.cli.run_files import check_not_running, check_run_dir, is_restart
from meshwright.cli.trackers import check_trackers
from meshwright.cli.train_config import StrategyTable, TrainConfig
from meshwright.cli.train_corpus import Corpus, find_corpus, find_prompts, find_validation
from meshwright.cli.train_data import Samples, find_samples
from meshwright.cli.train_model import ModelSource, OptimizerChoice, model_source, optimizer_of
from meshwright.cost import find_cluster
from meshwright.data import numbers_that_divide
from meshwright.errors import ConfigError, DataError
from meshwright.methods import GradientAccumulation, resolve
from meshwright.planner.config_models import check_config_path, config_path
from meshwright.runtime.torch_internals.interpreter import COMPILER
from meshwright.strategy import Strategy

PRELOADED = ("meshwright.cli.preloaded",)  # comes last, for it freezes what is imported then


@dataclass(frozen=True)
class Options:
    """Options of ``meshwright train``."""

    file: Path
    nproc: int | None = None
    steps: int | None = None
    resume: bool = False
    out: Path | None = None
    changes: tuple[str, ...] = ()
    traceback: bool = False
    max_restarts: int = 0
    min_nproc: int | None = None
    """Ranks on this machine that the run may go on with; None: all of them."""
    strategy: str | None = None
    """Text, or the path of a JSON file, in place of the file's."""

    def read(self) -> TrainConfig:
        """Return the training file with this command line's changes.

        Raises:
            ConfigError: Naming every key that is wrong.
        """
        overrides = {"run.steps": self.steps, "run.nproc": self.nproc}
        return read_config(self.file, self.changes, overrides, self.strategy)

    def arguments(self, run_dir: Path) -> list[str]:
        """Return the command line of one rank of this run."""
        return [
            "train", str(self.file), "--out", str(run_dir),
            *(["--nproc", str(self.nproc)] if self.nproc is not None else []),
            *(["--steps", str(self.steps)] if self.steps is not None else []),
            *(["--resume"] if self.resume else []),
            *(["--traceback"] if self.traceback else []),
            *(["--strategy", self.strategy] if self.strategy is not None else []),
            *(word for change in self.changes for word in ("--set", change)),
        ]  # fmt: skip

    def resume_command(self, run_dir: Path, steps: int) -> str:
        """Return the command line that goes on with this run up to ``steps``."""
        words = ["meshwright", "train", str(self.file), "--out", str(run_dir), "--resume", "--steps", str(steps)]
        words += ["--nproc", str(self.nproc)] if self.nproc is not None else []
        words += ["--strategy", self.strategy] if self.strategy is not None else []
        said = ("run.steps", "run.epochs", "run.resume")
        changes = [change for change in self.changes if change.partition("=")[0].strip() not in said]
        return shlex.join([*words, *(word for change in changes for word in ("--set", change))])


@dataclass(frozen=True)
class Prepared:
    """Everything that a training file names, found; nothing is built, started or written yet."""

    config: TrainConfig
    run_dir: Path | None  # None: nobody has named one
    model: ModelSource
    corpus: Corpus | Samples
    strategy: Strategy | None  # None: choose one
    optimizer: OptimizerChoice
    cluster: str | None = None  # a preset's name, or the path of a file
    validation: Corpus | None = None  # None: a part of the corpus, if any
    prompts: Sequence[str] = ()
    trackers: Sequence[str] = ()

    @property
    def backend(self) -> str | None:
        """Return the backend for ``init_distributed``; None: by device."""
        return "gloo" if self.config.run.device == "cpu" else None


def prepare(options: Options, world: int) -> Prepared:
    """Read and check everything that can be checked before ranks meet.

    Args:
        options: The command line.
        world: Number of ranks that will train.

    Raises:
        MeshwrightError: When something is wrong, or is not there.
    """
    config, folder = options.read(), options.file.resolve().parent
    find_modules_beside(folder)
    run_dir = _run_dir(options, config, folder)
    optimizer = optimizer_of(config.optimizer)
    strategy = strategy_of(config.strategy, folder)
    _check_batch(config, strategy, world)
    may_resume = options.resume or config.run.resume is not None
    if may_resume and run_dir is None:
        raise ConfigError(
            "--resume needs the run to go on with", expected="--out RUN_DIR", got="no --out", fix="name the directory"
        )
    # A restarted launch has written into its directory itself.
    if run_dir is not None and not is_restart(run_dir):
        check_run_dir(run_dir, resume=options.resume or (None if may_resume else False))
        if os.environ.get("RANK", "0") == "0":  # ranks that look at the same time would find each other
            check_not_running(run_dir)
    # A checkpoint has the weights, unless it leaves out frozen ones.
    reads_weights = not (options.resume and config.run.save_frozen)
    return find_all(config, folder, strategy, optimizer, run_dir=run_dir, reads_weights=reads_weights)


def find_all(
    config: TrainConfig,
    folder: Path,
    strategy: Strategy | None,
    optimizer: OptimizerChoice,
    *,
    run_dir: Path | None,
    reads_weights: bool,
) -> Prepared:
    """Find model, data, cluster and trackers of a training file; see :func:`prepare`."""
    check_packages(config.adapter)
    if (folder_of_model := config_path(config.model.source, folder)) is not None:
        check_config_path(folder_of_model, "model.source")  # before its tokenizer is missed
    corpus = _corpus(config, folder)
    of_text = isinstance(corpus, Corpus) and corpus.layout == "windows"
    model = model_source(config.model, folder, adapter=config.adapter, of_text=of_text, reads_weights=reads_weights)
    validation = _validation(config, corpus, folder)
    cluster = _cluster(config.strategy, folder)
    trackers = check_trackers(config.run.trackers, are_defaults="trackers" not in config.run.model_fields_set)
    prompts = _prompts(config, corpus, folder)
    return Prepared(config, run_dir, model, corpus, strategy, optimizer, cluster, validation, prompts, trackers)


def _corpus(config: TrainConfig, folder: Path) -> Corpus | Samples:
    if config.data.function is not None:
        return find_samples(config.data)
    model = config_path(config.model.source, folder)
    return find_corpus(config.data, folder, model if model is None or model.is_dir() else model.parent)


def _validation(config: TrainConfig, corpus: Corpus | Samples, folder: Path) -> Corpus | None:
    if not config.eval.is_on or isinstance(corpus, Corpus):
        return find_validation(config.eval, config.data, corpus, folder) if isinstance(corpus, Corpus) else None
    raise ConfigError(
        "Validation needs files",
        expected="data.source that names texts or conversations",
        got=f"data.source = {config.data.source!r}, a function",
        fix="leave [eval] out, and call job.evaluate in a loop of your own (docs/start.md)",
    )


def _prompts(config: TrainConfig, corpus: Corpus | Samples, folder: Path) -> Sequence[str]:
    if config.eval.samples is not None and not isinstance(corpus, Corpus):
        raise ConfigError(
            "Samples of text need a tokenizer",
            expected="data.source that names texts or conversations",
            got=f"data.source = {config.data.source!r}, a function",
            fix="leave eval.samples out; a callback's on_step can call job.model.generate",
        )
    return find_prompts(config.eval, folder)


def _run_dir(options: Options, config: TrainConfig, folder: Path) -> Path | None:
    if options.out is not None:
        return options.out
    return folder / Path(config.run.out).expanduser() if config.run.out is not None else None


def strategy_of(table: StrategyTable, folder: Path) -> Strategy | None:
    """Return the strategy that a training file names; None: choose one."""
    if table.is_automatic:
        return None
    return Strategy(table.methods if table.file is None else folder / Path(table.file).expanduser())


def preloaded(options: Options) -> tuple[str, ...]:
    """Return the modules that the ranks of a run need, which are imported once; see [Note: forked ranks].

    Raises:
        MeshwrightError: When the training file, or its strategy, is wrong.
    """
    strategy = strategy_of(options.read().strategy, options.file.resolve().parent)
    compiles = strategy is not None and "compile" in strategy
    return (*([COMPILER] if compiles else []), *PRELOADED)


def _cluster(table: StrategyTable, folder: Path) -> str | None:
    name = table.cluster
    if name is None:
        return None
    name = str(folder / Path(name).expanduser()) if Path(name).suffix else name
    find_cluster(name)  # reports what is wrong with it before anything is started
    return name


def parts_of_a_batch(config: TrainConfig, strategy: Strategy | None, world: int) -> tuple[int, int]:
    """Return the replicas that share a batch, and the micro-batches of each.

    Raises:
        StrategyError: When the strategy does not fit so many ranks.
    """
    axes = dict(resolve(strategy or Strategy(), world).axes)
    replicas = axes.get("data", 1) * axes.get("zero", 1)
    method = strategy.get("gradient_accumulation") if strategy is not None else None
    micro_batches = config.run.num_micro_batches
    if isinstance(method, GradientAccumulation):
        micro_batches = method.num_micro_batches
    return replicas, micro_batches


def _check_batch(config: TrainConfig, strategy: Strategy | None, world: int) -> None:
    replicas, micro_batches = parts_of_a_batch(config, strategy, world)
    parts = replicas * micro_batches
    if config.run.batch_size % parts:
        below = config.run.batch_size // parts * parts
        nearest = f"{below} or {below + parts}" if below else str(parts)
        raise DataError(
            "run.batch_size does not divide: it counts sequences over all ranks",
            expected=f"a multiple of {parts} ({replicas} replicas x {micro_batches} micro-batches)",
            got=str(config.run.batch_size),
            fix=f"use {nearest}{numbers_that_divide(config.run.batch_size, micro_batches)}",
        )


def unless_given(strategy: Strategy | None, method: str, table: Table, key: str) -> Any:
    """Return a value of the configuration; None where it is a default and a method of the strategy sets the same."""
    is_default = key not in table.model_fields_set
    return None if strategy is not None and method in strategy and is_default else getattr(table, key)


def number_of_processes(config: TrainConfig) -> int:
    """Return the ranks to start on this machine: as configured, else one per CUDA device, else one.

    Raises:
        ConfigError: When there are fewer CUDA devices than ranks.
    """
    cpu = "train on the CPU with --set run.device=cpu"
    on_cuda = config.run.device == "auto"
    return num_ranks(config.run.nproc, on_cuda=on_cuda, otherwise=1, option="--nproc", use_cpu=cpu)


# --- Reading a training file, with the changes of a command line


def read_config(
    file: Path,
    changes: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    strategy: str | None = None,
) -> TrainConfig:
    """Read a training file.

    Args:
        file: TOML file.
        changes: ``table.key=value`` texts, as ``--set`` takes them; later ones win.
        overrides: Values by dotted key that take precedence over all; None leaves a key as it is.
        strategy: As :func:`put_strategy` takes it; None leaves the file's.

    Raises:
        ConfigError: When the file cannot be read, or naming every key that is wrong.
    """
    content = _read_toml(file)
    put_changes(content, changes)
    put_strategy(content, strategy)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(content, key, value)
    return parse_config(content, str(file))


def put_changes(content: dict[str, Any], changes: Sequence[str]) -> None:
    """Put ``table.key=value`` texts, as ``--set`` takes them, into the content of a training file.

    Raises:
        ConfigError: When one is no such text, or names a key within something that is no table.
    """
    for change in changes:
        _put(content, *_parse_change(change))


def put_strategy(content: dict[str, Any], strategy: str | None) -> None:
    """Put the strategy of a command line, text or the path of a .json file, in place of the one in a training file."""
    if strategy is None:
        return
    given = {"file": str(Path(strategy).absolute())} if strategy.endswith(".json") else {"methods": strategy}
    kept = {key: each for key, each in dict(content.get("strategy", {})).items() if key == "cluster"}
    content["strategy"] = kept | given


def parse_config(content: Mapping[str, Any], where: str) -> TrainConfig:
    """Validate the content of a training file.

    Raises:
        ConfigError: Naming every key that is wrong.
    """
    try:
        return TrainConfig.model_validate(dict(content))
    except ValidationError as error:
        raise explained(error, where, TrainConfig) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read",
            expected="a TOML file",
            got=error.strerror or str(error),
            fix="name a training file; examples/gpt2/stdlib.toml is one",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML", expected="tables of key = value", got=str(error), fix=HELP) from None


_DEEPEST = 100  # lists within lists: what is saved with a checkpoint may be of 255


def _parsed(text: str) -> dict[str, Any]:
    """Parse a TOML text; refuse integers beyond 64 bits, which TOML does not have, and lists in lists without end.

    Raises:
        ValueError: When it is no TOML, or one of these.
    """
    content = tomllib.loads(text)
    left: list[tuple[Any, int]] = [(content, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("an integer of more than 64 bits")
        if depth > _DEEPEST:
            raise ValueError(f"lists or tables that are nested more than {_DEEPEST} deep")
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += ((each, depth + 1) for each in inside)
    return content


def _parse_change(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            "--set takes a key and a value",
            expected="table.key=value, such as optimizer.lr=1e-3",
            got=repr(change),
            fix="write it as --set table.key=value",
        )
    try:
        return key.strip(), _parsed(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), text.strip()  # shells strip quotes: run.device=cpu is meant as text


_INSTEAD = {"run.steps": "epochs", "run.epochs": "steps"}  # of two keys the later one counts


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    table = content
    for depth, name in enumerate(tables):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{key} cannot be set",
                expected=f"{'.'.join(tables[: depth + 1])} to be a table",
                got=repr(table),
                fix="see meshwright train --help-config",
            )
    table.pop(_INSTEAD.get(key, ""), None)
    table[last] = value

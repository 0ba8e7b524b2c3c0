"""Run ``meshwright eval`` and ``meshwright generate``: the loss and the texts of a trained model, on any layout."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Column, Table
from torch.utils.data import default_collate

from meshwright.cli.ranks import check_launched
from meshwright.cli.references import find_modules_beside
from meshwright.cli.run_files import CHECKPOINTS, CONFIG
from meshwright.cli.session import accelerate_trained, join, load_data
from meshwright.cli.train_config import TrainConfig
from meshwright.cli.train_corpus import Corpus
from meshwright.cli.train_model import optimizer_of
from meshwright.cli.train_options import (
    Prepared,
    find_all,
    number_of_processes,
    parse_config,
    put_changes,
    put_strategy,
    strategy_of,
)
from meshwright.cli.validation import Draws, Result, Writer, open_validation, perplexity
from meshwright.errors import ConfigError
from meshwright.runtime import rank, same_on_every_rank, shutdown_distributed
from meshwright.runtime.terminal import PlainConsole
from meshwright.store import CheckpointStore, TrainingState
from meshwright.store.manifest import MANIFEST
from meshwright.training.accelerated import Accelerated

_OF_A_RUN = ("seed", "device", "memory_limit", "memory_limit_gb", "batch_size", "save_frozen")
_OF_EVAL = ("batches", "batch_size", "ema")
_OF_SAMPLES = ("samples", "sample_tokens", "every")
_SEQ_LEN = 1024  # of a folder's model, or what it can take
_LONGEST = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Trained:
    """A trained model as a command names it, and where it shall run."""

    path: Path
    """A run of ``meshwright train``, one of its checkpoints, or a folder with a model of transformers."""
    strategy: str | None
    """Text, or the path of a JSON file; None chooses one."""
    nproc: int | None
    changes: tuple[str, ...]
    traceback: bool

    def words(self) -> list[str]:
        """Return the command line of one rank, without the command and its own options."""
        return [
            str(self.path),
            *(["--strategy", self.strategy] if self.strategy is not None else []),
            *(["--nproc", str(self.nproc)] if self.nproc is not None else []),
            *(["--traceback"] if self.traceback else []),
            *(word for change in self.changes for word in ("--set", change)),
        ]

    def run(self) -> Path | None:
        """Return the directory of the run; None for a folder of transformers.

        Raises:
            ConfigError: When it is neither.
        """
        whole = Path(os.path.abspath(self.path))  # "." and ".." have parents, too
        for directory in (self.path, whole.parent, whole.parent.parent):
            if {"file", "model", "run"} <= _document(directory / CONFIG).keys():
                return directory
        if "model_type" in _document(self.path / "config.json"):
            return None
        raise ConfigError(
            f"{self.path} is no trained model",
            expected="a run of meshwright train, one of its checkpoints, or a folder with a model of transformers",
            got="a folder without such a config.json" if self.path.is_dir() else "no such folder",
            fix="correct the path",
        )

    def content(self) -> tuple[dict[str, Any], Path]:
        """Return the tables of the model's training file that count here, and the folder their paths start at."""
        run = self.run()
        if run is None:
            document = _document(self.path / "config.json")
            longest = next((document[key] for key in _LONGEST if isinstance(document.get(key), int)), _SEQ_LEN)
            data = {"seq_len": min(longest, _SEQ_LEN)}
            content: dict[str, Any] = {"model": {"source": f"hf:{self.path.resolve()}"}, "data": data, "eval": {}}
            return content | {"run": {}}, Path.cwd()
        found = _document(run / CONFIG)
        content = {name: dict(found.get(name, {})) for name in ("model", "adapter", "data", "eval")}
        content["run"] = {key: found["run"][key] for key in _OF_A_RUN if found["run"].get(key) is not None}
        return content, Path(found["file"]).parent

    def config(self, content: dict[str, Any]) -> TrainConfig:
        """Return the training file that the tables make, with the changes of the command line."""
        put_strategy(content, self.strategy)
        content["run"] |= {"trackers": [], **({"nproc": self.nproc} if self.nproc is not None else {})}
        put_changes(content, self.changes)
        return parse_config(content, str(self.path))

    def find(self, config: TrainConfig, folder: Path) -> Prepared:
        """Find everything that the tables name; a checkpoint replaces weights, unless it leaves out frozen ones."""
        check_launched("--nproc", self.nproc)
        find_modules_beside(folder)
        strategy, optimizer = strategy_of(config.strategy, folder), optimizer_of(config.optimizer)
        reads = self.run() is None or not config.run.save_frozen
        return find_all(config, folder, strategy, optimizer, run_dir=None, reads_weights=reads)

    def load(self, accelerated: Accelerated, config: TrainConfig, *, averaged: bool) -> TrainingState:
        """Load the newest checkpoint that is whole, or the one that is named, if this is a run; collective."""
        state = TrainingState(accelerated.model, frozen=config.run.save_frozen, averaged=averaged)
        run = self.run()
        if run is None:
            return state
        is_one = (self.path / MANIFEST).is_file()
        store = CheckpointStore(self.path if self.path != run and not is_one else run / CHECKPOINTS)
        info = store.load(state, self.path if is_one else None)
        if rank() == 0:
            average = ", the moving average of its weights" if averaged else ""
            typer.echo(f"meshwright: {info.path}, after step {info.step}{average}", err=True)
        return state


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- ``meshwright eval``


@dataclass(frozen=True)
class EvalOptions:
    """Options of ``meshwright eval``."""

    trained: Trained
    data: tuple[str, ...]
    """Sources; none takes the ``[eval]`` of the run."""
    seq: int | None
    as_json: bool

    def config(self) -> tuple[TrainConfig, Path]:
        """Return the training file to evaluate with, and the folder its paths start at.

        Raises:
            ConfigError: When there is nothing to evaluate on.
        """
        content, folder = self.trained.content()
        if self.data:
            content["data"] = {key: each for key, each in content["data"].items() if key not in ("source", "args")}
            sources = [each if each == "stdlib" else str(Path(each).absolute()) for each in self.data]
            given = {"source": sources[0]} if len(sources) == 1 else {"mixture": [{"source": each} for each in sources]}
            content["data"] = {**content["data"], "mixture": [], **given}
            content["eval"] = {key: content["eval"].get(key) for key in _OF_EVAL if key in content["eval"]} | given
        else:
            content["eval"] |= {"keep_best": False, "patience": None}
            content["eval"] = {key: each for key, each in content["eval"].items() if key not in _OF_SAMPLES}
        if self.seq is not None:
            content["data"]["seq_len"] = self.seq
        config = self.trained.config(content)
        if not config.eval.is_on:
            raise ConfigError(
                "There is nothing to evaluate on",
                expected="--data SOURCE, or a run whose training file has a table [eval]",
                got=f"no --data, and {self.trained.path} without one",
                fix="add --data FILE; it is repeatable, and each source has a loss of its own",
            )
        return config, folder

    def num_processes(self) -> int:
        """Return the ranks to start on this machine."""
        return number_of_processes(self.config()[0])

    def arguments(self) -> list[str]:
        """Return the command line of one rank."""
        return [
            "eval", *self.trained.words(), *(word for each in self.data for word in ("--data", each)),
            *(["--seq-len", str(self.seq)] if self.seq is not None else []), *(["--json"] if self.as_json else []),
        ]  # fmt: skip


def evaluate(options: EvalOptions) -> int:
    """Compute the loss of every source as one rank of the world, and print it on rank 0; collective."""
    config, folder = options.config()
    prepared = join(lambda: options.trained.find(config, folder))
    data = load_data(prepared)
    with same_on_every_rank():
        sample = default_collate([data.dataset[0]])
    size = config.eval.batch_size or config.run.batch_size
    accelerated = accelerate_trained(prepared, data, sample, size)
    state = options.trained.load(accelerated, config, averaged=config.eval.ema)
    # The average has been loaded in place of the weights: there is none beside them.
    loaded = config.model_copy(update={"eval": config.eval.model_copy(update={"ema": False})})
    validation = open_validation(replace(prepared, config=loaded), data.kept_aside, accelerated, state, Path())
    assert validation is not None, "there is something to evaluate on"
    result = validation.run()
    if rank() == 0:
        _print(result, options.as_json)
    shutdown_distributed()
    return 0


def _print(result: Result, as_json: bool) -> None:
    rows = dict(result.by_source)
    if len(rows) > 1:
        rows["all"] = result.loss
    if as_json:
        found = {name: {"loss": loss, "perplexity": _finite(perplexity(loss))} for name, loss in rows.items()}
        typer.echo(json.dumps({"step": result.step, "sources": found}, indent=1))
        return
    table = Table("source", Column("loss", justify="right"), Column("perplexity", justify="right"))
    for name, loss in rows.items():
        table.add_row(name, f"{loss:.4f}", f"{perplexity(loss):.2f}")
    PlainConsole().print(table)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- ``meshwright generate``


@dataclass(frozen=True)
class GenerateOptions:
    """Options of ``meshwright generate``."""

    trained: Trained
    prompts: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    """0 takes the likeliest token."""
    top_p: float
    seed: int
    uses_template: bool
    as_json: bool
    averaged: bool | None = None
    """Whether to take the moving average of the weights; None: as the run validates."""

    def takes_average(self) -> bool:
        """Return whether the moving average of the weights speaks."""
        validates = self.trained.content()[0]["eval"].get("ema", False)
        return bool(validates) if self.averaged is None else self.averaged

    def config(self) -> tuple[TrainConfig, Path]:
        """Return the training file to generate with, and the folder its paths start at."""
        content, folder = self.trained.content()
        # No data are read: only the tokenizer counts.
        content["data"] = {key: content["data"][key] for key in ("tokenizer", "seq_len") if key in content["data"]}
        content["eval"] = {}
        return self.trained.config(content), folder

    def num_processes(self) -> int:
        """Return the ranks to start on this machine."""
        return number_of_processes(self.config()[0])

    def arguments(self) -> list[str]:
        """Return the command line of one rank."""
        return [
            "generate", *self.trained.words(), *(word for each in self.prompts for word in ("--prompt", each)),
            "--max-new-tokens", str(self.max_new_tokens), "--temperature", str(self.temperature),
            "--top-p", str(self.top_p), "--seed", str(self.seed),
            *([] if self.uses_template else ["--no-template"]), *(["--json"] if self.as_json else []),
            *([] if self.averaged is None else ["--ema" if self.averaged else "--no-ema"]),
        ]  # fmt: skip


def generate(options: GenerateOptions) -> int:
    """Continue every prompt as one rank of the world, and print the texts on rank 0; collective."""
    config, folder = options.config()
    prepared = join(lambda: options.trained.find(config, folder))
    corpus = prepared.corpus
    assert isinstance(corpus, Corpus), "nothing else was named"
    with same_on_every_rank():
        draws = Draws(options.max_new_tokens, options.temperature, options.top_p, options.seed)
        writer = Writer(corpus, config, folder, draws, uses_template=options.uses_template)
        encoded = [writer.encode(prompt) for prompt in options.prompts]
    sample = torch.zeros(1, min(corpus.seq_len, 32), dtype=torch.long)
    accelerated = accelerate_trained(prepared, None, sample, 1)
    options.trained.load(accelerated, config, averaged=options.takes_average())
    accelerated.model.eval()
    texts = [writer.continued(accelerated, ids) for ids in encoded]
    if rank() == 0:
        _print_texts(options, texts)
    shutdown_distributed()
    return 0


def _print_texts(options: GenerateOptions, texts: Sequence[str]) -> None:
    pairs = list(zip(options.prompts, texts, strict=True))
    if options.as_json:
        typer.echo(json.dumps([{"prompt": prompt, "text": text} for prompt, text in pairs], indent=1))
        return
    for prompt, text in pairs:
        typer.echo(f"> {prompt}\n{text}" if len(pairs) > 1 else text)

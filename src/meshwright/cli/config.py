"""What a training file may say: five tables of keys, each with its type, default and meaning."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwright.lr_scheduler import Decay

OPTIMIZERS = ("adamw", "sgd")

_REFERENCE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
_Reference = Annotated[str, Field(pattern=f"^{_REFERENCE}$")]
_Count = Annotated[int, Field(ge=1)]
_NonNegative = Annotated[int, Field(ge=0)]
_Betas = Annotated[tuple[float, ...], Field(strict=False, min_length=2, max_length=3)]  # TOML has lists only


class Table(BaseModel):
    """Base of all tables: immutable, and a key that is not known is an error."""

    # TOML has types of its own: a text where a number belongs is a mistake, not a number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelTable(Table):
    """What is trained."""

    source: Annotated[str, Field(pattern=f"^(hf:.+|{_REFERENCE})$")] = Field(
        description="'module:function' that returns the model (modules beside this file are found first), or 'hf:PATH' "
        "of a transformers config.json or the directory it lies in: built with random weights"
    )
    args: dict[str, Any] = Field(
        default={},
        description="keyword arguments of the function (vocab_size and seq_len, where it names them, default to the "
        "tokenizer's, if there is one, and data.seq_len), or values that replace those of the transformers config",
    )
    loss: _Reference | None = Field(
        default=None,
        description="'module:function' called as loss(model_input, model_output); "
        "default: cross-entropy of the next token, nats per token; where data.source is a function, the loss that the "
        "model's output carries",
    )


class DataTable(Table):
    """What it is trained on."""

    source: str | list[str] = Field(
        default="stdlib",
        description="'stdlib' (the Python standard library's own sources), a text file, a glob, or a list of these; or "
        "'module:function' that returns a torch Dataset or an iterable of samples, equal on every rank: a dictionary "
        "is passed to the model by name, a tuple or list in order, a tensor alone",
    )
    args: dict[str, Any] = Field(
        default={},
        description="keyword arguments of the function (seq_len and seed, where it names them, default to data.seq_len "
        "and run.seed)",
    )
    tokenizer: str = Field(default="bytes", description="'bytes' (257 ids), or the path of a tokenizers JSON file")
    seq_len: Annotated[int, Field(ge=2)] = Field(default=256, description="tokens per sequence")
    cache_dir: str | None = Field(
        default=None, description="folder for tokenized corpora; default: meshwright/ in the user's cache directory"
    )

    @property
    def function(self) -> str | None:
        """The reference to a function that returns samples; None where the source is text."""
        is_function = isinstance(self.source, str) and re.fullmatch(_REFERENCE, self.source)
        return str(self.source) if is_function else None

    @model_validator(mode="after")
    def _args_are_the_functions(self) -> Self:
        if self.args and self.function is None:
            raise ValueError("args beside a source 'module:function' only")
        return self


class StrategyTable(Table):
    """How it is distributed."""

    methods: str | list[Any] = Field(
        default="auto",
        description="'auto', text such as \"zero2 + amp_native(dtype='bf16')\", or a list of names and "
        "[name, config] pairs (see: meshwright methods)",
    )
    file: str | None = Field(default=None, description="strategy.json of an earlier run, instead of methods")
    excluded: list[str] = Field(default=[], description="methods that 'auto' must not use")
    included: list[str] = Field(default=[], description="methods that 'auto' must use")
    cluster: str | None = Field(
        default=None,
        description="what 'auto' predicts seconds with: a file of meshwright calibrate, or a preset's name",
    )
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="seconds in which 'auto' runs the best few; noted in the file of cluster"
    )

    @field_validator("methods")
    @classmethod
    def _no_path(cls, methods: Any) -> Any:
        if isinstance(methods, str) and methods.strip().endswith(".json"):
            raise ValueError("methods; a path belongs into strategy.file")
        return methods

    @model_validator(mode="after")
    def _decided_once(self) -> Self:
        if self.file is not None and self.methods != "auto":
            raise ValueError("methods or file, not both")
        if (self.excluded or self.included) and not self.is_automatic:
            raise ValueError("excluded and included beside methods = 'auto' only")
        if self.time_limit is not None and not self.is_automatic:
            raise ValueError("time_limit beside methods = 'auto' only")
        return self

    @property
    def is_automatic(self) -> bool:
        """Whether Meshwright chooses."""
        return self.file is None and self.methods == "auto"


class OptimizerTable(Table):
    """How weights are updated. Keys left out keep the optimizer's own defaults."""

    name: Annotated[str, Field(pattern=f"^([a-z_0-9]+|{_REFERENCE})$")] = Field(
        default="adamw",
        description="'adamw' (fused), 'sgd', 'lamb', 'adafactor', 'came', 'galore', 'galore_8bit', 'muon' (AdamW for "
        "embeddings, heads and vectors), or 'module:Class' of any torch optimizer",
    )
    lr: Annotated[float, Field(ge=0)] = Field(default=3e-4, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(default=None, description="weight decay")
    betas: _Betas | None = Field(default=None, description="decay rates of Adam's two moments (of CAME's three)")
    eps: Annotated[float, Field(gt=0)] | None = Field(default=None, description="added to Adam's denominator")
    momentum: Annotated[float, Field(ge=0)] | None = Field(default=None, description="momentum of sgd")
    args: dict[str, Any] = Field(default={}, description="further keyword arguments of the optimizer")
    schedule: Decay = Field(default="cosine", description="how the rate falls after warm-up, over run.steps")
    warmup_steps: _NonNegative = Field(default=0, description="steps of linear warm-up")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="lowest rate as a fraction of lr"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="gradients are clipped to this norm; 'none' measures without clipping"
    )

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value  # TOML has no null


class RunTable(Table):
    """How long, how large, where."""

    steps: _Count = Field(default=1000, description="optimizer steps of the whole run")
    batch_size: _Count = Field(default=8, description="sequences per step over all ranks")
    num_micro_batches: _Count = Field(default=1, description="parts into which each rank cuts its share of a batch")
    num_workers: _NonNegative = Field(
        default=0, description="processes of each rank that load samples ahead of its steps; 0 for streams"
    )
    checkpoint_every: _Count | None = Field(
        default=None, description="steps between checkpoints; default: one at the end"
    )
    keep_checkpoints: _Count = Field(default=2, description="newest checkpoints kept")
    save_frozen: bool = Field(
        default=True,
        description="save parameters that are not trained too; without them the model function must make them again, "
        "equal, when the run is resumed",
    )
    background_checkpoints: bool = Field(
        default=False, description="write checkpoints while training goes on, from a copy in host memory"
    )
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=25.0, description="seconds that a run has to save and leave after SIGTERM or Ctrl-C"
    )
    hang_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0, description="seconds without a new step after which the rank that holds up the others is named"
    )
    seed: _NonNegative = Field(default=0, description="seed of weights, order of samples and dropout")
    nproc: _Count | None = Field(
        default=None, description="processes on this machine; default: one per CUDA device, or 1"
    )
    log_every: _Count = Field(default=10, description="steps between printed lines where there is no terminal")
    memory_limit_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="GB (10^9 bytes) that one rank may plan with; default: what the device has"
    )
    device: Literal["auto", "cpu"] = Field(default="auto", description="'auto' (CUDA where there is some) or 'cpu'")
    tensorboard: bool = Field(default=True, description="write TensorBoard events, if it is installed")
    out: str | None = Field(
        default=None, description="run directory; default: runs/<name of this file>-<time>, where you are"
    )


class TrainConfig(Table):
    """A training file."""

    model: ModelTable
    data: DataTable = DataTable()
    strategy: StrategyTable = StrategyTable()
    optimizer: OptimizerTable = OptimizerTable()
    run: RunTable = RunTable()

"""Define and explain the tables of a training file: keys with types, defaults and descriptions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from meshwright.cli.config_help import Table, keys_help
from meshwright.errors import ConfigError
from meshwright.lr_scheduler import Decay
from meshwright.strategy import read_size

OPTIMIZERS = ("adamw", "sgd")

_REFERENCE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
_Reference = Annotated[str, Field(pattern=f"^{_REFERENCE}$")]
_Count = Annotated[int, Field(ge=1)]
_NonNegative = Annotated[int, Field(ge=0)]
_Betas = Annotated[tuple[float, ...], Field(strict=False, min_length=2, max_length=3)]  # TOML has lists only


class ModelTable(Table):
    """Model to train."""

    source: Annotated[str, Field(pattern=f"^(hf:.+|{_REFERENCE})$")] = Field(
        description="'module:function' that returns the model (modules beside this file are found first), or 'hf:PATH' "
        "of a transformers config.json or the directory it lies in"
    )
    weights: str = Field(
        default="auto",
        description="trained weights to start from: 'auto' (those in the directory of hf:PATH, if there are any), "
        "'random' (the model's own initialisation, from run.seed), or the path of a directory that save_pretrained "
        "wrote, a safetensors file, a run of meshwright train or one of its checkpoints, or a directory of "
        "torch.distributed.checkpoint",
    )
    allow_missing_weights: bool = Field(
        default=False,
        description="let the model's own initialisation fill what the weights lack, such as a new head, and name it",
    )
    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="type of the parameters that are trained, to which stored weights are cast; default: fp32 for "
        "hf:PATH, otherwise what the function makes",
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

    @field_validator("source", mode="before")
    @classmethod
    def _is_more_than_dimensions(cls, source: Any) -> Any:
        if isinstance(source, str) and not source.startswith("hf:") and not re.fullmatch(_REFERENCE, source):
            from meshwright.planner.model_shapes import known_models  # late: it is asked for names alone

            if source.partition(":")[0] in (*known_models(), "gpt", "llama", "mixtral"):
                text = f"'hf:FOLDER' of a model; {source!r} names dimensions alone, which meshwright plan can do with"
                raise ValueError(text)
        return source


class AdapterTable(Table):
    """Adapters of peft around the model (LoRA, DoRA, QLoRA), which stays frozen; without r there are none."""

    r: _Count | None = Field(default=None, description="rank of the adapters")
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="scale: adapters are weighted by alpha / r; default: twice r"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="dropout before the adapters")
    targets: str | list[str] = Field(
        default="all-linear",
        description="modules that get adapters: the ends of their names, a regular expression of whole names, or "
        "'all-linear' (but the head)",
    )
    modules_to_save: list[str] = Field(default=[], description="further modules that are trained whole, such as a head")
    rank_stabilized: bool = Field(default=False, description="weight by alpha / sqrt(r) instead (rsLoRA)")
    dora: bool = Field(
        default=False,
        description="train the magnitudes of the adapted weights, too (DoRA); not with tensor_parallel",
    )
    bits: Literal[4] | None = Field(
        default=None,
        description="keep the linear layers of the base in 4 bits, NF4 of bitsandbytes (QLoRA), but the head and "
        "modules_to_save; under data, zero1, zero2 and fsdp; default: as they are",
    )

    @property
    def needs_values(self) -> bool:
        """Return whether the adapters, or the base itself, are computed from the values of the base."""
        return self.r is not None and (self.dora or self.bits is not None)

    @model_validator(mode="after")
    def _one_change_of_weights(self) -> Self:
        if self.dora and self.bits is not None:
            raise ValueError("dora or bits, not both: magnitudes need the base's values in every step")
        return self

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        if self.r is None and dict(self) != defaults:
            raise ValueError("r, the rank of the adapters")
        return self


_SOURCES = (
    "a text file, a glob, or a list of these; .jsonl or .parquet files and folders of datasets, with texts or with "
    "conversations; all may be compressed"
)


class MixedTable(Table):
    """One source of a mixture."""

    source: str | list[str] = Field(description=_SOURCES)
    weight: Annotated[float, Field(gt=0)] = Field(default=1.0, description="share of the samples")
    name: str | None = Field(default=None, description="what figures of it are called; default: its first file's name")


class DataTable(Table):
    """Data to train on."""

    source: str | list[str] = Field(
        default="stdlib",
        description=f"'stdlib' (the Python standard library's own sources), {_SOURCES}; or "
        "'module:function' that returns a torch Dataset or an iterable of samples, equal on every rank: a dictionary "
        "is passed to the model by name, a tuple or list in order, a tensor alone",
    )
    mixture: list[MixedTable] = Field(
        default=[], description="several sources instead of one: tables of source, weight and name"
    )
    args: dict[str, Any] = Field(
        default={},
        description="keyword arguments of the function (seq_len and seed, where it names them, default to data.seq_len "
        "and run.seed)",
    )
    tokenizer: str = Field(
        default="auto",
        description="'auto' (the one in the folder of model.source hf:FOLDER, otherwise 'bytes'), 'bytes' (257 ids), "
        "the path of a tokenizers JSON file, 'tiktoken:FILE' with FILE named after its encoding "
        "(cl100k_base.tiktoken), or a folder with a tokenizer of transformers, which conversations need",
    )
    seq_len: Annotated[int, Field(ge=2)] = Field(default=256, description="tokens per sequence")
    layout: Literal["auto", "windows", "packed", "padded"] = Field(
        default="auto",
        description="'windows' cuts all texts, one behind the other, into sequences; 'packed' puts as many whole "
        "samples into a sequence as fit, each attending to itself alone; 'padded' puts one; default: windows of texts, "
        "and packed conversations",
    )
    too_long: Literal["cut", "split", "refuse"] = Field(
        default="cut", description="what happens to samples above seq_len where they are packed or padded"
    )
    text_key: str = Field(default="text", description="the key of records that holds their text")
    bad_lines: Literal["raise", "skip"] = Field(default="raise", description="what happens to lines that are no JSON")
    cache_dir: str | None = Field(
        default=None, description="folder for tokenized corpora; default: meshwright/ in the user's cache directory"
    )

    @property
    def function(self) -> str | None:
        """Return the reference to the function that returns samples; None where the source is files."""
        is_function = isinstance(self.source, str) and re.fullmatch(_REFERENCE, self.source)
        return str(self.source) if is_function and not self.mixture else None

    @model_validator(mode="after")
    def _args_are_the_functions(self) -> Self:
        if self.args and self.function is None:
            raise ValueError("args beside a source 'module:function' only")
        if self.mixture and self.source != type(self).model_fields["source"].default:
            raise ValueError("source or mixture, not both")
        return self


class EvalTable(Table):
    """Validation during the run, without source, mixture and holdout there is none; and samples of generated text."""

    source: str | list[str] | None = Field(default=None, description=f"data to validate on: {_SOURCES}")
    mixture: list[MixedTable] = Field(
        default=[], description="several sources instead of one, each with a loss of its own; weights have no meaning"
    )
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of the training data that is kept aside for validation, instead of a source"
    )
    every: _Count = Field(default=100, description="steps between validations; there is one at the end, too")
    batches: _Count | None = Field(default=None, description="batches of each source; default: all of it")
    batch_size: _Count | None = Field(
        default=None, description="sequences per batch over all ranks; default: those of a micro-batch of all ranks"
    )
    keep_best: bool = Field(default=False, description="keep the checkpoint with the lowest loss, in best/")
    patience: _Count | None = Field(
        default=None, description="validations without a lower loss after which the run ends; default: it does not"
    )
    ema: bool = Field(default=False, description="validate the moving average of the weights (method ema)")
    samples: str | list[str] | None = Field(
        default=None,
        description="prompts that the model continues at every validation: a list of texts, or a file with one a line",
    )
    sample_tokens: _Count = Field(default=64, description="most tokens of each of these continuations")

    @property
    def is_on(self) -> bool:
        """Return whether there is anything to validate on."""
        return self.source is not None or bool(self.mixture) or self.holdout is not None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("source", "mixture", "holdout") if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            raise ValueError(f"one of source, mixture and holdout, not {' and '.join(given)}")
        changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        if not given and changed - (_OF_SAMPLES if self.samples is not None else set()):
            raise ValueError("something to validate on: source, mixture or holdout")
        if self.samples is None and "sample_tokens" in changed:
            raise ValueError("sample_tokens beside samples only")
        if self.samples == []:
            raise ValueError("samples with one prompt or more")
        return self


_OF_SAMPLES = {"samples", "sample_tokens", "every", "ema"}  # what has a meaning without data to validate on


class StrategyTable(Table):
    """Strategy of distribution."""

    methods: str | list[Any] = Field(
        default="auto",
        description="'auto', text such as \"zero2 + amp_native(dtype='bf16')\" (or as meshwright plan shows it: "
        '"zero 8: zero2, amp_native bf16"), a list of names and [name, config] pairs (see: meshwright methods), or '
        "the path of a .json file, as strategy.json of an earlier run",
    )
    file: str | None = Field(default=None, description="the same path under a name of its own, instead of methods")
    excluded: list[str] = Field(default=[], description="methods that 'auto' must not use")
    included: list[str] = Field(default=[], description="methods that 'auto' must use")
    cluster: str | None = Field(
        default=None,
        description="what 'auto' predicts seconds with: a file of meshwright calibrate, or a preset's name",
    )
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="seconds in which 'auto' runs the best few plans; what they teach is saved in the file of cluster",
    )

    @model_validator(mode="before")
    @classmethod
    def _path_is_a_file(cls, table: Any) -> Any:
        methods = table.get("methods") if isinstance(table, dict) else None
        if isinstance(methods, str) and methods.strip().endswith(".json") and table.get("file") is None:
            return {**table, "file": methods.strip(), "methods": "auto"}
        return table

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
        """Return whether Meshwright chooses the strategy."""
        return self.file is None and self.methods == "auto"


class OptimizerTable(Table):
    """Optimizer and schedule. Keys left out keep the optimizer's own defaults."""

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


class ProfileTable(Table):
    """The steps that are profiled, in the folder ``profile`` of the run directory."""

    steps: Annotated[list[_Count], Field(min_length=2, max_length=2)] = Field(
        description="the first and the last step that are traced"
    )
    trace: bool = Field(default=True, description="write a trace per rank, for https://ui.perfetto.dev")
    memory: bool = Field(default=False, description="write a snapshot of CUDA's memory per rank, too")

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: list[int]) -> list[int]:
        if steps[0] > steps[1]:
            raise ValueError("the first step before the last")
        return steps


class SnapshotTable(Table):
    """Snapshots of the training state in host memory."""

    every: _Count = Field(default=1, description="steps between two snapshots")
    max_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="most host memory of one rank's snapshots in GB (10^9 bytes); default: what there is"
    )
    neighbour: bool = Field(default=True, description="keep a second copy at a rank of another host")


class RunTable(Table):
    """Length, batch size and place of the run."""

    steps: _Count = Field(default=1000, description="optimizer steps of the whole run")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="passes over the training data, instead of steps; of a mixture: as many sequences as all sources "
        "have together",
    )
    batch_size: _Count = Field(default=8, description="sequences per step over all ranks")
    num_micro_batches: _Count = Field(default=1, description="parts into which each rank cuts its share of a batch")
    num_workers: _NonNegative = Field(
        default=0, description="processes per rank that load samples ahead of its steps; 0 for streams"
    )
    checkpoint_every: _Count | None = Field(
        default=None, description="steps between checkpoints; default: one at the end"
    )
    keep_checkpoints: _Count = Field(default=2, description="newest checkpoints kept")
    save_frozen: bool = Field(
        default=True,
        description="save frozen parameters, too; without them the model function must return equal ones when the run "
        "is resumed; default with [adapter]: false",
    )
    background_checkpoints: bool = Field(
        default=False, description="write checkpoints while training goes on, from a copy in host memory"
    )
    snapshot: SnapshotTable | None = Field(
        default=None,
        description="keep the newest states in host memory, {every = 1, max_gb = 40, neighbour = true}: a run that is "
        "started again after a failure goes on from there, and loses a step at most; default: checkpoints alone",
    )
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=25.0, description="seconds for saving a checkpoint after SIGTERM or Ctrl-C"
    )
    hang_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="seconds without a new step after which the rank that blocks the others is named; with snapshots "
        "one that does nothing is named sooner",
    )
    seed: _NonNegative = Field(default=0, description="seed of weights, order of samples and dropout")
    nproc: _Count | None = Field(
        default=None, description="processes on this machine; default: one per CUDA device, or 1"
    )
    deterministic: bool = Field(
        default=False,
        description="compute with deterministic algorithms alone, which are slower on CUDA: two runs on the same ranks "
        "are equal to the last bit; an operator that has none raises an error",
    )
    log_every: _Count = Field(default=10, description="steps between printed lines where there is no terminal")
    log_level: Literal["debug", "info", "warning", "error"] | None = Field(
        default=None, description="which messages of other libraries are shown; default: errors alone"
    )
    norms_every: _Count | None = Field(
        default=None, description="steps between norms of the weights and gradients of every layer, in norms.jsonl"
    )
    profile: ProfileTable | None = Field(
        default=None,
        description="{steps = [10, 12], trace = true, memory = false}: trace these steps, and say where they went, "
        "predicted and measured, in the folder profile of the run directory",
    )
    memory_limit: str | int | None = Field(
        default=None,
        description="usable device memory of one rank: a size such as '40 GiB' or '40 GB', or bytes; default: all",
    )
    memory_limit_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the same in GB (10^9 bytes): an older name for memory_limit"
    )
    device: Literal["auto", "cpu"] = Field(default="auto", description="'auto' (CUDA where there is some) or 'cpu'")
    trackers: list[str] = Field(
        default=["tensorboard"],
        description="where figures are sent, too: 'tensorboard', 'wandb', 'mlflow', 'trackio'; without a network or a "
        "key they are kept in the run directory; default: tensorboard, if it is installed",
    )
    callbacks: list[_Reference] = Field(
        default=[],
        description="'module:function' or 'module:Class' of objects with some of the methods on_step(step, result), "
        "on_eval(step, figures), on_checkpoint(step, path) and on_stop(step), called on every rank",
    )
    resume: Literal["auto"] | None = Field(
        default=None,
        description="'auto': go on from the newest whole checkpoint of the run directory, which must have a name, or "
        "start if it has none; default: go on with --resume only",
    )
    out: str | None = Field(
        default=None,
        description="run directory; default: runs/<name of this file>-<time>-<id> in the working directory",
    )

    @field_validator("memory_limit")
    @classmethod
    def _is_a_size(cls, value: Any) -> Any:
        try:
            read_size(value, "memory_limit")
        except ConfigError as error:
            raise ValueError(error.expected) from None
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps or epochs, not both")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.memory_limit is not None and self.memory_limit_gb is not None:
            raise ValueError("memory_limit or memory_limit_gb, not both")
        return self

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return the usable device memory of one rank; None: all of it."""
        if self.memory_limit_gb is not None:
            return int(self.memory_limit_gb * 1e9)
        return read_size(self.memory_limit, "run.memory_limit")


class TrainConfig(Table):
    """A training file."""

    model: ModelTable
    adapter: AdapterTable = AdapterTable()
    data: DataTable = DataTable()
    eval: EvalTable = EvalTable()
    strategy: StrategyTable = StrategyTable()
    optimizer: OptimizerTable = OptimizerTable()
    run: RunTable = RunTable()

    @model_validator(mode="before")
    @classmethod
    def _base_is_not_saved(cls, content: Any) -> Any:
        """Leave the base of adapters, which does not change, out of checkpoints unless ``run.save_frozen`` is set."""
        if not isinstance(content, dict) or not isinstance(content.get("adapter"), dict):
            return content
        run = content.get("run", {})
        is_adapted = content["adapter"].get("r") is not None and isinstance(run, dict)
        return {**content, "run": {"save_frozen": False, **run}} if is_adapted else content


def config_help() -> str:
    """Return all tables and keys with type, default and description, as TOML to paste into a file."""
    return keys_help(TrainConfig)

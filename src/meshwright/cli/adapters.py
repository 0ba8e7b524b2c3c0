"""Put adapters of peft around a model, over a base in 4 bits if asked; record and merge them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from meshwright.cli.train_config import AdapterTable
from meshwright.errors import CheckpointError, ConfigError, did_you_mean, join_names
from meshwright.nn import setting_of
from meshwright.nn.four_bit import FourBitLinear
from meshwright.planner.config_models import read_model_config
from meshwright.runtime import same_on_every_rank
from meshwright.runtime.agreement import gather_distinct
from meshwright.store.entries import model_entries
from meshwright.store.export import copy_beside, is_weights_file
from meshwright.store.folder import adapter_names

_ADAPTER = "default"  # what peft calls it where nobody does


def with_adapters(model: nn.Module, table: AdapterTable, where: str = "[adapter]") -> nn.Module:
    """Return the model, frozen, with the adapters around it that a table asks for; as it is if it asks for none.

    Args:
        model: Built with values, or on ``meta``.
        table: The table ``[adapter]``.
        where: What asks for them, for errors.

    Raises:
        ConfigError: When peft is not installed, or finds none of the targets.
    """
    if table.r is None:
        return model
    check_packages(table, where)
    peft: Any = importlib.import_module("peft")
    if table.bits is not None:
        in_four_bits(model, table.modules_to_save)
    config = peft.LoraConfig(
        r=table.r,
        lora_alpha=2 * table.r if table.alpha is None else table.alpha,
        lora_dropout=table.dropout,
        target_modules=table.targets if isinstance(table.targets, str) else list(table.targets),
        modules_to_save=list(table.modules_to_save) or None,
        use_rslora=table.rank_stabilized,
        use_dora=table.dora,
        task_type=_task_of(model),
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:  # peft's, of names that it does not find
        linear = {name.rpartition(".")[2]: None for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        raise ConfigError(
            f"{where}: no adapters can be put around this model",
            expected=f"targets such as {join_names(linear)}, or 'all-linear'",
            got=f"targets = {table.targets!r} ({str(error).splitlines()[0]:.200})",
            fix="correct adapter.targets and adapter.modules_to_save",
        ) from error
    return adapted


def _task_of(model: nn.Module) -> str | None:
    """Return what peft calls the task of a model that generates text from text; None for others, such as Whisper."""
    takes_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    if not hasattr(model, "prepare_inputs_for_generation") or not takes_text:
        return None
    return "SEQ_2_SEQ_LM" if setting_of(getattr(model, "config", None), "is_encoder_decoder") else "CAUSAL_LM"


def check_packages(table: AdapterTable, where: str = "[adapter]") -> None:
    """Refuse adapters whose packages are not installed, before anything is started or built.

    Raises:
        ConfigError: Naming the package.
    """
    needed = {"peft": where if table.r is not None else None}
    needed["bitsandbytes"] = f"{where}: bits = 4" if table.bits is not None else None
    for package, what in needed.items():
        if what is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{what} needs {package}, which is not installed",
                expected=f"an importable package {package!r}",
                got="none",
                fix=f"pip install {package}, or 'meshwright[adapters]'",
            )


_KEYS = ("r", "alpha", "dropout", "targets", "modules_to_save", "rank_stabilized", "dora", "bits")


def parse_lora(text: str) -> AdapterTable:
    """Read ``r=16,alpha=32,targets=q_proj+v_proj``, the keys of ``[adapter]`` as ``meshwright plan --lora`` takes them.

    Raises:
        ConfigError: Naming what is wrong.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key not in _KEYS:
            raise _not_lora(text, f"{part.strip()!r}{did_you_mean(key, _KEYS) if equals else ''}")
        try:
            found[key] = _value(key, value)
        except ValueError:
            raise _not_lora(text, f"{part.strip()!r}") from None
    if not isinstance(found.get("r"), int) or found["r"] < 1:
        raise _not_lora(text, "no r of 1 or more")
    try:
        return AdapterTable(**found)
    except ValidationError as error:
        raise _not_lora(text, str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def _value(key: str, value: str) -> Any:
    if key in ("r", "bits"):
        return int(value)
    if key in ("alpha", "dropout"):
        return float(value)
    if key in ("rank_stabilized", "dora"):
        return {"true": True, "false": False}[value] if value in ("true", "false") else float("no boolean")
    return value if value == "all-linear" else value.split("+")


def _not_lora(text: str, got: str) -> ConfigError:
    return ConfigError(
        f"--lora {text} cannot be read",
        expected="KEY=VALUE,… with keys of [adapter], such as r=16,alpha=32,targets=q_proj+v_proj",
        got=got,
        fix="correct it",
    )


# --- Bases in 4 bits (QLoRA, Dettmers et al. 2023)


def in_four_bits(model: nn.Module, kept: Sequence[str]) -> None:
    """Replace the linear layers of a model, but its head and those whose names end in ``kept``, by 4-bit ones."""
    import bitsandbytes  # noqa: F401 - registers its operators

    of_transformers: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = of_transformers()
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            is_kept = any(f"{path}.{name}".endswith(f".{each}") or name == each for each in kept)
            if type(child) is nn.Linear and child is not head and not is_kept:
                setattr(module, name, FourBitLinear(child))


# --- What the run directory records of them, for ``meshwright checkpoint export``


def adapters_of(model: nn.Module) -> str | None:
    """Return a document of a model's adapters, or None where it has none; collective: ranks may hold different parts.

    Returns:
        JSON: ``config``, peft's own, and ``names``: those in peft's files to those in checkpoints.
    """
    peft = sys.modules.get("peft")  # not imported: the model cannot be one of peft's
    with same_on_every_rank():
        entries = model_entries(model)
        is_adapted = peft is not None and isinstance(entries.module, peft.PeftModel)
        own = adapter_names(entries.module, dict(entries.tensors)) if is_adapted else {}
    if not is_adapted:
        return None
    names: dict[str, str] = {}
    for _, part in gather_distinct(own, repr(sorted(own.items()))):
        names |= part
    adapted: Any = entries.module
    config = adapted.peft_config[_ADAPTER].to_dict()
    return json.dumps({"config": config, "names": names}, indent=2, sort_keys=True, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def read_adapters(path: Path) -> tuple[dict[str, str], str]:
    """Return the names of a run's adapters, and peft's config for them as text.

    Raises:
        CheckpointError: When the file is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names, config = found["names"], json.dumps(found["config"], indent=2) + "\n"
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise TypeError("names is no table of names")
        config.encode()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not describe the adapters of the run",
            expected="what meshwright train wrote: their config and names",
            got=f"{type(error).__name__}: {error}",
            fix="restore the file, or name an OUT that ends in .safetensors to export all weights",
        ) from error
    return names, config


@contextmanager
def merged(out: Path, pretrained: Path | None, dtype: torch.dtype | None) -> Iterator[Path]:
    """Yield a scratch folder for adapters, and then write their base with them merged into it, on one process.

    Args:
        out: A new folder, which ``from_pretrained`` loads.
        pretrained: The folder of the base.
        dtype: Of the merged weights; None keeps that of the base.

    Raises:
        CheckpointError: When the base is not there, or ``out`` is.
        ModelError: When the config of the base is refused.
    """
    if pretrained is None or not (pretrained / "config.json").is_file() or is_weights_file(out) or out.exists():
        is_base = pretrained is not None and (pretrained / "config.json").is_file()
        raise CheckpointError(
            "Adapters cannot be merged into their base",
            expected="a run with model.source = 'hf:FOLDER', whose folder is still there, and a new folder OUT",
            got=f"OUT = {out}" if is_base else "no folder of the base",
            fix="name a new folder" if is_base else "export without --merged, and merge them with peft",
        )
    import transformers
    from peft import PeftModel

    scratch = Path(tempfile.mkdtemp(prefix=".adapters-", dir=out.absolute().parent))
    try:
        yield scratch / "adapters"
        config = read_model_config(pretrained)  # refuses what would run code from elsewhere
        kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
        base = kind.from_pretrained(str(pretrained), dtype=dtype or "auto", local_files_only=True)
        PeftModel.from_pretrained(base, str(scratch / "adapters")).merge_and_unload().save_pretrained(str(out))
        copy_beside(pretrained, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

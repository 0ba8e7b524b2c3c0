"""The examples of transformers' models as a rank runs them: as a script, and as ``meshwright train`` of their file."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

from meshwright.cli import train_loop as training
from meshwright.cli.train_options import Options
from meshwright.runtime import rank
from meshwright.runtime.device import seed_everything
from tests.cli.helpers import losses

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH = 5, 8
TEXT = ("--batch-size", str(BATCH), "--seq-len", "32")
AS_TEXT = ("data.seq_len=32",)
CONFIG_OF = {"lora": "llama"}  # beside whose file the config lies, where it is another's
SCRIPT = {"llama": TEXT, "bert": TEXT, "lora": TEXT, "vit": ("--batch-size", str(BATCH), "--images", str(BATCH))}
CHANGES = {"llama": AS_TEXT, "bert": AS_TEXT, "lora": AS_TEXT, "vit": (f"data.args.num_images={BATCH}",)}


def both_ways(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """First and last loss of the script, and of its training file, both shortened alike."""
    path, said = list(sys.path), io.StringIO()
    sys.path.insert(0, str(EXAMPLES / name))
    try:
        config = _with_two_layers(EXAMPLES / CONFIG_OF.get(name, name) / "config.json", folder)
        example = importlib.import_module(name)
        corpus = [Path(importlib.import_module("argparse").__file__)]  # of the standard library, and short
        with (
            mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder)),
            mock.patch.object(example, "find_files", return_value=corpus, create=name == "vit"),
            mock.patch("meshwright.shutdown_distributed"),
            mock.patch.object(training, "shutdown_distributed"),
        ):
            seed_everything(0)  # a living rank has been seeded before
            with contextlib.redirect_stdout(said):
                example.main(["--config", str(config), "--steps", str(STEPS), *SCRIPT[name], *_saving(name, folder)])
            trained = _of_file(name, folder, corpus[0], config)
    finally:
        sys.path[:] = path
        sys.modules.pop(name, None)
    return [float(each) for each in re.findall(r"^step .* loss (\S+)", said.getvalue(), re.MULTILINE)], trained


def _saving(name: str, folder: Path) -> list[str]:
    return ["--save", str(folder / ("adapters" if name == "lora" else f"{name}.pt"))]


def _with_two_layers(file: Path, folder: Path) -> Path:
    """A copy of a config, of a smaller model; every rank has its own."""
    changed = folder / f"config-{rank()}" / "config.json"
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 2}))
    return changed


def _of_file(name: str, folder: Path, corpus: Path, config: Path) -> list[float]:
    changes = (*CHANGES[name], f"run.steps={STEPS}", f"run.batch_size={BATCH}", "optimizer.warmup_steps=0")
    changes += ("run.trackers=[]", "run.device=cpu")
    changes += (f"model.args.config={config}",) if name == "lora" else (f"model.source=hf:{config}",)
    changes += (f"data.source={corpus}",) if name in ("llama", "lora") else ()
    seed_everything(0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        training.train(Options(EXAMPLES / name / f"{name}.toml", out=folder / "run", changes=changes))
    found = losses(folder / "run")
    return [found[0], found[-1]]

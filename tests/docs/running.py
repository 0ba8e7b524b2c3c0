"""Runs the python blocks of pages one after the other, as a reader would, on tiny models in a scratch directory."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import meshwright as mw
from meshwright.runtime import gather_objects, rank, synchronize, world_size
from meshwright.strategy.value import METHOD_CONFIGS
from tests import tiny

GPT2_FOLDER = tiny._path.parent
LENGTH, VOCAB = tiny.SEQ_LEN, 64  # two tensor ranks divide it


def small():
    """The GPT of the examples, small; widths that 8 bits can multiply."""
    return tiny.gpt2.GPT2(vocab_size=VOCAB, seq_len=LENGTH, dim=32, num_layers=2, num_heads=2)


class MyNorm(nn.LayerNorm):
    """What a reader replaces."""


class MyFastNorm(nn.LayerNorm):
    """What it is replaced by."""


def llama():
    """What users of ColossalAI train: a model of transformers, which says itself how it is split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB, num_key_value_heads=2, use_cache=False))


def chatty():
    """A model that reads rows of conversations; they and its folder with a tokenizer lie in the scratch directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.cli.test_finetune import chats
    from tests.data.test_chat import tokenizer

    if rank() == 0:
        tokenizer(Path("path/to/folder"))
        Path("chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats(400)))
    synchronize()
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=272, num_key_value_heads=2))


def moe():
    from tests.methods.expert_runs import build

    return build("stacked")


def given(code):
    """What the prose around a fragment takes for granted: a model that nobody has touched, data, a loss."""
    model = moe() if "expert_parallel" in code else llama() if "Booster" in code else small()
    batches = [torch.randint(0, VOCAB, (4, LENGTH)) for _ in range(2)]
    return {
        "AdamW": torch.optim.AdamW, "Block": tiny.gpt2.Block, "MyFastNorm": MyFastNorm, "MyNorm": MyNorm,
        "batch": batches[0], "criterion": tiny.loss_func, "dataloader": batches,
        "dataset": torch.randint(0, VOCAB, (16, LENGTH)), "device": torch.device("cpu"),
        "loss_func": tiny.loss_func, "model": model, "mw": mw, "optimizer": torch.optim.AdamW(model.parameters()),
        "prepare_input": lambda data, device: data.to(device), "torch": torch,
    }  # fmt: skip


class _Read(ast.NodeTransformer):
    """Every ``strategy = …`` is read as a strategy, also where nothing applies it."""

    def visit_Assign(self, node):
        if any(getattr(target, "id", "") == "strategy" for target in node.targets):
            node.value = ast.Call(ast.Name("_strategy", ast.Load()), [node.value], [])
        return ast.fix_missing_locations(node)


def run_block(block, names):
    """Runs one block; one whose title is a file's name is written there, for the next one to import."""
    if block.title.endswith(".py"):
        Path(block.title).write_text(block.code)
        return
    torch.manual_seed(0)  # a script of its own: what ran before it has left each replica with draws of its own
    names |= given(block.code)
    if "ChatEncoder" in block.code:
        names["model"] = chatty()
    names["_strategy"] = mw.Strategy
    tree = _Read().visit(ast.parse(block.code, block.where))
    exec(compile(tree, block.where, "exec"), names)


def run_pages(listed):
    """Runs the blocks of every page in a scratch directory of all ranks; what went wrong, and what was printed."""
    failures, printed = {}, {}
    for page, found in listed.items():
        output = io.StringIO()
        with surroundings(), contextlib.redirect_stdout(output):
            try:
                names = {"__name__": "page"}
                for block in found:
                    run_block(block, names)
            except Exception:
                failures[page] = f"{block.where}: {traceback.format_exc()}"
        printed[page] = output.getvalue()
        names = None
        gc.collect()
    return failures, printed


@contextlib.contextmanager
def surroundings():
    """An empty directory, examples that can be imported, small GPTs, sensible batches, and no GPU."""
    before, modules, methods = Path.cwd(), set(sys.modules), set(METHOD_CONFIGS)
    folder = gather_objects(tempfile.mkdtemp() if rank() == 0 else None)[0] if world_size() > 1 else tempfile.mkdtemp()
    batches = {"dataloader_args": {"batch_size": 8}}
    sys.path[:0] = [folder, str(GPT2_FOLDER)]
    sys.modules["gpt2"] = tiny.gpt2
    os.chdir(folder)
    try:
        with (
            mock.patch("torch.cuda.is_available", return_value=False),
            mock.patch.object(tiny.gpt2, "GPT2", functools.partial(tiny.gpt2.GPT2, dim=32, num_layers=2, num_heads=2)),
            mock.patch.object(mw, "accelerate", _with_defaults(mw.accelerate, batches)),
            mock.patch.object(mw, "plan", _with_defaults(mw.plan, {"strategy": ["fsdp"]})),  # a prediction, no search
            mock.patch.object(mw, "launch_from_torch", functools.partial(mw.launch_from_torch, seed=0)),
            mock.patch("meshwright.runtime.torch_internals.compilers.missing_compiler", return_value=""),
        ):
            yield
    finally:
        os.chdir(before)
        del sys.path[:2]
        synchronize()
        shutil.rmtree(folder, ignore_errors=True)
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) and str(sys.modules[name].__file__).startswith(folder):
                del sys.modules[name]
        for name in set(METHOD_CONFIGS) - methods:
            del METHOD_CONFIGS[name]


def _with_defaults(function, defaults):
    """Fragments leave out what they do not speak of, the size of a batch first of all."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        return function(*args, **{**defaults, **kwargs})

    return called

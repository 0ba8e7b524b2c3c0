"""Validation by the moving average, the best checkpoint and an early end, where ranks hold other parts of the model."""

import json

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.cli.eval_and_generate import EvalOptions, Trained, evaluate
from tests.cli import test_finetune
from tests.cli.helpers import as_program, losses, train_as_rank
from tests.data.test_chat import tokenizer

LAYOUTS = {
    "pipeline": ("model", "parallel_mode(pipeline=2) + pipeline_parallel + gradient_accumulation(2)"),
    "expert": ("mixtral", "parallel_mode(expert=2) + expert_parallel"),
    "experts in zero": ("mixtral", "parallel_mode(expert=2) + expert_parallel + fsdp"),
    "tensor": ("model", "parallel_mode(tensor=2) + tensor_parallel"),
    "context": ("model", "parallel_mode(context=2) + context_parallel"),
}
EVAL = """
[eval]
source = "val.jsonl"
every = 2
ema = true
keep_best = true
patience = 2
"""


def mixture(folder):
    """A folder with a mixture of experts and a tokenizer."""
    tokenizer(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    test_finetune.project(folder, EVAL)
    mixture(folder / "mixtral")
    return folder


def trained(folder, out, model, strategy, lr=3e-3):
    changes = ("run.steps=10", f"optimizer.lr={lr}", f'model.source="hf:{model}"')
    methods = f"strategy.methods={json.dumps(strategy + ' + ema(decay=0.5)')}"
    return train_as_rank(folder / "sft.toml", *changes, methods, out=folder / out)


def validations(run_dir):
    return [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]


def evaluated(folder, path):
    with as_program(folder) as said:
        evaluate(EvalOptions(Trained(folder / path, None, None, (), False), (), None, True))
    return json.loads(said.getvalue())


_LONG = [pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS if each != "pipeline"]


@pytest.mark.parametrize("layout", ["pipeline", *_LONG])
def test_the_average_and_the_best_are_those_of_one_process(ranks, folder, layout):
    model, strategy = LAYOUTS[layout]
    if not (folder / model / "done").exists():
        ranks(1).run(trained, folder, f"{model}-alone", model, "gradient_accumulation(1)")
        (folder / model / "done").touch()
    ranks(2).run(trained, folder, layout, model, strategy)
    alone, found = validations(folder / f"{model}-alone"), validations(folder / layout)
    assert [each["step"] for each in found] == [each["step"] for each in alone]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in alone], rel=1e-4)
    assert len(losses(folder / layout)) == 10
    best = min(found, key=lambda each: each["loss"])
    assert [path.name for path in (folder / layout / "best").glob("step-*")] == [f"step-{best['step']:08}"]
    again = ranks(1).run(evaluated, folder, f"{layout}/best")[0]
    assert again["step"] == best["step"]
    assert again["sources"]["val"]["loss"] == pytest.approx(best["loss"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_gets_no_better_ends_early(ranks, folder, layout):
    model, strategy = LAYOUTS[layout]
    said, _ = ranks(2).run(trained, folder, f"{layout}-resting", model, strategy, 0.0)
    assert "the run ends here" in said
    assert len(losses(folder / f"{layout}-resting")) == 6  # two validations after the first were no lower

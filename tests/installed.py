"""Try a wheel as its users do: ``python tests/installed.py WHEEL`` installs it into an empty environment, and runs it.

Nothing of the checkout is in reach there: what the wheel forgot to pack is missed. Then the recipe of README.md is
followed word for word, with a small model and trackers that have no network: a full and a LoRA fine-tuning.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(257, 32)
        self.head = torch.nn.Linear(32, 257)
    def forward(self, batch):
        return self.head(self.token(batch))
"""
RUN = """
[model]
source = "net:Net"
[data]
source = "text.txt"
seq_len = 32
[run]
nproc = 2
steps = 4
batch_size = 4
"""
FOLDER = r"""
import json, pathlib, random, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

def chat(rng, answer):
    a, b = rng.randrange(20), rng.randrange(20)
    asked = {"role": "user", "content": f"What is {a}+{b}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"{answer} {a + b}."}]}

rng = random.Random(0)
for name, count, answer in (("others", 600, "Together that makes"), ("chats", 600, "It is"), ("test", 40, "It is")):
    lines = [json.dumps(chat(rng, answer)) + "\n" for _ in range(count)]
    pathlib.Path(f"{name}.jsonl").write_text("".join(lines))
own = Tokenizer(models.BPE())
own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|im_start|>", "<|im_end|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
own.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet))
template = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=own, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template
)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=1, pad_token_id=1, **sizes)
LlamaForCausalLM(config).save_pretrained("folder")
tokenizer.save_pretrained("folder")
"""
# The weights of the newest checkpoint in transformers' own model, beside the exported folder.
SAME = """
import pathlib, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from meshwright.store.pretrained import checkpoint_tensors

run, exported, base = map(pathlib.Path, sys.argv[1:])
ids = AutoTokenizer.from_pretrained(exported)("What is 2+2?", return_tensors="pt")["input_ids"]
(*_, checkpoint) = sorted((run / "checkpoints").glob("step-*"))
stored = {
    name: each.read(tuple(slice(0, size) for size in each.shape), each.dtype)
    for name, each in checkpoint_tensors(checkpoint)[0].items()
}
plain = AutoModelForCausalLM.from_pretrained(base)
before = plain(ids).logits
if any("lora_" in name for name in stored):
    from peft import LoraConfig, get_peft_model
    plain = get_peft_model(plain, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    missing, extra = plain.load_state_dict(stored, strict=False)
    assert not extra and not any("lora_" in name for name in missing), (missing, extra)
else:
    plain.load_state_dict(stored, strict=False)
with torch.no_grad():
    found, expected = AutoModelForCausalLM.from_pretrained(exported)(ids).logits, plain.eval()(ids).logits
assert torch.allclose(found, expected, atol=1e-5), (found - expected).abs().max()
assert not torch.allclose(found, before, atol=1e-2), "nothing was learned"
print("equal logits")
"""
CURVE = """
import pathlib, sys
from mlflow import MlflowClient
run = pathlib.Path(sys.argv[1])
# mlflow-skinny keeps files; mlflow, which is hundreds of MB more, a database.
place = run.absolute() / "mlflow.db"
client = MlflowClient(f"sqlite:///{place}" if place.exists() else (run.absolute() / "mlruns").as_uri())
(found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
print([each.value for each in client.get_metric_history(found.info.run_id, "eval/loss")])
"""


class Place:
    """A folder outside of the checkout, with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = ("PYTHON", "MLFLOW_", "WANDB_")
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self._environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "MLFLOW_ALLOW_FILE_STORE": "true"}
        venv.create(folder / "env", with_pip=True)

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment, show what it writes, and return its standard output."""
        print("$", program, *(each if "\n" not in each else "…" for each in arguments), flush=True)
        command = [str(self.folder / "env" / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self._environment, text=True, stdout=subprocess.PIPE)
        print(done.stdout, flush=True)
        done.check_returncode()
        return done.stdout

    def install(self, *packages: str) -> None:
        """Install packages, with torch as it is pinned: another build of it would be gigabytes."""
        pinned = re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pinned is not None, "constraints.txt pins no torch"
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", pinned[0], *packages)


def first_steps(place: Place) -> None:
    """Run the ways in that need no data, models or devices."""
    (place.folder / "net.py").write_text(MODEL)
    (place.folder / "run.toml").write_text(RUN)
    (place.folder / "text.txt").write_text("All that a model reads here is this sentence. " * 400)
    place.run("meshwright", "--version")
    place.run("meshwright", "plan", "--model", "llama-3-8b", "--cluster", "h100x64", "--batch-size", "256")
    place.run("meshwright", "train", "run.toml", "--out", "runs/one")
    code = "import meshwright as mw; print(mw.plan('gpt2', 'a100-80x8', global_batch=64)[0].strategy)"
    place.run("python", "-c", code)


def recipe(place: Place) -> None:
    """Follow README.md: fine-tune a folder on conversations, whole and by adapters, with two processes."""
    place.run("python", "-c", FOLDER)
    toml = re.search(r"```toml\n(# sft\.toml.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert toml is not None, "README.md has no sft.toml"
    text = toml[1].replace("path/to/folder", "folder")
    (place.folder / "sft.toml").write_text(text)
    # Adapters teach the trained model to answer in other words; random embeddings and heads could not be adapted.
    adapted = text.replace("hf:folder", "hf:sft").replace("chats.jsonl", "others.jsonl")
    (place.folder / "lora.toml").write_text(f"{adapted}[adapter]\nr = 16\n")
    place.run("meshwright", "plan", "--model", "hf:folder", "--cluster", "h100x8", "--batch-size", "64", "--top", "2")
    for name, base in (("sft", "folder"), ("lora", "sft")):
        _fine_tune(place, name, base)


def _fine_tune(place: Place, name: str, base: str) -> None:
    out = f"runs/{name}"
    keys = ["optimizer.lr=0.005", "eval.every=10", 'eval.samples=["What is 2+2?"]', 'run.trackers=["wandb","mlflow"]']
    words = [word for key in keys for word in ("--set", key)]
    train = ["train", f"{name}.toml", "--nproc", "2", "--out", out, "--resume", "auto", *words]
    told = place.run("meshwright", *train, "--steps", "20")
    assert told.count("Plan: ") == 1, told
    place.run("meshwright", *train, "--steps", "30")  # the same line goes on
    lines = (place.folder / out / "eval.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 3, losses
    assert losses[-1] < losses[0] - 0.1, losses

    written = [json.loads(line) for line in (place.folder / out / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in written] == [10, 20, 30], written
    assert len(list((place.folder / out).rglob("samples*.table.json"))) == 3, "W&B has no samples"
    assert {path.name for path in (place.folder / out).rglob("step-*.txt")} == {
        f"step-{step:08}.txt" for step in (10, 20, 30)
    }, "MLflow has no samples"
    curve = json.loads(place.run("python", "-c", CURVE, out).splitlines()[-1])
    assert [round(each, 5) for each in curve] == [round(each, 5) for each in losses], (curve, losses)
    logs = b"".join(file.read_bytes() for file in (place.folder / out / "wandb").rglob("*.wandb"))
    assert logs.count(b"eval/loss") >= len(losses), "W&B has no curve"

    place.run("meshwright", "eval", out, "--data", "test.jsonl", "--nproc", "2")
    place.run("meshwright", "generate", out, "--prompt", "What is 2+2?", "--max-new-tokens", "8")
    place.run("meshwright", "checkpoint", "export", out, name, *(["--merged"] if name == "lora" else []))
    assert "equal logits" in place.run("python", "-c", SAME, out, name, base)


def main(wheel: Path) -> None:
    """Install a wheel, and try it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        place.install(str(wheel))
        first_steps(place)
        place.install(f"{wheel}[hf,data,adapters]", "wandb", "mlflow-skinny")
        recipe(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

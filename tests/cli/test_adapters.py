"""The table ``[adapter]``: LoRA around a pretrained folder: trained, resumed, evaluated, exported, merged, planned."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.adapters import merged, parse_lora, with_adapters
from meshwright.cli.train_config import AdapterTable
from meshwright.cli.train_options import parse_config
from meshwright.errors import ConfigError, ModelError
from meshwright.strategy import Strategy
from tests.cli import test_finetune
from tests.cli.helpers import losses, train_as_rank
from tests.cli.test_eval_and_generate import evaluated
from tests.pool import RemoteFailure

peft = pytest.importorskip("peft")
SMALL = "gpt:layers=2,hidden=768,heads=12,vocab=50257,seq=64"
TABLE = '\n[adapter]\nr = 4\nmodules_to_save = ["lm_head"]\n\n[eval]\nsource = "val.jsonl"\nevery = 4\n'


def train(folder, out, steps, *changes):
    torch.manual_seed(0)
    train_as_rank(folder / "sft.toml", *changes, out=folder / out, steps=steps)


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    """A run on two ranks, of which one rank takes the last steps; and one on one rank."""
    folder = tmp_path_factory.mktemp("adapters")
    test_finetune.project(folder, TABLE)
    constant = 'run.resume="auto"'
    ranks(2).run(train, folder, "two", 2, constant, 'strategy.methods="fsdp"')
    ranks(1).run(train, folder, "two", 4, constant)
    ranks(1).run(train, folder, "one", 4)
    return folder


def test_losses_do_not_depend_on_the_ranks_or_on_a_resume(folder):
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    assert losses(folder / "one")[-1] < losses(folder / "one")[0]
    (*_, checkpoint) = sorted((folder / "one" / "checkpoints").iterdir())
    stored = json.loads((checkpoint / "state.json").read_text())["tensors"]
    assert any("lora_A" in name for name in stored)
    assert all("lora_" in name or "lm_head" in name for name in stored)  # the base is not saved


def test_adapters_leave_alone_or_merged_into_their_base(ranks, folder):
    for words in (["adapters-3.1"], ["merged-3.1", "--merged"]):
        result = CliRunner().invoke(
            app, ["checkpoint", "export", str(folder / "one"), str(folder / words[0]), *words[1:]]
        )
        assert result.exit_code == 0, result.output
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapters-3.1")
    whole = AutoModelForCausalLM.from_pretrained(folder / "merged-3.1")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder / "model")(ids).logits
        logits = whole(ids).logits
        assert torch.allclose(logits, adapted(ids).logits, atol=1e-5)
        assert not torch.allclose(logits, plain, atol=1e-3)
    assert (folder / "merged-3.1" / "tokenizer.json").is_file()
    expected = json.loads((folder / "one" / "eval.jsonl").read_text().splitlines()[-1])["loss"]
    assert test_finetune._alone(whole, folder) == pytest.approx(expected, rel=1e-5)
    found, *_ = ranks(2).run(evaluated, folder, "two", (), "fsdp")
    assert found["sources"]["val"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_base_whose_config_names_code_from_elsewhere_is_not_merged(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "attn_implementation": "owner/repo"}')
    with pytest.raises(ModelError, match="owner/repo"), merged(tmp_path / "out", tmp_path, None):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


def test_plans_count_what_is_trained(folder):
    Strategy(["fsdp"]).save(folder / "fsdp.json")
    words = ["plan", "--model", f"hf:{folder / 'model'}", "--cluster", "a100-40x2", "--global-batch", "4"]
    words += ["--seq", "64", "--strategy", str(folder / "fsdp.json"), "--json"]
    found = []
    for more in ([], ["--lora", "r=4,targets=q_proj+v_proj"]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["plans"][0]["memory"]["ranks"][0]["moments"]["update"])
    full, lora = found
    trained = 2 * (4 * (32 + 32) + 4 * (32 + 16))  # of two layers: A and B of q and v, in fp32, half of them on a rank
    assert lora["gradients"] == trained * 4 // 2
    assert lora["optimizer"] == 2 * lora["gradients"] + 8 * 4 < full["optimizer"] / 10  # 8 tensors count their steps


def test_a_search_knows_what_is_frozen():
    """Formulas train all of a model, and found nothing but offloading for what fits as it is."""
    words = ["plan", "--model", SMALL, "--cluster", "a100-40x2", "--batch-size", "4", "--seq", "64", "--lora", "r=4"]
    words += ["--exclude", "compile", "--exclude", "context_parallel", "--exclude", "pipeline_parallel"]
    found = CliRunner().invoke(app, [*words, "--memory-limit", "500 MiB", "--top", "1", "--json"])
    assert found.exit_code == 0, found.output
    (plan,) = json.loads(found.stdout)["plans"]
    assert "offload" not in plan["summary"]
    assert not any("formulas" in gap for gap in plan["gaps"])


def test_a_base_in_half_precision_takes_half_and_a_plan_over_another_says_so():
    words = ["plan", "--model", SMALL, "--cluster", "a100-40x2", "--batch-size", "4", "--seq", "64", "--lora", "r=4"]
    words += ["--strategy", "fsdp"]
    runs = [CliRunner().invoke(app, [*words, *more]) for more in ([], ["--dtype", "bf16"], ["--dtype", "int8"])]
    assert ["The frozen base is in fp32, 201" in each.output for each in runs] == [True, False, False]
    assert [each.exit_code for each in runs] == [0, 0, 1]
    assert "--dtype is no type" in runs[2].output
    held = [
        json.loads(CliRunner().invoke(app, [*words, *more, "--json"]).stdout)["plans"][0]["building"]["device_bytes"]
        for more in ([], ["--dtype", "bf16"])
    ]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("GPT2LMHeadModel", "CAUSAL_LM"), ("T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
        ("WhisperForConditionalGeneration", None), ("LlamaForSequenceClassification", None),
    ],
)  # fmt: skip
def test_peft_is_told_what_a_model_makes_of_what(kind, task):
    """It calls models of text by these names of arguments; Whisper takes others."""
    made = getattr(transformers, kind)
    with torch.device("meta"):
        adapted = with_adapters(made(made.config_class()), AdapterTable(r=2))
    assert adapted.peft_config["default"].task_type == task


def test_what_lora_says_is_read():
    assert parse_lora("r=16") == AdapterTable(r=16)
    given = parse_lora("r=8, alpha=4, dropout=0.1, targets=q_proj+v_proj, rank_stabilized=true")
    assert given == AdapterTable(r=8, alpha=4.0, dropout=0.1, targets=["q_proj", "v_proj"], rank_stabilized=True)
    for text, words in (("alpha=3", "no r"), ("r=x", "'r=x'"), ("rank=3", "'rank=3'"), ("r=4,rank_stabilized=5", "=5")):
        with pytest.raises(ConfigError, match=words):
            parse_lora(text)


def test_adapters_need_a_rank_targets_and_modules(ranks, folder):
    with pytest.raises(ConfigError, match="r, the rank"):
        parse_config({"model": {"source": "hf:x"}, "adapter": {"alpha": 3.0}}, "x.toml")
    found = parse_config({"model": {"source": "hf:x"}, "adapter": {"r": 3}}, "x.toml")
    assert found.run.save_frozen is False
    explicit = parse_config({"model": {"source": "hf:x"}, "adapter": {"r": 3}, "run": {"save_frozen": True}}, "x.toml")
    assert explicit.run.save_frozen is True
    with pytest.raises(RemoteFailure, match=r"no adapters can be put around this model.*q_proj"):
        ranks(1).run(train, folder, "absent", 1, 'adapter.targets=["absent"]')
    named = ["plan", "--model", SMALL, "--cluster", "a100-40x2", "--batch-size", "4", "--strategy", "fsdp", "--json"]
    results = [CliRunner().invoke(app, [*named, *more]) for more in (["--lora", "r=4"], [])]
    plans = [json.loads(each.stdout)["plans"][0]["memory"]["ranks"][0]["moments"]["update"] for each in results]
    assert 0 < 20 * plans[0]["optimizer"] < plans[1]["optimizer"]  # a model by its name is a config like others


FORMS = {"dora": "adapter.dora=true", "four bits": "adapter.bits=4", "rslora": "adapter.rank_stabilized=true"}
LAYOUTS = {"data": "parallel_mode", "zero2": "zero2", "fsdp": "fsdp"}


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("dora", "fsdp"),
        ("four bits", "fsdp"),
        pytest.param("four bits", "data", marks=pytest.mark.long),
        pytest.param("four bits", "zero2", marks=pytest.mark.long),
        pytest.param("dora", "data", marks=pytest.mark.long),
        pytest.param("rslora", "fsdp", marks=pytest.mark.long),
    ],
)
def test_other_adapters_train_as_one_process_does_on_any_layout(ranks, folder, form, layout):
    if form == "four bits":
        pytest.importorskip("bitsandbytes")
    name, changes = f"{form}-{layout}".replace(" ", "-"), (FORMS[form], 'run.resume="auto"')
    ranks(1).run(train, folder, f"{form}-one", 6, *changes)
    ranks(2).run(train, folder, name, 3, *changes, f'strategy.methods="{LAYOUTS[layout]}"')
    ranks(2).run(train, folder, name, 6, *changes, f'strategy.methods="{LAYOUTS[layout]}"')
    assert losses(folder / name) == pytest.approx(losses(folder / f"{form}-one"), rel=1e-5)
    assert losses(folder / name)[-1] < losses(folder / name)[0]
    if (form, layout) == ("dora", "fsdp"):
        words = ["checkpoint", "export", str(folder / name), str(folder / "dora-merged"), "--merged"]
        assert CliRunner().invoke(app, words).exit_code == 0
        whole = AutoModelForCausalLM.from_pretrained(folder / "dora-merged")
        (found, *_) = ranks(2).run(evaluated, folder, name, (), "fsdp")
        assert test_finetune._alone(whole, folder) == pytest.approx(found["sources"]["val"]["loss"], rel=1e-5)
    assert losses(folder / name)[2] != pytest.approx(losses(folder / "one")[2], rel=1e-6)


# As inductor does, this decomposes operators and saves as little as it can.
COMPILED = ("compile", {"backend": "aot_eager_decomp_partition"})


def bytes_of_four_bits(folder, strategy):
    """What a step in 4 bits is predicted to hold, and holds; the reference: the same values, kept as they are."""
    from meshwright import accelerate
    from meshwright.nn.four_bit import FourBitLinear, dequantized

    ids = torch.arange(64).reshape(4, 16) % 250
    found = []
    for is_packed in (True, False):
        torch.manual_seed(5)
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        model = with_adapters(base, AdapterTable(r=4, bits=4))
        if not is_packed:
            for module in list(model.modules()):
                for key, child in list(module.named_children()):
                    if isinstance(child, FourBitLinear):
                        sizes = child.out_features, child.in_features, child.num_scales
                        plain = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                        plain.weight = torch.nn.Parameter(dequantized(child.weight, sizes, torch.float32), False)
                        setattr(module, key, plain)
        job = accelerate(
            model, torch.optim.AdamW, [{"input_ids": row, "labels": row} for row in ids], strategy=strategy,
            optim_args={"lr": 1e-2}, model_input_format="unpack_dict", dataloader_args={"batch_size": 4},
        )  # fmt: skip
        batch = next(iter(job.dataloader))
        result, measured = job.measured_step(batch)
        found.append(
            ([float(result.loss), *(float(job.step(batch).loss) for _ in range(4))], job.plan.memory, measured)
        )
    return found


STRATEGIES = {
    "data": ["parallel_mode"],
    "fsdp": ["fsdp"],
    "compiled": ["fsdp", COMPILED],
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_base_in_four_bits_computes_with_its_rounded_values_and_is_predicted(ranks, folder, strategy):
    pytest.importorskip("bitsandbytes")
    for packed, plain in ranks(2).run(bytes_of_four_bits, folder, strategy):
        assert packed[0] == pytest.approx(plain[0], rel=1e-5)
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(packed[1], name) == packed[2][name], name
        assert packed[1].parameters < 0.65 * plain[1].parameters  # the embedding and the head stay
        assert packed[1].activations == pytest.approx(packed[2]["activations"], rel=0.03)


def test_forms_of_adapters_that_do_not_go_together_are_refused(ranks, folder):
    with pytest.raises(ConfigError, match="dora or bits, not both"):
        parse_config({"model": {"source": "hf:x"}, "adapter": {"r": 3, "dora": True, "bits": 4}}, "x.toml")
    with pytest.raises(ConfigError, match="Input should be 4"):
        parse_lora("r=3,bits=8")
    assert parse_lora("r=3,bits=4,dora=false") == AdapterTable(r=3, bits=4)
    with pytest.raises(RemoteFailure, match=r"(?s)does not fit the model.*missing: "):  # it holds adapters alone
        ranks(1).run(train, folder, "none", 2, "adapter.bits=4", f'model.weights="{folder / "one"}"')
    pytest.importorskip("bitsandbytes")
    tensor = 'strategy.methods="parallel_mode(tensor=2) + tensor_parallel"'
    for form in ("adapter.bits=4", "adapter.dora=true"):
        with pytest.raises(RemoteFailure, match="cannot be split"):
            ranks(2).run(train, folder, "none", 2, form, tensor, "adapter.modules_to_save=[]")

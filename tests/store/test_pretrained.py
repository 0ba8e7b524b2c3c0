"""Slices of stored weights, to the bit what ``from_pretrained`` gives, and every error before anything is read."""

import copy
import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import meshwright as mw
from meshwright.errors import CheckpointError
from meshwright.runtime import rank
from meshwright.store import save, stored_tensors
from meshwright.store.pretrained import StoredWeights, find_together
from tests.store import runs
from tests.store.counting import counting

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
CASES = {
    "gpt2": ("GPT2LMHead", {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 12}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "tied": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 50, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 16, "patch_size": 4}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 5}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS, "head_dim": 6}),
}


def build(case, device="cpu", **changes):
    """A model by its name in CASES, or of another class with the same config."""
    import transformers

    name, sizes = CASES[case]
    cls = getattr(transformers, changes.pop("cls", {"GPT2LMHead": "GPT2LMHeadModel"}.get(name, name)))
    torch.manual_seed(3)
    with torch.device(device):
        return cls(
            cls.config_class(
                **{key: size for key, size in (sizes | changes).items() if key != "vocab_size" or case != "vit"}
            )
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(case)`` is what save_pretrained wrote, in several files; not to be changed."""
    made = {}

    def folder(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            build(case).save_pretrained(made[case], max_shard_size="8KB")
        return made[case]

    return folder


def everything(tensor):
    return tuple(slice(0, size) for size in tensor.shape)


def parts(shape, generator):
    """A random part: of every dim all, a stretch (which may be empty), or some positions in any order."""
    for size in shape:
        kind, first = (int(torch.randint(0, n, (), generator=generator)) for n in (3, max(size, 1)))
        end = int(torch.randint(first, size + 1, (), generator=generator))
        positions = torch.randperm(size, generator=generator)[first:end]
        yield (slice(0, size), slice(first, end), positions)[kind]


def cut(tensor, index):
    for dim, each in enumerate(index):
        tensor = tensor[(slice(None),) * dim + (each,)]
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_slices_are_those_of_from_pretrained(folders, case, dtype):
    assert len(list(folders(case).glob("*.safetensors"))) > 2
    meta = build(case, "meta")
    expected = type(meta).from_pretrained(folders(case), dtype=dtype).state_dict()
    weights = StoredWeights.open(folders(case), meta)
    assert weights.names == expected.keys()
    assert (weights.missing, weights.unused) == ((), ())
    generator = torch.Generator().manual_seed(5)
    for name, value in expected.items():
        assert name in weights
        for index in (everything(value), *(tuple(parts(value.shape, generator)) for _ in range(4))):
            assert torch.equal(weights.read(name, index, value.dtype), cut(value, index)), (name, index)
    whole = {id(each): each for each in meta.state_dict(keep_vars=True).values()}
    assert weights.num_bytes == sum(each.numel() * 4 for each in whole.values())
    weights.close()


@pytest.fixture
def counted(monkeypatch):
    """Bytes of every read or window, and files opened for reading."""
    read, opened = [], []
    file, open_file = stored_tensors.SafetensorsFile, os.open
    read_bytes, window = file.read_bytes, file.window
    count = lambda file, at, out: read.append(out.numel() * out.element_size()) or read_bytes(file, at, out)  # noqa: E731
    monkeypatch.setattr(file, "read_bytes", count)
    monkeypatch.setattr(file, "window", lambda file, at, size: read.append(size) or window(file, at, size))
    monkeypatch.setattr(stored_tensors.os, "open", lambda *given: opened.append(given[0]) or open_file(*given))
    return read, opened


def test_only_the_bytes_needed_are_read(folders, counted):
    read, opened = counted
    weights = StoredWeights.open(folders("mixtral"), build("mixtral", "meta"))
    assert not read
    embedding = "model.embed_tokens.weight"
    assert weights.read(embedding, (slice(7, 30), slice(0, 24)), torch.float32).shape == (23, 24)
    assert read == [23 * 24 * 4]  # rows together in one read
    del read[:]
    positions = torch.tensor([3, 4, 5, 40, 41, 9])
    weights.read(embedding, (positions, slice(0, 24)), torch.float32)
    assert read == [3 * 24 * 4, 2 * 24 * 4, 24 * 4]
    del read[:]
    # Of five experts two, and of each half of either projection.
    index = (slice(1, 3), torch.cat([torch.arange(0, 25), torch.arange(50, 75)]), slice(0, 24))
    weights.read("model.layers.1.mlp.experts.gate_up_proj", index, torch.float32)
    assert sum(read) == 2 * 2 * 25 * 24 * 4
    assert len(opened) == len(set(opened))
    weights.close()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.rand(5, 9000))
        self.deep = nn.Parameter(torch.rand(3, 4, 5, 6))
        self.short = nn.Parameter(torch.rand(6, 7).half())
        self.one = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.register_buffer("counts", torch.arange(6))
        self.register_buffer("flags", torch.arange(6) % 2 == 0)
        self.register_buffer("turns", torch.randn(3, dtype=torch.complex64))


def test_every_shape_and_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensors, "_WINDOW_BYTES", 64)
    torch.manual_seed(2)
    model = Odd()
    save_file(model.state_dict(), tmp_path / "odd.safetensors")
    weights = StoredWeights.open(tmp_path / "odd.safetensors", model)
    generator = torch.Generator().manual_seed(7)
    for name, value in model.state_dict().items():
        for dtype in (value.dtype, torch.float64) if value.is_floating_point() else (value.dtype,):
            for index in (everything(value), *(tuple(parts(value.shape, generator)) for _ in range(12))):
                assert torch.equal(weights.read(name, index, dtype), cut(value.to(dtype), index)), (name, index)


# --- Names that transformers converts


def test_a_base_models_folder_fills_a_model_with_a_head(tmp_path):
    build("bert", cls="BertModel").save_pretrained(tmp_path)
    head = build("bert", "meta")
    with pytest.raises(mw.CheckpointError, match=r"missing: cls\.predictions.*allow_missing_weights") as error:
        StoredWeights.open(tmp_path, head)
    assert "bert." not in str(error.value).partition("missing:")[2].partition("What to do")[0]
    weights = StoredWeights.open(tmp_path, head, allow_missing=True)
    expected = type(head).from_pretrained(tmp_path).state_dict()
    assert {name for name in weights.missing if name.startswith("bert.")} == set()
    assert all(name.startswith("cls.") for name in weights.missing)
    assert weights.names | set(weights.missing) == expected.keys()
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(weights.read(name, everything(expected[name]), torch.float32), expected[name])
    assert weights.unused == ("pooler.dense.bias", "pooler.dense.weight")


def test_a_folder_with_a_head_fills_the_base_model(folders):
    base = build("llama", "meta", cls="LlamaModel")
    weights = StoredWeights.open(folders("llama"), base)
    expected = type(base).from_pretrained(folders("llama")).state_dict()
    assert weights.names == expected.keys()
    assert weights.unused == ("lm_head.weight",)
    for name, value in expected.items():
        assert torch.equal(weights.read(name, everything(value), torch.float32), value)


def test_another_head_is_left_and_a_new_one_missing(folders):
    model = build("bert", "meta", cls="BertForSequenceClassification")
    weights = StoredWeights.open(folders("bert"), model, allow_missing=True)
    assert {"classifier.weight", "classifier.bias"} < set(weights.missing)
    assert "cls.predictions.bias" in weights.unused


def test_old_names_are_converted(folders, tmp_path):
    state = {}
    for file in folders("bert").glob("*.safetensors"):
        state |= load_file(file)
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for n, v in state.items()
    }
    assert old.keys() != state.keys()
    save_file(old | {"bert.embeddings.position_ids": torch.arange(4)}, tmp_path / "model.safetensors")
    model = build("bert")
    weights = StoredWeights.open(tmp_path, model)
    for name, value in model.state_dict().items():
        assert torch.equal(weights.read(name, everything(value), value.dtype), value)


def test_operations_that_are_no_stack_read_their_sources_whole(tmp_path, counted):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, Interleave, PermuteForRope, Transpose, WeightConverter

    from meshwright.store.conversions import plan_as_transformers
    from meshwright.store.stored_tensors import InFile, SafetensorsFile

    # Rules of no installed model: the model says only what the functions of transformers ask it.
    torch.manual_seed(1)
    state = {
        "a.qkv": torch.rand(12, 5),
        "b.old": torch.rand(8, 6),
        "c.old": torch.rand(3, 4),
        "d.old": torch.rand(6, 2),
    }
    save_file(state, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    rules = [
        WeightConverter(".qkv", [".q", ".k", ".v"], [Chunk(dim=0)]),
        WeightConverter("b.old", "b.new", [PermuteForRope()]),
        WeightConverter("c.old", "c.new", [Transpose(0, 1)]),
        WeightConverter("d.old", "d.new", [Interleave(dim=0)]),
    ]
    model = type("Model", (), {"base_model_prefix": "", "config": type("Config", (), {"num_attention_heads": 2})()})()
    shapes = {"a.q": (4, 5), "a.k": (4, 5), "a.v": (4, 5), "b.new": (8, 6), "c.new": (4, 3), "d.new": (6, 2)}
    stored = {name: InFile(file, at, shape, dtype) for name, (at, dtype, shape) in file.tensors.items()}
    wanted = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: copy.deepcopy(rules))
        plan = plan_as_transformers(model, stored, wanted)
    assert {name: each.shape for name, each in plan.tensors.items()} == shapes
    assert not counted[0]
    expected = {
        **dict(zip(("a.q", "a.k", "a.v"), state["a.qkv"].chunk(3), strict=True)),
        "b.new": state["b.old"].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6),
        "c.new": state["c.old"].T,
        "d.new": state["d.old"].reshape(3, 2, 2).transpose(0, 1).reshape(6, 2),
    }
    generator = torch.Generator().manual_seed(3)
    for name, value in expected.items():
        for index in (everything(value), *(tuple(parts(value.shape, generator)) for _ in range(6))):
            assert torch.equal(plan.tensors[name].read(index, torch.float32), cut(value, index)), (name, index)
    del counted[0][:]
    plan.tensors["a.k"].read((slice(1, 3), slice(0, 5)), torch.float32)
    assert counted[0] == [2 * 5 * 4]  # a chunk is read by parts


class Scorer(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(24, 1, device="meta")


def test_a_model_around_a_pretrained_one(folders):
    model = Scorer(build("mixtral", "meta", cls="MixtralModel"))
    refused(folders("mixtral"), model, "missing: score.weight, score.bias")
    weights = StoredWeights.open(folders("mixtral"), model, allow_missing=True)
    assert set(weights.missing) == {"score.weight", "score.bias"}
    for name, value in build("mixtral").model.state_dict().items():
        assert torch.equal(weights.read(f"backbone.{name}", everything(value), value.dtype), value)


def test_adapters_over_a_pretrained_model(folders, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(build("llama"), config)
    expected = {name: value for name, value in model.state_dict().items() if "lora_" not in name}
    blank = peft.get_peft_model(build("llama", "meta"), config)
    weights = StoredWeights.open(folders("llama"), blank)
    assert weights.names == expected.keys()
    assert set(weights.missing) == model.state_dict().keys() - expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights.read(name, everything(value), value.dtype), value)
    # What is saved of the whole has its names, adapters and all.
    save_file({n: v.contiguous() for n, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert StoredWeights.open(tmp_path, blank).names == model.state_dict().keys()
    refused(folders("qwen2"), blank, "too much: model.layers.0.self_attn.k_proj.bias")


# --- Weights that do not fit


def copied(folders, case, to):
    shutil.copytree(folders(case), to, dirs_exist_ok=True)
    return sorted(to.glob("*.safetensors"))


def refused(path, model, *told, **options):
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    with pytest.raises(mw.CheckpointError) as error:
        StoredWeights.open(path, model, **options)
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before
    for text in (*told, "What to do"):
        assert text in str(error.value)


def test_another_models_weights(folders):
    model = build("gpt2", "meta")
    for options in ({}, {"allow_missing": True}):
        # Both have a head of one name, which GPT-2 ties to its embedding.
        told = ("lm_head.weight: (61, 24) in", *(() if options else ("missing: transformer.wpe.weight",)))
        refused(folders("qwen2"), model, "build the model that the weights were saved from", *told, **options)


def test_fewer_layers_and_other_sizes_are_told_at_once(folders):
    model = build("llama", "meta", num_hidden_layers=1, intermediate_size=51)
    refused(
        folders("llama"), model,
        "too much: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight",
        "other shapes: model.layers.0.mlp.down_proj.weight: (24, 50) in the files, (24, 51) in the model",
    )  # fmt: skip
    refused(folders("mixtral"), build("mixtral", "meta", num_local_experts=4), "experts.gate_up_proj: (5, 100, 24) in")


def test_parts_inside_of_layers_are_not_left_out(folders, tmp_path):
    refused(
        folders("qwen2"),
        build("llama", "meta"),
        "too much: model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
    )
    build("bert", cls="BertForPreTraining").save_pretrained(tmp_path)
    weights = StoredWeights.open(tmp_path, build("bert", "meta"))
    assert {name.rpartition(".")[0] for name in weights.unused} == {"bert.pooler.dense", "cls.seq_relationship"}


def test_more_layers_are_missing(folders):
    refused(
        folders("llama"), build("llama", "meta", num_hidden_layers=3), "missing: model.layers.2.self_attn.q_proj.weight"
    )


def test_a_plain_model_takes_its_own_names_only(tmp_path):
    model = nn.Linear(3, 2)
    save_file({"weight": torch.ones(2, 3), "other": torch.ones(2)}, tmp_path / "model.safetensors")
    refused(tmp_path, model, "missing: bias", "too much: other")
    save_file({"weight": torch.ones(2, 3, dtype=torch.int8), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    refused(tmp_path, model, "other types: weight: torch.int8")


def test_tied_weights_that_differ(tmp_path):
    model = build("tied")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert "lm_head.weight" in StoredWeights.open(tmp_path, model)
    state["lm_head.weight"][-1, -1] += 1
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, model, "one tensor for", "lm_head.weight", "two that differ", "tie_word_embeddings=False")


def test_damaged_files(folders, tmp_path):
    model = build("llama", "meta")
    files = copied(folders, "llama", tmp_path)
    content = files[1].read_bytes()
    for damaged in (content[:-7], content[:5], b"", b"\x00" * 50, content + b"more", content[:8] + b"[" + content[9:]):
        files[1].write_bytes(damaged)
        refused(tmp_path, model, files[1].name, "copy the file again")


def test_an_index_that_does_not_fit(folders, tmp_path):
    model = build("llama", "meta")
    files = copied(folders, "llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    files[0].unlink()
    files[2].unlink()
    refused(tmp_path, model, files[0].name, files[2].name, "absent")
    copied(folders, "llama", tmp_path)
    found["weight_map"]["more.weight"] = files[1].name
    index.write_text(json.dumps(found))
    refused(tmp_path, model, "none of the name more.weight")
    index.write_text("{")
    refused(tmp_path, model, index.name)


def test_what_cannot_be_read_by_slices(tmp_path):
    model = nn.Linear(3, 2)
    refused(tmp_path / "nothing", model, "no such file or folder", "all hosts share")
    refused(tmp_path, model, "an empty folder")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refused(tmp_path, model, "pytorch_model.bin is a pickle", "convert it once", "safetensors")
    refused(tmp_path / "pytorch_model.bin", model, "pytorch_model.bin is a pickle")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "weights.gguf", model, ".gguf", "convert it to safetensors")
    for name in ("one", "two"):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    refused(tmp_path, model, "more than one set of weights", "one.safetensors", "two.safetensors", "name the file")


def test_quantized_weights(folders, tmp_path):
    model = build("llama", "meta")
    files = copied(folders, "llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    refused(tmp_path, model, "gptq quantization", "dequantize")
    (tmp_path / "config.json").unlink()
    state = {}
    for file in files:
        state |= load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    state[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, model, f"{name}_scale_inv")


def test_a_file_cut_after_it_was_opened(tmp_path):
    model = nn.Linear(30, 20)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    weights = StoredWeights.open(tmp_path, model)
    os.truncate(tmp_path / "model.safetensors", 300)
    with pytest.raises(mw.CheckpointError, match=r"Reading weight.*cut while it was read"):
        weights.read("weight", (slice(0, 20), slice(0, 30)), torch.float32)


# --- Our checkpoints, and DCP's


def _same_as(path, state, model, **options):
    weights = StoredWeights.open(path, model, **options)
    generator = torch.Generator().manual_seed(5)
    assert weights.names == state.keys()
    for name, value in state.items():
        for index in (everything(value), *(tuple(parts(value.shape, generator)) for _ in range(5))):
            assert torch.equal(weights.read(name, index, value.dtype), cut(value, index)), (name, index)
    weights.close()
    return True


def saved_by_ranks(folder):
    """A checkpoint, and a file, of a model in shards."""
    from meshwright.store import CheckpointStore

    state = runs.build("fsdp")
    state.step = 4
    CheckpointStore(folder / "run" / "checkpoints").save(state)
    state.step = 2
    CheckpointStore(folder / "run" / "checkpoints").save(state)
    save(state.model, folder / "file.safetensors")
    return True


def test_our_checkpoints_and_files(ranks, tmp_path):
    assert all(ranks(2).run(saved_by_ranks, tmp_path))
    torch.manual_seed(0)
    model = runs.Net()
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / "step-00000004"
    for path in (tmp_path / "run", checkpoints, newest, tmp_path / "file.safetensors"):
        assert _same_as(path, model.state_dict(), model)
    files = sorted((newest / "tensors").glob("*.safetensors"))
    assert len(files) == 2
    files[1].write_bytes(files[1].read_bytes()[:-1])
    refused(tmp_path / "run", model, "is damaged", files[1].name)


def saved_with_dcp(folder):
    """What torch writes of a sharded model: alone, beside an optimizer, and as safetensors of ranks."""
    import torch.distributed.checkpoint as dcp

    state = runs.build("fsdp")
    named = state.model.state_dict()
    dcp.save(named, checkpoint_id=folder / "plain")
    optimizer = {"state": {"into.weight": {"step": torch.ones(())}}, "lr": 0.1}
    dcp.save({"model": named, "optimizer": optimizer}, checkpoint_id=folder / "state")
    dcp.save(dict(named) | {"optimizer.state.into.weight": torch.ones(3), "step": 3}, checkpoint_id=folder / "flat")
    writer = dcp.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True)
    dcp.save({name: each for name, each in named.items() if name != "out.weight"}, storage_writer=writer)  # it is tied
    return True


def test_torchs_distributed_checkpoints(ranks, tmp_path):
    assert all(ranks(2).run(saved_with_dcp, tmp_path))
    torch.manual_seed(0)
    model = runs.Net()
    for name in ("plain", "state", "flat", "hf"):
        assert _same_as(tmp_path / name, model.state_dict(), model), name
    more = nn.Sequential(model)
    refused(tmp_path / "plain", more, "missing: 0.")
    one, _ = sorted((tmp_path / "hf").glob("*.safetensors"))
    one.unlink()
    refused(tmp_path / "hf", model, "not whole")
    one = next((tmp_path / "plain").glob("*.distcp"))
    one.unlink()
    refused(tmp_path / "plain", model, one.name)
    (tmp_path / "state" / ".metadata").write_bytes(b"nothing")
    refused(tmp_path / "state", model, ".metadata cannot be read")


class Harmful:
    def __reduce__(self):
        return os.system, ("false",)


def test_metadata_runs_no_code(ranks, tmp_path):
    assert all(ranks(1).run(saved_with_dcp, tmp_path))
    stream = io.BytesIO()
    pickle.dump(Harmful(), stream)
    (tmp_path / "plain" / ".metadata").write_bytes(stream.getvalue())
    refused(tmp_path / "plain", runs.Net(), f"it names {os.system.__module__}.system")
    assert re.match(r"posix|nt", os.system.__module__)


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def in_two_files(folder):
    """A folder of transformers' form with one file for each layer."""
    state = two_layers().state_dict()
    weight_map = {name: f"model-{name[0]}.safetensors" for name in state}
    for file in set(weight_map.values()):
        save_file({name: value for name, value in state.items() if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def found_by_ranks(folder):
    """The files that this rank opens to find weights and to read one, and what it reads."""
    with counting(folder) as finding:
        weights = StoredWeights.open(folder, two_layers(), found=find_together(folder))
    with counting(folder) as reading:
        value = weights.read("1.weight", (slice(0, 2), slice(1, 3)), torch.float32)
    weights.close()
    if rank() == 1:
        (Path(folder) / "model-0.safetensors").write_bytes(b"another file")
        with pytest.raises(CheckpointError, match="another file here"):
            weights.read("0.bias", (slice(0, 4),), torch.float32)
    return sorted(finding.opened), reading.opened, value


def test_one_rank_reads_the_headers(ranks, tmp_path):
    expected = in_two_files(tmp_path)["1.weight"][:, 1:3]
    (first, *_), (finding, reading, value) = ranks(2).run(found_by_ranks, str(tmp_path))
    assert {"model-0.safetensors", "model-1.safetensors"} < set(first)
    assert (finding, reading) == ([], ["model-1.safetensors"])
    assert torch.equal(value, expected)


def found_nowhere(folder):
    with pytest.raises(CheckpointError, match="no weights"):
        find_together(folder)
    assert find_together(None) is None
    return find_together(f"{folder}/{rank()}") is None


def test_weights_that_rank_0_does_not_find(ranks, tmp_path):
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        in_two_files(tmp_path / f"{number}")
    found = ranks(2).run(found_nowhere, str(tmp_path))
    assert found == [False, True]  # the ranks have named different folders, and look for themselves

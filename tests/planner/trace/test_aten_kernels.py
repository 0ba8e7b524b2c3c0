"""What compiled blocks save for backward: measured, beside what a pass without data says of them."""

import contextlib

import pytest
import torch

from meshwright.nn import compile_forward, find_blocks
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.fused_kernels import Fusion
from meshwright.planner.trace.live_tensors import record_saved

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=96, n_positions=64, use_cache=False, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def decoder(name, **changes):
    """One of transformers' small decoders in bf16, by what its classes' names begin with."""
    usual = {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**usual | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)


def forward(model, ids):
    return model(input_ids=ids).logits.float().logsumexp(-1).sum()


@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.long)])
def test_compiled_blocks_save_what_is_predicted_of_them(make):
    model, ids = make(), torch.zeros(4, 64, dtype=torch.long)
    found = Pass(model, ids, forward).predict().activations
    compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend="aot_eager")
    with record_saved(model) as measured:
        forward(model, ids)
    assert found.fused().saved_bytes == pytest.approx(measured.bytes, rel=0.005)  # less a number per row of each norm
    assert found.fused().saved_bytes < 0.8 * found.saved_bytes


@pytest.mark.long
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"head_dim": 32}) for name in ("Qwen3", "Gemma", "Gemma2", "Cohere2", "Glm", "Glm4", "Helium")),
        *((name, {}) for name in ("Mistral", "Qwen2", "Olmo", "Olmo2", "StableLm", "Starcoder2", "Cohere", "Granite")),
        ("Ernie4_5", {"head_dim": 32}),
        *((name, {}) for name in ("SmolLM3", "Nemotron", "GPTNeoX", "Exaone4", "Apertus", "Arcee")),
        ("OPT", {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0}),
    ],
)  # fmt: skip
def test_other_decoders_save_what_is_predicted_of_them(name, changes, autocasts):
    model = decoder(name, **changes)
    saved, measured = saves(model.float() if autocasts else model, autocasts)
    assert saved == pytest.approx(measured, rel=0.01)


def saves(model, autocasts):
    """Return the bytes that compiled blocks save, as predicted and as measured."""
    ids = torch.zeros(4, 64, dtype=torch.long)

    def run(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return forward(model, ids)

    found = Pass(model, ids, run).predict().activations
    torch.compiler.reset()  # or what compiled blocks of other classes left counts as this one's recompilations
    # It cuts the graph as inductor does, with norms and activations taken apart, and compiles nothing.
    backend = "aot_eager_decomp_partition"
    compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend=backend)
    with record_saved(model) as measured:
        run(model, ids)
    return found.fused().saved_bytes, measured.bytes


@pytest.mark.parametrize("targets", ["all-linear", pytest.param(["q_proj", "v_proj"], marks=pytest.mark.long)])
@pytest.mark.parametrize("autocasts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_adapters_save_their_sum_with_a_layers_result(targets, autocasts):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=targets)
    model = peft.get_peft_model(llama(), config, autocast_adapter_dtype=autocasts)
    saved, measured = saves(model, autocasts)
    assert saved == pytest.approx(measured, rel=0.01)


def noted(fusion, name, taken, made, *, is_alone=False, dtype=torch.float32):
    fusion.note(name, taken, {each: torch.empty(4, dtype=dtype, device="meta") for each in made}, 0, is_alone=is_alone)


def test_what_fused_kernels_make_is_computed_again_from_what_lies_in_memory():
    fusion = Fusion()
    noted(fusion, "aten.mm", [1, 2], [3], is_alone=True)
    noted(fusion, "aten.silu", [3], [4])
    noted(fusion, "aten.mul", [4, 3], [5])
    noted(fusion, "aten.native_dropout", [5], [6, 7])
    noted(fusion, "aten.mm", [6], [8], is_alone=True)
    assert fusion.fates([4, 5, 6, 7]) == {4: "gone", 5: "gone", 3: "kept"}
    assert fusion.fates([3, 6, 7]) == {}


def test_what_is_made_of_two_tensors_is_kept_in_place_of_both():
    fusion = Fusion()
    for product in (2, 3):
        noted(fusion, "aten.mm", [1], [product], is_alone=True)
    noted(fusion, "aten.add", [2, 3], [4])
    noted(fusion, "aten.silu", [4], [5])
    noted(fusion, "aten.mul", [5, 4], [6])
    assert fusion.fates([4, 5]) == {5: "gone"}
    assert fusion.fates([5]) in ({}, {5: "gone", 4: "kept"})


def test_what_is_made_of_nothing_is_made_again():
    fusion = Fusion()
    noted(fusion, "aten.arange", [], [1])
    noted(fusion, "aten.cos", [1], [2])
    assert fusion.fates([2]) == {2: "gone"}


def test_equal_casts_are_one_and_casts_to_8_bits_are_kept():
    fusion = Fusion()
    for cast in (2, 3):
        noted(fusion, "aten._to_copy", [1], [cast], dtype=torch.bfloat16)
        noted(fusion, "aten.mm", [cast], [cast + 10], is_alone=True)
    assert fusion.fates([2, 3]) == {3: "gone"}
    assert fusion.fates([3]) == {}  # the first is not saved
    for cast in (20, 21):  # casts of casts
        noted(fusion, "aten._to_copy", [cast - 18], [cast])
        noted(fusion, "aten.mm", [cast], [cast + 10], is_alone=True)
    assert len(fusion.fates([20, 21])) == 1
    noted(fusion, "aten._to_copy", [1], [4], dtype=torch.float8_e4m3fn)
    assert fusion.fates([4]) == {}

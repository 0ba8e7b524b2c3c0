"""Compare what compiled blocks save and move, as measured, with what a pass without data says of them."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from meshwright.cost import Block, Step
from meshwright.methods import Compile
from meshwright.nn import compile_forward, find_blocks
from meshwright.planner.trace.aten_kernels import storage_of
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
    backend = "aot_eager_decomp_partition"  # cuts the graph as inductor does, and compiles nothing
    compile_forward([block for _, block in find_blocks(model)], contextlib.nullcontext, backend=backend)
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


# --- What their kernels move.


def counted_by_inductor(model, run):
    """Return the bytes that inductor's own graphs of blocks move beside products, in forward and in backward."""
    found = []

    def count(graph_module, inputs, **_):
        record_original_output_strides(graph_module)
        graph = GraphLowering(graph_module)
        with V.set_graph_handler(graph), V.set_fake_mode(detect_fake_mode(inputs)), DebugContext():
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            moves = (node for node in graph.scheduler.nodes if not node.is_extern())
            found.append(sum(node.get_read_write_buffers_sizes() for node in moves))
        return graph_module.forward

    torch.compiler.reset()
    _, block = find_blocks(model)[0]
    compile_forward([block], contextlib.nullcontext, backend=functools.partial(compile_fx, inner_compile=count))
    with inductor.patch(force_pointwise_cat=True):  # as on a GPU: rotary positions are one kernel
        run().backward()
    return found


WIDE = {"hidden_size": 256, "intermediate_size": 704}


@pytest.mark.parametrize("autocasts", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", WIDE),
        *(
            pytest.param(name, changes, marks=pytest.mark.long)
            for name, changes in (("GPT2", {}), ("Qwen3", WIDE | {"head_dim": 64}), ("Gemma2", WIDE | {"head_dim": 64}))
        ),
    ],
)
def test_compiled_blocks_move_what_inductor_counts(name, changes, autocasts):
    model, ids = gpt2() if name == "GPT2" else decoder(name, **changes), torch.zeros(16, 64, dtype=torch.long)
    model = model.float() if autocasts else model.bfloat16()

    def run(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return forward(model, ids)

    _, ops = Pass(model, ids, run).predict().ops.blocks[0]
    moves = [op for op in ops if op.kind == "move"]
    counted = sum(counted_by_inductor(model, functools.partial(run, model, ids)))
    assert sum(moved_when_fused(op) for op in moves) == pytest.approx(counted, rel=0.08)
    assert sum(op.num_bytes for op in moves) > 3 * counted


def moved_when_fused(op):
    return op.num_bytes if op.when_fused is None else op.when_fused[0]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_kernel_reads_once_and_writes_what_others_read():
    model = Stack()
    x = torch.zeros(4, 32, 64, requires_grad=True)
    _, ops = Pass(model, x, lambda model, x: model(x).sum()).predict().ops.blocks[1]
    moves, unit = [op for op in ops if op.kind == "move"], 4 * 32 * 64 * 4
    forward, backward = (
        sum(moved_when_fused(op) for op in moves if op.moment == moment) for moment in ("forward", "backward")
    )
    # The norm reads its input and two vectors and writes what the first product takes, the activation reads and writes
    # four units each, and the sum reads two and writes one.
    assert forward == (2 + 8 + 3) * unit + 2 * 64 * 4
    # Gradients of biases are sums over rows, by themselves. Between them the activation reads its input and a gradient,
    # and writes another; the norm reads its input and two gradients, and writes their sum.
    assert backward == pytest.approx((1 + 4 + 12 + 4) * unit, rel=0.01)
    assert sum(op.when_fused[1] for op in moves if op.moment == "forward") == pytest.approx(3)


def test_casts_of_weights_stay_whole():
    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    model = Stack()
    _, ops = Pass(model, torch.zeros(4, 32, 64), run).predict().ops.blocks[1]
    casts = [op for op in ops if op.of_weights]
    size = 64 * 256
    numbers = [size, 256, size, 64]
    assert sorted(op.num_bytes for op in casts if op.moment == "forward") == sorted(6 * each for each in numbers)
    assert sorted(op.num_bytes for op in casts if op.moment == "backward") == sorted(6 * each for each in numbers)
    assert all(op.when_fused is None for op in casts)
    step = Compile().cost(Step(blocks=(Block("Normed", 3, (), ops=ops),), axes=()))
    assert sum(op.num_bytes for op in step.blocks[0].ops if op.of_weights) == sum(op.num_bytes for op in casts)


# --- What they save, by storages.


class Storages:
    """Tensors by numbers, noted as arguments and results of operators."""

    def __init__(self):
        self.fusion, self._known = Fusion(num_blocks=1), {}

    def noted(self, name, taken, made, *, multiplies=False, dtype=torch.float32):
        tensors = [self._known.setdefault(each, torch.empty(4, dtype=dtype, device="meta")) for each in (*taken, *made)]
        given, result = tensors[: len(taken)], tensors[len(taken) :]
        self.fusion.note(name, given, result, 0, multiplies=multiplies)

    def fates(self, saved):
        numbers = {storage_of(tensor)[0]: number for number, tensor in self._known.items()}
        keys = [storage_of(self._known[each])[0] for each in saved]
        return {numbers[key]: fate for key, fate in self.fusion.fates(keys).items()}


def test_what_fused_kernels_make_is_computed_again_from_what_lies_in_memory():
    known = Storages()
    known.noted("aten.mm", [1, 2], [3], multiplies=True)
    known.noted("aten.silu", [3], [4])
    known.noted("aten.mul", [4, 3], [5])
    known.noted("aten.native_dropout", [5], [6, 7])
    known.noted("aten.mm", [6], [8], multiplies=True)
    assert known.fates([4, 5, 6, 7]) == {4: "gone", 5: "gone", 3: "kept"}
    assert known.fates([3, 6, 7]) == {}


def test_what_is_made_of_two_tensors_is_kept_in_place_of_both():
    known = Storages()
    for product in (2, 3):
        known.noted("aten.mm", [1], [product], multiplies=True)
    known.noted("aten.add", [2, 3], [4])
    known.noted("aten.silu", [4], [5])
    known.noted("aten.mul", [5, 4], [6])
    assert known.fates([4, 5]) == {5: "gone"}
    assert known.fates([5]) in ({}, {5: "gone", 4: "kept"})


def test_what_is_made_of_nothing_is_made_again():
    known = Storages()
    known.noted("aten.arange", [], [1])
    known.noted("aten.cos", [1], [2])
    assert known.fates([2]) == {2: "gone"}


def test_equal_casts_are_one_and_casts_to_8_bits_are_kept():
    known = Storages()
    for cast in (2, 3):
        known.noted("aten._to_copy", [1], [cast], dtype=torch.bfloat16)
        known.noted("aten.mm", [cast], [cast + 10], multiplies=True)
    assert known.fates([2, 3]) == {3: "gone"}
    assert known.fates([3]) == {}  # the first is not saved
    known.noted("aten._to_copy", [1], [4], dtype=torch.bfloat16)
    known.noted("aten.mm", [4], [14], multiplies=True)
    # Of those, too, one stays: by the order of saving, which is the same in every block.
    assert known.fates([3, 4]) == {3: "gone"}
    assert known.fates([4, 3]) == {4: "gone"}
    for cast in (20, 21):  # casts of casts
        known.noted("aten._to_copy", [cast - 18], [cast])
        known.noted("aten.mm", [cast], [cast + 10], multiplies=True)
    assert len(known.fates([20, 21])) == 1
    known.noted("aten._to_copy", [1], [5], dtype=torch.float8_e4m3fn)
    assert known.fates([5]) == {}

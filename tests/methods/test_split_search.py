"""Plans found in the data flow of blocks: attentions and MLPs as people write them, and what cannot be split."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.methods import SampleRun, TensorParallel
from meshwright.methods.tensor import block_trials, model_split, narrow_copy
from meshwright.methods.tensor.split_checks import vocabulary_entries
from tests.methods.split_runs import build

WIDTH, TOKENS = 16, 6
layout, find = model_split.sequence_layout, model_split.find_plan


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, make_block, vocab=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(2))
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Grouped(nn.Module):
    """Queries for 4 heads, keys and values for 2, fused; norms within heads; a gated MLP, fused; all in one module."""

    def __init__(self, heads=4, shared=2):
        super().__init__()
        self.n_head, self.head_dim, self.sizes = heads, 4, [4 * heads, 4 * shared, 4 * shared]
        self.norm, self.head_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(4)
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(4 * heads, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x):
        fused = self.qkv(self.norm(x))
        ratio = fused.shape[-1] / sum(self.sizes)
        q, k, v = fused.split([int(size * ratio) for size in self.sizes], -1)
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim))
            for each in (self.head_norm(q.unflatten(-1, (-1, 4))).flatten(-2), k, v)
        )
        repeats = q.shape[2] // k.shape[2]
        x = x + self.out(attend(q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Interleaved(nn.Module):
    """Each head's queries, keys and values side by side (Megatron, BLOOM): nothing to reorder. Counts its heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, 4)).unbind(-2)
        return x + self.out(attend(q, k, v).reshape(*x.shape[:-1], -1))


class Inflexible(nn.Module):
    """Takes the size of a head from the width of its input, and gives its heads that width again."""

    def __init__(self):
        super().__init__()
        self.n_head = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (each.view(batch, tokens, self.n_head, width // self.n_head) for each in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).reshape(batch, tokens, width))


class Unflattening(Inflexible):
    """Does the same without a view whose whole shape says what is meant."""

    def forward(self, x):
        width = x.shape[-1]
        q, k, v = (each.unflatten(-1, (self.n_head, width // self.n_head)) for each in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).reshape(*x.shape))


class Cutting(Inflexible):
    """Cuts by an attribute, and has scores and a mask of its own, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.n_embd = WIDTH
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        batch, tokens, width = x.size()
        q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).contiguous().view(batch, tokens, width))


class Timm(Inflexible):
    """Takes queries, keys and values out of one view, as timm does."""

    def forward(self, x):
        batch, tokens, width = x.shape
        fused = self.qkv(x).reshape(batch, tokens, 3, self.n_head, width // self.n_head)
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


class Held(nn.Module):
    """A block around an attention."""

    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Mixing(nn.Module):
    """Normalises over what would be split: every rank could run it, and would compute something else."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


class Pooling(Mixing):
    """Looks at all tokens outside its linear layers."""

    def forward(self, x):
        return x + self.down(self.up(x).relu()) + x.mean(1, keepdim=True)


def split(model, ranks=2, tokens=TOKENS, **keys):
    ids = torch.zeros(2, tokens, dtype=torch.long)
    return TensorParallel(**keys).split(
        model, ranks, SampleRun(lambda samples: ids[:samples], lambda model, ids: model(ids))
    )


def described(found):
    return {
        layer.path.removeprefix("blocks.1."): (layer.style.name, layer.parts)
        for layer in found.layers
        if not layer.path.startswith("blocks.0.")
    }


def test_attentions_and_mlps_as_people_write_them():
    vocabulary = {"embedding": ("embedding_rowwise", ()), "head": ("vocabulary_head", ())}
    model = Model(Grouped)
    model.train()
    assert described(split(model)) == {
        "qkv": ("colwise", (16, 8, 8)), "out": ("rowwise", ()), "gate_up": ("colwise", (12, 12)),
        "down": ("rowwise", ()), "head_norm": ("replicated_with_grad_allreduce", ()), **vocabulary,
    }  # fmt: skip
    assert model.blocks[0].n_head == 4
    assert all(module.training for module in model.modules())
    found = split(Model(Interleaved))
    assert described(found) == {"qkv": ("colwise", ()), "out": ("rowwise", ()), **vocabulary}
    assert [(a.path, a.name, a.value) for a in found.adjustments] == [
        ("blocks.0", "num_heads", 2), ("blocks.1", "num_heads", 2)]  # fmt: skip


class Masked(nn.Module):
    """Counts its heads, and takes a mask of integers: 1 where a token may be seen, or where it may not."""

    def __init__(self, visible):
        super().__init__()
        self.num_heads, self.visible = 4, visible
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None] != self.visible, -1e4)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class MaskedModel(Model):
    def forward(self, ids):
        x, mask = self.embedding(ids), torch.ones_like(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@pytest.mark.parametrize("visible", [0, 1])
def test_behind_a_mask_that_hides_everything_nothing_is_proved(visible):
    """Where all scores are hidden, heads of half their size would look right."""
    found = split(MaskedModel(lambda: Masked(visible)))
    assert {(each.name, each.value) for each in found.adjustments} == {("num_heads", 2)}


VIEWING = {"chunked": Inflexible, "cut": Cutting, "in one": Timm}


@pytest.mark.parametrize("block", VIEWING.values(), ids=VIEWING)
def test_heads_of_the_input_s_width_are_a_rank_s_share(block):
    found = split(Model(lambda: Held(block())))
    assert {layer.path: layer.style.name for layer in found.layers}["blocks.1.attention.qkv"] == "colwise"
    assert {each.name for each in found.adjustments} - {"n_embd"} == {"views"}


def viewing(name, how):
    """Losses of a model split over two ranks, and those in one process; the shape of a rank's part."""
    torch.manual_seed(0)
    model = Model(lambda: Held(VIEWING[name]()))
    alone, ids = copy.deepcopy(model), torch.randint(0, 32, (10, 4, TOKENS), generator=torch.Generator().manual_seed(1))

    def loss_func(batch, output):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    strategy = [("parallel_mode", {"tensor": 2}), ("tensor_parallel", {"sequence": how == "sequence"})]
    strategy += [("compile", {"backend": "aot_eager", "fullgraph": True})] if how == "compiled" else []
    job = mw.accelerate(
        model, torch.optim.SGD, loss_func=loss_func, optim_args={"lr": 0.3}, sample_batch=ids[0], strategy=strategy,
    )  # fmt: skip
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=0.3), []
    for batch in ids:
        optimizer.zero_grad()
        loss = loss_func(batch, alone(batch))
        loss.backward()
        optimizer.step()
        losses.append((job.step(batch).loss.item(), loss.item()))
    job.model.eval(), alone.eval()
    losses.append((job.evaluate(ids[0]).item(), loss_func(ids[0], alone(ids[0])).item()))
    return losses, tuple(job.model.blocks[0].attention.qkv.weight.to_local().shape), job.plan.memory.activations


@pytest.mark.parametrize("how", ["plain", "sequence", "compiled"])
@pytest.mark.parametrize("name", VIEWING)
def test_heads_of_the_input_s_width_train_as_in_one_process(ranks, name, how):
    for losses, shape, activations in ranks(2).run(viewing, name, how):
        assert [own for own, _ in losses] == pytest.approx([alone for _, alone in losses], rel=1e-5)
        assert shape == (3 * WIDTH // 2, WIDTH)
        assert activations


class Positions(nn.Embedding):
    """Counts positions itself, from 2, as BART's do."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[-1]) + 2)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


def test_only_what_looks_up_ids_is_split_as_a_vocabulary():
    model = Model(lambda: nn.Linear(WIDTH, WIDTH))
    model.embedding, model.positions = Scaled(32, WIDTH), Positions(64, WIDTH)
    entries, remark = vocabulary_entries(model, 2)
    assert entries == {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
    assert not remark
    model.head = nn.Linear(WIDTH, 3)
    assert vocabulary_entries(model, 2) == ({}, "positions does more than look up rows and stays whole")


def test_a_bias_of_the_scores_is_split_with_its_heads():
    found = {layer.path: layer.style.name for layer in TensorParallel().layers(build("t5"), 2)}  # its own dummy input
    assert found["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] == "embedding_colwise"
    assert found["encoder.block.1.layer.1.DenseReluDense.wi_1"] == "colwise"
    assert found["shared"] == "embedding_rowwise"


def test_what_is_split_is_said_in_one_line():
    model = build("odd")
    said = split(model).summary(model, 2)
    assert "colwise in 3 parts: blocks.*.attention.qkv" in said
    assert "head stay whole: 2 ranks do not divide a vocabulary of 61" in said
    assert "\n" not in said


REFUSED = {
    "sizes of its own": (lambda: Model(Unflattening), 2, r"blocks.0 \(qkv \+ out\) cannot be split.*RuntimeError"),
    "features are mixed": (lambda: Model(Mixing), 2, r"blocks.0 \(up \+ down\) cannot be split.*sum of its parts"),
    "no pair": (lambda: Model(Residual), 2, "no linear layer of it is fed by linear layers alone"),
    "heads": (lambda: Model(Interleaved), 3, "does not divide num_heads of blocks.0.*multiple of 3.*Got 4"),
    "one head for keys": (lambda: Model(lambda: Grouped(shared=1)), 2, "cannot be split"),
    "features": (lambda: Model(Mixing), 3, "a tensor axis of 3 does not divide its features"),
    "no blocks": (lambda: nn.Sequential(nn.Linear(2, 2)), 2, "no repeated blocks"),
    "no run": (lambda: Model(lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)), 2, "blocks.1 cannot be found.*TypeError"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused_with_the_reason(case):
    make, ranks, said = REFUSED[case]
    model = make()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(mw.ModelError, match=said) as caught:
        split(model, ranks)
    assert "What to do" in str(caught.value)
    for name, parameter in model.named_parameters():
        assert before[name][0] == id(parameter)
        assert torch.equal(before[name][1], parameter)


def test_heads_of_a_transformers_model_that_the_axis_does_not_divide_are_told():
    config = LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(mw.ModelError, match=r"does not divide num_attention_heads.*multiple of 2.*Got 3"):
        split(LlamaForCausalLM(config))


def test_where_tokens_are_gathered():
    """At the layers themselves where norms are beside them; in a module of its own before that module."""
    inline = split(Model(Grouped), sequence=True).sequence
    assert inline.scopes == ("blocks.0.qkv", "blocks.0.gate_up", "blocks.1.qkv", "blocks.1.gate_up")
    assert set(inline.summed) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm", "head_norm")}
    apart = split(build("plain"), sequence=True).sequence
    assert apart.scopes[:2] == ("blocks.0.attention", "blocks.0.mlp")
    assert (apart.first, apart.last) == (("blocks.0",), ("blocks.1",))
    with pytest.raises(mw.ModelError, match=r"blocks.0 cannot work on a part of the tokens"):
        split(Model(Pooling), sequence=True)
    with pytest.raises(mw.ModelError, match=r"multiple of 2 tokens. Got 5"):
        split(Model(Grouped), tokens=5, sequence=True)


def test_large_blocks_are_proved_on_a_narrow_copy(monkeypatch):
    """The copy is of a transformers model: its code is the same. Others are proved as they are."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    whole = split(LlamaForCausalLM(config), sequence=True).sequence
    apart = split(Model(Grouped), sequence=True).sequence
    monkeypatch.setattr(narrow_copy, "_LARGE", 1)
    proved = []
    monkeypatch.setattr(
        model_split, "sequence_layout", lambda model, *args: proved.append(model) or layout(model, *args)
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert split(model, sequence=True).sequence == whole
    assert proved[0].model.layers[0].mlp.up_proj.weight.shape == (32, 32)
    assert split(model := Model(Grouped), sequence=True).sequence == apart
    assert proved[1] is model


def test_a_copy_stands_for_a_model_with_another_head_and_not_for_one_with_other_blocks(monkeypatch):
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    monkeypatch.setattr(narrow_copy, "_LARGE", 1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for pairs, stands in (("fused_loss", True), ("rms_norm", False)):
        method = mw.methods.ModuleReplace.parse([pairs])
        found = method.replacement(model, mw.Strategy([method]), {}, torch.device("meta"))
        with found.tried(model):
            assert (narrow_copy.narrow_copy(model, 2) is not None) == stands


def test_a_narrow_copy_has_narrow_experts_and_latents():
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=512, intermediate_size=1024, moe_intermediate_size=2**13, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=1, topk_group=1, q_lora_rank=256,
        kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.model.layers[1].parameters()) > narrow_copy._LARGE
    small = narrow_copy.narrow_copy(model, 2)
    shapes = {name: tuple(p.shape) for name, p in small.model.layers[1].named_parameters()}
    assert shapes["mlp.experts.down_proj"] == (8, 4 * 2, 2 * 4)
    assert shapes["self_attn.kv_b_proj.weight"] == (4 * (8 + 8), 32)
    assert shapes["self_attn.q_a_proj.weight"] == (32, 4 * 2)


NARROWED = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=96, n_head=4, n_inner=160, n_positions=16),
    "bert": lambda: transformers.BertConfig(
        num_hidden_layers=2, hidden_size=96, num_attention_heads=4, intermediate_size=160
    ),
    "opt": lambda: transformers.OPTConfig(
        num_hidden_layers=2, hidden_size=96, word_embed_proj_dim=96, num_attention_heads=4, ffn_dim=160
    ),
    # It rotates more features than narrow heads have.
    "gptj": lambda: transformers.GPTJConfig(n_layer=2, n_embd=96, n_head=4, n_positions=16, rotary_dim=16),
}


@pytest.mark.parametrize(("kind", "sequence"), [("gpt2", True), ("bert", True), ("opt", False), ("gptj", True)])
def test_plans_of_large_blocks_are_found_in_a_narrow_copy(kind, sequence, monkeypatch):
    """Fused layers and attributes that count features have the sizes of the model itself."""
    config = NARROWED[kind]()
    config.vocab_size, config.use_cache = 64, False
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    found, tried = [], []
    for large in (2**24, 1):
        monkeypatch.setattr(narrow_copy, "_LARGE", large)
        monkeypatch.setattr(model_split, "find_plan", lambda model, *args: tried.append(model) or find(model, *args))
        with torch.device("meta"):
            model = auto.from_config(config)
        plan = split(model, sequence=sequence)
        layers = [(layer.path, layer.style.name, layer.parts) for layer in plan.layers]
        found.append((layers, plan.adjustments, plan.remarks, plan.sequence))
    assert found[0] == found[1]
    assert len(tried) == 2
    assert tried[1] is not model


@pytest.mark.parametrize(("most", "tried"), [(2**29, 2), (0, 1)])
def test_what_fails_narrow_is_tried_itself_where_blocks_are_not_too_large(most, tried, monkeypatch):
    monkeypatch.setattr(narrow_copy, "_LARGE", 1)
    monkeypatch.setattr(narrow_copy, "_MOST_TRIED", most)
    proved = []
    monkeypatch.setattr(
        model_split, "sequence_layout", lambda model, *args: proved.append(model) or layout(model, *args)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(NARROWED["opt"]())
    with pytest.raises(mw.ModelError, match="cannot work on a part of the tokens"):
        split(model, sequence=True)  # it joins samples and tokens
    assert len(proved) == tried


def test_weights_of_a_trial_are_as_random_where_they_repeat(monkeypatch):
    layer = nn.Linear(96, 40)
    monkeypatch.setattr(block_trials, "_DRAWN", 997)
    weight = block_trials.random_state(layer, 3)["weight"]
    assert weight.std().item() == pytest.approx(96**-0.5, rel=0.1)
    rows = weight.unique(dim=0)
    columns = weight.unique(dim=1)
    assert (len(rows), columns.shape[1]) == (40, 96), "two rows or columns are alike"


def test_without_a_sample_there_is_nothing_to_read_off():
    with pytest.raises(mw.ModelError, match="there is no sample"):
        TensorParallel().split(Model(Interleaved), 2)

"""The models that random strategies train: small, with random weights, in the shapes that people bring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from tests.tiny import gpt2

VOCAB, TOKENS, SAMPLES, IMAGE = 60, 16, 96, 16
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt(layers):
    return gpt2.GPT2(vocab_size=VOCAB, seq_len=TOKENS, dim=40, num_layers=layers, num_heads=4)


def gpt2_hf(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=48, n_layer=layers, n_head=4, n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, num_hidden_layers=layers))


def bert(layers):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, **NO_DROPOUT, num_hidden_layers=layers, max_position_embeddings=TOKENS)
    return BertForMaskedLM(config)


def t5(layers):
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=88, num_layers=layers, num_heads=4, dropout_rate=0.0,
            use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit(layers):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48, intermediate_size=88, num_attention_heads=4, num_hidden_layers=layers, image_size=IMAGE,
        patch_size=4, num_labels=10, **NO_DROPOUT,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mixtral(layers):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**DECODER, num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def qwen_moe(layers):
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **DECODER, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


class Recurrent(nn.Module):
    """Tokens through a GRU."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 36)
        self.rnn = nn.GRU(36, 44, num_layers=layers, batch_first=True)
        self.head = nn.Linear(44, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


class Residual(nn.Module):
    """One step of a ResNet, with norms that know no batch."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(3, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(3, channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    """Images through residual steps, in a Sequential."""

    def __init__(self, layers):
        super().__init__()
        self.stem = nn.Conv2d(3, 15, 3, stride=2, padding=1)
        self.steps = nn.Sequential(*(Residual(15) for _ in range(layers)))
        self.head = nn.Linear(15, 10)

    def forward(self, batch):
        pixels, _ = batch  # and labels, as loops that hand on whole batches do
        return self.head(self.steps(self.stem(pixels)).mean((2, 3)))


class Mixing(nn.Module):
    """A block without attention."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Shared(nn.Module):
    """Two blocks that each run again and again, as ALBERT's do."""

    def __init__(self, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 36), nn.Linear(36, VOCAB)
        one, two = Mixing(36, 52), Mixing(36, 52)
        self.blocks = nn.ModuleList((one, two) * (layers // 2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Odd(nn.Module):
    """Parameters that nothing uses, parameters of one number, and outputs in outputs."""

    def __init__(self, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 36), nn.Linear(36, VOCAB)
        self.blocks = nn.ModuleList(Mixing(36, 44) for _ in range(layers))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))
        self.unused = nn.Linear(7, 5)

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return {"logits": (self.head(x) + self.shift.sum(), x), "extra": [{"mean": x.mean()}]}


class Rows(Dataset):
    """Token ids or images; row i is the same everywhere."""

    def __init__(self, images):
        generator = torch.Generator().manual_seed(7)
        self.images = images
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
        shape = (SAMPLES, 3, IMAGE, IMAGE)
        self.rows = (
            torch.randn(shape, generator=generator)
            if images
            else torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=generator)
        )

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return (self.rows[index], self.labels[index]) if self.images else self.rows[index]


MODELS = {
    "gpt": gpt, "gpt2": gpt2_hf, "llama": llama, "bert": bert, "t5": t5, "vit": vit, "mixtral": mixtral,
    "qwen_moe": qwen_moe, "gru": Recurrent, "resnet": ResNet, "shared": Shared, "odd": Odd,
}  # fmt: skip
IMAGES, EXPERTS = ("vit", "resnet"), ("mixtral", "qwen_moe")
NAMED_INPUTS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "qwen_moe")


def build(name, layers):
    """Weights depend on nothing but name and number of layers; biases of zero would hide what is lost."""
    torch.manual_seed(3)
    model = MODELS[name](layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def data(name):
    return Rows(name in IMAGES)


def prepare_for(name):
    """What the model is called with, as its users call it."""

    def prepare(batch, device):
        if name == "resnet":
            return batch[0].to(device), batch[1].to(device)
        if name == "vit":
            return {"pixel_values": batch[0].to(device), "labels": batch[1].to(device)}
        ids = batch.to(device)
        return {"input_ids": ids, "labels": ids} if name in NAMED_INPUTS else ids

    return prepare


def input_format(name):
    return "unpack_dict" if name in NAMED_INPUTS else None


def forward(name, model, inputs):
    """What :func:`meshwright.accelerate` does with ``input_format(name)``."""
    return model(**inputs) if name in NAMED_INPUTS else model(inputs)


def loss_func(inputs, output):
    """The model's own loss, else that of the next token or of the label."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    if isinstance(output, dict):
        output = output["logits"][0]
    if isinstance(inputs, (tuple, list)):
        return F.cross_entropy(output, inputs[1])
    return F.cross_entropy(output[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())

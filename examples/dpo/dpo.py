"""The model and the data of dpo.toml: direct preference optimization, two models in one job (arXiv 2305.18290)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.data import ByteTokenizer, TokenDataset, find_files, token_cache

CONFIG = Path(__file__).parents[1] / "llama" / "config.json"


class Preference(nn.Module):
    """A policy and its frozen reference. The output carries the loss: pairs whose first text is the better one."""

    def __init__(self, policy: nn.Module, reference: nn.Module, beta: float) -> None:
        super().__init__()
        self.policy, self.reference, self.beta = policy, reference.requires_grad_(False), beta

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ids, labels = input_ids.flatten(0, 1), labels.flatten(0, 1)  # (pairs, 2, seq_len)
        gain = log_likelihood(self.policy, ids, labels) - log_likelihood(self.reference, ids, labels)
        return {"loss": -nn.functional.logsigmoid(self.beta * (gain[::2] - gain[1::2])).mean()}


def log_likelihood(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of the labels that are not -100, summed over each text: (texts,)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].transpose(1, 2)
    return -nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none", ignore_index=-100).sum(1)


def build_model(base: str | Path | None = None, config: str | Path = CONFIG, beta: float = 0.1) -> nn.Module:
    """Both models from a trained folder; without one, of equal random weights: enough to see how it works."""
    if base is not None:
        return Preference(*(AutoModelForCausalLM.from_pretrained(base, local_files_only=True) for _ in range(2)), beta)
    policy, reference = (AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)) for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    return Preference(policy, reference, beta)


class Continuations(Dataset):
    """Pairs: a piece of source code, and the same with its second half out of order. The first half is given."""

    def __init__(self, seq_len: int = 64) -> None:
        files, cache = find_files("stdlib", Path()), Path.home() / ".cache" / "meshwright"
        self.texts = TokenDataset(token_cache(files, ByteTokenizer(), cache), seq_len)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, half = self.texts[index], len(self.texts[index]) // 2
        order = torch.randperm(len(text) - half, generator=torch.Generator().manual_seed(index))
        ids = torch.stack([text, torch.cat([text[:half], text[half:][order]])])
        return {"input_ids": ids, "labels": torch.cat([torch.full_like(ids[:, :half], -100), ids[:, half:]], 1)}

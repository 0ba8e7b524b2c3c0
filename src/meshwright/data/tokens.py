"""Windows over a token file, as a torch dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from meshwright.data.cache import open_tokens
from meshwright.errors import ConfigError, DataError


class TokenDataset(Dataset[torch.Tensor]):
    """Non-overlapping windows of a token file; the tokens stay on disk until they are asked for.

    Item ``i`` is an int64 tensor of shape (seq_len,): tokens ``i * seq_len`` to ``(i + 1) * seq_len``. Tokens behind
    the last whole window are left out. May be sent to DataLoader workers, forked or spawned.

    Args:
        path: Token file, as ``token_cache`` writes it.
        seq_len: Tokens per window.

    Raises:
        ConfigError: When ``seq_len`` is not a positive count.
        DataError: When the file is damaged, or shorter than one window.
    """

    def __init__(self, path: Path, seq_len: int) -> None:
        if seq_len < 1:
            raise ConfigError(
                "seq_len is not a count", expected="1 or more", got=repr(seq_len), fix="give the tokens per sample"
            )
        self.path = Path(path)
        self.seq_len = seq_len
        self._tokens: np.ndarray = open_tokens(self.path)
        if len(self) == 0:
            raise DataError(
                "The corpus is shorter than one sequence",
                expected=f"at least {seq_len} tokens (seq_len)",
                got=f"{self.num_tokens} tokens in {self.path}",
                fix="add text, or train on shorter sequences",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the file, those behind the last whole window included."""
        return int(self._tokens.size)

    def __len__(self) -> int:
        return self.num_tokens // self.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = (index % len(self)) * self.seq_len
        return torch.from_numpy(self._tokens[start : start + self.seq_len].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map carries the whole file with it; the other process maps the file itself.
        return {key: value for key, value in vars(self).items() if key != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = open_tokens(self.path)

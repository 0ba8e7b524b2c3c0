"""What transformers must be told where its models run on tensors without data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def one_sequence_per_sample() -> Iterator[None]:
    """Lets transformers see that samples are not packed, which it cannot read from position ids without values.

    It would make a mask over all pairs of tokens, as it does not in training, and much would be predicted for it.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(position_ids, FakeTensor) else original(position_ids, *args, **kwargs)

    with mock.patch.object(masks, "find_packed_sequence_indices", find):
        yield


@contextlib.contextmanager
def without_grouped_kernels() -> Iterator[None]:
    """Lets transformers' experts run on tensors without data in any precision: the kernel they call takes bf16 only.

    What they save for backward is the same without it.
    """
    transformers = sys.modules.get("transformers.integrations.moe")
    if transformers is None or not hasattr(transformers, "_can_use_grouped_mm"):
        yield
        return
    with mock.patch.object(transformers, "_can_use_grouped_mm", return_value=False):
        yield

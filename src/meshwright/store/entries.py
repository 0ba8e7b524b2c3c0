"""Name everything in a training state: entries of the model, plain values as JSON, and random generators.

Names are those of the plain model, whatever wraps it, and fused parameters lie in the model's own order: a checkpoint
loads into any layout of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError
from meshwright.nn import RankOrder, rank_orders
from meshwright.optim import local_tensor


@dataclass
class TrainingState:
    """The live objects of one training run: ``save`` reads them, ``load`` fills them in place."""

    model: nn.Module
    """Plain, DDP or FSDP2; every rank holds the whole model or its shards of it."""
    optim: Optimizer | None = None
    """Any torch optimizer, or a GuardedOptimizer, whose master weights and loss scale are then stored too."""
    lr_scheduler: LRScheduler | None = None
    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    """Position in the data, counted over all ranks."""
    strategy: str = ""
    """JSON text of the strategy; recorded for information, never applied."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that is plain: numbers, strings, lists, tuples and dictionaries of them; rank 0's are stored."""
    frozen: bool = True
    """Whether parameters that are not trained are stored too. Without them (adapters around a large model) a
    checkpoint loads only into a model that has them already; those of one that holds them are then left alone."""
    averaged: bool = False
    """Whether ``load`` fills the model with the moving average of its weights (method ``ema``), for evaluation."""

    def settle(self) -> None:
        """Turn the position of the run into plain numbers: a checkpoint of anything else would not load.

        Raises:
            CheckpointError: When ``step`` or ``samples_seen`` is no whole number from 0 on, or ``strategy`` no text.
        """
        for name in ("step", "samples_seen"):
            given = getattr(self, name)
            number = _whole_number(given)
            if number is None or number < 0:
                raise CheckpointError(
                    f"The training state's {name} cannot be stored",
                    expected="a whole number from 0 on",
                    got=repr(given),
                    fix=f"set state.{name} to an int",
                )
            setattr(self, name, number)
        if not isinstance(self.strategy, str):
            raise CheckpointError(
                "The training state's strategy cannot be stored",
                expected="text",
                got=type(self.strategy).__name__,
                fix="give str(strategy), or leave it out: it is recorded for information",
            )


def _whole_number(value: Any) -> int | None:
    """Return an integer of Python, numpy or a tensor of one element; None for anything else."""
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class CheckpointInfo:
    """Origin of a loaded checkpoint, and its notes on the run that wrote it."""

    path: Path
    step: int
    samples_seen: int
    strategy: str
    extra: dict[str, Any]
    world_size: int
    """Ranks of the run that wrote it."""
    rng_restored: bool
    """Whether this rank's random generators go on where they stopped; False when ranks or devices differ."""
    damaged: tuple[str, ...] = ()
    """Errors of newer checkpoints, which were passed over; empty when the checkpoint was named."""


# --- Python values as JSON and back, exactly: the state of a scheduler or an optimizer beside tensors
#
# JSON has no tuples and no integer keys, but ``MultiStepLR`` has a ``Counter`` of steps: such values are tagged.

_TUPLE, _ITEMS, _COUNTER, _TENSOR = "__tuple__", "__items__", "__counter__", "__tensor__"


def to_plain(value: Any, where: str) -> Any:
    """Turn a value into JSON types.

    Args:
        value: None, bool, number, string, one-element tensor, or a list, tuple, mapping or Counter of these.
        where: Name of the value, for the error.

    Raises:
        CheckpointError: When something in it cannot be stored without pickle.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, where)
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() == 1:
        return {_TENSOR: value.tolist(), "dtype": dtype_name(value.dtype)}
    raise CheckpointError(
        f"{where} cannot be stored in a checkpoint",
        expected="numbers, strings, one-element tensors, and lists, tuples or dictionaries of them (never pickle)",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        fix="make it a tensor of the model or the optimizer, or turn it into plain values",
    )


def _mapping_to_plain(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    pairs = [(key, to_plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {_COUNTER: [[to_plain(key, where), item] for key, item in pairs]}
    if all(isinstance(key, str) and not key.startswith("__") for key, _ in pairs):
        return dict(pairs)
    return {_ITEMS: [[to_plain(key, where), item] for key, item in pairs]}


def from_plain(value: Any) -> Any:
    """Return the value that :func:`to_plain` turned into JSON types.

    Raises:
        Exception: KeyError, TypeError, ValueError or AttributeError, for JSON that :func:`to_plain` never makes.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_plain(item) for item in value[_TUPLE])
    if _COUNTER in value:
        return Counter({from_plain(key): from_plain(item) for key, item in value[_COUNTER]})
    if _ITEMS in value:
        return {from_plain(key): from_plain(item) for key, item in value[_ITEMS]}
    if _TENSOR in value:
        try:
            return torch.tensor(value[_TENSOR], dtype=dtype_named(value["dtype"]))
        except (OverflowError, RuntimeError) as error:  # a number that the type cannot hold
            raise ValueError(str(error)) from None
    return {key: from_plain(item) for key, item in value.items()}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        CheckpointError: When this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint holds tensors of the unknown type {name!r}", fix="load it with the torch that wrote it"
        )
    return dtype


# --- A model as named tensors: the same names whether it is plain, compiled, or wrapped in DDP or FSDP2

# What wrapper modules add to names; the root's own wrappers are taken off before.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ModelEntries:
    """The state dict of a model, divided into tensors and values for JSON."""

    module: nn.Module
    """The model without DDP and torch.compile around it."""
    raw: dict[str, Any]
    """Its state dict with live parameters, under its own names."""
    tensors: dict[str, torch.Tensor]
    """Live tensors under the stored names; of tied ones only the first name."""
    values: dict[str, Any]
    """Entries that are not tensors (``get_extra_state``), in JSON types."""

    def load(self, values: dict[str, Any]) -> None:
        """Load the state dict after ``tensors`` were filled in place.

        This changes nothing more in ordinary parameters; modules with load hooks or extra state need it.
        """
        stored = {name: from_plain(values[stored_name(name)]) for name in self.raw if stored_name(name) in values}
        self.module.load_state_dict(self.raw | stored)


_reading = False


def is_reading_entries() -> bool:
    """Return whether a ``state_dict`` is being read for its live tensors, which a model's own must not replace."""
    return _reading


@contextlib.contextmanager
def _reading_entries() -> Iterator[None]:
    global _reading
    before, _reading = _reading, True
    try:
        yield
    finally:
        _reading = before


def model_entries(model: nn.Module) -> ModelEntries:
    """Name all persistent tensors of a model; do not communicate.

    Raises:
        CheckpointError: When a module's extra state cannot be stored.
    """
    module = unwrapped(model)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward without backward, the root's weights are still gathered
    with _reading_entries():
        raw: dict[str, Any] = module.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in raw.items():
        if not isinstance(value, torch.Tensor):
            values[stored_name(name)] = to_plain(value, name)
        elif id(value) not in seen:
            seen.add(id(value))
            tensors[stored_name(name)] = value
    return ModelEntries(module, raw, tensors, values)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def stored_name(name: str) -> str:
    """Return a name without the parts that wrappers have added to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# --- Fused parameters of a tensor axis
#
# Their rows, and those of their states, lie in the order of ranks (see ``RankOrder``); every checkpoint has them in the
# model's own order.

_CODES, _SCALES = "_codes", "_absmax"  # endings of the names of 8-bit states


def in_model_order(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace tensors that lie in the order of ranks by copies in the model's order; collective for these.

    Args:
        entries: The model.
        tensors: Weights, masters and states, by names that contain those of the model.

    Raises:
        CheckpointError: When a block of a quantized state reaches across rows that would be separated.
    """
    return dict(tensors) | {name: order.to_model(tensors[name], dim) for name, order, dim in _fused(entries, tensors)}


@torch.no_grad()
def to_rank_order_(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reorder tensors that were filled in the model's order into the order of ranks, in place; collective for these."""
    for name, order, dim in _fused(entries, tensors):
        local_tensor(tensors[name].detach()).copy_(local_tensor(order.to_ranks(tensors[name], dim)))


def check_orders(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that could be filled but not reordered into the order of ranks; change nothing.

    Raises:
        CheckpointError: When a block of a quantized state reaches across rows that would be separated.
    """
    for _ in _fused(entries, tensors):
        pass


def _fused(entries: ModelEntries, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, RankOrder, int]]:
    """Yield name, order and dim of every tensor that has the rows of a fused parameter."""
    by_identity = rank_orders(entries.module)
    for weight, parameter in entries.tensors.items():
        order = by_identity.get(id(parameter))
        if order is None:
            continue
        for name, tensor in tensors.items():
            if f".{weight}." in f".{name}.":
                codes = tensors.get(f"{name.removesuffix(_SCALES)}{_CODES}") if name.endswith(_SCALES) else None
                if codes is not None:
                    found = _order_of_scales(name, tensor, codes, parameter, order)
                else:
                    found = _order_of(name, tensor, tensors, parameter, order)
                if found is not None:
                    yield name, *found


def _order_of(
    name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor, order: RankOrder
) -> tuple[RankOrder, int] | None:
    """Return the rank order of a tensor and its fused dim; None if it has none, such as a factor of columns."""
    dim = _fused_dim(tensor, parameter, order)
    if dim is None:
        return None
    if not tensor.is_floating_point():
        scales = tensors.get(f"{name.removesuffix(_CODES)}{_SCALES}") if name.endswith(_CODES) else None
        if scales is None:
            raise _torn(name, tensor)
        _order_of_scales(name, scales, tensor, parameter, order)
    return order, dim


def _order_of_scales(
    name: str, scales: torch.Tensor, codes: torch.Tensor, parameter: torch.Tensor, order: RankOrder
) -> tuple[RankOrder, int] | None:
    """Return the order and fused dim of the scales of blocks of codes.

    Scales of blocks within rows follow their rows; those of blocks along the fused dim must not cross its parts.

    Raises:
        CheckpointError: When a block reaches across parts that the other order separates.
    """
    # Late: most runs have no 8-bit states, and their module takes a while to import.
    from meshwright.optim.eight_bit_moments import BLOCK_SIZE

    dim = _fused_dim(codes, parameter, order)
    if dim is None or scales.numel() == 1:
        return None
    if dim == 0 and codes.ndim > 1 and scales.shape[0] == codes.shape[0]:
        return order, 0
    whole_blocks = all(part % (order.ranks * BLOCK_SIZE) == 0 for part in order.parts)
    if dim != codes.ndim - 1 or codes.ndim > 2 or not whole_blocks:
        raise _torn(name, codes)
    return dataclasses.replace(order, parts=tuple(part // BLOCK_SIZE for part in order.parts)), dim


def _fused_dim(tensor: torch.Tensor, parameter: torch.Tensor, order: RankOrder) -> int | None:
    if tensor.shape == parameter.shape:
        return order.dim
    dims = [dim for dim, size in enumerate(tensor.shape) if size == parameter.shape[order.dim]]
    return dims[0] if dims else None


def _torn(name: str, tensor: torch.Tensor) -> CheckpointError:
    from meshwright.optim.eight_bit_moments import BLOCK_SIZE

    return CheckpointError(
        f"{name} cannot be stored: its blocks of quantized values reach across the parts of a fused projection",
        expected=f"blocks within rows, or parts that are multiples of {BLOCK_SIZE} on every rank",
        got=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
        fix="use an optimizer with states in fp32 or bf16 with tensor_parallel",
    )


# --- The state of a rank's random generators as tensors: torch (CPU and CUDA), numpy and ``random``


def generator_tensors() -> dict[str, torch.Tensor]:
    """Return the state of all generators of this process, as CPU tensors."""
    _, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "torch.cpu": torch.get_rng_state(),
        "python.state": _python_state(internal),
        # A normal number that random.gauss has stored for its next call; nan where there is none.
        "python.gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy.position": torch.tensor([int(position), int(has_gauss)], dtype=torch.int64),
        "numpy.gauss": torch.tensor(float(cached), dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["torch.cuda"] = torch.cuda.get_rng_state()
    return tensors


@functools.lru_cache(1)  # most steps draw no such number, and the conversion takes longer than a comparison
def _python_state(internal: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.array(internal, dtype=np.int64))


def set_generators(tensors: dict[str, torch.Tensor]) -> bool:
    """Put all generators into a saved state.

    Returns:
        Whether it did: nothing changes when this process has other generators (CUDA or not) than the saved one.
    """
    if tensors.keys() != generator_tensors().keys():
        return False
    gauss = tensors["python.gauss"].item()
    random.setstate((3, tuple(tensors["python.state"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss = tensors["numpy.position"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, tensors["numpy.gauss"].item()))
    torch.set_rng_state(tensors["torch.cpu"])
    if "torch.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["torch.cuda"])
    return True

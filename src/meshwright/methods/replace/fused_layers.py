"""Replace norms, language-model heads and MLPs by fused kernels of torch and Liger."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError, join_names
from meshwright.loss import HeadLogits
from meshwright.loss.lazy_logits import LossRanks
from meshwright.methods.replace.model_changes import NewForward, Replacement
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.modules import CHILDREN, PARAMETERS, buffers_of, children_of, parameters_of

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # a few roundings of the result
_PROBES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
"""Dtypes of input and weight: fp32, half precision, and a half-precision input with fp32 weights."""


@functools.cache
def rms_forward(eps_name: str, plus_one: bool) -> Callable[..., Tensor]:
    """Return a forward that is one fused operation of torch, with the sum of squares in fp32."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())
        weight: Any = self.weight
        eps: Any = getattr(self, eps_name)
        if plus_one:
            return F.rms_norm(hidden.float(), weight.shape, 1.0 + weight.float(), eps).to(hidden.dtype)
        if hidden.dtype == weight.dtype:
            return F.rms_norm(hidden, weight.shape, weight, eps)
        return weight * F.rms_norm(hidden, weight.shape, None, eps)

    return forward


def replace_rms_norms(model: nn.Module, into: Replacement) -> None:
    """Add a fused forward for every module of ``model`` that is proven to be an RMSNorm."""
    known: dict[Any, Callable[..., Tensor] | None] = {}
    changes = []
    for module in model.modules():
        eps_name = _eps_name(module)
        if eps_name is None:
            continue
        key = (type(module), module.weight.shape, getattr(module, eps_name))  # type: ignore[union-attr]
        if key not in known:
            known[key] = proven_forward(module, eps_name)
        forward = known[key]
        if forward is not None:
            changes.append(NewForward(module, forward))
    names = ", ".join(sorted({type(change.module).__name__ for change in changes}))
    into.add(f"rms_norm: {len(changes)} modules ({names}) use torch's fused one", changes)
    if not changes:
        into.left.append("rms_norm: there is no RMSNorm but torch's own")


def _eps_name(module: nn.Module) -> str | None:
    """Return the name of the attribute with ε, if the module looks like a normalisation with one weight."""
    weight = parameters_of(module).get("weight")
    if (
        weight is None
        or weight.dim() != 1
        or buffers_of(module)
        or children_of(module)
        or isinstance(module, nn.RMSNorm)
    ):
        return None
    if any(parameter is not None for name, parameter in parameters_of(module).items() if name != "weight"):
        return None
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def proven_forward(module: nn.Module, eps_name: str) -> Callable[..., Tensor] | None:
    """Return a fused forward that agrees with ``module`` on random inputs and weights; None if none does."""
    for plus_one in (False, True):
        forward = rms_forward(eps_name, plus_one)
        try:
            with torch.no_grad(), preserved_rng():
                if all(_agree(module, forward, *dtypes) for dtypes in _PROBES):
                    return forward
        except Exception:  # not a normalisation after all: it takes other arguments, for example
            return None
    return None


def _agree(module: nn.Module, forward: Callable[..., Tensor], dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    width: Any = module.weight.shape[0]  # type: ignore[union-attr,index]
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)  # without its hooks and its weight: called by its forward alone
    weight = torch.rand(width, generator=generator).add(0.5).to(weight_dtype)
    probe.__dict__ = {**module.__dict__, PARAMETERS: {"weight": nn.Parameter(weight)}}
    # Some rows so small that ε counts.
    scale = torch.tensor([1e-3, 1e-2, 1.0, 30.0]).view(-1, 1, 1)
    hidden = (torch.randn(4, 3, width, generator=generator) * scale).to(dtype)
    expected, got = type(module).forward(probe, hidden), forward(probe, hidden)
    tolerance = _TOLERANCE[dtype]
    return got.dtype == expected.dtype and torch.allclose(got, expected, rtol=tolerance, atol=tolerance * 1e-3)


# --- Heads of language models: logits are not computed where only their cross entropy is needed


def replace_head(model: nn.Module, path: str | None, into: Replacement) -> None:
    """Add the change of the head: in training it returns :class:`~meshwright.loss.HeadLogits`.

    Args:
        model: The model with the head.
        path: Path of the head; None finds it.
        into: The replacement to add to.

    Raises:
        ModelError: When there is no head, or several.
    """
    found = find_heads(model) if path is None else _named(model, path)
    if len(found) != 1:
        raise ModelError(
            "module_replace: the head whose logits the loss is to do without is not clear",
            expected="one nn.Linear from the width of an embedding to its number of entries",
            got=join_names(found),
            fix='name it: ("module_replace", {"loss": "path.of.the.head"})',
        )
    ((name, head),) = found.items()
    shape = f"{head.in_features} x {head.out_features}"
    into.add(f"fused_loss: the logits of {name} ({shape}) go into a cross entropy in parts", [NewForward(head, _lazy)])


_RANKS = "_meshwright_loss_ranks"


def _lazy(self: nn.Linear, input: Tensor) -> Tensor:
    # In evaluation logits are read in other ways, and FSDP may have freed the weight by then.
    if not (self.training and torch.is_grad_enabled() and input.requires_grad):
        return F.linear(input, self.weight, self.bias)
    return HeadLogits.of(input, self.weight, self.bias, self.__dict__.get(_RANKS, ()))


def share_loss(model: nn.Module, ranks: LossRanks) -> LossShare:
    """Let ranks with the same hidden states compute the loss of a part of the rows each, where a head is replaced.

    Returns:
        A handle that ends it.
    """
    heads = []
    for head in model.modules():
        before = vars(head).get(_RANKS, ())
        # Other methods wrap forwards; models have several lists of blocks.
        if inspect.unwrap(type(head).forward) is _lazy and ranks not in before:
            head.__dict__[_RANKS] = (*before, ranks)
            heads.append(head)
    return LossShare(heads, ranks)


class LossShare:
    """Ends what :func:`share_loss` began."""

    def __init__(self, heads: list[nn.Module], ranks: LossRanks) -> None:
        self._heads, self._ranks = heads, ranks

    def remove(self) -> None:
        """Let every rank compute the loss of all rows again."""
        for head in self._heads:
            head.__dict__[_RANKS] = tuple(each for each in vars(head)[_RANKS] if each is not self._ranks)


def _named(model: nn.Module, path: str) -> dict[str, nn.Linear]:
    module = dict(model.named_modules()).get(path)
    return {path: module} if type(module) is nn.Linear else {}


def find_heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the output embeddings of a transformers model; else all layers of the shape of an embedding."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    asked = getter() if getter is not None else None
    if asked is not None:
        return {path: m for path, m in model.named_modules() if m is asked and type(m) is nn.Linear}
    tables = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {p: m for p, m in model.named_modules() if type(m) is nn.Linear and tuple(m.weight.shape) in tables}


# --- Liger-Kernel's fused operations (Hsu et al. 2024), where it is installed and the job runs on CUDA
#
# Modules stay, and their forwards call Liger's functions: Liger's own patches would change classes of transformers for
# the whole process. Before that each module is tested on the CPU, with small random weights, to compute the formula of
# the kernel.

_SWIGLU_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def liger_functions(device: torch.device) -> Any:
    """Return the module of Liger's functions; None where it is not installed or the device is not CUDA."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    return importlib.import_module("liger_kernel.transformers.functional")


_Found = Iterator[tuple[nn.Module, Callable[[Any], Callable[..., Any]]]]
"""Modules, each with a function that makes its new forward from Liger's functions."""


def _layer_norms(model: nn.Module) -> _Found:
    # torch's LayerNorm is one kernel already; Liger's reads and writes less in backward.
    for module in model.modules():
        if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.bias is not None:
            yield module, _layer_norm_forward


@functools.cache
def _layer_norm_forward(functions: Any) -> Callable[..., Tensor]:
    def forward(self: nn.LayerNorm, input: Tensor) -> Tensor:
        if input.dtype != self.weight.dtype:  # under autocast
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        normalised: Tensor = functions.liger_layer_norm(input, self.weight, self.bias, self.eps)
        return normalised

    return forward


def _swiglus(model: nn.Module) -> _Found:
    """Yield MLPs that compute down(silu(gate(x)) · up(x))."""
    known: dict[Any, bool] = {}
    for module in model.modules():
        for names in _SWIGLU_NAMES:
            layers = [children_of(module).get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                key = (type(module), names, str(getattr(module, "act_fn", None)))
                if key not in known:
                    known[key] = _is_swiglu(module, names)
                if known[key]:
                    yield module, functools.partial(_swiglu_forward, names)


@functools.cache
def _swiglu_forward(names: tuple[str, str, str], functions: Any) -> Callable[..., Tensor]:
    gate, up, down = names

    def forward(self: Any, x: Tensor) -> Tensor:
        product: Tensor = getattr(self, down)(functions.liger_swiglu(getattr(self, gate)(x), getattr(self, up)(x)))
        return product

    return forward


def _is_swiglu(module: nn.Module, names: tuple[str, str, str]) -> bool:
    """Return whether the module, with small layers in place of its own, computes the formula."""
    with preserved_rng(), torch.no_grad():
        small = dict(zip(names, (nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)), strict=True))
        probe = copy.copy(module)
        probe.__dict__ = {**module.__dict__, CHILDREN: {**children_of(module), **small}}
        x = torch.randn(5, 4)
        gate, up, down = small.values()
        try:
            got = type(module).forward(probe, x)
        except Exception:  # not a SwiGLU after all
            return False
        return isinstance(got, Tensor) and torch.allclose(got, down(F.silu(gate(x)) * up(x)), atol=1e-6)


def _rotaries(model: nn.Module) -> _Found:
    """Yield modules whose forward calls a function ``apply_rotary_pos_emb`` of its file."""
    known: dict[Callable[..., Any], bool] = {}
    for module in model.modules():
        forward = type(module).forward
        code = getattr(forward, "__code__", None)
        rotate = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
        if code is None or rotate is None or "apply_rotary_pos_emb" not in code.co_names or _is_partial(module):
            continue
        if rotate not in known:
            known[rotate] = _is_rotation(rotate)
        if known[rotate]:
            yield module, functools.partial(_rotary_forward, forward)


@functools.cache
def _rotary_forward(forward: types.FunctionType, functions: Any) -> Callable[..., Any]:
    """Return a copy of a forward that calls Liger's function; the file's function stays for all other modules."""
    names = {**forward.__globals__, "apply_rotary_pos_emb": functions.liger_rope}
    changed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(changed, forward)


def _is_partial(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    factors = (getattr(config, "partial_rotary_factor", None), parameters.get("partial_rotary_factor"))
    return any(factor not in (None, 1, 1.0) for factor in factors)


def _is_rotation(rotate: Callable[..., Any]) -> bool:
    """Return whether a function rotates halves of queries and keys (batch, heads, tokens, features) as in RoFormer."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    angles = torch.rand(1, 3, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    try:
        if len(inspect.signature(rotate).parameters) < 4:
            return False
        got = rotate(q, k, cos, sin)
    except Exception:  # not a rotation, in spite of its name
        return False
    return all(torch.allclose(a, rotated(b), atol=1e-6) for a, b in zip(got, (q, k), strict=True))


LIGER: dict[str, Callable[[nn.Module], _Found]] = {"layer_norm": _layer_norms, "swiglu": _swiglus, "rotary": _rotaries}
"""The modules of a model that each of Liger's kernels can take, by the name of the replacement."""


def replace_by_liger(name: str, model: nn.Module, device: torch.device, into: Replacement) -> None:
    """Add Liger's kernel of a name in ``LIGER`` for every module that computes its formula."""
    functions, found = liger_functions(device), LIGER[name](model)
    if functions is None:
        count = sum(1 for _ in found)
        if count:
            into.left.append(f"{name}: {count} modules stay torch's, without liger-kernel on CUDA")
        return
    changes = [NewForward(module, make(functions)) for module, make in found]
    into.add(f"{name}: {len(changes)} modules use liger-kernel", changes)

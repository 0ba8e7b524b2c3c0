"""The styles of a tensor-parallel plan: what each splits of a layer, and what its ranks tell each other.

Names are those of transformers' ``base_model_tp_plan``, older spellings included. Megatron-LM (Shoeybi et al. 2019,
§3) is where the pair comes from: a layer split by columns feeds one split by rows, one all-reduce behind the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from meshwright.errors import ModelError, join_names


@dataclass(frozen=True)
class Style:
    """What a tensor axis does to one layer."""

    name: str
    dims: tuple[tuple[str, int], ...] = ()  # the dim of each parameter that is divided; the others stay whole
    gradient: Literal["nothing", "all_reduce", "all_gather"] = "nothing"  # of the layer's input, in backward
    output: Literal["as computed", "all_reduce", "all_gather", "logits"] = "as computed"
    splits_input: bool = False  # a whole input is cut before the layer; else it comes in cut, if the layer needs it so


LINEAR = {
    "colwise": Style("colwise", (("weight", 0), ("bias", 0)), gradient="all_reduce"),
    "colwise_gather_output": Style(
        "colwise_gather_output", (("weight", 0), ("bias", 0)), gradient="all_reduce", output="all_gather"
    ),
    "vocabulary_head": Style("vocabulary_head", (("weight", 0), ("bias", 0)), gradient="all_reduce", output="logits"),
    "rowwise": Style("rowwise", (("weight", 1),), output="all_reduce"),
    "rowwise_split_input": Style(
        "rowwise_split_input", (("weight", 1),), gradient="all_gather", output="all_reduce", splits_input=True
    ),
}
EMBEDDING = {
    "embedding_rowwise": Style("embedding_rowwise", (("weight", 0),), output="all_reduce"),
    "embedding_colwise": Style("embedding_colwise", (("weight", 1),)),
}
ANY = {
    "replicated_with_grad_allreduce": Style("replicated_with_grad_allreduce"),
    "replicate": Style("replicate"),
}
STYLES = LINEAR | EMBEDDING | ANY

_OLDER = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_OF_EMBEDDING = {"rowwise": "embedding_rowwise", "rowwise_split_input": "embedding_rowwise"}


def style_of(path: str, module: nn.Module, name: str) -> Style:
    """The style that a plan's entry means for one module.

    Raises:
        ModelError: When the style is unknown, or cannot be applied to such a module.
    """
    name = _OLDER.get(name, name)
    if isinstance(module, nn.Embedding):
        name = _OF_EMBEDDING.get(name, name)
    if name not in STYLES:
        raise ModelError(
            f"tensor_parallel: the plan has a style that is not known for {path}",
            expected=f"one of {join_names([*STYLES, *_OLDER])}",
            got=repr(name),
            fix=f"override it, such as plan={{{path!r}: 'replicate'}}; mixtures of experts are not split yet",
        )
    _check_kind(path, module, name)
    return STYLES[name]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, or transformers' Conv1D, which keeps its weight transposed."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (in, out): GPT-2's Conv1D in transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def features(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer."""
    weight = module.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def _check_kind(path: str, module: nn.Module, name: str) -> None:
    wanted = nn.Linear if name in LINEAR else nn.Embedding if name in EMBEDDING else nn.Module
    if not isinstance(module, wanted) and not (name in LINEAR and is_linear(module)):
        raise ModelError(
            f"tensor_parallel: {path} is no layer that the style {name} can split",
            expected=f"a torch.nn.{wanted.__name__}",
            got=type(module).__name__,
            fix=f"leave it whole with plan={{{path!r}: 'replicate'}}, and with it the layers that feed it",
        )
    if isinstance(module, nn.Embedding) and name in EMBEDDING:
        odd = [key for key in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(module, key)]
        if odd:
            raise ModelError(
                f"tensor_parallel: the embedding {path} does more than look up rows",
                expected="an nn.Embedding without max_norm, sparse and scale_grad_by_freq",
                got=join_names(odd),
                fix=f"leave it whole with plan={{{path!r}: 'replicate'}}",
            )

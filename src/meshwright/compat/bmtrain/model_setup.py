"""Set up a whole model: `BMTrainModelWrapper`, `init_parameters` and `grouped_parameters`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.block_list import all_parameters
from meshwright.compat.bmtrain.distributed_module import check_no_scalars, distributed_class
from meshwright.compat.bmtrain.parameter import DistributedParameter, record_of
from meshwright.errors import ModelError, join_names
from meshwright.nn.fsdp_units import reshard
from meshwright.nn.model_layout import local_part
from meshwright.nn.module_structure import check_no_renorm, find_blocks, without_caches
from meshwright.runtime import broadcast_object, print_rank, require_distributed, settings, world_size
from meshwright.runtime.torch_internals.modules import buffers_of, children_of, parameters_of


def BMTrainModelWrapper(model: nn.Module, use_checkpoint: bool = True, zero_level: int | None = None) -> nn.Module:
    """Shard a model in place over all ranks: its repeated blocks become Blocks, its modules DistributedModules.

    Blocks are the members of the outermost ``nn.ModuleList``s that have submodules of their own, as transformer layers
    do. Values, names, tied weights, buffers and classes stay, and frozen parameters stay frozen. Models of the
    transformers library work.

    Args:
        model: Any module with ordinary parameters, equal on all ranks.
        use_checkpoint: As for :class:`Block`.
        zero_level: As for :class:`Block`.

    Returns:
        The model itself.

    Raises:
        LaunchError: Before ``init_distributed``.
        ModelError: When something in it is distributed already, or a block shares a single parameter with the rest.
    """
    require_distributed("BMTrainModelWrapper")
    check_no_renorm(model, world_size())
    blocks = [(path, module) for path, module in find_blocks(model) if next(module.children(), None) is not None]
    inside = {id(inner) for _, module in blocks for inner in module.modules()}
    # A recurrent module has a second list of its weights, which only FSDP2 keeps up to date: it becomes a Block.
    recurrent = [entry for entry in model.named_modules() if isinstance(entry[1], nn.RNNBase)]
    recurrent = [(path, module) for path, module in recurrent if id(module) not in inside]
    _check(model, blocks + recurrent)
    made = {id(module): Block(module, use_checkpoint, zero_level) for _, module in blocks}
    made |= {id(module): Block(module, False, zero_level) for _, module in recurrent}
    for parent in list(model.modules()):
        for name, child in children_of(parent).items():
            if id(child) in made:
                children_of(parent)[name] = made[id(child)]
    _distribute_rest(model)
    if use_checkpoint and blocks and without_caches(model):
        print_rank("meshwright: config.use_cache was set to False; a cache cannot be recomputed")
    return model


def _distribute_rest(model: nn.Module) -> None:
    """Shard all parameters outside the blocks; tied parameters stay one parameter."""
    device = settings().device
    made: dict[int, nn.Parameter] = {}
    inside = {id(inner) for block in model.modules() if isinstance(block, Block) for inner in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = DistributedParameter(parameter, parameter.requires_grad)
            parameters_of(module)[name] = made[id(parameter)]
        for name, buffer in buffers_of(module).items():
            buffers_of(module)[name] = buffer.to(device) if buffer is not None else None
        if type(module) is not nn.ModuleList:
            module.__class__ = distributed_class(type(module))


def _check(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    done = [name for name, tensor in model.named_parameters() if isinstance(tensor, DTensor)]
    if done or any(isinstance(module, Block) for module in model.modules()):
        raise ModelError(
            "The model is distributed already",
            expected="a model of ordinary modules and parameters",
            got=join_names(done),
            fix="wrap it once, before anything else distributes it",
        )
    # Its second list of weights would stay the old ones.
    if isinstance(model, nn.RNNBase):
        raise ModelError(
            "A recurrent module cannot be wrapped by itself",
            expected="a model with such modules in it",
            got=type(model).__name__,
            fix="use meshwright.Block(module, use_checkpoint=False)",
        )
    check_no_scalars("Scalar parameters", model.named_parameters())
    unit_of = {id(inner): path for path, module in blocks for inner in module.modules()}
    home: dict[int, str | None] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            unit = unit_of.get(id(module))
            if home.setdefault(id(parameter), unit) == unit:
                continue
            raise ModelError(
                "A block shares a single parameter with another part of the model",
                expected="parameters tied within one block, or outside all blocks",
                got=f"{path}.{key}",
                fix="untie it, or share the whole block",
            )


# --- Initial values and groups of distributed parameters.


@torch.no_grad()
def init_parameters(model: nn.Module) -> None:
    """Call the ``init_method`` of every :class:`DistributedParameter` of a model; others keep their values.

    Every rank fills the full tensors one after the other, in the model's order and with rank 0's random generators, and
    keeps its parts: values are those of a single process, and memory is bounded by one parameter. Collective.

    Args:
        model: Any module.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    require_distributed("init_parameters")
    reshard(model)
    with _generators_of_rank_0():
        for parameter, is_here in all_parameters(model):
            record = record_of(parameter)
            if record is None or record.init_method is None:
                continue
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=settings().device)
            record.init_method(full)
            # Other stages' parameters are drawn all the same: the generators must agree for the next one.
            if not is_here:
                continue
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(local_part(full, parameter))


@contextlib.contextmanager
def _generators_of_rank_0() -> Iterator[None]:
    """Give all ranks the state of rank 0's generators; from the first forward on they have seeds of their own."""
    device = settings().device
    own = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    shared = broadcast_object(own)
    _set_generators(shared, device)
    yield
    if not torch.equal(own[0], shared[0]):
        _set_generators(own, device)


def _set_generators(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """Yield a model's parameters by the ``group`` they were given, for optimizers with options per group.

    Yields:
        ``(group, parameters)`` in order of first appearance; plain parameters are in the group None. Every pipeline
        stage has the same groups, each with the parameters of this stage, which may be none.
    """
    groups: dict[str | None, list[nn.Parameter]] = {}
    for parameter, is_here in all_parameters(model):
        record = record_of(parameter)
        group = groups.setdefault(record.group if record else None, [])
        if is_here:
            group.append(parameter)
    yield from groups.items()

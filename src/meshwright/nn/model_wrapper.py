"""Any model, wrapped as if it had been written with distributed modules, parameters and Blocks. Seed: BMTrain."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError, join_names
from meshwright.nn.block import Block
from meshwright.nn.blocks import find_blocks
from meshwright.nn.caches import without_caches
from meshwright.nn.module import distributed_class
from meshwright.nn.parameter import DistributedParameter
from meshwright.nn.renorm import check_no_renorm
from meshwright.runtime import print_rank, require_distributed, settings, world_size


def BMTrainModelWrapper(model: nn.Module, use_checkpoint: bool = True, zero_level: int | None = None) -> nn.Module:
    """Shards a model in place over all ranks: its repeated blocks become Blocks, its modules DistributedModules.

    Blocks are the members of the outermost ``nn.ModuleList``s that have submodules of their own, as transformer layers
    do. Values, names, tied weights, buffers and classes stay; values must be equal on all ranks. Works with models of
    the transformers library. A frozen part stays frozen.

    Args:
        model: Any module with ordinary parameters.
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
    # A recurrent module keeps a list of its weights, which FSDP2 knows to keep up to date.
    recurrent = [entry for entry in model.named_modules() if isinstance(entry[1], nn.RNNBase)]
    recurrent = [(path, module) for path, module in recurrent if id(module) not in inside]
    _check(model, blocks + recurrent)
    made = {id(module): Block(module, use_checkpoint, zero_level) for _, module in blocks}
    made |= {id(module): Block(module, False, zero_level) for _, module in recurrent}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    _distribute_rest(model)
    if use_checkpoint and blocks and without_caches(model):
        print_rank("meshwright: config.use_cache was set to False; a cache cannot be recomputed")
    return model


def _distribute_rest(model: nn.Module) -> None:
    """Shards what is outside the blocks; tied parameters stay one parameter."""
    device = settings().device
    made: dict[int, nn.Parameter] = {}
    inside = {id(inner) for block in model.modules() if isinstance(block, Block) for inner in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = DistributedParameter(parameter, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(device) if buffer is not None else None
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
    if isinstance(model, nn.RNNBase):  # it would go on computing with the weights it had before
        raise ModelError(
            "A recurrent module cannot be wrapped by itself",
            expected="a model with such modules in it",
            got=type(model).__name__,
            fix="use meshwright.Block(module, use_checkpoint=False)",
        )
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            "Scalar parameters cannot be split over ranks",
            expected="parameters with at least one dimension",
            got=join_names(scalars),
            fix="make them tensors of shape (1,)",
        )
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

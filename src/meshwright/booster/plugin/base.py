"""What a plugin is: a named strategy, with ColossalAI's keyword arguments, and the few options no strategy can say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from meshwright.data import global_batch_loader
from meshwright.errors import ConfigError
from meshwright.methods import SAMPLED, resolve
from meshwright.runtime import coordinate_of, rank, world_size
from meshwright.strategy import Strategy


def inert(default: Any, why: str) -> Any:
    """An argument that is accepted and changes nothing here; the user is told once when it is not the default."""
    return field(default=default, metadata={"inert": why})


def near(default: Any, what: str) -> Any:
    """An argument that means something close to what it means in ColossalAI; the user is told once what."""
    return field(default=default, metadata={"near": what})


def only(default: Any, what: str, fix: str) -> Any:
    """An argument with one possible value: any other would change the result, and cannot be honoured."""
    return field(default=default, metadata={"only": what, "fix": fix})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plugin(ABC):
    """Base of all plugins. A plugin is immutable; it can be used by several boosters.

    Args:
        methods: Methods to add to the plugin's strategy, such as ``["checkpoint"]``; in any form a Strategy reads.

    Raises:
        ConfigError: For a value that cannot be honoured.
        TypeError: For an argument that does not exist.
    """

    methods: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for option in fields(self):
            if "only" in option.metadata and not self._is_default(option):
                raise ConfigError(
                    f"{type(self).__name__}: {option.name} asks for {option.metadata['only']}, which it cannot do",
                    expected=repr(option.default),
                    got=repr(getattr(self, option.name)),
                    fix=option.metadata["fix"],
                )
        max_norm, norm_type = self.clipping
        if not (max_norm >= 0 and norm_type > 0):
            raise ConfigError(
                f"{type(self).__name__}: max_norm and norm_type are no norm to clip by",
                expected="max_norm of 0 (no clipping) or more, and norm_type above 0",
                got=f"{max_norm!r} and {norm_type!r}",
                fix="leave them out to train without clipping",
            )

    @abstractmethod
    def strategy(self, world: int) -> Strategy:
        """The strategy for a number of ranks.

        Raises:
            ConfigError: When the plugin's sizes do not fit the world.
        """

    def with_methods(self, methods: Sequence[Any]) -> Strategy:
        """A strategy of these methods and the user's own; a user's replaces one of the same name."""
        strategy = Strategy(list(methods))
        for method in Strategy(list(self.methods)).methods:
            strategy = strategy.with_method(method)
        return strategy

    @property
    def controls_precision(self) -> bool:
        """Whether the precision is the plugin's, not ``Booster(mixed_precision=)``."""
        return True

    @property
    def clipping(self) -> tuple[float, float]:
        """Largest gradient norm (0: no clipping) and the p of the p-norm, applied in every optimizer step."""
        return 0.0, 2.0

    @property
    def ddp_options(self) -> Mapping[str, Any]:
        """Keyword arguments of DistributedDataParallel, for strategies that replicate parameters."""
        return {}

    @property
    def outputs_in_fp32(self) -> bool:
        """Whether the model's outputs are cast to fp32."""
        return False

    def notices(self) -> list[str]:
        """What the user should know of arguments that change nothing, or mean something else; one sentence each."""
        given = [option for option in fields(self) if not self._is_default(option)]
        said = [
            (each, f" changes nothing; {each.metadata['inert']}" if "inert" in each.metadata else each.metadata["near"])
            for each in given
            if not {"inert", "near"}.isdisjoint(each.metadata)
        ]
        return [f"{type(self).__name__}: {each.name}={getattr(self, each.name)!r}{text}" for each, text in said]

    def prepare_model(self, model: nn.Module, device: torch.device) -> list[str]:
        """Changes modules of the plain model before its strategy is applied; returns notices."""
        return []

    def num_micro_batches(self, batch_size: int) -> int:
        """Into how many micro-batches ``execute_pipeline`` cuts a batch of this rank."""
        return 1

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """A dataloader whose batches are this rank's share: ranks that hold one replica together get the same ones.

        Args:
            dataset: torch Dataset.
            batch_size: Samples per batch of one replica (not of all together).
            shuffle: Shuffle, in the order that ``seed`` and ``set_epoch`` of the loader decide.
            seed: Seed of the order, equal on all ranks.
            drop_last: Drop the last incomplete batch.
            pin_memory: As in torch's DataLoader.
            num_workers: As in torch's DataLoader; workers are seeded by torch, each one differently.
            distributed_sampler_cls: Used instead of torch's DistributedSampler.
            **kwargs: Further arguments of torch's DataLoader.

        Raises:
            DataError, ConfigError: When these do not fit together.
        """
        replica, num_replicas = self._replica()
        options = {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
        return global_batch_loader(
            dataset,
            loader_args={"batch_size": batch_size * num_replicas, "shuffle": shuffle, **options},
            replica=replica,
            num_replicas=num_replicas,
            sampler_cls=distributed_sampler_cls,
            sampler_seed=seed,
        )

    def _replica(self) -> tuple[int, int]:
        """Which data-parallel replica this rank belongs to, and how many there are."""
        axes = resolve(self.strategy(world_size()), world_size()).axes
        sizes, here = dict(axes), coordinate_of(rank(), axes)
        replica, replicas = 0, 1
        for axis in SAMPLED:
            replica = replica * sizes.get(axis, 1) + here.get(axis, 0)
            replicas *= sizes.get(axis, 1)
        return replica, replicas

    def _is_default(self, option: Field[Any]) -> bool:
        return bool(getattr(self, option.name) == option.default)

    def __repr__(self) -> str:
        shown = [option for option in fields(self) if option.default is MISSING or not self._is_default(option)]
        arguments = ", ".join(f"{option.name}={getattr(self, option.name)!r}" for option in shown)
        return f"{type(self).__name__}({arguments})"

"""Who takes part: a process group or a mesh axis, seen from one of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ConfigError, LaunchError

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a DeviceMesh of one axis, or None for the world."""


@dataclass(frozen=True)
class Members:
    """A process group, this process's rank in it, and its number of ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def backend(self, device: torch.device) -> str | None:
        """The backend by which tensors on ``device`` travel in this group, such as ``"nccl"``; None if they cannot."""
        pairs = dist.get_backend_config(self.group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in pairs).get(device.type)

    @property
    def host_device(self) -> torch.device:
        """Where small messages to the host travel: the CPU, or the CUDA device of a group that is NCCL alone."""
        host = torch.device("cpu")
        return host if self.backend(host) else torch.device("cuda", torch.cuda.current_device())

    def check_place(self, name: str, place: int) -> None:
        """Refuses a root or peer that is not in the group.

        Raises:
            ConfigError: Naming the argument.
        """
        if not 0 <= place < self.size:
            raise ConfigError(
                f"{name} is not a rank of the group",
                expected=f"0..{self.size - 1}" if self.size > 1 else "0: the group has one rank",
                got=repr(place),
                fix="count ranks within the group (they are those of the world where group is None)",
            )


def members_of(group: Group, comm: Group = None) -> Members:
    """Finds the group that a caller means, by either of its two names.

    Raises:
        LaunchError: Before ``init_distributed``, or when this rank is not in the group.
        ConfigError: When a mesh has more than one axis, or both names are given.
    """
    if group is not None and comm is not None:
        raise ConfigError(
            "A collective was given two groups",
            expected="group, or BMTrain's name for it, comm",
            got="both",
            fix="leave comm out",
        )
    group = comm if group is None else group
    if not dist.is_initialized():
        raise LaunchError(
            "A collective needs the ranks to have found each other",
            expected="init_distributed() before it",
            got="no process group",
            fix="call meshwright.init_distributed() at the start; one process alone needs it too",
        )
    if isinstance(group, DeviceMesh):
        group = _only_axis(group)
    process_group = dist.group.WORLD if group is None else group
    # new_group hands a sentinel to the ranks it leaves out.
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise LaunchError(
            "This rank is not in the group",
            expected="a group that it belongs to",
            got=f"rank {dist.get_rank()} of the world",
            fix="call the collective only on the ranks of the group",
        )
    return Members(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))


def _only_axis(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ConfigError(
            "A collective goes along one mesh axis",
            expected="a DeviceMesh with one axis",
            got=f"{mesh.ndim} axes ({', '.join(mesh.mesh_dim_names or ())})",
            fix="slice one, such as mesh['data']",
        )
    return mesh.get_group()

"""Bound a candidate's step time and memory from below, from a few probes and its state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from meshwright.cost import Block, Cluster, Link, Stages, Step, fitted
from meshwright.cost.device_time import Machine, Network
from meshwright.cost.rank_memory import keeps_state
from meshwright.cost.scheduling import StageTimes, pipeline_s, settled_after
from meshwright.cost.step import element_bytes
from meshwright.cost.step_time import rank_of
from meshwright.errors import MeshwrightError
from meshwright.methods import Role, cost_of, mesh_method
from meshwright.methods.base import SHARD_AXES
from meshwright.methods.composition import shard_axis_of
from meshwright.planner.plans import Subject
from meshwright.planner.search.probing import Probe, SavedBytes, State, bare_blocks, probe_of, probing, saved_by, scaled
from meshwright.planner.search.search_space import Branch, Choice, Mesh, Space, role_of, shards_alone
from meshwright.runtime import TOKEN_AXES
from meshwright.strategy import Strategy


def bubble(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the waiting time of a pipeline's ranks, in units of their computation for one micro-batch."""
    # Further micro-batches add nothing: the schedule repeats.
    return _played_bubble(schedule, ranks, stages_per_rank, settled_after(schedule, ranks, micro_batches))


@functools.lru_cache(maxsize=4096)
def _played_bubble(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    times = [StageTimes(1 / 3, 2 / 3)] * ranks
    try:
        return max(pipeline_s(schedule, times, 0.0, stages_per_rank, micro_batches) - micro_batches, 0.0)
    except ValueError:  # numbers that the schedule does not run with
        return math.inf


_MANY = 64  # samples per micro-batch beyond which kernels get no more efficient
_OF_EACH_CALL = ("gap_s", "product_s", "call_s", "hop", "reduce_scatter_s", "shard_s", "wait_s")  # bounds go without


class Bounds:
    """Lower bounds for the candidates of one subject on one cluster.

    A probe is one plan of the subject without pipeline and sharding, with micro-batches of one sample. It tells what a
    rank computes and saves for a sample. Everything else follows from the methods' ``cost`` twins on bare parameters,
    so bounds know no method. They hold as far as no stage is larger than the mean one, and a link is used at its full
    bandwidth.
    """

    def __init__(self, subject: Subject, cluster: Cluster) -> None:
        self.subject, self.cluster = subject, cluster
        self.known = known = getattr(subject, "calibration", None) or cluster.calibration or fitted()
        ideal = dataclasses.replace(known.constants, **dict.fromkeys(_OF_EACH_CALL, 0.0))
        self._ideal = dataclasses.replace(known, constants=ideal)
        links = (cluster.intra, cluster.inter, cluster.host_link, cluster.disk)
        intra, inter, host, disk = (Link(link.bytes_per_s, 0.0) for link in links)
        self._full_links = dataclasses.replace(cluster, intra=intra, inter=inter, host_link=host, disk=disk)
        efficiency = known.of(cluster.device.efficiency)
        self._machine = Machine(cluster.device, efficiency, ideal, cluster.num_devices)
        self._network = Network(self._full_links, efficiency, ideal)
        self.num_probes = 0
        self.limit_bytes: int | None = None  # known when anything has been probed
        self._probes: dict[object, Probe | MeshwrightError] = {}
        self._undivided: dict[Branch, Probe] = {}
        self._divided: dict[Branch, Probe] = {}
        self._computed: dict[object, tuple[float, float, float]] = {}
        self._whole = Mesh((), subject.world, 1, 1, ())
        self._states: dict[object, State] = {}
        self._state_of: dict[Branch, State] = {}
        self._twins: dict[object, int] = {}
        self._blocks: dict[tuple[int, bool], tuple[Block, ...]] = {}
        self._numbers: dict[Choice, int] = {}
        self._numbered: dict[tuple[int, ...], tuple[int, Choice]] = {}
        self._probing: dict[object, Choice] = {}

    def state_bytes(self) -> int:
        """Return the bytes of all parameters and their optimizer states, once, by any probe; 0 where there is none."""
        probes = {id(probe): probe for probe in self._undivided.values()}
        return min((_state_bytes(probe.step) for probe in probes.values()), default=0)

    def _number(self, methods: Choice) -> int:
        """Return a number that is equal for equal methods, which take long to hash."""
        ids = tuple(map(id, methods))
        if ids not in self._numbered:  # they are kept, so that no others come to have their ids
            self._numbered[ids] = self._numbers.setdefault(methods, len(self._numbers)), methods
        return self._numbered[ids][0]

    def probe(self, mesh: Mesh, methods: Choice) -> Probe:
        """Return the probe of a mesh's inner axes with methods for precision, recomputation and others.

        Raises:
            MeshwrightError: When the subject refuses these axes.
        """
        key = mesh.inner, self._number(mesh.inner_methods), self._number(methods)
        found = self._probes.get(key)
        if found is None:
            try:
                found = self._probed(mesh, methods)
            except MeshwrightError as error:
                found = error
            self._probes[key] = found
        if isinstance(found, MeshwrightError):
            raise found
        return found

    def _probed(self, mesh: Mesh, methods: Choice) -> Probe:
        ranks = self.subject.world // math.prod(size for _, size in mesh.inner)
        replicas = ranks * dict(mesh.inner).get("expert", 1)
        axis = "zero" if any(getattr(method, "shards", False) for method in methods) and ranks > 1 else "data"
        strategy = Strategy([mesh_method((*mesh.inner, (axis, ranks))), *mesh.inner_methods, *methods])
        self.num_probes += 1
        plan = self.subject.plan(strategy, math.ceil((self.subject.batch_size or 1) / replicas))
        self.limit_bytes = plan.limit_bytes
        of_batch: Callable[[int], Subject] | None = getattr(self.subject, "of_batch", None)
        if of_batch is None:
            return probe_of(plan)

        def again(samples: int) -> SavedBytes:
            self.num_probes += 1
            return saved_by(of_batch(samples * replicas).plan(strategy, 1))

        return probe_of(plan, again)

    def known_probe(self, branch: Branch) -> bool:
        """Return whether the probe of a branch has been made."""
        if branch in self._divided:  # found by the branch itself: to hash its methods takes long
            return True
        mesh = branch.mesh
        return (mesh.inner, self._number(mesh.inner_methods), self._number(self._probing_of(branch))) in self._probes

    def undivided(self, branch: Branch) -> Probe:
        """Return the probe without inner axes."""
        if branch not in self._undivided:
            self._undivided[branch] = self.probe(self._whole, self._probing_of(branch))
        return self._undivided[branch]

    def is_undivided_known(self, branch: Branch) -> bool:
        """Return whether the probe without inner axes has been made."""
        return branch in self._undivided or self._made(self._probing_of(branch)) is not None

    def _made(self, methods: Choice) -> Probe | None:
        found = self._probes.get((self._whole.inner, self._number(()), self._number(methods)))
        return found if isinstance(found, Probe) else None

    def _of_state(self, branch: Branch) -> Probe:
        """Return a probe with the parameters of a branch: its own, or one that is known already, with them sharded."""
        if not branch.sharding and not self.is_undivided_known(branch):
            for recompute, rest in itertools.product((branch.recompute, ()), (branch.rest, _but_for_loss(branch))):
                made = self._made(probing(branch.precision, recompute, rest, sharded=True))
                if made is not None:
                    return made
        return self.undivided(branch)

    def divided(self, branch: Branch) -> Probe:
        """Return the probe of a branch's inner axes."""
        if branch not in self._divided:
            self._divided[branch] = self.probe(branch.mesh, self._probing_of(branch))
        return self._divided[branch]

    def mesh_s(self, mesh: Mesh, samples: int, space: Space, *, probed: bool) -> float:
        """Return the seconds of computing on one rank of a mesh with the fastest methods of a space.

        Args:
            mesh: A mesh with or without inner axes.
            samples: Samples of one replica in a step.
            space: The choices.
            probed: Whether the inner axes are probed; otherwise they are taken to divide all work equally and to send
                nothing.

        Raises:
            MeshwrightError: When the subject refuses these axes.
        """
        found, refused = list[float](), list[MeshwrightError]()
        for loss in space.loss:
            try:
                found.append(self._with_loss_s(mesh, samples, space, loss, probed=probed))
            except MeshwrightError as error:
                refused.append(error)
        if refused and not found:
            raise refused[0]
        return min(found)

    def _with_loss_s(self, mesh: Mesh, samples: int, space: Space, loss: Choice, *, probed: bool) -> float:
        quickest = functools.partial(
            probing, space.precision[0], space.recompute[0], (*space.offload[0], *loss, *space.kernels[0], *space.extra)
        )  # fmt: skip
        if any(space.sharding) and (mesh.ranks > 1 or shards_alone(mesh, space)):
            try:
                return self._mesh_s(mesh, samples, quickest(sharded=True), probed=probed)
            except MeshwrightError:
                if all(space.sharding):
                    raise  # otherwise go on without sharding; the branches report the reason
        return self._mesh_s(mesh, samples, quickest(sharded=False), probed=probed)

    def _mesh_s(self, mesh: Mesh, samples: int, methods: Choice, *, probed: bool) -> float:
        if probed:
            return self._ideal_s(self.probe(mesh, methods), samples) / mesh.pipeline
        return self._ideal_s(self.probe(self._whole, methods), samples) / _shares(mesh) / mesh.pipeline

    def roughly_s(self, branch: Branch, samples: int, micro_batches: int) -> float:
        """Return the seconds of a branch's step without a new probe.

        Only the least waiting and the least traffic are counted.
        """
        (ranks, per_rank), parts = branch.shape, self._parts(branch)
        probed, state = self.known_probe(branch), self.state(branch)
        probe = self.divided(branch) if probed else self.undivided(branch)
        shares, update = 1 if probed else _shares(branch.mesh), state.update_s / parts
        whole = self._ideal_s(probe, samples) / shares / ranks
        if branch.schedule is None:
            return max(whole, state.link_s[1] / parts, self._copies_s(probe, samples) / shares) + update
        blocks = probe.num_blocks
        even = (blocks // (ranks * per_rank)) * ranks * per_rank / max(blocks, 1)
        waits = bubble(branch.schedule.schedule, ranks, per_rank, micro_batches)
        inside = self._inside_share(probe)
        return whole * (1 + inside * even * waits / micro_batches) + update

    def _copies_s(self, probe: Probe, samples: int) -> float:
        """Return the seconds of offloading activations beside forward, and of their return beside backward."""
        return (
            2 * probe.offloaded_bytes * samples / self._full_links.host_share.bytes_per_s
            if not probe.step.on_cpu
            else 0.0
        )

    def _ideal_s(self, probe: Probe, samples: int) -> float:
        inside, outside, _ = self._seconds(probe, _MANY, ideal=True)
        return (inside + outside) * samples / _MANY

    def _inside_share(self, probe: Probe) -> float:
        inside, outside, _ = self._seconds(probe, _MANY, ideal=True)
        return inside / max(inside + outside, 1e-30)

    def step_s(self, branch: Branch, samples: int, micro_batches: int) -> float:
        """Return the seconds of a branch's step from the probe of its inner axes.

        Raises:
            MeshwrightError: When the subject refuses these axes.
        """
        probe = self.divided(branch)
        inside, outside, least = self._seconds(probe, max(samples // micro_batches, 1), ideal=False)
        (ranks, per_rank), state = branch.shape, self.state(branch)
        update = state.update_s / self._parts(branch) + self.known.constants.step_s
        if ranks == 1:
            link = state.link_s[0] + (micro_batches - 1) * state.link_s[1]
            copies = self._copies_s(probe, samples)
            return max((inside + outside) * micro_batches, link / self._parts(branch), copies) + update
        assert branch.schedule is not None
        mine = least * (probe.num_blocks // (ranks * per_rank)) * per_rank
        waits = mine * bubble(branch.schedule.schedule, ranks, per_rank, micro_batches)
        return max((inside + outside) / ranks, mine) * micro_batches + waits + update

    def _seconds(self, probe: Probe, samples: int, *, ideal: bool) -> tuple[float, float, float]:
        """Return the seconds of a micro-batch: of all blocks, of what is outside of them, and of the quickest block."""
        key = id(probe), samples, ideal
        if key not in self._computed:
            cluster, known = (self._full_links, self._ideal) if ideal else (self.cluster, self.known)
            passes = rank_of(scaled(probe.step, samples), cluster, known).passes
            blocks = [f + b for f, b in zip(passes.forward_s, passes.backward_s, strict=True)]
            outside = passes.outside_forward_s + passes.outside_backward_s
            self._computed[key] = sum(blocks), outside, min(blocks, default=0.0)
        return self._computed[key]

    def held_bytes(self, branch: Branch, micro_batch: int, micro_batches: int, *, roughly: bool = False) -> float:
        """Return the bytes that a branch takes of a rank's limit, from the probe of its inner axes where known.

        Args:
            branch: The branch.
            micro_batch: Samples of a micro-batch; 0 counts the state alone.
            micro_batches: Micro-batches of a step.
            roughly: Whether every sample counts as much as a single one, which can be too much. Otherwise tensors that
                samples share count once, which takes a probe of two samples.
        """
        state, parts = self.state(branch), self._parts(branch)
        alone = state.held_bytes(micro_batches) / parts
        probe = self.divided(branch) if micro_batch and self.known_probe(branch) else None
        if probe is None:
            return alone * self._of_state(branch).slack
        saved = probe.saved.of_samples(micro_batch, None if roughly or micro_batch == 1 else probe.saved_by_two)
        if branch.schedule is None:
            at_loss: float = saved.total
        else:
            ranks, per_rank = branch.shape
            each = probe.num_blocks // (ranks * per_rank) * per_rank / max(probe.num_blocks, 1)
            at_loss = max(
                saved.inside * each * branch.schedule.in_flight(ranks, micro_batches), saved.behind + saved.loss
            )
        return max(alone, state.at_loss_bytes(micro_batches) / parts + at_loss) * probe.slack

    def _parts(self, branch: Branch) -> int:
        """Return the number of parts into which parameters are divided before they are sharded."""
        inner = dict(branch.mesh.inner)
        return inner.get("tensor", 1) * inner.get("expert", 1) * branch.mesh.pipeline

    def state(self, branch: Branch) -> State:
        """Return the state of a branch's sharding as if no inner axis divided the parameters."""
        if branch not in self._state_of:
            shared = TOKEN_AXES if branch.sharding else ()
            axes = tuple(axis for axis in branch.axes if axis[0] in ("data", "zero", "replica", *shared))
            axes = axes or tuple(axis for axis in branch.axes if axis[0] in SHARD_AXES)
            methods = self._number((*branch.sharding, *branch.precision, *_but_for_loss(branch)))
            key = axes, methods, branch.mesh.pipeline > 1
            if key not in self._states:
                self._states[key] = self._state(branch, axes)
            self._state_of[branch] = self._states[key]
        return self._state_of[branch]

    def _state(self, branch: Branch, axes: tuple[tuple[str, int], ...]) -> State:
        # Offloading chooses parameter by parameter, so they must not be merged.
        merged = self._bare(branch, axes, 1, merged=True).offloaded is None
        bare = functools.partial(self._bare, branch, axes, merged=merged)
        return State(bare, self._full_links, self._machine, self._network, self._of_state(branch).taken)

    def twin(self, branch: Branch) -> int:
        """Return a number that is equal for branches whose states cost exactly the same."""
        state = self.state(branch)
        if id(state) not in self._twins:  # to hash a step takes long
            self._twins[id(state)] = self._twins.setdefault((state.once, state.twice), len(self._twins))
        return self._twins[id(state)]

    def _bare(self, branch: Branch, axes: tuple[tuple[str, int], ...], micro_batches: int, *, merged: bool) -> Step:
        sharding, probe = Strategy([*branch.sharding, *branch.precision, *branch.rest]), self._of_state(branch)
        step = Step(
            blocks=self._bare_blocks(probe, merged),
            axes=axes,
            shard_axis=shard_axis_of(sharding, dict(axes)),
            num_micro_batches=micro_batches,
            stages=Stages((0,), ((0, 1),), 1, 0) if branch.mesh.pipeline > 1 else None,
            on_cpu=probe.step.on_cpu,
            on_one_host=probe.step.on_one_host,
            updates_elements=probe.step.updates_elements,
        )
        return cost_of(sharding, step)

    def _probing_of(self, branch: Branch) -> Choice:
        others = branch.precision, branch.recompute, branch.rest
        key = bool(branch.sharding), *(self._number(methods) for methods in others)
        if key not in self._probing:
            self._probing[key] = probing(*others, sharded=bool(branch.sharding))
        return self._probing[key]

    def _bare_blocks(self, probe: Probe, merged: bool) -> tuple[Block, ...]:
        key = id(probe), merged
        if key not in self._blocks:
            self._blocks[key] = bare_blocks(probe.step, merged=merged)
        return self._blocks[key]


def _state_bytes(step: Step) -> int:
    total = 0
    for count, each in step.every_parameter():
        states = (state for state in each.states if each.trainable and keeps_state(step, each, state))
        of_states = sum(math.prod(each.shape[dim] for dim in state.dims) * state.itemsize for state in states)
        total += count * (each.numel * element_bytes(each, step.held_itemsize(each)) + of_states)
    return total


def _but_for_loss(branch: Branch) -> Choice:
    return tuple(method for method in branch.rest if role_of(method) is not Role.LOSS)


def _shares(mesh: Mesh) -> int:
    """Return the number of parts into which inner axes divide a replica's work; expert ranks have their own samples."""
    inner = dict(mesh.inner)
    return math.prod(inner.values()) // inner.get("expert", 1)

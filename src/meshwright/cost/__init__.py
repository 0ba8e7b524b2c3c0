"""The simulated step: pure functions on plain data. Never imports torch."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.cost.activations import (
        Activations,
        BackwardAt,
        BlockSaves,
        Recomputed,
        SavedTensor,
        TracedModule,
        Work,
    )
    from meshwright.cost.cluster import Cluster, Link, make_cluster
    from meshwright.cost.cluster_file import find_cluster, read_cluster, write_cluster
    from meshwright.cost.copies import copies
    from meshwright.cost.device import DEVICES, Device, find_device
    from meshwright.cost.efficiency import (
        Calibration,
        Constants,
        Efficiency,
        fitted,
        read_calibration,
        write_calibration,
    )
    from meshwright.cost.events import StepEvent, coalesced, step_events
    from meshwright.cost.gathering import AVERAGING
    from meshwright.cost.homes import Home, homes_of, pick_largest
    from meshwright.cost.kernels import pass_flops
    from meshwright.cost.learned import Learned, learned_from
    from meshwright.cost.liveness import Peak, moments, peak
    from meshwright.cost.memory import (
        Memory,
        element_bytes,
        gathered_itemsize,
        local_shape,
        memory,
        padded_bytes,
        shape_on,
    )
    from meshwright.cost.names import names_class
    from meshwright.cost.owners import balanced_owners
    from meshwright.cost.placed import Placed
    from meshwright.cost.rank import seconds_of
    from meshwright.cost.sharding_traffic import (
        gather_traffic,
        gathered_bytes,
        mean_traffic,
        reduce_traffic,
        reduced_bytes,
    )
    from meshwright.cost.simulate import StepTime, simulate, timeline
    from meshwright.cost.step import (
        Block,
        Boundary,
        BoundaryAxis,
        Buffer,
        CollectiveKind,
        Copy,
        Hosted,
        Moment,
        Op,
        Parameter,
        Placement,
        Scaling,
        Stages,
        StateTensor,
        Step,
        Traffic,
        Updating,
    )
    from meshwright.cost.timeline import Event
    from meshwright.cost.traffic import inline_traffic, send_boundaries
    from meshwright.cost.transient import Instant, Transient, outermost_instants
    from meshwright.cost.weight_copies import Average, OuterState
    from meshwright.cost.wire import Encoding, Wire
else:
    on_demand(
        __name__,
        """
        activations: Activations BackwardAt BlockSaves Recomputed SavedTensor TracedModule Work
        cluster: Cluster Link make_cluster
        cluster_file: find_cluster read_cluster write_cluster
        copies: copies
        device: DEVICES Device find_device
        efficiency: Calibration Constants Efficiency fitted read_calibration write_calibration
        events: StepEvent coalesced step_events
        gathering: AVERAGING
        homes: Home homes_of pick_largest
        kernels: pass_flops
        learned: Learned learned_from
        liveness: Peak moments peak
        memory: Memory element_bytes gathered_itemsize local_shape memory padded_bytes shape_on
        names: names_class
        owners: balanced_owners
        placed: Placed
        rank: seconds_of
        sharding_traffic: gather_traffic gathered_bytes mean_traffic reduce_traffic reduced_bytes
        simulate: StepTime simulate timeline
        step: Block Boundary BoundaryAxis Buffer CollectiveKind Copy Hosted Moment Op Parameter Placement
        step: Scaling Stages StateTensor Step Traffic Updating
        timeline: Event
        traffic: inline_traffic send_boundaries
        transient: Instant Transient outermost_instants
        weight_copies: Average OuterState
        wire: Encoding Wire
        """,
    )

__all__ = [
    "AVERAGING",
    "DEVICES",
    "Activations",
    "Average",
    "BackwardAt",
    "Block",
    "BlockSaves",
    "Boundary",
    "BoundaryAxis",
    "Buffer",
    "Calibration",
    "Cluster",
    "CollectiveKind",
    "Constants",
    "Copy",
    "Device",
    "Efficiency",
    "Encoding",
    "Event",
    "Home",
    "Hosted",
    "Instant",
    "Learned",
    "Link",
    "Memory",
    "Moment",
    "Op",
    "OuterState",
    "Parameter",
    "Peak",
    "Placed",
    "Placement",
    "Recomputed",
    "SavedTensor",
    "Scaling",
    "Stages",
    "StateTensor",
    "Step",
    "StepEvent",
    "StepTime",
    "TracedModule",
    "Traffic",
    "Transient",
    "Updating",
    "Wire",
    "Work",
    "balanced_owners",
    "coalesced",
    "copies",
    "element_bytes",
    "find_cluster",
    "find_device",
    "fitted",
    "gather_traffic",
    "gathered_bytes",
    "gathered_itemsize",
    "homes_of",
    "inline_traffic",
    "learned_from",
    "local_shape",
    "make_cluster",
    "mean_traffic",
    "memory",
    "moments",
    "names_class",
    "outermost_instants",
    "padded_bytes",
    "pass_flops",
    "peak",
    "pick_largest",
    "read_calibration",
    "read_cluster",
    "reduce_traffic",
    "reduced_bytes",
    "seconds_of",
    "send_boundaries",
    "shape_on",
    "simulate",
    "step_events",
    "timeline",
    "write_calibration",
    "write_cluster",
]

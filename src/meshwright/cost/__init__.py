"""The simulated step: pure functions on plain data. Never imports torch."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.cost.activations import (
        Activations as Activations,
        BackwardAt as BackwardAt,
        Inputs as Inputs,
        Instant as Instant,
        OperatorResult as OperatorResult,
        Placed as Placed,
        Recomputed as Recomputed,
        SavedTensor as SavedTensor,
        SplitBackward as SplitBackward,
        TracedModule as TracedModule,
        Transient as Transient,
        Work as Work,
        outermost_instants as outermost_instants,
    )
    from meshwright.cost.calibration import (
        Calibration as Calibration,
        Constants as Constants,
        Efficiency as Efficiency,
        Learned as Learned,
        fitted as fitted,
        learned_from as learned_from,
        read_calibration as read_calibration,
        write_calibration as write_calibration,
    )
    from meshwright.cost.cluster import (
        DEVICES as DEVICES,
        Cluster as Cluster,
        Device as Device,
        Link as Link,
        find_cluster as find_cluster,
        find_device as find_device,
        make_cluster as make_cluster,
        read_cluster as read_cluster,
        write_cluster as write_cluster,
    )
    from meshwright.cost.device_time import copies as copies
    from meshwright.cost.events import StepEvent as StepEvent, coalesced as coalesced, step_events as step_events
    from meshwright.cost.peak_memory import AVERAGING as AVERAGING, Peak as Peak, moments as moments, peak as peak
    from meshwright.cost.rank_memory import (
        MEMORY_LABELS as MEMORY_LABELS,
        Memory as Memory,
        OffloadPlacement as OffloadPlacement,
        balanced_owners as balanced_owners,
        local_shape as local_shape,
        memory as memory,
        offload_placements as offload_placements,
        pick_largest as pick_largest,
        shape_on as shape_on,
        tie_key as tie_key,
    )
    from meshwright.cost.scheduling import Event as Event
    from meshwright.cost.step import (
        FP8 as FP8,
        HALF as HALF,
        Average as Average,
        Block as Block,
        Boundary as Boundary,
        BoundaryAxis as BoundaryAxis,
        Buffer as Buffer,
        CollectiveKind as CollectiveKind,
        Compression as Compression,
        Copy as Copy,
        Encoding as Encoding,
        Moment as Moment,
        Offloaded as Offloaded,
        Op as Op,
        OuterState as OuterState,
        Parameter as Parameter,
        Placement as Placement,
        ProductDtype as ProductDtype,
        Scaling as Scaling,
        Stages as Stages,
        StateTensor as StateTensor,
        Step as Step,
        Traffic as Traffic,
        Updating as Updating,
        axis_parts as axis_parts,
        element_bytes as element_bytes,
        gather_traffic as gather_traffic,
        gathered_bytes as gathered_bytes,
        gathered_itemsize as gathered_itemsize,
        inline_traffic as inline_traffic,
        mean_traffic as mean_traffic,
        names_class as names_class,
        padded_bytes as padded_bytes,
        pass_flops as pass_flops,
        reduce_traffic as reduce_traffic,
        reduced_bytes as reduced_bytes,
        send_boundaries as send_boundaries,
    )
    from meshwright.cost.step_time import (
        Building as Building,
        StepTime as StepTime,
        building as building,
        seconds_of as seconds_of,
        simulate as simulate,
        timeline as timeline,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)

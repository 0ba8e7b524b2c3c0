"""Keys and values that the ranks of a context axis pass on while they attend to those they have."""

from __future__ import annotations

from meshwright.cost.collectives import Network, collective_s, group_of
from meshwright.cost.kernels import Machine, backward_s, forward_s
from meshwright.cost.step import Step

AXIS = "context"


def ring_s(step: Step, network: Network, moment: str) -> float:
    """Seconds of a micro-batch's forward or backward that attention does not hide of what is passed on beside it.

    Args:
        step: After all ``cost`` twins.
        network: What carries it, between devices that attend.
        moment: ``"forward"`` or ``"backward"``.
    """
    sent = [each for each in step.traffic if each.moment == moment and each.axis == AXIS and each.kind == "send"]
    if not sent:
        return 0.0
    group = group_of(step.axes, (AXIS,), network.cluster.devices_per_node, step.counted_again)
    travels = sum(collective_s("send", each.bytes_per_step, group, network, each.calls) for each in sent)
    cluster = network.cluster
    machine = Machine(cluster.device, network.efficiency, network.constants, cluster.num_devices)
    seconds = forward_s if moment == "forward" else backward_s
    hides = sum(b.count * seconds(op, machine) for b in step.blocks for op in b.ops if op.kind == "attention")
    waits = sum(each.calls * network.constants.waits_s(step.size(each.axis)) for each in sent)
    return max(travels / step.num_micro_batches - hides, 0.0) + waits / step.num_micro_batches

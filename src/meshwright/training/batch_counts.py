"""Count what of a batch is trained or measured: the items of a loss, and the samples that are no repeats."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.data.loader import current_counts
from meshwright.errors import ConfigError, DataError
from meshwright.methods import Job
from meshwright.methods.job import SAMPLED, STEP_AXES, mean_over
from meshwright.nn.batches import batch_size_of, first_samples, leaves_of, map_tree, shares_of
from meshwright.runtime import HostCopy, flat_bytes

LossWeight = Callable[[Any], float | torch.Tensor]
"""Called with a model input; returns the number of items that its loss is the mean over."""

Divisor = float | torch.Tensor
"""What a micro-batch's loss is divided by: a number, or a 0-dim tensor on its device."""

# --- Items that a loss is the mean over


@torch.no_grad()
def loss_divisors(
    job: Job, weight_of: LossWeight, inputs: Sequence[Any], axes: tuple[str, ...], shares: Sequence[Divisor] = ()
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return divisors of the micro-batches' losses: their sum, averaged over ranks, is then the mean over all items.

    Equal weights give the number of micro-batches. Collective. The host does not wait for the numbers of a GPU: they
    are divided there, and checked when backward has been issued, before anything is updated.

    Args:
        job: Gives the ranks.
        weight_of: Called with the model input of each micro-batch.
        inputs: This rank's model inputs.
        axes: Mesh axes along which ranks have different samples of the batch.
        shares: By which losses would be divided without weights: infinity for inputs that shall not count.

    Returns:
        One fp64 number per micro-batch, infinite for one without items; and a function to call before the update.

    Raises:
        ConfigError: On every rank along ``axes``, when a weight is no number of at least 0 on any of them: on a GPU by
            the function.
    """
    given = [weight_of(each) for each in inputs]
    if math.inf in shares:
        given = [0.0 if share == math.inf else each for each, share in zip(given, shares, strict=True)]
    weights = torch.stack([_as_number(each, job.device) for each in given])
    wrong = ~(weights.isfinite() & (weights >= 0))
    means = mean_over(job.mesh_axes, torch.stack([weights.sum(), wrong.sum()]), axes)
    found = HostCopy(torch.cat([means[1:], wrong.to(means.dtype)]))

    def check() -> None:
        any_wrong, *own = found.tolist()
        if any_wrong:
            raise _weight_error([value for value, is_wrong in zip(given, own, strict=True) if is_wrong])

    if job.device.type == "cpu":
        check()
    return list((means[0].double() / weights.double()).where(weights > 0, math.inf)), check


def _as_number(value: Any, device: torch.device) -> torch.Tensor:
    """Return a value as a 0-dim tensor on the device; nan for anything but a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(()).to(device, torch.float32)
    # Filled on the device: a tensor of a number is made on the host, and its copy waited for.
    return torch.full((), float(value) if isinstance(value, numbers.Real) else math.nan, device=device)


def _weight_error(wrong: list[Any]) -> ConfigError:
    got = "such numbers on this rank, and something else on another"
    if wrong:
        value = wrong[0]
        is_several = isinstance(value, torch.Tensor) and value.numel() != 1
        got = f"a tensor of shape {tuple(value.shape)}" if is_several else f"{type(value).__name__} {value!r:.80}"
    return ConfigError(
        "loss_weight returned no weight",
        expected="a finite number of at least 0, or a tensor of one",
        got=got,
        fix="return how many items the loss of this model input is the mean over, "
        'such as (inputs["labels"] != -100).sum()',
    )


# --- Samples that fill the last batch of an epoch, so that all replicas take equally many steps


def without_repeats(
    job: Job, parts: list[Any], counts: Sequence[int], axes: tuple[str, ...]
) -> tuple[list[Any], Sequence[Divisor]]:
    """Return a batch's parts without the sample that is there only to fill it up, and divisors of their losses.

    The mean over ranks of their sums is then the mean over all samples that are no repeats. A part that holds a repeat
    alone stays as it is, since all ranks gather and reduce alike, and is divided by infinity. Batches of which it
    cannot be told count whole.

    Args:
        job: Gives the ranks.
        parts: Of a batch that a :class:`~meshwright.data.GlobalBatchLoader` yielded.
        counts: Its samples that are no repeats, on each replica.
        axes: Those over whose ranks the mean is taken: ``STEP_AXES``, or ``SAMPLED``.
    """
    whole = parts, shares_of(parts)
    if job.mesh_axes.num_replicas != len(counts):
        return whole
    first, size = 0, len(counts)
    if axes == STEP_AXES:  # the ranks of this replica of ``outer`` alone
        size = math.prod(map(job.mesh_axes.size, STEP_AXES))
        first = job.mesh_axes.replica // size * size
    total, repeats = sum(counts[first : first + size]), max(counts) - counts[job.mesh_axes.replica]
    try:
        sizes = [batch_size_of(part) for part in parts]
    except DataError:
        return whole
    last = first_samples(parts[-1], sizes[-1] - repeats)
    if last is None or not total or sum(sizes) != max(counts):
        return whole
    sizes[-1] -= repeats
    return [*parts[:-1], *last], [total / (size * own) if own else math.inf for own in sizes]


def gather_for_metrics(job: Job, values: Any) -> Any:
    """Return the values of all replicas, in the order of the samples and without repeats; see ``Accelerated``."""
    replicas = job.mesh_axes.num_replicas
    counts = current_counts()
    if job.pipeline is not None:
        values = job.pipeline.shared_output(values)
    if replicas == 1:
        return values
    tensors = [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]
    _check_rows(tensors, max(counts) if counts is not None else None)
    group = job.mesh_axes.flat_mesh(*SAMPLED).get_group()
    order = _order_of_replicas(job, tensors, group)
    total = sum(counts) if counts is not None else None

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach().contiguous()
        packed = flat_bytes(own).to(job.device)
        every = packed.new_empty(replicas, len(packed))
        dist.all_gather(list(every), packed, group=group)
        parts = [every[place].view(own.dtype).reshape(own.shape) for place in order]
        # Sample number n of the batch is in replica n % replicas.
        whole = torch.stack(parts, 1).flatten(0, 1)
        return (whole if leaf.dim() == 0 else whole[:total]).to(leaf.device)

    return map_tree(gathered, values)


def _check_rows(tensors: Sequence[torch.Tensor], rows: int | None) -> None:
    sizes = {leaf.shape[0] for leaf in tensors if leaf.dim()}
    if not tensors or (rows is not None and sizes - {rows}):
        raise DataError(
            "These values cannot be matched with the samples of the batch",
            expected=f"tensors with {rows} rows, one for each sample" if rows is not None else "tensors",
            got=f"rows {sorted(sizes)}" if tensors else "none",
            fix="gather one row per sample: before they are flattened, or made one number",
        )


def _order_of_replicas(job: Job, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[int]:
    """Return where in the group each replica is; refuse values of different shapes. Collective."""
    shapes = repr([(tuple(leaf.shape), leaf.dtype) for leaf in tensors])
    own = torch.tensor([job.mesh_axes.replica, zlib.crc32(shapes.encode())]).to(job.device, non_blocking=True)
    every = own.new_empty(dist.get_world_size(group), 2)
    dist.all_gather(list(every), own, group=group)
    numbers_and_shapes = every.tolist()
    if len({shape for _, shape in numbers_and_shapes}) > 1:
        raise DataError(
            "The values to gather differ in shape or type between ranks",
            expected="equal ones on every rank",
            got=f"{shapes} on this rank, and others elsewhere",
            fix="pad them to one length, and gather one row per sample",
        )
    return sorted(range(len(numbers_and_shapes)), key=lambda place: numbers_and_shapes[place][0])

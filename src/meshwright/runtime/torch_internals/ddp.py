"""DistributedDataParallel's reducer: its buckets, their hooks, its state after a failure, and what it leaves alone."""

from operator import attrgetter, methodcaller

ATTRIBUTES_OF = ("torch.nn.parallel.distributed", "torch._C._distributed_c10d.Reducer")

# Forget a backward pass that failed; else the next raises "Expected to have finished reduction". No public way.
reset_reducer = methodcaller("_reset_state")

# Rebuild the buckets by the order in which one backward pass was ready. DDP does it in ``forward``, which pipelines
# and several passes per step call more than once. No public way.
rebuild_buckets = methodcaller("_rebuild_buckets")

# Raise where parameters went unused, as DDP's own next ``forward`` would: a step asks at its own end.
check_reducer_finalized = methodcaller("_check_reducer_finalized")

# The names that DDP does not broadcast or reduce. torch's own setter is private, too
# (``_set_params_and_buffers_to_ignore_for_model``), and replaces the list instead of adding to it.
IGNORED = "_ddp_params_and_buffers_to_ignore"
ignored_names = attrgetter(IGNORED)

# The hooks that average buckets, each with its state: DDP's own copy has them listed, and not in use.
COMM_HOOKS = "_comm_hooks"

"""How parameters are sharded with FSDP2: what ``zero1``, ``zero2`` and ``fsdp`` share."""

"""How ``comm`` changes what travels: FSDP2's collectives, and DDP's."""

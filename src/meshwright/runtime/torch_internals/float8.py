"""torchao's weights in 8 bits: the scale that is computed ahead for FSDP2's gathers."""

ATTRIBUTES_OF = ("torchao.float8.fsdp_utils",)

# Set after every step, and to be forgotten where other weights are loaded, which torchao does not notice.
PRECOMPUTED_SCALE = "_precomputed_scale"

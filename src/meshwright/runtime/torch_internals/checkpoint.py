"""The metadata with which DCP marks safetensors files: what torch writes is read here, and the other way round.

Replaced by a public module; the keys are part of the files by now.
"""

from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY as CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY as DCP_VERSION_KEY,
    FORMAT_KEY as FORMAT_KEY,
    FORMAT_VALUE as FORMAT_VALUE,
    HF_DCP_VERSION as HF_DCP_VERSION,
    SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY,
)

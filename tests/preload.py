"""Imported once by the fork server: every worker starts with these modules already loaded."""

import contextlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import meshwright

with contextlib.suppress(ImportError):
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama

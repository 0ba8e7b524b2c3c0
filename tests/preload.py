"""Imported once by the fork server: every worker starts with these modules already loaded."""

import contextlib
import gc
import importlib
import os
import pkgutil

import meshwright

_STARTED = ("meshwright.__main__",)  # importing these runs them

os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # what is imported stays

for _name in (
    *(name for _, name, _ in pkgutil.walk_packages(meshwright.__path__, "meshwright.") if name not in _STARTED),
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.data",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "peft",
    "tests.methods.test_parity",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

# Hundreds of thousands of objects that live as long as the workers: none of their collections need look at them again.
gc.collect()
gc.freeze()
gc.enable()

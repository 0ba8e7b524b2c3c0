"""Dynamo, functorch's and inductor's settings, for ``torch.compile``. Importing this imports all of dynamo.

``torch.compiler`` has no limit of recompilations, which is raised for models of many layers, and no memory budget. It
would replace them, and a public check of the toolchain :func:`missing_compiler`.
"""

import shutil

import torch._dynamo as dynamo
import torch._functorch.config as functorch_config

__all__ = ["dynamo", "functorch_config", "missing_compiler", "prepare_inductor"]


def prepare_inductor() -> None:
    """Find out what inductor keeps for a process: the version of its code, and the processor's vector instructions.

    Each process would read all of its code, and try instructions in processes of their own, before it looks into its
    cache; those that are forked from this one do not.
    """
    from torch._inductor import codecache, cpu_vec_isa

    codecache.torch_key()
    cpu_vec_isa.valid_vec_isa_list()


def missing_compiler(device_type: str) -> str:
    """Name the compiler that inductor needs and does not find; empty when nothing is missing.

    Inductor itself says so only in the first step, when ranks wait for each other.
    """
    if device_type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            return "" if shutil.which(cpp_builder.get_cpp_compiler()) else "a C++ compiler"
        except exc.InvalidCxxCompiler:
            return "a C++ compiler"
    from torch.utils._triton import has_triton

    return "" if has_triton() else "Triton"

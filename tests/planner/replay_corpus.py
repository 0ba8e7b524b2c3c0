"""Stored plans: what the planner chose for a corpus of models and clusters. A change that alters one must mean to.

``python -m tests.planner.replay_corpus --write`` rewrites them all; the diff then shows what the change has altered.
"""

import argparse
import json
import time
from pathlib import Path

from meshwright.cost import find_cluster
from meshwright.planner import FamilyWorkload, default_space, parse_family
from meshwright.planner.search import choices, search

FOLDER = Path(__file__).parent / "replay"
_NO_TOKENS = {"sequence": (1,), "context": (1,)}
# name: model, cluster, batch, and what differs from the defaults
CORPUS = {
    "gpt2_1": ("gpt2", "a100-40x1", 32, {}),
    "gpt2_8": ("gpt2", "a100-40x8", 128, {"narrow": True}),
    "gpt2_xl_4_v100": ("gpt2-xl", "v100-16x4", 32, {"narrow": True}),
    "gpt_1.3b_8_memory": ("gpt-3-1.3b", "a100-40x8", 64, {"narrow": True, "objective": "memory"}),
    "llama_2_7b_8": ("llama-2-7b", "h100x8", 64, {"narrow": True}),
    "llama_2_7b_8_limit": ("llama-2-7b", "h100x8", 64, {"narrow": True, "limit_bytes": 24 * 2**30}),
    "llama_2_7b_1_offload": ("llama-2-7b", "a100-80x1", 8, {"narrow": True}),
    "llama_3_8b_16_fp8": ("llama-3-8b", "h100x16", 64, {"narrow": True, "included": ["fp8"]}),
    "llama_2_13b_8_price": ("llama-2-13b", "a100-80x8", 64, {"narrow": True, "objective": "price"}),
    "mixtral_8x7b_32_experts": ("mixtral-8x7b", "h100x32", 128, {"narrow": True, "included": ["expert_parallel"]}),
    "llama_3_70b_64": ("llama-3-70b", "h100x64", 128, {"narrow": True}),
    "gpt_3_175b_512": ("gpt-3-175b", "a100-80x512", 512, {"narrow": True}),
    "llama_3_405b_16384": ("llama-3.1-405b", "h100x16384", 2048, {"narrow": True}),
}  # fmt: skip


def replayed(name):
    """The best plan of one case, as plain data."""
    model, cluster, batch, options = CORPUS[name]
    options = dict(options)
    subject = FamilyWorkload(
        parse_family(model), find_cluster(cluster), batch, limit_bytes=options.pop("limit_bytes", None)
    )
    space = default_space(subject)
    if options.pop("narrow", False):
        pipelines = choices("pipeline_parallel", ("pipeline_parallel", {"schedule": "interleaved"}))
        space = space.replace(
            sizes=space.sizes | _NO_TOKENS, axis_methods=space.axis_methods | {"pipeline": pipelines},
            precision=space.precision[:1], hybrid=False,
        )  # fmt: skip
    found = search(subject, space=space, top=1, max_predictions=160, **options)
    best = found.plans[0]
    return {
        "model": model, "cluster": cluster, "batch_size": batch, "strategy": str(best.strategy),
        "num_micro_batches": best.step.num_micro_batches, "micro_batch": best.micro_batch,
        "step_time_s": best.forecast.time.step_time_s, "needed_bytes": best.needed_bytes,
    }  # fmt: skip


def stored(name):
    """The same as it was when it was last written."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def main():
    """Writes, or shows how long each takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the stored plans")
    write = parser.parse_args().write
    for name in CORPUS:
        start = time.process_time()
        found = replayed(name)
        print(f"{name}: {time.process_time() - start:.2f} s, {found['strategy']}")
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

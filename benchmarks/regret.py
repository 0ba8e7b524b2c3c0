"""How much worse the plans of the search for real modules are than the best of the whole space, on hard cases.

Plans are compared by the figure that ranks them: seconds of a sample with surcharges.

Families stand in for modules, so that the whole space can be searched in seconds: less than one sample a device, one,
and four, on devices with much memory and with little.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator

from meshwright.cost import find_cluster
from meshwright.errors import StrategyError
from meshwright.planner import FamilyWorkload, Plan, default_space, parse_family
from meshwright.planner.search import search, search_in_stages
from meshwright.planner.search.search_state import rank_of_plan

MODELS = (
    "llama-3-8b", "llama-2-7b:seq=2048", "gpt2-xl", "llama-3-8b:seq=32768", "llama-2-13b", "mixtral-8x7b:seq=2048",
    "gpt2-large",
)  # fmt: skip
CLUSTERS = ("a100-40x8", "h100x8", "h100x16", "v100-32x16", "l4x8", "h100x32")
SAMPLES = (0.25, 1, 4)


def regret(model: str, cluster: str, batch: int) -> tuple[float, int, float, Plan, Plan] | None:
    """Of one case: what is lost, predictions and CPU seconds of the search in stages, and both plans.

    None: nothing fits.
    """
    subject = FamilyWorkload(parse_family(model), find_cluster(cluster), batch)
    space = default_space(subject).replace(kernels=((),))  # as models that are searched in stages have them
    try:
        best = search(subject, space=space, top=1).plans[0]
    except StrategyError:
        return None
    start = time.process_time()
    found = search_in_stages(subject, space, top=1)
    seconds, first = time.process_time() - start, found.plans[0]
    lost = rank_of_plan(first, "tokens_per_s")[0] / rank_of_plan(best, "tokens_per_s")[0] - 1
    return lost, found.num_predicted, seconds, first, best


def cases(number: int) -> Iterator[tuple[str, str, int]]:
    """The same ones in every run."""
    every = list(itertools.product(MODELS, CLUSTERS, SAMPLES))
    random.Random(1).shuffle(every)
    for model, cluster, each in every[:number]:
        yield model, cluster, max(1, int(find_cluster(cluster).num_devices * each))


def main() -> None:
    """Prints one line for every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=44, help="how many")
    found = []
    for case in cases(parser.parse_args().cases):
        one = regret(*case)
        if one is None:
            continue
        found.append(one[0])
        print(*case, f"{one[0]:.1%}, {one[1]} predictions, {one[2]:.1f} s", flush=True)
        if one[0] > 0.005:
            print(f"    {one[3]}\n    {one[4]}")
    many = sum(lost > 0.03 for lost in found)
    print(f"{many} of {len(found)} lose more than 3 %, at most {max(found):.1%}")


if __name__ == "__main__":
    main()

"""How much worse the plans of the search for real modules are than the best of the whole space, on hard cases.

Plans are compared by the figure that ranks them: seconds of a sample with surcharges.

Families stand in for modules, so that the whole space can be searched in seconds: less than one sample a device, one,
and four, on devices with much memory and with little.

With ``--in-time``: how much worse the best of the whole space is that a search by formulas finds in the seconds that it
has of a user's 20 than in 45, on few devices and on thousands.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost import find_cluster
from meshwright.errors import StrategyError
from meshwright.planner import FamilyWorkload, Plan, default_space, parse_family
from meshwright.planner.plan_request import HEADROOM
from meshwright.planner.plans import usable_bytes
from meshwright.planner.search import FollowUp, experts_first, search, search_in_stages
from meshwright.planner.search.search_state import rank_of_plan

SOON_S, LATE_S = 10.0, 45.0
REQUESTS = (
    ("llama-3-8b", "h100x64", 256), ("llama-3-8b:seq=32768", "h100x64", 64), ("llama-3-70b", "h100x64", 128),
    ("llama-3-70b", "h100x512", 512), ("llama-3-70b:seq=65536", "h100x128", 32), ("llama-3.1-405b", "h100x1024", 512),
    ("llama-3.1-405b", "h100x4096", 1024), ("llama-3.1-405b", "h100x16384", 2048),
    ("llama-3.1-405b:seq=131072", "h100x16384", 128), ("gpt-3-175b:vocab=51200", "a100-80x512", 512),
    ("gpt-3-175b:vocab=51200", "a100-80x1024", 1536), ("gpt-3-175b:vocab=51200", "v100-32x1024", 512),
    ("llama-2-13b", "a100-40x32", 128), ("llama-2-70b", "a100-80x64", 128), ("mixtral-8x7b:seq=4096", "h100x64", 256),
    ("mixtral-8x22b:seq=4096", "h100x256", 512),
)  # fmt: skip
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


def found_within(model: str, cluster: str, batch: int, seconds: float) -> Plan:
    """Return the best plan that formulas find in some seconds of processor time, or in more where there is none."""
    subject = FamilyWorkload(parse_family(model), find_cluster(cluster), batch)
    subject = replace(
        subject, limit_bytes=round(usable_bytes(subject.cluster.device) * (1 - HEADROOM)), limit_is_free=True
    )
    space, follow_ups = default_space(subject), tuple[FollowUp, ...]()
    if subject.shape.experts > 1:
        space, follow_ups = experts_first(space, subject.shape.experts, subject.world)
    limits = {"limit_s": 2 * LATE_S, "enough_s": seconds, "max_predictions": 20_000}
    found = search(subject, space=space, follow_ups=follow_ups, top=20, reach=1.3, of_family=2, **limits)
    return found.plans[0]


def in_time() -> None:
    """Print one line for every request."""
    found = []
    for request in REQUESTS:
        soon, late = (found_within(*request, seconds) for seconds in (SOON_S, LATE_S))
        found.append(rank_of_plan(soon, "tokens_per_s")[0] / rank_of_plan(late, "tokens_per_s")[0] - 1)
        print(*request, f"{found[-1]:.1%}\n    {soon}\n    {late}", flush=True)
    print(f"{sum(lost < 1e-3 for lost in found)} of {len(found)} lose nothing, one at most {max(found):.1%}")


def cases(number: int) -> Iterator[tuple[str, str, int]]:
    """The same ones in every run."""
    every = list(itertools.product(MODELS, CLUSTERS, SAMPLES))
    random.Random(1).shuffle(every)
    for model, cluster, each in every[:number]:
        yield model, cluster, max(1, int(find_cluster(cluster).num_devices * each))


def main() -> None:
    """Print one line for every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=44, help="how many")
    parser.add_argument("--in-time", action="store_true", help="compare what is found in time with what is found later")
    options, found = parser.parse_args(), list[float]()
    if options.in_time:
        in_time()
        return
    for case in cases(options.cases):
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

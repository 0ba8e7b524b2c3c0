"""Count what torch's caching allocator reserves for samples of one length, and for samples of many, without a GPU.

    python benchmarks/mixed_lengths.py [--model Qwen-7B] [--most 2048,8192] [--samples 160]

The allocator's policy for large blocks (segments of 2 MiB and their multiples, best fit, what is left over split off,
free neighbours within a segment are joined, segments never) is played with the tensors that fine-tuning of a Llama with
recomputed blocks and frozen weights makes one after the other. Lengths are drawn as the tokens of the data set are
spread on which ms-swift measured (``docs/predictions.md``); longer ones than ``--most`` are left out, as ms-swift does.
"""

from __future__ import annotations

import argparse
import bisect
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB, GIB = 2**20, 2**30
SMALL_SEGMENT, SMALL_REQUEST = 20 * MIB, 10 * MIB  # a smaller request than the second takes a segment of the first
SPLIT_ABOVE = MIB
MEAN, DEVIATION, LEAST = 3234.4, 2547.5, 91  # tokens of a sample of cls-fudan-news-zh, by Qwen's tokenizer
FP32, HALF = 4, 2


@dataclass(frozen=True)
class Dims:
    vocab: int
    hidden: int
    ffn: int
    layers: int
    kv: int


MODELS = {
    "Qwen-1.8B": Dims(151936, 2048, 5504, 24, 2048),
    "Qwen-7B": Dims(151936, 4096, 11008, 32, 4096),
    "Qwen-14B": Dims(152064, 5120, 13696, 40, 5120),
    "Yi-6B": Dims(64000, 4096, 11008, 32, 512),
}


@dataclass(eq=False)
class Part:
    """A part of a segment, free or in use, between its neighbours."""

    size: int
    place: tuple[int, int]  # the segment's number, and the offset in it
    before: Part | None = None
    after: Part | None = None
    free: bool = False


@dataclass
class Allocator:
    """Large blocks alone, on one stream."""

    reserved: int = 0
    allocated: int = 0
    most: int = 0
    _free: list[tuple[int, tuple[int, int], Part]] = field(default_factory=list)
    _segments: int = 0

    def get(self, num_bytes: int) -> Part:
        """The smallest free part that is large enough, or a new segment; what is left over is split off."""
        size = -(-num_bytes // 512) * 512
        index = bisect.bisect_left(self._free, (size, (-1, -1)), key=lambda entry: entry[:2])
        part = self._free.pop(index)[2] if index < len(self._free) else self._segment(size)
        part.free = False
        if part.size - size > SPLIT_ABOVE:
            rest = Part(part.size - size, (part.place[0], part.place[1] + size), part, part.after)
            if part.after is not None:
                part.after.before = rest
            part.after, part.size = rest, size
            self._keep(rest)
        self.allocated += part.size
        self.most = max(self.most, self.allocated)
        return part

    def give(self, *parts: Part) -> None:
        """Frees; neighbours in a segment that are free, too, are joined."""
        for each in parts:
            part = each
            self.allocated -= part.size
            if part.before is not None and part.before.free:
                self._drop(part.before)
                part = self._joined(part.before, part)
            if part.after is not None and part.after.free:
                self._drop(part.after)
                part = self._joined(part, part.after)
            self._keep(part)

    def _segment(self, size: int) -> Part:
        whole = SMALL_SEGMENT if size < SMALL_REQUEST else -(-size // (2 * MIB)) * 2 * MIB
        self._segments += 1
        self.reserved += whole
        return Part(whole, (self._segments, 0))

    def _joined(self, left: Part, right: Part) -> Part:
        left.size, left.after = left.size + right.size, right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _keep(self, part: Part) -> None:
        part.free = True
        bisect.insort(self._free, (part.size, part.place, part), key=lambda entry: entry[:2])

    def _drop(self, part: Part) -> None:
        del self._free[bisect.bisect_left(self._free, (part.size, part.place), key=lambda entry: entry[:2])]


def train_one(allocator: Allocator, dims: Dims, tokens: int) -> None:
    """Forward and backward of one sample: every block keeps its input, and runs again in backward."""

    def make(width: int, itemsize: int = HALF) -> Part:
        return allocator.get(tokens * width * itemsize)

    state, inputs = make(dims.hidden), []
    for _ in range(dims.layers):
        inputs.append(state)
        allocator.give(*(make(width, size) for width, size in _norm_and_attention(dims)))
        middle = make(dims.hidden)
        made = [make(width, size) for width, size in _feed_forward(dims)]
        state = make(dims.hidden)
        allocator.give(middle, *made)
    gradient = _loss(allocator, dims, tokens)
    allocator.give(state)
    for kept in reversed(inputs):
        made = [make(width, size) for width, size in (*_norm_and_attention(dims), *_feed_forward(dims))]
        allocator.give(*(make(dims.ffn) for _ in range(3)))
        following = make(dims.hidden)
        allocator.give(*reversed(made), gradient, kept)
        gradient = following
    allocator.give(gradient)


def _norm_and_attention(dims: Dims) -> Iterator[tuple[int, int]]:
    yield from ((dims.hidden, FP32), (dims.hidden, FP32), (dims.hidden, HALF))
    yield from ((dims.hidden + 2 * dims.kv, HALF), (dims.hidden, HALF), (dims.hidden, HALF))


def _feed_forward(dims: Dims) -> Iterator[tuple[int, int]]:
    yield from ((dims.hidden, FP32), (dims.hidden, FP32), (dims.hidden, HALF))
    yield from ((dims.ffn, HALF),) * 4


def _loss(allocator: Allocator, dims: Dims, tokens: int) -> Part:
    """The head, and the loss of logits in fp32, of all tokens but the last; the gradient of the blocks' output."""
    rows, vocab = tokens - 1, dims.vocab
    normed, logits = allocator.get(tokens * dims.hidden * HALF), allocator.get(tokens * vocab * HALF)
    shifted, wide = allocator.get(rows * vocab * HALF), allocator.get(rows * vocab * FP32)
    chances = allocator.get(rows * vocab * FP32)
    allocator.give(wide)
    of_wide = allocator.get(rows * vocab * FP32)
    allocator.give(chances)
    of_shifted = allocator.get(rows * vocab * HALF)
    allocator.give(of_wide, shifted)
    of_logits = allocator.get(tokens * vocab * HALF)
    allocator.give(of_shifted, logits)
    gradient = allocator.get(tokens * dims.hidden * HALF)
    allocator.give(of_logits, normed)
    return gradient


def lengths(most: int, count: int, seed: int = 0) -> list[int]:
    """Lognormal, by the mean and the deviation of the data set."""
    draws, found = random.Random(seed), []
    variance = math.log(1 + (DEVIATION / MEAN) ** 2)
    while len(found) < count:
        tokens = int(draws.lognormvariate(math.log(MEAN) - variance / 2, math.sqrt(variance)))
        if LEAST <= tokens <= most:
            found.append(tokens)
    return found


def reserved_gib(dims: Dims, samples: list[int]) -> tuple[float, float]:
    """GiB that are reserved after all samples, and the most that tensors had."""
    allocator = Allocator()
    for tokens in samples:
        train_one(allocator, dims, tokens)
    return allocator.reserved / GIB, allocator.most / GIB


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen-7B", choices=MODELS)
    parser.add_argument("--most", default="512,1024,2048,4096,8192", help="tokens that a sample has at most")
    parser.add_argument("--samples", type=int, default=160)
    options = parser.parse_args(arguments)
    dims = MODELS[options.model]
    for most in map(int, options.most.split(",")):
        one, tensors = reserved_gib(dims, [most] * 3)
        mixed, _ = reserved_gib(dims, lengths(most, options.samples))
        print(
            f"{options.model}, {most} tokens: tensors {tensors:.1f} GiB, reserved {one:.1f} for one length and "
            f"{mixed:.1f} for {options.samples} samples of mixed lengths ({mixed - one:+.1f})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

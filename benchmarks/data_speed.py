"""Time batches of tokens: our loader beside ``datasets`` with torch's DataLoader, litdata and streaming.

One process reads the sources of Python's standard library, as bytes, from the format of each: rows of SEQ tokens in a
shuffled order, BATCH at a time. All take turns of the same number of batches, so that a machine whose speed drifts
slows all alike; figures are medians over turns, and ratios are ours over theirs, turn by turn. The page cache is warm.
A library that is not installed, or fails, is left out, which is said.

    python benchmarks/data_speed.py [--turns N] [--batches N] [--workers N] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from meshwright.data import ByteTokenizer, TokenDataset, find_files, global_batch_loader, token_cache

SEQ, BATCH = 1024, 16


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def ours(cached: Path, folder: Path, workers: int) -> Iterator[Any]:
    """``meshwright.data``: a memory-mapped file of tokens."""
    arguments = {"batch_size": BATCH, "num_workers": workers}
    return endless(global_batch_loader(TokenDataset(cached, SEQ), loader_args=arguments, replica=0, num_replicas=1))


def rows_of(cached: Path) -> np.ndarray:
    dataset = TokenDataset(cached, SEQ)
    return np.stack([dataset[index].numpy() for index in range(len(dataset))])


def by_datasets(cached: Path, folder: Path, workers: int) -> Iterator[Any]:
    """``datasets``: a folder of Arrow files on disk, in torch's format."""
    import datasets

    columns = {"input_ids": rows_of(cached).astype(np.int32)}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "arrow"))
    dataset = datasets.load_from_disk(str(folder / "arrow")).with_format("torch")
    return endless(DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers))


def by_litdata(cached: Path, folder: Path, workers: int) -> Iterator[Any]:
    """``litdata``: chunks of tokens, read block by block."""
    import litdata
    from litdata.streaming.cache import Cache

    (folder / "litdata").mkdir()
    cache = Cache(str(folder / "litdata"), chunk_bytes="64MB", item_loader=litdata.TokensLoader(SEQ))
    flat = torch.from_numpy(rows_of(cached).astype(np.int32))
    for index, row in enumerate(flat):
        cache[index] = row
    cache.done()
    cache.merge()
    dataset = litdata.StreamingDataset(str(folder / "litdata"), item_loader=litdata.TokensLoader(SEQ), shuffle=True)
    return endless(litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers))


def by_streaming(cached: Path, folder: Path, workers: int) -> Iterator[Any]:
    """``streaming`` of MosaicML: shards of rows."""
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mds"), columns={"input_ids": "ndarray:int32"}) as writer:
        for row in rows_of(cached).astype(np.int32):
            writer.write({"input_ids": row})
    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return endless(DataLoader(dataset, batch_size=BATCH, num_workers=workers))


READERS = {"meshwright": (ours, "torch"), "datasets": (by_datasets, "datasets"), "litdata": (by_litdata, "litdata"),
           "streaming": (by_streaming, "streaming")}  # fmt: skip


def tokens_in(batch: Any) -> int:
    found = batch["input_ids"] if isinstance(batch, dict) else batch
    return int(found.numel())


def speed(batches: Iterator[Any], count: int) -> float:
    """Tokens per second of the next batches; a sum of each is taken, so that it has really been read."""
    start, tokens = time.perf_counter(), 0
    for _ in range(count):
        batch = next(batches)
        tokens += tokens_in(batch)
        int((batch["input_ids"] if isinstance(batch, dict) else batch).sum())
    return tokens / (time.perf_counter() - start)


def measure(turns: int, batches: int, workers: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    absent = [name for name, (_, package) in READERS.items() if importlib.util.find_spec(package) is None]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cached = token_cache(find_files("stdlib", folder), ByteTokenizer(), folder / "cache")
        readers = {}
        for name, (read, _) in READERS.items():
            if name in absent:
                continue
            try:
                readers[name] = read(cached, folder, workers)
                speed(readers[name], 2)
            except Exception as error:
                absent.append(f"{name} ({type(error).__name__}: {error})")
                readers.pop(name, None)
        for _ in range(turns):
            for name, batches_of in readers.items():
                found.setdefault(name, []).append(speed(batches_of, batches))
    own = found["meshwright"]
    rows = {
        name: {
            "tokens_per_s": statistics.median(speeds),
            "ours_over_it": statistics.median(mine / its for mine, its in zip(own, speeds, strict=True)),
        }
        for name, speeds in found.items()
    }
    return {"seq": SEQ, "batch": BATCH, "workers": workers, "turns": turns, "absent": absent, "readers": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.turns, options.batches, options.workers)
    table = Table("reader", "tokens/s", "ours / it", title=f"{BATCH} x {SEQ} tokens, {options.workers} workers")
    for name, row in found["readers"].items():
        table.add_row(name, f"{row['tokens_per_s']:,.0f}", f"{row['ours_over_it']:.2f}")
    Console().print(table)
    for name in found["absent"]:
        print(f"left out, since it is not installed or fails: {name}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Hundreds of flipped bits and cut files, each found and named."""

import random
import shutil

import pytest

from meshwright.store import CheckpointStore
from meshwright.store.manifest import damage_of
from tests.faults.vocabulary import corrupt, truncate
from tests.store.runs import build, train


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.long)])
def test_random_damage_is_named(tmp_path, count):
    state, rng = build("plain"), random.Random(count)
    train(state, 1)
    good = CheckpointStore(tmp_path).save(state)
    names = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
    for number in range(count):
        copy = shutil.copytree(good, tmp_path / "copy" / good.name, dirs_exist_ok=True)
        name = rng.choice(names)
        size = (copy / name).stat().st_size
        if number % 2:
            corrupt(copy / name, rng.randrange(size), rng.randrange(8))
        else:
            truncate(copy / name, rng.randrange(size))
        problems = damage_of(copy)
        assert problems, f"nobody noticed the damage to {name}"
        assert str(name) in str(problems[0])
    assert damage_of(good) == []

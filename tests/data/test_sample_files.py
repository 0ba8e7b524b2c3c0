"""Samples on disk and in rows: lengths, packing, labels and the treatment of long samples."""

import pickle

import numpy as np
import pytest

from meshwright.data import SampleFiles, SampleRows, Tokens, pack, sample_cache, trained_labels
from meshwright.errors import DataError


def _sample(first, length, trained_from=1):
    return Tokens(np.arange(first, first + length), np.arange(length) >= trained_from)


def _cache(tmp_path, samples, **options):
    source = tmp_path / "source"
    if not source.exists():
        source.write_text("")
    options = {"fingerprint": "a", "seq_len": 8} | options
    return sample_cache([source], lambda: samples, tmp_path / "cache", **options)


def test_samples_come_back(tmp_path):
    samples = [_sample(10, 3), _sample(20, 8, trained_from=5), _sample(70000, 2)]
    found = _cache(tmp_path, samples)
    assert len(found) == 3
    for number, sample in enumerate(samples):
        assert np.array_equal(found.tokens(number).ids, sample.ids)
        assert np.array_equal(found.tokens(number).trained, sample.trained)
    assert found.lengths.tolist() == [3, 8, 2]
    assert found.trained_counts.tolist() == [2, 3, 1]
    again = _cache(tmp_path, None)  # nothing is encoded a second time
    assert np.array_equal(pickle.loads(pickle.dumps(again)).tokens(2).ids, samples[2].ids)


def test_samples_that_are_too_long_and_such_without_anything_to_train(tmp_path):
    long, prompt = _sample(0, 19), _sample(50, 4, trained_from=9)
    cut = _cache(tmp_path, [long, prompt])
    assert cut.lengths.tolist() == [8]
    assert cut.counts == {"samples": 2, "too_long": 1, "untrained": 1, "bad_lines": 0}
    assert _cache(tmp_path, [long], too_long="split").lengths.tolist() == [8, 8, 3]
    with pytest.raises(DataError, match="19 tokens in sample 1"):
        _cache(tmp_path, [long], too_long="refuse")
    with pytest.raises(DataError, match="nothing to train on"):
        _cache(tmp_path, [prompt], fingerprint="b")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_damaged_files_are_told(tmp_path):
    folder = _cache(tmp_path, [_sample(0, 3)]).folder
    (folder / "ids.npy").write_bytes((folder / "ids.npy").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"no complete samples.*delete the folder"):
        SampleFiles(folder)


def test_packed_rows_restart_positions_and_train_no_first_token(tmp_path):
    rows = SampleRows(_cache(tmp_path, [_sample(10, 5, trained_from=0), _sample(20, 3)]), 9, packed=True, pad_id=7)
    (row,) = [rows[index] for index in range(len(rows))]
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 7]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert row["labels"].tolist() == [-100, 11, 12, 13, 14, -100, 21, 22, -100]
    assert rows.num_trained() == [6] == [int(trained_labels({"labels": row["labels"][None]}))]
    assert trained_labels({"labels": rows.blank()["labels"][None]}) == 0


def test_padded_rows(tmp_path):
    rows = SampleRows(_cache(tmp_path, [_sample(10, 5), _sample(20, 3)]), 6, packed=False, pad_id=7)
    assert rows[1]["input_ids"].tolist() == [20, 21, 22, 7, 7, 7]
    assert rows[1]["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert rows[1]["labels"].tolist() == [-100, 21, 22, -100, -100, -100]
    assert rows.num_trained() == [4, 2]


def test_rows_are_full_and_every_sample_is_in_one():
    lengths = np.random.default_rng(0).integers(1, 300, size=2000)
    rows = pack(lengths, 512)
    assert sorted(index for row in rows for index in row) == list(range(2000))
    filled = [lengths[list(row)].sum() for row in rows]
    assert max(filled) <= 512
    assert sum(filled) / (512 * len(rows)) > 0.99
    assert pack(np.array([4, 4]), 4) == [(0,), (1,)]

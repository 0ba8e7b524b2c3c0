"""Records from every kind of file."""

import bz2
import errno
import gzip
import json
import sys

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from meshwright.data import BadLines, ByteTokenizer, find_files, open_tokens, read_records, token_cache
from meshwright.data.records import holds_records, open_text
from meshwright.errors import ConfigError, DataError

ROWS = [{"text": "one"}, {"text": "two ü"}, {"text": "three"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _write(kind, folder):
    path = folder / kind
    if kind.lower().endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind == "folder":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "splits":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)
    else:
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix.lower(), bytes)
        path.write_bytes(pack(LINES))
    return path


KINDS = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.PARQUET", "a.JSONL", "a.Jsonl.GZ"]


@pytest.mark.parametrize("kind", [*KINDS, "folder", "splits"])
def test_records_of_every_kind(tmp_path, kind):
    path = _write(kind, tmp_path)
    assert holds_records(path)
    found = list(read_records(path))
    assert [record.value for record in found] == ROWS
    assert all(str(path) in record.where for record in found)
    ids = open_tokens(token_cache(find_files(kind, tmp_path), ByteTokenizer(), tmp_path / "cache"))
    assert bytes(ids[ids != 256].astype("uint8")).decode() == "onetwo üthree"
    assert (ids == 256).sum() == 3


def test_lines_that_are_no_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b'\n"text"\n{"text": 1' + b"\xff\n")
    with pytest.raises(DataError, match=r"Line 5 of .*a\.jsonl is no JSON object.*bad_lines"):
        list(read_records(path))
    bad_lines = BadLines("skip")
    assert len(list(read_records(path, bad_lines))) == 3
    assert bad_lines.skipped == {str(path): 2}


def test_halves_of_characters_become_question_marks(tmp_path):
    path = tmp_path / "a.jsonl"
    talk = rb'{"messages": [{"role": "user", "content": "\uDC00"}]}'
    path.write_bytes(rb'{"text": "a\ud800b \ud83d\ude00"}' + b'\n{"text": "c\xed\xa0\x80"}\n' + talk)
    found = [record.value for record in read_records(path)]
    assert found == [{"text": "a?b 😀"}, {"text": "c?"}, {"messages": [{"role": "user", "content": "?"}]}]
    path.write_bytes(rb'{"text": "a\ud800b"}')
    ids = open_tokens(token_cache([path], ByteTokenizer(), tmp_path / "cache"))
    assert bytes(ids[:-1].astype("uint8")) == b"a?b"


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        list(read_records(tmp_path / "a.parquet"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"no split 'train'.*splits/test"):
        list(read_records(tmp_path / "splits"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES)[:-10])
    with pytest.raises(DataError, match="is damaged"):
        list(read_records(tmp_path / "b.jsonl.gz"))
    packed = bz2.compress(LINES)
    for content in (packed[:-10], packed[:12] + b"\xff" * 8 + packed[20:]):
        (tmp_path / "c.jsonl.bz2").write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged.*a whole bzip2 file"):
            list(read_records(tmp_path / "c.jsonl.bz2"))
    with pytest.raises(OSError, match="full"), open_text(tmp_path / "c.jsonl.bz2"):
        raise OSError(errno.ENOSPC, "full")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install"):
        list(read_records(tmp_path / "a.parquet"))


def test_records_without_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b'{"body": "four"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:4 has no text.*Got keys body"):
        token_cache([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "cache")

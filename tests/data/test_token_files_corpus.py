import bz2
import gzip
import lzma
import os
import zipfile

import pytest
import zstandard

from meshwright.data import ByteTokenizer, find_files, open_tokens, token_cache
from meshwright.errors import DataError
from tests.data.helpers import refused


@pytest.fixture
def texts(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md", "odd[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def _names(files, base):
    return [path.relative_to(base).as_posix() for path in files]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deep/er/c.txt", "odd[1].txt"]),
        (["deep/**/*", "a.txt"], ["a.txt", "deep/d.md", "deep/er/c.txt"]),
        ("odd[1].txt", ["odd[1].txt"]),
        ("deep/../a.txt", ["a.txt"]),
    ],
)
def test_paths_and_globs_are_found_in_sorted_order(texts, source, expected):
    assert _names(find_files(source, texts), texts) == expected


def test_the_base_is_no_glob(tmp_path):
    base = tmp_path / "run [2024] *"
    (base / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt"):
        (base / name).write_text(name)
    for source in ("**/*.txt", "deep/../**/*.txt"):
        assert _names(find_files(source, base), base) == ["a.txt", "deep/b.txt"]


def test_absolute_paths_ignore_the_base(texts):
    assert find_files(str(texts / "a.txt"), texts / "deep") == [texts / "a.txt"]


def test_a_file_reached_in_several_ways_is_listed_once(texts):
    os.symlink(texts / "a.txt", texts / "z.txt")
    assert _names(find_files(["z.txt", "a.txt", "[a].txt", str(texts / "a.txt")], texts), texts) == ["a.txt"]


def test_the_standard_library_is_itself_and_nothing_installed(tmp_path):
    files = find_files("stdlib", tmp_path)
    assert "argparse.py" in {path.name for path in files}
    folders = {part for path in files for part in path.parent.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    assert files == sorted(set(files))
    assert files == find_files(["stdlib", "stdlib"], tmp_path)


def test_a_standard_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with refused(DataError, str(tmp_path)):
        find_files("stdlib", tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], ["an empty list"]),
        ("absent.txt", ["File 'absent.txt' matches no file", "absent.txt"]),
        (["a.txt", "*.csv"], ["Glob '*.csv' matches no file"]),
        ("deep", ["the folder", "deep/**/*.txt"]),
    ],
)
def test_sources_without_files_are_refused(texts, source, words):
    with refused(DataError, *words):
        find_files(source, texts)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_compressed_files_are_unpacked(tmp_path, pack):
    text = b"".join(b"line %d\n" % number for number in range(3000))
    (tmp_path / "b.txt").write_bytes(pack(text))
    found = open_tokens(token_cache(find_files("b.txt", tmp_path), ByteTokenizer(), tmp_path))
    assert bytes(found[:-1].astype("uint8")) == text
    (tmp_path / "b.txt").write_bytes(pack(text)[:-9])
    with pytest.raises(DataError, match="compressed file of the corpus is damaged"):
        token_cache([tmp_path / "b.txt"], ByteTokenizer(), tmp_path)


def test_archives_are_refused(tmp_path):
    """Their bytes would train a model, to no use, without a word."""
    with zipfile.ZipFile(tmp_path / "b.txt", "w") as archive:
        archive.writestr("b", "another")
    with pytest.raises(DataError, match=r"an archive.*b\.txt, which is zip"):
        find_files("*.txt", tmp_path)


def test_text_that_begins_like_a_compressed_file_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("BZh is the magic of bzip2, PK that of zip\n")
    assert len(find_files("a.txt", tmp_path)) == 1

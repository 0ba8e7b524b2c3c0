import bz2
import gzip
import lzma
import os
import zipfile

import pytest

from meshwright.data import find_files
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


@pytest.mark.parametrize(
    ("name", "pack"), [("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress), ("zip", None)]
)
def test_compressed_files_are_refused(tmp_path, name, pack):
    """Their bytes would train a model, to no use, without a word."""
    (tmp_path / "a.txt").write_text("a text\n")
    if pack is None:
        with zipfile.ZipFile(tmp_path / "b.txt", "w") as archive:
            archive.writestr("b", "another")
    else:
        (tmp_path / "b.txt").write_bytes(pack(b"another"))
    assert len(find_files("a.txt", tmp_path)) == 1
    with pytest.raises(DataError, match=f"compressed.*b.txt, which is {name}"):
        find_files("*.txt", tmp_path)


def test_text_that_begins_like_a_compressed_file_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("BZh is the magic of bzip2, PK that of zip\n")
    assert len(find_files("a.txt", tmp_path)) == 1

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from meshwright.data import ByteTokenizer, Tokens, open_tokens, sample_cache, token_cache, token_files as cache
from meshwright.errors import DataError
from tests.cli.helpers import TIMEOUT_S, environment
from tests.data.helpers import refused


@pytest.fixture
def files(tmp_path):
    texts = {"a.txt": b"first\ntext", "b.txt": b"", "c.txt": b"\x00\xff last"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return [tmp_path / name for name in texts]


class CountingTokenizer(ByteTokenizer):
    def __init__(self):
        self.calls = 0

    def encode(self, text):
        self.calls += 1
        return super().encode(text)


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    end_of_text = 69_999
    fingerprint = "wide"


class TinyTokenizer(ByteTokenizer):
    vocab_size = 256
    end_of_text = 0
    fingerprint = "tiny"


def test_documents_follow_each_other_with_end_of_text_between(files, tmp_path):
    tokens = open_tokens(token_cache(files, ByteTokenizer(), tmp_path / "made" / "here"))
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [*b"first\ntext", 256, 256, *b"\x00\xff last", 256]
    assert not tokens.flags.writeable


@pytest.mark.parametrize(("tokenizer", "token_type"), [(TinyTokenizer(), "u1"), (WideTokenizer(), "u4")])
def test_the_type_is_the_smallest_that_holds_the_vocabulary(files, tmp_path, tokenizer, token_type):
    tokens = open_tokens(token_cache(files, tokenizer, tmp_path))
    assert tokens.dtype == np.dtype(token_type)
    assert tokens[-1] == tokenizer.end_of_text


def test_a_complete_cache_is_found_again(files, tmp_path):
    tokenizer = CountingTokenizer()
    first = token_cache(files, tokenizer, tmp_path / "cache")
    calls, stamp = tokenizer.calls, first.stat().st_mtime_ns
    assert token_cache(files, tokenizer, tmp_path / "cache") == first
    assert (tokenizer.calls, first.stat().st_mtime_ns) == (calls, stamp)
    assert os.listdir(tmp_path / "cache") == [first.name]


def test_changed_texts_orders_and_tokenizers_get_files_of_their_own(files, tmp_path):
    names = {token_cache(files, ByteTokenizer(), tmp_path), token_cache(files[::-1], ByteTokenizer(), tmp_path)}
    names |= {token_cache(files, WideTokenizer(), tmp_path), token_cache(files[:2], ByteTokenizer(), tmp_path)}
    files[0].write_bytes(b"FIRST\ntext")
    names |= {token_cache(files, ByteTokenizer(), tmp_path)}
    assert len(names) == 5


def test_files_are_known_by_their_content(files, tmp_path, monkeypatch):
    tokenizer, hashed = CountingTokenizer(), []
    monkeypatch.setattr(cache, "_TICK_NS", -(10**12))  # as if they were written long ago
    whole = cache.hashlib.file_digest
    monkeypatch.setattr(cache.hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or whole(file, kind))
    first = token_cache(files, tokenizer, tmp_path / "cache")
    copies = [tmp_path / "elsewhere" / path.name for path in files]
    copies[0].parent.mkdir()
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    calls = tokenizer.calls
    assert [token_cache(each, tokenizer, tmp_path / "cache") for each in (copies, files, copies)] == [first] * 3
    assert tokenizer.calls == calls
    assert len(hashed) == 6  # each once
    times = copies[0].stat()
    copies[0].write_bytes(b"FIRST\ntext")
    os.utime(copies[0], ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    changed = token_cache(copies, tokenizer, tmp_path / "cache")
    assert changed != first
    assert bytes(open_tokens(changed)[:5].astype("u1")) == b"FIRST"


def test_what_was_written_just_now_is_hashed_again(files, tmp_path):
    token_cache(files, ByteTokenizer(), tmp_path / "cache")
    assert not (tmp_path / "cache" / "contents").exists()


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "longer", "noise", "type"])
def test_damaged_caches_are_built_again(files, tmp_path, damage):
    path = token_cache(files, ByteTokenizer(), tmp_path)
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "header": whole[:40],
        "cut": whole[:-1],
        "longer": whole + b"\x00\x00",
        "noise": b"not an array at all",
        "type": whole.replace(b"<u2", b"<i2"),
    }[damage]
    path.write_bytes(damaged)
    with refused(DataError, "not a complete token file", path.name):
        open_tokens(path)
    assert token_cache(files, ByteTokenizer(), tmp_path) == path
    assert path.read_bytes() == whole


def test_a_builder_that_dies_leaves_nothing(files, tmp_path):
    class Dying(ByteTokenizer):
        def encode(self, text):
            if b"last" in text:
                raise RuntimeError("out of luck")
            return super().encode(text)

    with pytest.raises(RuntimeError, match="luck"):
        token_cache(files, Dying(), tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_builders_at_the_same_time_do_not_disturb_each_other(files, tmp_path):
    together = threading.Barrier(4, timeout=20)

    class Meeting(ByteTokenizer):
        def encode(self, text):
            if b"first" in text:
                together.wait()  # all four have begun, none has finished
            return super().encode(text)

    answers = []
    builders = [
        threading.Thread(target=lambda: answers.append(token_cache(files, Meeting(), tmp_path / "cache")))
        for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=30)
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert os.listdir(tmp_path / "cache") == [answers[0].name]
    assert open_tokens(answers[0]).size == 20


def test_progress_counts_bytes_and_ends_with_all_of_them(files, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_PIECE_BYTES", 3)
    seen = []
    path = token_cache(files, ByteTokenizer(), tmp_path, progress=lambda *counts: seen.append(counts))
    assert {total for _, total in seen} == {17}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (17, 17)
    assert len(seen) == 3  # "first\n", "text", all of the last
    assert open_tokens(path).tolist() == [*b"first\ntext", 256, 256, *b"\x00\xff last", 256]


def test_nothing_to_tokenize_is_refused(tmp_path):
    with refused(DataError, "nothing to tokenize"):
        token_cache([], ByteTokenizer(), tmp_path)


def test_unreadable_files_are_refused(files, tmp_path):
    with refused(DataError, "cannot be read", "gone.txt"):
        token_cache([*files, tmp_path / "gone.txt"], ByteTokenizer(), tmp_path)


def test_a_directory_that_cannot_be_made_is_told_and_not_blamed_on_the_corpus(files, tmp_path):
    tokens = Tokens(np.arange(3), np.ones(3, dtype=bool))
    with refused(DataError, "cache of tokens", str(files[0] / "cache"), "data.cache_dir"):
        token_cache(files, ByteTokenizer(), files[0] / "cache")
    with refused(DataError, "cache of tokens", str(files[0] / "cache"), "data.cache_dir"):
        sample_cache(files, lambda: [tokens], files[0] / "cache", fingerprint="", seq_len=4)


# --- What a killed process leaves behind

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from meshwright.data import ByteTokenizer, sample_cache, token_cache
from meshwright.data.chat import Tokens


class Killed(ByteTokenizer):
    def encode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def samples():
    yield Tokens(np.arange(4), np.ones(4, dtype=bool))
    os.kill(os.getpid(), signal.SIGKILL)


file, cache = Path(sys.argv[1]), Path(sys.argv[1]).parent / "cache"
if os.fork() == 0:
    token_cache([file], Killed(), cache)
os.wait()
sample_cache([file], samples, cache, fingerprint="", seq_len=4)
"""


def _leftovers(folder):
    return sorted(path.name[:7] for path in folder.glob(".*.partial"))


def _age(folder):
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))


def test_what_a_killed_process_has_left_is_removed(files, tmp_path):
    from meshwright.cli.train_config import DataTable
    from meshwright.cli.train_corpus import find_corpus

    folder = tmp_path / "cache"
    subprocess.run([sys.executable, "-c", KILLED, str(files[0])], env=environment(), timeout=TIMEOUT_S, check=False)
    assert _leftovers(folder) == [".sample", ".tokens"]
    cache.remove_leftovers(folder)
    assert _leftovers(folder) == [".sample", ".tokens"], "another host may be writing it"
    _age(folder)
    find_corpus(DataTable(source="a.txt", seq_len=2, cache_dir="cache"), tmp_path).sources()
    assert _leftovers(folder) == []


class LookingTokenizer(ByteTokenizer):
    """Lets another process clean up meanwhile."""

    def __init__(self, folder):
        self.folder = folder

    def encode(self, text):
        _age(self.folder)
        cache.remove_leftovers(self.folder)
        return super().encode(text)


def test_what_another_process_still_writes_stays(files, tmp_path):
    tokens = open_tokens(token_cache(files, LookingTokenizer(tmp_path / "cache"), tmp_path / "cache"))
    assert tokens[-1] == 256
    assert _leftovers(tmp_path / "cache") == []

import base64
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshwright.data import ByteTokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError
from tests.data.helpers import refused


@given(st.text(alphabet="a\n\0é€😀"))
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert ids.shape == (len(text.encode()),)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, *ids, 256]) == text


def test_bytes_name_needs_no_file(tmp_path):
    tokenizer = load_tokenizer("bytes", tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([0xFF, 65]) == "\N{REPLACEMENT CHARACTER}A"


@pytest.mark.parametrize("wrong", [-1, 257])
def test_ids_outside_the_bytes_are_refused(wrong):
    with refused(DataError, str(wrong), "0 to 256"):
        ByteTokenizer().decode([65, wrong])


@pytest.fixture
def json_file(tmp_path):
    library = pytest.importorskip("tokenizers")

    def make(special):
        vocabulary = {"[UNK]": 0, "hello": 1, "world": 5}  # ids with a gap
        tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(special)
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=64)
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return path

    return make


def test_json_tokenizer_reads_whole_texts(json_file, tmp_path):
    json_file(["<|endoftext|>"])
    tokenizer = load_tokenizer("tokenizer.json", tmp_path)
    ids = tokenizer.encode(b"hello world hello \xff")
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 5, 1, 0]  # neither truncated nor padded
    assert tokenizer.decode(ids[:3]) == "hello world hello"
    assert tokenizer.end_of_text < tokenizer.vocab_size


def test_json_end_of_text_is_the_vocabularys_own_or_one_more(json_file, tmp_path):
    path = json_file(["<|endoftext|>"])
    with_own = load_tokenizer(str(path), tmp_path / "elsewhere")
    assert with_own.end_of_text not in with_own.encode(b"hello <|endoftext|> world")
    assert with_own.decode([1, with_own.end_of_text]) == "hello"
    json_file([])
    without = load_tokenizer(str(path), tmp_path)
    assert (without.end_of_text, without.vocab_size) == (6, 7)
    assert without.decode([1, without.end_of_text]) == "hello"
    assert with_own.fingerprint != without.fingerprint


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.json").write_text('{"a": 1}')
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00")
    for name in ("vocab.json", "noise"):
        with refused(ConfigError, name, "is not a tokenizer"):
            load_tokenizer(name, tmp_path)


def test_absent_files_are_refused(tmp_path):
    with refused(ConfigError, "did you mean 'bytes'", str(tmp_path)):
        load_tokenizer("byte", tmp_path)
    with refused(ConfigError, "cannot be read"):
        load_tokenizer(".", tmp_path)


def test_the_library_is_asked_for_where_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(ConfigError, "pip install"):
        load_tokenizer("tokenizer.json", tmp_path)
    assert load_tokenizer("bytes", tmp_path).vocab_size == 257


def test_a_vocabulary_of_tiktoken_is_read_from_a_local_file(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    pairs = [bytes([each]) for each in range(256)] + [b"th", b"he", b"the", b" the", b"  "]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(pairs)]
    file = tmp_path / "cl100k_base.tiktoken"
    file.write_text("\n".join(lines))
    made = load_tokenizer("tiktoken:cl100k_base.tiktoken", tmp_path)
    text = "the cat, the  <|endoftext|> \u00e9 12345"
    ids = made.encode(text.encode())
    assert made.decode([*ids, made.end_of_text, 5_000, 10**12]) == text
    assert made.end_of_text == 100257
    assert made.vocab_size > made.end_of_text > max(ids)
    own = tiktoken.Encoding(
        "own", pat_str=made._encoding._pat_str, mergeable_ranks={token: rank for rank, token in enumerate(pairs)},
        special_tokens={},
    )  # fmt: skip
    assert ids.tolist() == own.encode_ordinary(text)
    other = tmp_path / "o200k_base.tiktoken"
    other.write_text(file.read_text())
    assert load_tokenizer("tiktoken:o200k_base.tiktoken", tmp_path).fingerprint != made.fingerprint
    for name, content, word in (
        ("mine.tiktoken", file.read_text(), "no encoding that tiktoken defines"),
        ("p50k_base.tiktoken", "not base64", "not the vocabulary of p50k_base"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=word):
            load_tokenizer(f"tiktoken:{name}", tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer("tiktoken:absent.tiktoken", tmp_path)

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from meshwright.data import ByteTokenizer, TokenDataset, token_cache
from meshwright.errors import ConfigError, DataError
from tests.data.helpers import refused


@pytest.fixture
def path(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(100)))  # and one end-of-text: 101 tokens
    return token_cache([text], ByteTokenizer(), tmp_path)


def test_windows_do_not_overlap_and_the_tail_is_left_out(path):
    dataset = TokenDataset(path, seq_len=8)
    assert (len(dataset), dataset.num_tokens) == (12, 101)
    assert dataset[0].dtype == torch.int64
    assert torch.cat([dataset[index] for index in range(len(dataset))]).tolist() == list(range(96))
    assert dataset[-1].tolist() == dataset[11].tolist()
    dataset[0].zero_()  # a copy: neither the file nor the next reader sees it
    assert dataset[0].tolist() == list(range(8))


def test_iteration_ends(path):
    dataset = TokenDataset(path, seq_len=50)
    assert len(list(dataset)) == 2
    for index in (2, -3):
        with pytest.raises(IndexError):
            dataset[index]


def test_a_pickle_is_small_and_maps_the_file_again(path):
    dataset = TokenDataset(path, seq_len=8)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 400
    assert pickle.loads(pickled)[3].tolist() == dataset[3].tolist()


def test_workers_read_it(path):
    batches = list(DataLoader(TokenDataset(path, seq_len=8), batch_size=6, num_workers=2))
    assert torch.cat(batches).flatten().tolist() == list(range(96))


def test_too_short_a_corpus_is_refused(path):
    assert len(TokenDataset(path, seq_len=101)) == 1
    with refused(DataError, "at least 102 tokens", "101 tokens"):
        TokenDataset(path, seq_len=102)


def test_bad_arguments_are_refused(path, tmp_path):
    with pytest.raises(ConfigError, match=r"seq_len.*Expected 1 or more.*Got 0"):
        TokenDataset(path, seq_len=0)
    with refused(DataError, "absent.npy", "delete it"):
        TokenDataset(tmp_path / "absent.npy", seq_len=8)

"""Samples that a function returns: datasets and streams, what a model takes them as, and what is refused."""

import itertools
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.utils.data import Dataset

from meshwright.cli import train_corpus
from meshwright.cli.run_display import speed
from meshwright.cli.train_config import DataTable, ModelTable
from meshwright.cli.train_data import find_samples
from meshwright.cli.train_model import model_source
from meshwright.cli.train_options import parse_config
from meshwright.data import GlobalOrder, RepeatedStream, ShardedStream
from meshwright.errors import ConfigError, DataError
from meshwright.runtime import rank
from meshwright.runtime.processes import agreeing_over, make_group
from tests.cli.helpers import metrics

SOURCE = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, count, seed):
        self.x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum()


class Stream:
    def __init__(self, points):
        self.points = points

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


def points(count=12, seed=0):
    return Points(count, seed)


def stream(count=12, seed=0):
    return Stream(Points(count, seed))


def ids(seq_len):
    return [{"input_ids": torch.arange(seq_len), "labels": torch.arange(seq_len)}] * 4


def once():
    return iter(Points(5, 0))


def generated():
    yield from Points(5, 0)


class Again(Stream):
    def __iter__(self):
        self.rest = super().__iter__()
        return self

    def __next__(self):
        return next(self.rest)


def again():
    return Again(Points(4, 0))


def number():
    return 3


def fails():
    raise OSError("the disk is away")


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "points.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "points", raising=False)
    yield
    sys.modules.pop("points", None)


def _loaded(name, **table):
    return find_samples(DataTable(source=f"points:{name}", **table)).load(seed=5)


def test_a_dataset_is_put_into_one_order_and_told_the_seed():
    loaded = _loaded("points", args={"count": 7})
    assert isinstance(loaded.dataset, Dataset)
    assert isinstance(loaded.order, GlobalOrder)
    assert loaded.order.num_samples == 7
    assert torch.equal(loaded.dataset.x, _loaded("points", args={"count": 7, "seed": 5}).dataset.x)
    assert loaded.model_input_format == "unpack_sequence"
    assert loaded.tokens_per_sample is None
    loaded.start_at(3)
    assert loaded.loader_args(4, 2) == {"batch_size": 4, "num_workers": 2, "sampler": loaded.order}
    assert loaded.order.start == 3


def test_token_ids_are_counted_and_passed_by_name():
    loaded = _loaded("ids", seq_len=6)
    assert loaded.tokens_per_sample == 6
    assert loaded.model_input_format == "unpack_dict"


def test_a_stream_begins_again_and_goes_on_where_it_was():
    loaded = _loaded("stream", args={"count": 4})
    assert loaded.loader_args(2) == {"batch_size": 2, "num_workers": 0}
    with pytest.raises(ConfigError, match="A stream cannot be read by several processes"):
        loaded.loader_args(2, 1)
    assert loaded.sample_batch[0].shape == (1, 3)
    seen = [y.item() for _, y in itertools.islice(loaded.dataset, 10)]
    assert seen[:4] == seen[4:8]
    loaded.start_at(3)
    assert [y.item() for _, y in itertools.islice(loaded.dataset, 5)] == seen[3:8]
    halves = [[y.item() for _, y in itertools.islice(ShardedStream(loaded.dataset, each, 2), 2)] for each in (0, 1)]
    assert [halves[0][0], halves[1][0], halves[0][1], halves[1][1]] == seen[3:7]


def test_an_iterator_that_begins_anew_is_a_stream():
    seen, expected = _loaded("again").dataset, _loaded("stream", args={"count": 4, "seed": 0}).dataset
    assert [y.item() for _, y in itertools.islice(seen, 6)] == [y.item() for _, y in itertools.islice(expected, 6)]


def test_a_stream_that_ends_for_good_is_refused():
    with pytest.raises(DataError, match=r"empty.*epoch 2.*instead of a generator"):
        list(itertools.islice(RepeatedStream(iter([1, 2])), 3))
    with pytest.raises(DataError, match="none in its first epoch"):
        next(iter(RepeatedStream([])))


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("number", {}, "returned no samples"),
        ("once", {}, r"points:once returned what can be read only once.*Got an iterator \(.*__iter__"),
        ("generated", {}, r"read only once.*Got an iterator \(generator\)"),
        ("fails", {}, "OSError: the disk is away"),
        ("points", {"args": {"number": 3}}, "number"),
        ("points", {"args": {"count": 0}}, "no samples"),
    ],
)
def test_what_is_no_data_is_told(name, table, words):
    with pytest.raises(DataError, match=words):
        _loaded(name, **table)


def test_names_that_are_not_there_are_told():
    with pytest.raises(ConfigError, match=r"data\.source 'points:point'.*did you mean 'points'"):
        _loaded("point")
    with pytest.raises(ConfigError, match="args beside a source 'module:function' only"):
        parse_config({"model": {"source": "a:b"}, "data": {"source": "stdlib", "args": {"x": 1}}}, "x.toml")


def test_the_loss_is_that_of_the_output_and_text_is_for_causal_models_alone(tmp_path):
    pytest.importorskip("transformers")
    small = '"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16'
    (tmp_path / "config.json").write_text(f'{{"model_type": "bert", "vocab_size": 300, {small}}}')
    table = ModelTable(source="hf:.")
    source = model_source(table, tmp_path, of_text=False)
    assert source.loss_func is None
    model = source.build(None, None)
    assert type(model).__name__ == "BertForMaskedLM"
    sample = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}
    assert model(**source.prepare_input(sample, torch.device("cpu"))).loss > 0
    with pytest.raises(ConfigError, match=r"BertForMaskedLM is no causal language model.*examples/bert"):
        model_source(table, tmp_path).build(257, 16)


def test_speed_is_told_in_samples_where_there_are_no_tokens():
    assert speed([{"tokens_per_s": None, "samples_per_s": 1500.0}]) == "1.5k samples/s"
    assert speed([{"tokens_per_s": each, "samples_per_s": 1.0} for each in (10.0, 30.0, 20.0)]) == "20 tokens/s"


def _train(folder, source, steps, resume):
    import contextlib
    import io
    from unittest import mock

    from meshwright.cli import train_loop as training
    from meshwright.cli.train_options import Options
    from meshwright.runtime.device import seed_everything

    seed_everything(0)
    path, said = list(sys.path), io.StringIO()
    changes = (f"data.source=points:{source}",)
    try:
        with (
            mock.patch.object(training, "shutdown_distributed"),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            options = Options(folder / "points.toml", steps=steps, out=folder / source, changes=changes, resume=resume)
            training.train(options)
    finally:
        sys.path[:] = path
        sys.modules.pop("points", None)
    return said.getvalue()


def _both(folder):
    for source in ("points", "stream"):
        said = _train(folder, source, 8, False) + _train(folder, source, 12, True)
    return said


def test_a_run_of_samples_resumes_where_it_was(ranks, tmp_path):
    (tmp_path / "points.toml").write_text(
        '[model]\nsource = "points:Sum"\n[optimizer]\nlr = 0.1\nschedule = "constant"\n'
        "[run]\nbatch_size = 4\ntrackers = []\n"
    )
    said, _ = ranks(2).run(_both, tmp_path)
    assert "samples/s" in said
    for source in ("points", "stream"):
        records = metrics(tmp_path / source)
        assert [record["step"] for record in records] == list(range(1, 13))
        assert records[-1]["loss"] < records[0]["loss"]
        assert {record["tokens_per_s"] for record in records} == {None}
        assert all(record["samples_per_s"] > 0 for record in records)


# --- Corpora that take longer than a collective may


def _slowly(folder, what):
    """Find the sources of a corpus that takes the first rank two seconds, where collectives may take half a second."""
    from tests.cli.test_finetune import _corpus  # the tokenizers of transformers are slow to import

    corpus = _corpus(folder, source="corpus.txt", tokenizer="bytes", cache_dir=what)
    group = make_group(backend="gloo", timeout=timedelta(seconds=0.5))
    makes = train_corpus.token_cache

    def slow(*arguments, **options):
        if rank() == 0 and not list((folder / what).glob("tokens-*")):
            time.sleep(2)
            if what == "failing":
                raise DataError("No tokens", expected="some", got="none", fix="add some")
        return makes(*arguments, **options)

    started_s = time.monotonic()
    with mock.patch.object(train_corpus, "token_cache", slow), agreeing_over(group):
        try:
            return len(corpus.sources()[0][1])
        except DataError as error:
            return error.what, time.monotonic() - started_s < 10


@pytest.mark.parametrize(("what", "found"), [("slow", 62), ("failing", ("No tokens", True))])
def test_ranks_wait_for_a_corpus_longer_than_a_collective_may_take(ranks, tmp_path, what, found):
    (tmp_path / "corpus.txt").write_text("some text of a corpus\n" * 136)
    assert ranks(2).run(_slowly, tmp_path, what) == [found] * 2

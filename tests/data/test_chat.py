"""Conversations as tokens: every form of records, templates with and without marks, and the pieces in between."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshwright.data.chat import ChatEncoder, messages_of
from meshwright.data.records import Record
from meshwright.errors import ConfigError, DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
)
# As Qwen3's: the last message of the assistant is preceded by thoughts, those before are not.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


def tokenizer(folder, template=CHATML):
    """Write a byte-level tokenizer with a chat template into a folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": " hi there "},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "bye"},
]


def _trained_text(encoder, value):
    ids, trained = encoder.encode(Record(value, "a.jsonl:1"))
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(trained.astype(int))) + 1)
    return [encoder._tokenizer.decode(ids[run]) for run in runs if trained[run[0]]]


def test_marks_and_their_absence_train_the_same_tokens(tmp_path):
    marked = ChatEncoder(tokenizer(tmp_path / "marked", MARKED))
    found = ChatEncoder(tokenizer(tmp_path / "plain", CHATML))
    for value in ({"messages": TALK}, {"messages": TALK[1:3]}):
        expected, own = (each.encode(Record(value, "here")) for each in (marked, found))
        assert np.array_equal(expected.ids, own.ids)
        assert np.array_equal(expected.trained, own.trained)
    assert _trained_text(found, {"messages": TALK}) == ["hi there<|im_end|>", "bye<|im_end|>"]
    assert marked.fingerprint != found.fingerprint


def test_a_template_that_treats_the_last_message_differently(tmp_path):
    encoder = ChatEncoder(tokenizer(tmp_path, THINKING))
    talk = [{**each, "content": each["content"].strip()} for each in TALK]
    assert _trained_text(encoder, {"messages": talk}) == ["hi there<|im_end|>", "bye<|im_end|>"]


@pytest.mark.parametrize(
    "value",
    [
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "name": None}]},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]},
    ],
)
def test_forms_of_records(tmp_path, value):
    encoder = ChatEncoder(tokenizer(tmp_path))
    assert _trained_text(encoder, value) == ["4<|im_end|>"]
    assert [each["role"] for each in messages_of(Record(value, ""))] == ["user", "assistant"]


def test_a_prompt_and_its_completion_need_no_template(tmp_path):
    encoder = ChatEncoder(tokenizer(tmp_path, None))
    assert _trained_text(encoder, {"prompt": "one two", "completion": " three"}) == [" three<|im_end|>"]
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.encode(Record({"messages": TALK}, "here"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"text": "no talk"}, "a.jsonl:7 holds no conversation.*Got keys text"),
        ({"messages": []}, "holds no conversation"),
        ({"messages": [{"role": "user"}]}, "a message with keys role"),
        ({"messages": TALK[:2]}, "no message of the assistant.*roles system, user"),
        ({"messages": [{"role": "user", "content": "a"}, *TALK, {"role": "fail", "content": ""}]}, "refuses a.jsonl:7"),
    ],
)
def test_records_that_are_no_conversations(tmp_path, value, words):
    template = "{% for m in messages %}{% if m.role == 'fail' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    encoder = ChatEncoder(tokenizer(tmp_path, template + CHATML))
    with pytest.raises(DataError, match=words):
        encoder.encode(Record(value, "a.jsonl:7"))


def test_a_template_that_hides_what_the_assistant_said(tmp_path):
    encoder = ChatEncoder(tokenizer(tmp_path, "{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    with pytest.raises(DataError, match=r"does not show where.*generation"):
        encoder.encode(Record({"messages": TALK}, "here"))


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer that transformers can load"):
        ChatEncoder(tmp_path)
    folder = tokenizer(tmp_path / "no_end")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            values.pop("eos_token", None)
            (folder / name).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="no eos_token"):
        ChatEncoder(folder)

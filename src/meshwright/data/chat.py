"""Turn records of conversations into tokens, and say which of them the assistant wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.records import Record
from meshwright.errors import ConfigError, DataError, join_names

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "function": "tool"}
_CONVERSATIONS = ("messages", "conversations", "conversation")
_ASSISTANT = "assistant"


class Tokens(NamedTuple):
    """A sample: its ids, and which of them a model is trained to predict."""

    ids: np.ndarray
    """int64 of shape (num_tokens,)."""
    trained: np.ndarray
    """bool of shape (num_tokens,)."""


def is_conversation(value: Mapping[str, Any]) -> bool:
    """Return whether a record is a conversation, or a prompt with its completion."""
    return any(key in value for key in _CONVERSATIONS) or ("prompt" in value and "completion" in value)


def messages_of(record: Record) -> list[dict[str, Any]]:
    """Return a record's messages, each with ``role`` and ``content``, as chat templates take them.

    Taken are ``messages`` (OpenAI's form), ``conversations`` with ``from`` and ``value`` (ShareGPT's), and ``prompt``
    and ``completion`` that are lists of messages.

    Raises:
        DataError: When the record is none of these.
    """
    value = record.value
    found = next((value[key] for key in _CONVERSATIONS if key in value), None)
    if found is None and "prompt" in value and "completion" in value:
        parts = [value["prompt"], value["completion"]]
        found = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    if not isinstance(found, list) or not found or not all(isinstance(each, Mapping) for each in found):
        raise _no_conversation(record, f"keys {join_names(map(str, value), limit=8)}")
    return [_message(each, record) for each in found]


def _message(value: Mapping[str, Any], record: Record) -> dict[str, Any]:
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str) or not (isinstance(content, str | list) or value.get("tool_calls")):
        raise _no_conversation(record, f"a message with keys {join_names(map(str, value), limit=8)}")
    rest = {key: each for key, each in value.items() if key not in ("role", "from", "content", "value")}
    # Tables of columns fill what one of their messages lacks with None.
    kept = {key: each for key, each in rest.items() if each is not None}
    return {"role": _ROLES.get(role, role), "content": content, **kept}


def _no_conversation(record: Record, got: str) -> DataError:
    return DataError(
        f"{record.where} holds no conversation",
        expected="messages with role and content, conversations with from and value, or prompt and completion",
        got=got,
        fix="bring the file into one of these forms, or leave the record out",
    )


class ChatEncoder:
    """Encode conversations with the chat template of a transformers tokenizer.

    What the assistant wrote is trained: the template's ``{% generation %}`` marks say where that is. Of a template
    without them, it is the text of the assistant's messages and the special token that ends each of them. A prompt and
    its completion that are plain texts are encoded without a template; the completion and the end of the text are
    trained.

    Args:
        folder: A folder with the tokenizer's files, as ``save_pretrained`` writes them.

    Raises:
        ConfigError: When there is no such tokenizer there.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers_tokenizer(folder)
        self._template: str = self._tokenizer.chat_template or ""
        self._marks = "{% generation" in self._template or "{%- generation" in self._template
        self._special = sorted(map(str, self._tokenizer.all_special_tokens), key=len, reverse=True)
        self.fingerprint = "chat-1-" + fingerprint_of(folder, extra=self._template)
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_text: int = self._tokenizer.eos_token_id
        self.pad_id: int = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0

    def encode(self, record: Record) -> Tokens:
        """Encode one record.

        Raises:
            DataError: When it is no conversation, has no message of the assistant, or the template refuses it.
        """
        prompt, completion = record.value.get("prompt"), record.value.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._of_texts(prompt, completion)
        messages = messages_of(record)
        if not any(each["role"] == _ASSISTANT for each in messages):
            raise DataError(
                f"{record.where} has no message of the assistant, so nothing of it would be trained",
                expected=f"a message with the role {_ASSISTANT!r}",
                got=f"roles {join_names({each['role']: None for each in messages})}",
                fix="correct its roles, or leave it out",
            )
        if not self._template:
            raise ConfigError(
                "The tokenizer has no chat template",
                expected="chat_template in tokenizer_config.json, or chat_template.jinja",
                got=f"{type(self._tokenizer).__name__} without one",
                fix="take the tokenizer of an instruction-tuned model, or set tokenizer.chat_template and save it",
            )
        tools = record.value.get("tools")
        return self._marked(messages, tools, record) if self._marks else self._found(messages, tools, record)

    def _of_texts(self, prompt: str, completion: str) -> Tokens:
        first = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        second = [*self._tokenizer(completion, add_special_tokens=False)["input_ids"], self.end_of_text]
        trained = np.arange(len(first) + len(second)) >= len(first)
        return Tokens(np.array([*first, *second], dtype=np.int64), trained)

    def _marked(self, messages: list[dict[str, Any]], tools: Any, record: Record) -> Tokens:
        found = self._render(
            messages, tools, record, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Tokens(
            np.array(found["input_ids"], dtype=np.int64), np.array(found["assistant_masks"], dtype=np.int64) != 0
        )

    def _found(self, messages: list[dict[str, Any]], tools: Any, record: Record) -> Tokens:
        text = str(self._render(messages, tools, record, tokenize=False))
        spans = self._spans(text, messages, tools, record)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            trained |= (starts < end) & (ends > start)
        return Tokens(np.array(encoded["input_ids"], dtype=np.int64), trained)

    def _spans(self, text: str, messages: list[dict[str, Any]], tools: Any, record: Record) -> list[tuple[int, int]]:
        """Return where in the rendered text the assistant's messages lie, each with the token that ends it.

        Templates treat the last message differently, so a conversation that is cut off behind one renders other text:
        each content is replaced by a mark, and what stands between the marks is looked for in the text.
        """
        marked, contents = [], []
        for number, each in enumerate(messages):
            if each["role"] == _ASSISTANT:
                contents.append(each["content"] if isinstance(each["content"], str) else "")
                each = {**each, "content": f"\x02{number}\x03"}
            marked.append(each)
        marks = [each["content"] for each in marked if each["role"] == _ASSISTANT]
        around, rest = [], str(self._render(marked, tools, record, tokenize=False))
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                raise self._not_found(record)
            around.append(before)
        around.append(rest)
        return self._between(text, around, contents, record)

    def _between(self, text: str, around: list[str], contents: list[str], record: Record) -> list[tuple[int, int]]:
        if not text.startswith(around[0]):
            raise self._not_found(record)
        spans, position = [], len(around[0])
        for content, following in zip(contents, around[1:], strict=True):
            forms = (content, content.strip(), content.lstrip(), content.rstrip())
            whole = [form for form in forms if text.startswith(form + following, position)]
            end = position + len(whole[0]) if whole else text.find(following, position)
            if end < 0 or (not following and not whole):
                raise self._not_found(record)
            ending = next((token for token in self._special if text.startswith(token, end)), "")
            spans.append((position, end + len(ending)))
            position = end + len(following)
        return spans

    def _not_found(self, record: Record) -> DataError:
        return DataError(
            "The chat template does not show where the assistant's messages lie",
            expected="a template with {% generation %} marks, or one that writes contents as they are",
            got=f"text of {record.where} in which they cannot be found",
            fix="put {% generation %} … {% endgeneration %} around the assistant's part of the chat template",
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, record: Record, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools or None, **options)
        except Exception as error:  # jinja's, of the template and of what it raises itself
            raise DataError(
                f"The chat template refuses {record.where}",
                expected="messages in an order that it knows",
                got=f"{type(error).__name__}: {error}",
                fix="correct the conversation, or leave it out",
            ) from error


# --- Tokenizers of transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")


def is_tokenizer_folder(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def transformers_tokenizer(folder: Path) -> Any:
    """Load a tokenizer from a folder, without a network and without code from the folder.

    Raises:
        ConfigError: When it cannot be loaded, or has no fast implementation.
    """
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers has an error for everything
        raise ConfigError(
            f"{folder} holds no tokenizer that transformers can load",
            expected="tokenizer.json and tokenizer_config.json, as save_pretrained writes them",
            got=f"{type(error).__name__}: {error}",
            fix="name the folder of a pretrained model with its tokenizer; transformers is in 'meshwright[hf]'",
        ) from error
    if not found.is_fast or found.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer in {folder} cannot be used for training",
            expected="a fast tokenizer with an eos_token",
            got=f"{type(found).__name__}, {'no eos_token' if found.is_fast else 'which is a slow one'}",
            fix="set tokenizer.eos_token and save it again" if found.is_fast else "convert it to tokenizer.json",
        )
    return found


def fingerprint_of(folder: Path, extra: str = "") -> str:
    """Return a hash of a tokenizer's files, and of a text beside them."""
    digest = hashlib.sha256(extra.encode())
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()

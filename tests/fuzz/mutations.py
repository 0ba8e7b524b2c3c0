"""Changes that leave a file's outer form whole, so that a guided fuzzer gets behind the first check."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

Bytes = Callable[[bytes], bytes]

ODD = (
    None, True, False, 0, -1, 1, 2, 3, 255, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "..", "/", "../x", "/etc/passwd", "\x00", "\ud800", "\x1b[31m", "[red]", "float32", "load", "__class__", "auto",
    [], {}, [[[]]], [0], [None], {"": 0}, {"__tuple__": 5}, {"__items__": [[[], 0]]}, {"__tensor__": [1], "dtype": "x"},
    "x" * 3000,
)  # fmt: skip
_TOKENS = re.compile(rb"\s+|[A-Za-z_]\w*|\d+|.", re.DOTALL)
_ODD_TOKENS = (b"", b"0", b"-1", b"nan", b"inf", b"1e999", b"9" * 5000, b"\x00", b"\xff", b"\xed\xa0\x80", b"[", b"{",
               b"(", b"'", b'"', b"[" * 3000, b"(" * 150, b"-" * 3000, b"*", b"**", b"=", b"\n", b"x1", b"{[]: 1}",
               b"1979-05-27", b"None", b"True", b"0x" + b"f" * 5000, b"\x1b[2J", b"\xe2\x80\xae")  # fmt: skip


def changed(kind: str, content: bytes, rng: Random, raw: Bytes) -> bytes:
    """A changed copy of a file of some kind; ``raw`` changes bytes without regard for what they mean."""
    if rng.random() < 0.25:
        return raw(content)
    try:
        return _BY_KIND[kind](content, rng, raw)
    except Exception:  # what was changed before can be anything, and archives fail in every way; nothing is lost by it
        return raw(content)


def _json(content: bytes, rng: Random, raw: Bytes) -> bytes:
    tree = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = _changed_tree(tree, tree, rng)
    written = json.dumps(tree, indent=rng.choice((None, 1))).encode()
    # json writes no number of so many digits.
    return re.sub(rb"\d+", b"9" * 5000, written, count=1) if rng.random() < 0.02 else written


def _changed_tree(tree: Any, whole: Any, rng: Random) -> Any:
    if not tree or not isinstance(tree, dict | list) or rng.random() < 0.1:
        return _odd(tree, whole, rng)
    keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))
    key, other = rng.choice(keys), rng.choice(keys)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    choice = rng.random()
    if choice < 0.1:
        del copy[key]
    elif choice < 0.2:
        copy[key] = tree[other]
    elif choice < 0.3 and isinstance(copy, dict):
        copy[rng.choice(("", "x", "..", "/", "a\x00", f"{key}x", str(rng.choice(ODD))))] = copy.pop(key)
    elif choice < 0.3:
        copy.append(tree[other])
    else:
        copy[key] = _changed_tree(tree[key], whole, rng)
    return copy


def _odd(value: Any, whole: Any, rng: Random) -> Any:
    choice = rng.random()
    if choice < 0.15 and isinstance(value, int | float) and not isinstance(value, bool):
        return value + rng.choice((-1, 1)) if rng.random() < 0.5 else _multiplied(value, rng)
    if choice < 0.2:
        return _somewhere(whole, rng)
    if choice < 0.25:
        return [value] if rng.random() < 0.5 else {"x": value}
    return rng.choice(ODD)


def _multiplied(value: float, rng: Random) -> float:
    factor = rng.choice((-1, 2, 1e3, 0.5))
    try:
        return value * factor
    except OverflowError:  # an int that no float can hold
        return -value


def _somewhere(tree: Any, rng: Random) -> Any:
    while isinstance(tree, dict | list) and tree and rng.random() < 0.8:
        tree = rng.choice(list(tree.values()) if isinstance(tree, dict) else tree)
    return tree


def _text(content: bytes, rng: Random, raw: Bytes) -> bytes:
    tokens = _TOKENS.findall(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(tokens) + 1)
        new = rng.choice(_ODD_TOKENS) if rng.random() < 0.5 else rng.choice(tokens)
        tokens[place : place + rng.choice((0, 1, 1, 1, 3))] = [new] if rng.random() < 0.9 else [new] * 20
    return b"".join(tokens)


def _safetensors(content: bytes, rng: Random, raw: Bytes) -> bytes:
    """The header changes; the length before it stays right."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    header = _json(header, rng, raw)
    return len(header).to_bytes(8, "little") + header + rest


def _npy(content: bytes, rng: Random, raw: Bytes) -> bytes:
    length = int.from_bytes(content[8:10], "little")
    header = _text(content[10 : 10 + length], rng, raw)[:60_000]
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + length :]


def _pt(content: bytes, rng: Random, raw: Bytes) -> bytes:
    """A record of the archive changes, mostly the pickle; its checksum stays right."""
    source = zipfile.ZipFile(io.BytesIO(content))
    names = source.namelist()
    pickles = [name for name in names if name.endswith("data.pkl")]
    target = rng.choice(names if rng.random() < 0.3 or not pickles else pickles)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, raw(source.read(name)) if name == target else source.read(name))
    return out.getvalue()


_BY_KIND: dict[str, Callable[[bytes, Random, Bytes], bytes]] = {
    "json": _json, "text": _text, "safetensors": _safetensors, "npy": _npy, "pt": _pt,
}  # fmt: skip

"""Files as an enemy or a bad disk would write them: valid ones with pieces changed, and noise."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**63, 2**70, 10**400, 1e308, float("nan"), float("inf"), "", "..", "/", "\x00", "\ud800"]),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just([[[]]]),
)


def json_trees() -> st.SearchStrategy[Any]:
    """Small JSON values of any shape."""
    return st.recursive(
        _ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    )


@st.composite
def changed_tree(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of a JSON value with one place in it replaced, removed or doubled."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(tree)))
        match draw(st.integers(0, 5)):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, draw(st.text(max_size=6)): tree[key]}
            case _:
                return {**tree, key: draw(changed_tree(tree[key]))}
    if isinstance(tree, list) and tree and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(tree) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                return tree[:index] + tree[index + 1 :]
            case 1:
                return [*tree, tree[index]]
            case _:
                return [*tree[:index], draw(changed_tree(tree[index])), *tree[index + 1 :]]
    return draw(json_trees())


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with a stretch of it replaced; or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=64))
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 16)))
    return content[:start] + draw(st.binary(max_size=8)) + content[end:]


def files(valid: bytes) -> st.SearchStrategy[bytes]:
    """Changed copies of a valid file: by bytes, and where it is JSON by its tree too."""
    try:
        tree = json.loads(valid)
    except ValueError:
        return changed_bytes(valid)
    text = changed_tree(tree).map(lambda found: json.dumps(found, indent=1).encode())
    # Too deep for Python's parser, and a number of more digits than it reads.
    return changed_bytes(valid) | text | st.sampled_from([b"[" * 100_000, b"9" * 5000])

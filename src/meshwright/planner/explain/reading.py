"""Reads documents of plans that ``--json`` has written, and refuses those in which something else stands."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import ConfigError
from meshwright.planner.explain.document import FORMAT, SCHEMA_VERSION

_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Part(BaseModel):
    """What is shown and compared; documents hold more than that."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rank(_Part):
    allocated_bytes: _Int | None
    reserved_bytes: _Int | None
    moments: Annotated[dict[str, dict[str, _Int]], Field(min_length=1)]


class _Memory(_Part):
    limit_bytes: _Int | None
    needed_bytes: _Int
    ranks: Annotated[list[_Rank], Field(min_length=1)]


class _Time(_Part):
    step_time_s: float
    parts_s: dict[str, float]
    binds: str | None
    samples_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    price_per_billion_tokens_usd: float | None


class _Plan(_Part):
    summary: str
    strategy: dict[str, Any]
    axes: dict[str, _Int]
    num_micro_batches: _Int
    micro_batch: _Int | float
    fits: bool
    time: _Time | None
    memory: _Memory


class _Document(_Part):
    model: dict[str, Any]
    plans: Annotated[list[_Plan], Field(min_length=1)]


def read_document(text: str, name: str) -> dict[str, Any] | None:
    """Reads what ``--json`` has written; None where the text is something else, such as a strategy.

    Args:
        text: Of the file.
        name: Of the file, for errors.

    Raises:
        ConfigError: When it is such a document, of a version that is not known, or not as it was written.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if found.get("schema_version") != SCHEMA_VERSION:
        raise _unreadable(name, f"schema_version {found.get('schema_version')!r}")
    try:
        _Document.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise _unreadable(name, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return found


def _unreadable(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"The plans in {name} cannot be read",
        expected=f"schema_version {SCHEMA_VERSION}, and at least one plan with its figures",
        got=got,
        fix="write the file anew with meshwright plan --json",
    )

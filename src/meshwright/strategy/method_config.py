"""The base of all method configs, immutable and validated, and the register of all methods by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from meshwright.errors import ConfigError, MeshwrightError, StrategyError, did_you_mean, join_names


class Register(MutableMapping[str, "type[MethodConfig]"]):
    """Method configs by name, in the order in which they were announced or set.

    A name may be announced with the module that sets it, which is imported when the name is first looked up.
    """

    def __init__(self) -> None:
        self._found: dict[str, type[MethodConfig] | str] = {}

    def announce(self, module: str, *names: str) -> None:
        """Register names that importing a module sets."""
        for name in names:
            self._found.setdefault(name, module)

    def __getitem__(self, name: str) -> type[MethodConfig]:
        found = self._found[name]
        if isinstance(found, str):
            importlib.import_module(found)
            found = self._found[name]
            assert not isinstance(found, str), f"{name} was announced, but {found} does not set it"
        return found

    def __setitem__(self, name: str, config: type[MethodConfig]) -> None:
        self._found[name] = config

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._found))

    def __len__(self) -> int:
        return len(self._found)


METHOD_CONFIGS = Register()
"""Every known method by name; filled as the files of ``meshwright.methods`` are imported."""

Bytes = Annotated[ByteSize, Field(lt=2**63)]
"""A size as people write it, ``"40 GiB"`` or a number of bytes, that fits into 64 bits."""

_BYTES: TypeAdapter[int] = TypeAdapter(Bytes)


def read_size(value: Any, name: str) -> int | None:
    """Read a size as people write it; None stays None.

    Args:
        value: ``"40 GiB"``, or a number of bytes.
        name: Name of the argument, for the error.

    Returns:
        The size in bytes.

    Raises:
        ConfigError: When it is not a size, or 0.
    """
    try:
        size = None if value is None else 0 if isinstance(value, bool) else int(_BYTES.validate_python(value))
    except (ValidationError, OverflowError):
        size = 0
    if size is not None and size < 1:
        raise ConfigError(
            f"{name} is no size",
            expected='bytes, 1 or more, or a size such as "40 GiB"',
            got=repr(value),
            fix="correct the size",
        )
    return size


class MethodConfig(BaseModel):
    """Base of all method configs: an immutable, hashable value.

    A subclass with a ``method_name`` enters the register; its fields are the keys a strategy may set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    method_name: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Register a concrete method."""
        super().__pydantic_init_subclass__(**options)
        if "method_name" in cls.__dict__:
            METHOD_CONFIGS[cls.method_name] = cls

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Read a config as users write it: None for the defaults, a mapping of keys, or the method's short form.

        Raises:
            StrategyError: Naming the key and the value that are wrong.
        """
        if isinstance(raw, cls):
            return raw
        try:
            keys = {} if raw is None else raw if isinstance(raw, Mapping) else cls.from_short(raw)
            return cls(**cls.normalised(dict(keys)))
        except ValidationError as error:
            raise cls._explained(error) from None
        except MeshwrightError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            # Methods read short forms and rename keys before these are validated, so any value may reach them.
            raise StrategyError(
                f"{cls.method_name}: the config cannot be used",
                expected=f"keys from {join_names(cls.model_fields)}" if cls.model_fields else "no config",
                got=f"{raw!r:.200} ({type(error).__name__}: {error})",
                fix="correct the values, or leave keys out for their defaults",
            ) from error

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Turn the method's short form, such as ``"bf16"`` or a tuple of classes, into keys."""
        raise StrategyError(
            f"{cls.method_name}: the config is of a wrong kind",
            expected=f"a dictionary with keys from {join_names(cls.model_fields)}" if cls.model_fields else "no config",
            got=f"{type(raw).__name__} {raw!r}",
            fix="write the method as (name, {key: value, …})",
        )

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Rename or refuse keys before they are validated; return the keys to validate."""
        return keys

    def notices(self) -> list[str]:
        """Return one sentence for each key that is accepted and changes nothing."""
        return []

    def text_arguments(self) -> dict[str, Any]:
        """Return the keys worth printing: those that differ from their defaults, as plain values."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.text_arguments().items())
        return f"{self.method_name}({arguments})" if arguments else self.method_name

    @classmethod
    def _explained(cls, error: ValidationError) -> StrategyError:
        first = error.errors()[0]
        *outer, key = [str(each) for each in first["loc"]] or [""]
        if first["type"] == "extra_forbidden":
            known = _fields(cls, outer)
            where = ".".join([cls.method_name, *outer])
            return StrategyError(
                f"{where} has no config key {key!r}{did_you_mean(key, known)}",
                expected=f"keys from {join_names(known)}" if known else "no keys",
                got=repr(key),
                fix="correct the key or leave it out",
            )
        if first["type"] == "missing":
            return StrategyError(
                f"{cls.method_name} has no default for its config key {key!r}",
                expected=f"a config with {key!r}",
                got=repr(first["input"]),
                fix=f"write ({cls.method_name!r}, {{{key!r}: …}})",
            )
        key = outer[0] if outer else key
        return StrategyError(
            f"{cls.method_name}: config key {key!r} has a value that cannot be used",
            expected=first["msg"].removeprefix("Value error, "),
            got=repr(first["input"]),
            fix="correct the value, or leave the key out for its default",
        )


def _fields(config: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the config at a path of keys in another one; empty if there is no config."""
    for key in path:
        field = config.model_fields.get(key)
        every = () if field is None else (field.annotation, *get_args(field.annotation))
        found = next((each for each in every if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if found is None:
            return []
        config = found
    return list(config.model_fields)

"""The strategy: an immutable value of methods with their configs, read from lists, JSON, text and files."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
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
    foreign_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other engines, and what to do instead. They are refused, unless their value asks for nothing."""
    foreign_off: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The values that ask for nothing, of foreign keys where these are not None, False, 0 and what is empty."""

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
            return cls(**cls.normalised(cls._without_foreign(keys)))
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
    def _without_foreign(cls, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out foreign keys that ask for nothing, and refuse the others."""
        for key in cls.foreign_keys.keys() & keys.keys():
            value = keys[key]
            if not (value in cls.foreign_off[key] if key in cls.foreign_off else _asks_for_nothing(value)):
                raise StrategyError(
                    f"{cls.method_name}: {key!r} configures another engine, which Meshwright does not have",
                    expected=f"keys from {join_names(cls.model_fields)}" if cls.model_fields else "no keys",
                    got=f"{key}={value!r}",
                    fix=cls.foreign_keys[key],
                )
        return {key: value for key, value in keys.items() if key not in cls.foreign_keys}

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


def _asks_for_nothing(value: Any) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # FSDP1's CPUOffload(offload_params=False)
        return not any(vars(value).values())
    return not value


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


FORMAT = "meshwright.strategy"
SCHEMA_VERSION = 1
_PLANS = "meshwright.plans"  # the format that meshwright plan --json prints

# What to do instead of names that are not methods here: methods of ATorch, and mesh axes.
_ADVICE = {
    "fsdp2": "name fsdp, which is FSDP2 here",
    "native_dynamo": "name compile",
    "auto_ddp": "leave it out: ranks of the axis data are replicas whose gradients are averaged",
    "amp_apex_o1": "name amp_native",
    "amp_apex_o2": "name amp_native, or half, which has fp32 master weights",
    # Mesh axes, which are easily taken for methods.
    "data": "leave it out: what no other axis takes is data parallel; ('parallel_mode', {'data': 8}) says so",
    "zero": "name zero1, zero2 or fsdp, which shard over it",
    "replica": "name it with its size, ('parallel_mode', {'replica': 2}), and the method outer",
} | {
    axis: f"name {axis}_parallel, and the size of the axis: ('parallel_mode', {{'{axis}': 2}})"
    for axis in ("tensor", "sequence", "context", "expert", "pipeline")
}


def parse_method(item: Any) -> MethodConfig:
    """Read one method: a name, a ``(name, config)`` pair, ATorch's ``(name, config, tunable)``, or a config.

    Raises:
        StrategyError: For an unknown name or a config that is not valid.
    """
    if isinstance(item, MethodConfig):
        return item
    if isinstance(item, str):
        return _config_class(item).parse(None)
    if isinstance(item, Mapping) and "name" in item:
        rest = {key: value for key, value in item.items() if key != "name"}
        return _config_class(item["name"]).parse(rest.get("config") if set(rest) == {"config"} else rest)
    if isinstance(item, Sequence) and 1 <= len(item) <= 3 and isinstance(item[0], str):
        if len(item) == 3 and item[2]:
            raise StrategyError(
                f"{item[0]}: tunable methods are not searched in this version",
                expected="(name, config) with a config that is final",
                got=f"tunable={item[2]!r}",
                fix="drop the third item and give the config, or leave load_strategy out to let Meshwright choose",
            )
        return _config_class(item[0]).parse(item[1] if len(item) > 1 else None)
    raise StrategyError(
        "A strategy holds something that is not a method",
        expected="a name, or a (name, config) pair",
        got=f"{type(item).__name__} {item!r}",
        fix='write it as a name, such as "zero2", or as ("zero2", {…})',
    )


def _config_class(name: Any) -> type[MethodConfig]:
    if isinstance(name, str) and name in METHOD_CONFIGS:
        return METHOD_CONFIGS[name]
    advice = _ADVICE.get(str(name))
    raise StrategyError(
        f"Unknown method {name!r}" + ("" if advice else did_you_mean(str(name), METHOD_CONFIGS)),
        expected=f"one of {join_names(METHOD_CONFIGS, limit=40)}",
        got=repr(name),
        fix=advice or "correct the name; meshwright methods lists them",
    )


def read_methods(source: Any) -> list[MethodConfig]:
    """Read the methods of a strategy from any source that :class:`Strategy` takes.

    Raises:
        StrategyError: When it cannot be read, saying where.
    """
    if isinstance(source, os.PathLike):
        return _from_file(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), "the bytes given")
    if isinstance(source, str):
        return _from_string(source)
    if isinstance(source, Sequence | set | frozenset) and not isinstance(source, Mapping):
        return [parse_method(item) for item in source]
    raise StrategyError(
        "This is not a strategy",
        expected="a Strategy, a list of methods, JSON text, bytes, text or a path",
        got=type(source).__name__,
        fix='pass a list such as ["zero2", ("amp_native", "bf16")]',
    )


def _from_string(source: str) -> list[MethodConfig]:
    stripped = source.strip()
    if not stripped:
        return []
    if stripped[:1] in "{[":
        return _from_json(stripped, "the text given")
    is_path = os.sep in stripped and not _SHORT.fullmatch(stripped)  # "module_replace rms_norm/fused_loss" is none
    if stripped.endswith(".json") or is_path or _is_file(stripped):
        return _from_file(Path(stripped))
    return _from_text(stripped)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with characters that no path has
        return False


def _from_file(path: Path) -> list[MethodConfig]:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise StrategyError(
            "The strategy file cannot be read",
            expected="a JSON file",
            got=f"{path}: {error}",
            fix="check the path, or pass the list of methods itself",
        ) from None
    return _from_bytes(content, f"the file {path}")


def _from_bytes(content: bytes, where: str) -> list[MethodConfig]:
    # A pickle of protocol 2 or later starts with 0x80; protocols 0 and 1 end with the STOP opcode, as no JSON does.
    if content[:1] == b"\x80" or (content[-1:] == b"." and content[:1] not in b"{["):
        raise StrategyError(
            "This strategy is a pickle, and reading a pickle can run any code",
            expected="JSON as Strategy.save writes it",
            got=f"a pickle in {where}",
            fix="open it once with the program that wrote it, and write its list of methods down as text or JSON",
        )
    try:
        return _from_json(content.decode(), where)
    except UnicodeDecodeError:
        raise StrategyError(
            "This strategy is not text",
            expected="JSON in UTF-8",
            got=f"other bytes in {where}",
            fix="write it with Strategy.save",
        ) from None


def _from_json(text: str, where: str) -> list[MethodConfig]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of more digits than Python reads
        raise StrategyError(
            "The strategy is not valid JSON",
            got=f"{error} in {where}",
            expected="JSON as Strategy.save writes it",
            fix="write it again with Strategy.save, or correct it where it says",
        ) from None
    if isinstance(document, list):
        return [parse_method(item) for item in document]
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        got, fix = where, "write it with Strategy.save"
        if isinstance(document, dict) and document.get("format") == _PLANS:
            got = f"{where}, plans that meshwright plan --json has printed"
            fix = "write the first plan's strategy with meshwright plan --save"
        raise StrategyError(
            "This JSON is not a strategy", expected=f'an object with "format": "{FORMAT}"', got=got, fix=fix
        )
    if document.get("schema_version") != SCHEMA_VERSION:
        raise StrategyError(
            "The strategy was written in another schema version",
            expected=f"schema_version {SCHEMA_VERSION}",
            got=repr(document.get("schema_version")),
            fix="update Meshwright, or write the strategy again with this version",
        )
    methods = document.get("methods")
    if not isinstance(methods, list):
        raise StrategyError(
            "The strategy holds no list of methods",
            expected='"methods": […]',
            got=repr(methods),
            fix="write it with Strategy.save",
        )
    return [parse_method(item) for item in methods]


def _from_text(text: str) -> list[MethodConfig]:
    """Read ``name(key=value, …) + name``, or the short form of tables.

    Python literals only, parsed and never evaluated.
    """
    try:
        expression = ast.parse(text, mode="eval").body
        return [_method_of(node) for node in _terms(expression)]
    except (SyntaxError, RecursionError, MemoryError, TypeError):  # a TypeError: {[]: 1} parses, too
        pass
    except ValueError as error:
        if isinstance(error, StrategyError):
            raise
    if _SHORT.fullmatch(text):
        return _from_short_text(text)
    raise StrategyError(
        "This text is not a strategy",
        expected="methods joined by '+', such as \"zero2 + amp_native(dtype='bf16')\"; a strategy as tables show it, "
        '"zero 8: zero2, amp_native bf16"; or the path of a JSON file',
        got=repr(text if len(text) < 200 else text[:200] + "…"),
        fix="correct it, or pass a list of methods",
    )


# "tensor 2 x zero 4: fsdp, amp_native bf16, checkpoint every=2", as tables of plans show a strategy.
_MESH = re.compile(r"one rank|\w+ \d{1,9}( x \w+ \d{1,9})*")
_SHORT = re.compile(rf"({_MESH.pattern})|(({_MESH.pattern}): *)?\w+( [\w./=-]+)*( *[,+] *\w+( [\w./=-]+)*)*")


def _from_short_text(text: str) -> list[MethodConfig]:
    """Read a mesh, and methods with their values; a method with default keys may be named by its axis alone."""
    mesh, colon, rest = text.partition(":")
    if not colon:
        mesh, rest = ("", text) if _MESH.fullmatch(text) is None else (text, "")
    axes = [(name, int(size)) for name, size in re.findall(r"(\w+) (\d+)", mesh)]
    named = [_from_words(*each.split()) for each in re.split("[,+]", rest) if each.strip()]
    names = [method.method_name for method in named]
    implied = (f"{axis}_parallel" for axis, _ in axes)
    named += [parse_method(name) for name in implied if name in METHOD_CONFIGS and name not in names]
    return [parse_method(("parallel_mode", axes)), *named] if axes else named


def _from_words(name: str, *words: str) -> MethodConfig:
    """Read ``checkpoint selective every=2``: values by key, and those that the method's short form takes alone."""
    keys: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        keys |= {key: _literal(value)} if equals else _config_class(name).from_short(_short_value(word))
    return parse_method((name, keys))


def _short_value(word: str) -> Any:
    """Read the value of a short form: one word or number, or several words between slashes."""
    return tuple(word.split("/")) if "/" in word else _literal(word)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _terms(node: ast.expr) -> list[ast.expr]:
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _method_of(node: ast.expr) -> MethodConfig:
    if isinstance(node, ast.Name):
        return parse_method(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError("neither a name nor a call")
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    positional = [ast.literal_eval(argument) for argument in node.args]
    if len(keywords) != len(node.keywords) or (positional and keywords):
        raise ValueError("short form and keys mixed")
    if not positional:
        return parse_method((node.func.id, keywords))
    return parse_method((node.func.id, positional[0] if len(positional) == 1 else tuple(positional)))


class Strategy:
    """A set of optimisation methods with their configs. The order in which they are listed has no meaning.

    Args:
        source: A list of names, ``(name, config)`` pairs or configs; another Strategy; JSON text or bytes; the path of
            a JSON file; or text as a strategy prints itself, ``"zero2 + amp_native(dtype='bf16')"``, or as tables of
            plans show it, ``"zero 8: zero2, amp_native bf16"``.

    Raises:
        StrategyError: When ``source`` cannot be read, names an unknown method or key, or names a method twice.

    Example:
        >>> Strategy(["fsdp", ("amp_native", {"dtype": "bf16"})])
        Strategy("fsdp + amp_native(dtype='bf16')")
    """

    __slots__ = ("methods",)

    methods: tuple[MethodConfig, ...]

    def __init__(self, source: Any = ()) -> None:
        methods = source.methods if isinstance(source, Strategy) else tuple(read_methods(source))
        names = [method.method_name for method in methods]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise StrategyError(
                "A method is listed twice",
                expected="every method once",
                got=", ".join(twice),
                fix="merge the two into one",
            )
        object.__setattr__(self, "methods", methods)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"A Strategy is immutable: {name!r} cannot be set. What to do: use with_method or without."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A Strategy is immutable: {name!r} cannot be deleted.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the methods, in the order listed."""
        return tuple(method.method_name for method in self.methods)

    def get(self, name: str) -> MethodConfig | None:
        """Return the config of a method, or None when the strategy does not name it."""
        return next((method for method in self.methods if method.method_name == name), None)

    def with_method(self, method: Any) -> Strategy:
        """Return the strategy with one method added, or replaced where it is already named."""
        added = parse_method(method)
        if added.method_name not in self.names:
            return Strategy([*self.methods, added])
        return Strategy([added if each.method_name == added.method_name else each for each in self.methods])

    def without(self, name: str) -> Strategy:
        """Return the strategy without one method."""
        return Strategy([method for method in self.methods if method.method_name != name])

    def diff(self, other: Strategy) -> str:
        """Return the changes from this strategy to ``other`` as lines of ``-``, ``+`` or ``~``; empty if equal."""
        lines = []
        for name in dict.fromkeys((*self.names, *other.names)):
            here, there = self.get(name), other.get(name)
            if here is None:
                lines.append(f"+ {there}")
            elif there is None:
                lines.append(f"- {here}")
            elif here != there:
                lines.append(f"~ {here} -> {there}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return JSON text with a schema version; classes are stored by their qualified names."""
        methods = [{"name": method.method_name, "config": method.model_dump(mode="json")} for method in self.methods]
        return json.dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, "methods": methods}, indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, completely or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_text(self.to_json() + "\n")
        temporary.replace(target)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[tuple[str, MethodConfig]]:
        return ((method.method_name, method) for method in self.methods)

    def __len__(self) -> int:
        return len(self.methods)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and frozenset(self.methods) == frozenset(other.methods)

    def __hash__(self) -> int:
        return hash(frozenset(self.methods))

    def __str__(self) -> str:
        return " + ".join(map(str, self.methods))

    def __repr__(self) -> str:
        return f'Strategy("{self}")' if self.methods else "Strategy()"

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy, (self.to_json(),)

"""Snapshots and plans as canonical text: for hashes that any machine agrees on, and to be kept and read again.

A snapshot is a set of items, each with its section (the field of ``Snapshot``) and key (the id within it). The hash of
the whole is the sum, modulo 2^256, of the hashes of its items, hashed once more: the order of items never matters, and
when an item changes its old hash is taken off and the new one added, so a hash of 26,000 items costs what changed
since the last one. Source: Bellare and Micciancio, "A New Paradigm for Collision-free Hashing: Incrementality at
Reduced Cost", EUROCRYPT 1997 (AdHash). Fields with their default value are left out of the text, so a field that is
added later changes no old hash.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from hashlib import blake2b, sha256
from typing import Any

from pool.engine.model import Plan, Policy, Snapshot

Key = tuple[str, str]
"""Section and key of an item, both as text."""
MODULUS = 1 << 256
IDENTITY = ("allocation_id", "id", "code", "request_id")
"""What tells the elements of a section apart; the first that an element has."""
WHOLE_KEY = ""


def items(snapshot: Snapshot) -> Iterator[tuple[Key, Any]]:
    """All items of a snapshot. Empty sections and fields without a value have none."""
    for one in fields(Snapshot):
        value = getattr(snapshot, one.name)
        if isinstance(value, Mapping):
            yield from (((one.name, _text(key)), element) for key, element in value.items())
        elif isinstance(value, tuple):
            name = _identity(value[0]) if value else ""
            yield from (((one.name, str(getattr(element, name))), element) for element in value)
        elif value is not None:
            yield (one.name, WHOLE_KEY), value


def snapshot_of(parts: Iterable[tuple[Key, bytes]]) -> Snapshot:
    """The snapshot with these items, from their text; the inverse of ``items`` and ``encode``."""
    hints = _hints(Snapshot)
    found: dict[str, list[tuple[str, bytes]]] = {}
    for (section, key), text in parts:
        found.setdefault(section, []).append((key, text))
    values: dict[str, Any] = {}
    for one in fields(Snapshot):
        entries = found.get(one.name, [])
        hint = hints[one.name]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            read = _reader(arguments[0])
            values[one.name] = tuple(read(json.loads(text)) for _, text in entries)
        elif origin is not None and _is_mapping(origin):
            read = _reader(arguments[1])
            values[one.name] = {_untext(key, arguments[0]): read(json.loads(text)) for key, text in entries}
        elif entries:
            values[one.name] = _reader(hint)(json.loads(entries[0][1]))
    return Snapshot(**values)


def encode(value: Any) -> bytes:
    """Canonical text of a value of the model: JSON with sorted keys, without blanks, without defaults."""
    return _ENCODER.encode(_plain(value)).encode()


def digest(key: Key, text: bytes) -> int:
    """The hash of one item."""
    state = blake2b(digest_size=32)
    state.update(f"{key[0]}\x00{key[1]}\x00".encode())
    state.update(text)
    return int.from_bytes(state.digest(), "big")


def whole(total: int) -> str:
    """The hash of a snapshot from the sum of its items' hashes."""
    return sha256(total.to_bytes(32, "big")).hexdigest()


def snapshot_hash(snapshot: Snapshot) -> str:
    """The hash computed from nothing: what ``Print`` gives piece by piece."""
    return whole(sum(digest(key, encode(value)) for key, value in items(snapshot)) % MODULUS)


def plan_hash(plan: Plan) -> str:
    """A hash of all that a plan orders and of why and where everybody else waits."""
    state = sha256()
    for op in plan.ops:
        state.update(type(op).__name__.encode() + encode(op) + b"\n")
    for one in plan.spared:
        state.update(b"spared" + encode(one) + b"\n")
    for wait in plan.waiting:
        state.update(f"{wait.request_id}:{wait.code}:{wait.flavour}:{wait.position}:{wait.of}\n".encode())
    return state.hexdigest()


def policy_values(policy: Policy) -> dict[str, Any]:
    """The switches of a policy that differ from the defaults, as plain data."""
    return typing.cast("dict[str, Any]", _plain(policy))


class Print:
    """The hash of a snapshot that changes: give it each one in turn; it looks again only at what is new.

    Items are compared by identity first, so keep unchanged ones. ``texts`` are the items' texts as of now;
    ``changed`` and ``gone`` gather the keys that came or changed, and went, until they are cleared.
    """

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Any, int]] = {}
        self._total = 0
        self.texts: dict[Key, bytes] = {}
        self.changed: set[Key] = set()
        self.gone: set[Key] = set()

    def take(self, snapshot: Snapshot) -> str:
        """The hash of ``snapshot``."""
        count = 0
        for key, value in items(snapshot):
            count += 1
            known = self._seen.get(key)
            if known is not None and known[0] is value:
                continue
            text = encode(value)
            if known is not None and self.texts[key] == text:
                self._seen[key] = (value, known[1])
                continue
            number = digest(key, text)
            self._total += number - (known[1] if known is not None else 0)
            self._seen[key] = (value, number)
            self.texts[key] = text
            self.changed.add(key)
            self.gone.discard(key)
        if count != len(self._seen):
            self._drop({key for key, _ in items(snapshot)})
        self._total %= MODULUS
        return whole(self._total)

    def _drop(self, present: set[Key]) -> None:
        for key in self._seen.keys() - present:
            self._total -= self._seen.pop(key)[1]
            del self.texts[key]
            self.changed.discard(key)
            self.gone.add(key)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _identity(element: Any) -> str:
    return next(name for name in IDENTITY if hasattr(element, name))


def _text(key: Any) -> str:
    return f"#{key}" if isinstance(key, int) else f"${key}"


def _untext(text: str, hint: Any) -> Any:
    return int(text[1:]) if text.startswith("#") else text[1:]


def _is_mapping(origin: Any) -> bool:
    """Whether a type's origin is a mapping."""
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: _plain(held)
            for name, default in _defaults(type(value))
            if (held := getattr(value, name)) is not default and held != default
        }
    if isinstance(value, frozenset | set):
        return sorted(_plain(one) for one in value)
    if isinstance(value, Mapping):
        return sorted(
            ([_plain(key), _plain(one)] for key, one in value.items()), key=lambda pair: str(pair[0])
        )
    return [_plain(one) for one in value]


@cache
def _defaults(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple((one.name, _default(one)) for one in fields(cls))


_NOTHING = object()


def _default(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not MISSING else _NOTHING


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """A function from plain data to a value of the type ``hint``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            each = _reader(arguments[0])
            return lambda value: tuple(each(one) for one in value)
        readers = [_reader(one) for one in arguments]
        return lambda value: tuple(read(one) for read, one in zip(readers, value, strict=True))
    if origin is frozenset:
        member = _reader(arguments[0])
        return lambda value: frozenset(member(one) for one in value)
    if origin is not None and _is_mapping(origin):
        of_key, of_value = _reader(arguments[0]), _reader(arguments[1])
        return lambda value: {of_key(key): of_value(one) for key, one in value}
    if origin in (typing.Union, types.UnionType):
        inner = [_reader(one) for one in arguments if is_dataclass(one) or typing.get_origin(one) is not None]
        if inner:
            return lambda value: None if value is None else inner[0](value)
    return _same


def _same(value: Any) -> Any:
    return value


def _dataclass_reader(cls: type) -> Callable[[Any], Any]:
    hints = _hints(cls)

    def read(value: Any) -> Any:
        known = {name: _reader(hints[name])(held) for name, held in value.items() if name in hints}
        return cls(**known)

    return read

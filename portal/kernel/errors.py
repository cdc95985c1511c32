"""Errors that people and programs get to see.

Every error has one stable `code` (shared by page, API and docs), an HTTP status and a translated `detail`.
`errors` points at single fields (`pointer` is the field's name), `blocking` carries the sum behind a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict


class FieldProblem(TypedDict):
    """One field's problem: `pointer` names the field, `detail` says what and how to mend it."""

    pointer: str
    detail: Any


class Blocking(TypedDict, total=False):
    """The sum behind a refusal, in milli-GPU where amounts are meant. `limit` None means unlimited."""

    level: str
    limit: int | None
    used: int
    requested: int


@dataclass
class DomainError(Exception):
    """Base of all errors with a meaning for the reader. `detail` is (lazily) translated text."""

    code: str
    detail: Any
    errors: list[FieldProblem] = field(default_factory=list)
    blocking: Blocking | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    status: int = 400

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass
class Invalid(DomainError):
    """The input is wrong (400); nothing was written."""

    status: int = 400

    @classmethod
    def field(cls, pointer: str, detail: Any, code: str = "invalid") -> Invalid:
        """An error of one field."""
        return cls(code=code, detail=detail, errors=[{"pointer": pointer, "detail": detail}])


@dataclass
class Refused(DomainError):
    """The person may not do this (403)."""

    status: int = 403


@dataclass
class NotFound(DomainError):
    """No such thing, or none that the person may see (404): the two look alike on purpose."""

    status: int = 404


@dataclass
class Conflict(DomainError):
    """The thing changed meanwhile, or is not in a state that allows this (409)."""

    status: int = 409


@dataclass
class Blocked(Conflict):
    """A limit stands in the way (409); `blocking` names the level and carries the sum."""


@dataclass
class PreconditionFailed(DomainError):
    """`If-Match` names an older version than the present one (412)."""

    status: int = 412

"""Numbers and quota trees of a case: decimals are scaled to integers (1/1000) or taken as exact fractions, and
come back as plain JSON numbers."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from quotas.engine.tree import QuotaNode, QuotaTree

Case = dict[str, Any]
Result = dict[str, Any]
SCALE = 1000


def scaled(value: Any) -> int:
    number = Fraction(str(value)) * SCALE
    if number.denominator != 1:
        raise ValueError(f"{value!r} is finer than 1/{SCALE}")
    return number.numerator


def scaled_or_none(value: Any) -> int | None:
    return None if value is None else scaled(value)


def plain(value: int | Fraction) -> int | float:
    number = Fraction(value)
    return number.numerator if number.denominator == 1 else float(number)


def unscaled(value: int) -> int | float:
    return plain(Fraction(value, SCALE))


def pairs_in(case: Case) -> list[tuple[str, str]]:
    """All (flavour, resource) pairs that the case's quotas, usage or probes name, in order."""
    found: set[tuple[str, str]] = set()
    for node in [*case.get("cohorts", []), *case.get("queues", [])]:
        found.update(pairs_of(node.get("quotas") or {}))
    for usage in (case.get("usage") or {}).values():
        found.update(pairs_of(usage))
    return sorted(found)


def pairs_of(amounts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for flavour, resources in amounts.items():
        for resource in resources:
            yield flavour, resource


def build_trees(case: Case) -> dict[tuple[str, str], QuotaTree]:
    """One tree per (flavour, resource) of the case, with its start usage booked."""
    trees: dict[tuple[str, str], QuotaTree] = {}
    for flavour, resource in pairs_in(case):
        nodes = []
        for node in [*case.get("cohorts", []), *case.get("queues", [])]:
            quota = ((node.get("quotas") or {}).get(flavour) or {}).get(resource) or {}
            nodes.append(
                QuotaNode(
                    id=node["id"],
                    parent=node.get("parent"),
                    own=scaled(quota.get("nominal") or 0),
                    borrow_limit=scaled_or_none(quota.get("borrowing_limit")),
                    lend_limit=scaled_or_none(quota.get("lending_limit")),
                )
            )
        trees[flavour, resource] = QuotaTree(nodes)
    for queue, usage in (case.get("usage") or {}).items():
        for flavour, resource in pairs_of(usage):
            trees[flavour, resource].add(queue, scaled(usage[flavour][resource]))
    return trees


def fraction(value: Any) -> int | Fraction:
    return value if isinstance(value, int) else Fraction(str(value))


def fraction_or_none(value: Any) -> int | Fraction | None:
    return None if value is None else fraction(value)

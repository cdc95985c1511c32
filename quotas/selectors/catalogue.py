"""The catalogue of GPU models that the installation ships: names, memory, abilities, MIG profiles.

Data: ``quotas/data/catalogue.json``. A flavour copies its facts when it is made; the profiles of a flavour
are looked up here by its ``mig_table``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data" / "catalogue.json"
MIB_PER_GB = 1024
MEMORY_TOLERANCE = 0.12  # a card reports up to a tenth less than its name says


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One row of a card's table of MIG profiles; ``memory_mib`` None where unknown."""

    name: str
    compute_slices: int
    memory_slices: int
    max_instances: int
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class MigTable:
    """How a card may be cut: slices in all, and the profiles."""

    compute_slices: int
    memory_slices: int
    profiles: tuple[MigProfile, ...]

    def get(self, name: str) -> MigProfile | None:
        """The profile of that name, if the card has it."""
        return next((profile for profile in self.profiles if profile.name == name), None)


@cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


@cache
def mig_table(key: str) -> MigTable | None:
    """The table of MIG profiles named by a flavour's ``mig_table``; None for a card that cannot be split."""
    row = _data()["mig_tables"].get(key)
    if row is None:
        return None
    return MigTable(
        row["compute_slices"], row["memory_slices"], tuple(MigProfile(**p) for p in row["profiles"])
    )


def catalogue_rows() -> list[dict[str, Any]]:
    """All models, in the order of the catalogue."""
    rows: list[dict[str, Any]] = _data()["gpus"]
    return rows


def normal_name(name: str) -> str:
    """A product name with what drivers and Kubernetes add to it taken off: case, ``NVIDIA``, marks of
    sharing.
    """
    text = re.sub(r"-(SHARED|MIG-.*)$", "", name.strip(), flags=re.IGNORECASE)
    text = re.sub(r"[\s_-]+", " ", text.lower()).strip()
    return re.sub(r"^(nvidia|tesla) ", "", re.sub(r"^(nvidia|tesla) ", "", text))


@cache
def _by_name() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Rows by their full names, and by the short names that several may share."""
    full: dict[str, list[int]] = {}
    short: dict[str, list[int]] = {}
    for index, row in enumerate(catalogue_rows()):
        for name in {normal_name(n) for n in (row["key"], row["name"], row["code"], *row["nvml_names"])}:
            full.setdefault(name, []).append(index)
        for name in {normal_name(n) for n in row["short"]}:
            short.setdefault(name, []).append(index)
    return full, short


def catalogue_match(model_name: str, memory_mib: int) -> dict[str, Any] | None:
    """The row of a product name as a driver, Slurm or Kubernetes spells it, or None.

    Several rows may share a name (``a100``): the memory decides, to within ``MEMORY_TOLERANCE``. A name that
    is unique matches even where the memory differs (cards are rebuilt with more memory).
    """
    rows = catalogue_rows()
    found: list[list[int]] = [names.get(normal_name(model_name), []) for names in _by_name()]
    for indexes in found:
        close = [i for i in indexes if memory_matches(rows[i], memory_mib)]
        if close:
            return rows[close[0]]
    for indexes in found:
        if len(indexes) == 1 or (indexes and memory_mib <= 0):
            return rows[indexes[0]]
    return None


def memory_matches(row: dict[str, Any], memory_mib: int) -> bool:
    """Whether a card's reported memory is that of the catalogue row."""
    expected = row["memory_gb"] * MIB_PER_GB
    return bool(abs(memory_mib - expected) <= expected * MEMORY_TOLERANCE)

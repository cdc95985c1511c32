"""MIG geometry: which instances a card can carry, found by searching real placements and never by summing.

An instance takes ``size`` consecutive memory slots beginning at one of its profile's ``starts``; two
instances of a card must not overlap; per profile at most ``max_instances``; at most one instance with a
media engine (``+me``).
Existing instances cannot be moved. Data: ``data/mig_profiles.json`` (vendor's tables of profiles and
placements).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from portal.kernel.units import MILLI_PER_GPU
from quotas.engine.charge import mig_charge

DATA = Path(__file__).with_name("data") / "mig_profiles.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """One row of a card's table; ``memory_mib`` None where no card was read."""

    name: str
    compute_slices: int
    size: int
    starts: tuple[int, ...]
    max_instances: int
    memory_mib: int | None = None

    @property
    def media(self) -> bool:
        """Whether it claims the card's single media-extension set."""
        return self.name.endswith(("+me", "+me.all"))


@dataclass(frozen=True, slots=True)
class Placed:
    """An instance on a card: memory slots [start, start + size)."""

    profile: str
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Geometry:
    """The table of one card model."""

    key: str
    product_names: tuple[str, ...]
    memory_slices: int
    compute_slices: int
    profiles: tuple[Profile, ...]

    def profile(self, name: str) -> Profile | None:
        """The named profile, or None when this card has no such one."""
        return next((profile for profile in self.profiles if profile.name == name), None)

    def charge(self, name: str) -> int:
        """Milli-GPU of one instance of the profile. KeyError for an unknown profile."""
        profile = self.profile(name)
        if profile is None:
            raise KeyError(name)
        return mig_charge(profile.compute_slices, self.compute_slices)

    def span(self, start: int, size: int) -> tuple[int, int]:
        """Memory slots scaled to the card's [0, 1000): what two instances share is shared there too."""
        scale = self.memory_slices
        return MILLI_PER_GPU * start // scale, MILLI_PER_GPU * (start + size) // scale

    def free_starts(self, existing: Sequence[Placed], name: str) -> list[int]:
        """Starts at which one more instance of the profile fits beside the existing ones, ascending."""
        profile = self.profile(name)
        if profile is None or sum(one.profile == name for one in existing) >= profile.max_instances:
            return []
        if profile.media and any(_is_media(one.profile) for one in existing):
            return []
        return [
            start
            for start in profile.starts
            if all(start >= one.end or start + profile.size <= one.start for one in existing)
        ]

    def layout(self, names: Sequence[str], existing: Sequence[Placed] = ()) -> tuple[Placed, ...] | None:
        """Placements for further instances beside the existing ones, or None where no set of starts works.

        Deterministic: larger profiles first, lower starts first; the answer is sorted by start.
        """
        sizes = {profile.name: profile.size for profile in self.profiles}
        if any(name not in sizes for name in names):
            return None
        order = sorted(names, key=lambda name: (-sizes[name], name))
        found = self._search(order, list(existing))
        return None if found is None else tuple(sorted(found, key=lambda one: one.start))

    def _search(self, names: Sequence[str], taken: list[Placed]) -> list[Placed] | None:
        if not names:
            return []
        profile = self.profile(names[0])
        assert profile is not None
        for start in self.free_starts(taken, names[0]):
            here = Placed(names[0], start, profile.size)
            rest = self._search(names[1:], [*taken, here])
            if rest is not None:
                return [here, *rest]
        return None

    def layouts(self) -> Iterator[tuple[str, ...]]:
        """Every set of profiles that one empty card can carry and that takes no further instance, sorted
        names.
        """
        seen: set[tuple[str, ...]] = set()
        stack: list[list[Placed]] = [[]]
        visited: set[tuple[Placed, ...]] = set()
        while stack:
            taken = stack.pop()
            grown = False
            for profile in self.profiles:
                for start in self.free_starts(taken, profile.name):
                    grown = True
                    more = sorted(
                        [*taken, Placed(profile.name, start, profile.size)], key=lambda one: one.start
                    )
                    if tuple(more) not in visited:
                        visited.add(tuple(more))
                        stack.append(more)
            if taken and not grown:
                seen.add(tuple(sorted(one.profile for one in taken)))
        yield from sorted(seen)


def _is_media(name: str) -> bool:
    return name.endswith(("+me", "+me.all"))


@cache
def geometries() -> tuple[Geometry, ...]:
    """All tables, in the order of the data file."""
    document = json.loads(DATA.read_text(encoding="utf-8"))
    return tuple(
        Geometry(
            key=row["key"],
            product_names=tuple(row["product_names"]),
            memory_slices=row["memory_slices"],
            compute_slices=row["compute_slices"],
            profiles=tuple(
                Profile(
                    name=profile["name"],
                    compute_slices=profile["compute_slices"],
                    size=profile["size"],
                    starts=tuple(profile["starts"]),
                    max_instances=profile["max_instances"],
                    memory_mib=None if profile["memory_gib"] is None else int(profile["memory_gib"] * 1024),
                )
                for profile in row["profiles"]
            ),
        )
        for row in document["tables"]
    )


def geometry(key: str) -> Geometry | None:
    """The table with this key, or None."""
    return next((one for one in geometries() if one.key == key), None)


def geometry_for_product(name: str) -> Geometry | None:
    """The table for a name as the driver prints it (``NVIDIA A100-SXM4-40GB``); the longest match wins."""
    plain = name.removeprefix("NVIDIA ").strip().lower()
    best: tuple[int, Geometry] | None = None
    for one in geometries():
        for product in one.product_names:
            known = product.removeprefix("NVIDIA ").lower()
            if (plain == known or plain.startswith(known + " ")) and (best is None or len(known) > best[0]):
                best = (len(known), one)
    return best[1] if best else None


def is_valid(existing: Iterable[Placed], table: Geometry) -> bool:
    """Whether instances as reported can stand on one card of this model."""
    taken: list[Placed] = []
    for one in existing:
        if one.start not in table.free_starts(taken, one.profile):
            return False
        taken.append(one)
    return True

"""Where a request may run, as asked: site, network, storage, racks and switches, driver, data sets.

What the pool has told of each flavour's nodes is held against it here, so that a wish that no node can meet
is told at once, with what there is. Where the pool has told nothing, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.utils.translation import gettext as _

from portal.accounts.policy import Policy
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.pool_names import (
    datasets_named,
    fabrics_of,
    facts_of,
    levels_of,
    site_problem,
    storage_of,
)
from quotas.services.asking_run import version
from quotas.services.reader import Reader

FASTEST_GBIT_S = 100_000
Test = Callable[[Mapping[str, Any]], bool]


def read_place(r: Reader, flavours: list[GpuFlavour], policy: Policy) -> list[GpuFlavour]:
    """Reads the fields; gives back the flavours that have nodes which meet all of it."""
    site = r.text("site_code", 48)
    fabric = r.choice("fabric", ["", *CapacityRequest.Fabric.values], "")
    speed = r.whole("fabric_gbit_s", 0, 0, FASTEST_GBIT_S) or 0
    storage = r.text("storage", 24).lower()
    r.out["storage"] = storage
    required = r.choice("domain_required", ["", *CapacityRequest.Level.values], "")
    r.choice("domain_preferred", ["", *CapacityRequest.Level.values], "")
    r.flag("stage_datasets", True)
    _datasets(r, policy)
    if speed and not fabric:
        r.wrong("fabric", _("Say which network has to be so fast."))
    if problem := site_problem(site):
        r.wrong("site_code", problem)
        return flavours
    tests: list[tuple[str, bool, Test, Callable[[list[GpuFlavour]], str]]] = [
        ("site_code", bool(site), lambda f: site in (f.get("sites") or {}), lambda fs: _no_site(fs, site)),
        (
            "fabric",
            bool(fabric),
            lambda f: (f.get("fabrics") or {}).get(fabric, -1) >= speed,
            lambda fs: _no_fabric(fs, fabric, speed),
        ),
        ("storage", bool(storage), lambda f: storage in (f.get("storage") or []), _no_storage),
        (
            "domain_required",
            bool(required),
            lambda f: (f.get("levels") or {}).get(required, 0) >= _nodes_at_least(r),
            lambda fs: _no_level(fs, required, _nodes_at_least(r)),
        ),
        ("requirement", bool(_driver(r)), lambda f: _newer(f, _driver(r)), lambda fs: _no_driver(fs, r)),
    ]
    for pointer, asked, test, words in tests:
        if asked and flavours:
            able = [one for one in flavours if not facts_of(one) or test(facts_of(one))]
            if not able:
                r.wrong(pointer, words(flavours))
                return flavours
            flavours = able
    return flavours


def _datasets(r: Reader, policy: Policy) -> None:
    names = r.names("datasets", 20)
    r.out["datasets"] = names
    if not names:
        return
    known = set(datasets_named(policy).filter(code__in=names).values_list("code", flat=True))
    unknown = [name for name in names if name not in known]
    if unknown:
        r.wrong(
            "datasets",
            _("There is no such data set, or you may not use it: {names}.").format(names=", ".join(unknown)),
        )


def _nodes_at_least(r: Reader) -> int:
    return r.out.get("nodes_min") or (1 if r.out.get("is_service") else r.out.get("nodes") or 1)


def _driver(r: Reader) -> str:
    return str((r.out.get("requirement") or {}).get("driver") or "")


def _newer(facts: Mapping[str, Any], driver: str) -> bool:
    newest = str(facts.get("driver") or "")
    return not newest or version(newest) >= version(driver)


def _name(flavours: list[GpuFlavour]) -> str:
    return flavours[0].name if len(flavours) == 1 else _("these flavours")


def _no_site(flavours: list[GpuFlavour], site: str) -> str:
    sites = sorted({code for one in flavours for code in facts_of(one).get("sites") or {}})
    return _("No node of {name} stands at {site}; they stand at {sites}.").format(
        name=_name(flavours), site=site, sites=", ".join(sites) or "–"
    )


def _no_fabric(flavours: list[GpuFlavour], fabric: str, speed: int) -> str:
    have = fabrics_of(flavours)
    words = dict(CapacityRequest.Fabric.choices)
    listed = ", ".join(f"{words.get(kind, kind)} {gbit} Gbit/s" for kind, gbit in sorted(have.items()))
    asked = f"{words.get(fabric, fabric)} {speed} Gbit/s" if speed else str(words.get(fabric, fabric))
    return _("No node of {name} has {asked}. There is: {have}.").format(
        name=_name(flavours), asked=asked, have=listed or "–"
    )


def _no_storage(flavours: list[GpuFlavour]) -> str:
    return _("No node of {name} has it. There is: {have}.").format(
        name=_name(flavours), have=", ".join(storage_of(flavours)) or "–"
    )


def _no_level(flavours: list[GpuFlavour], level: str, nodes: int) -> str:
    most = levels_of(flavours).get(level, 0)
    texts = {
        "row": _("{nodes} nodes are asked in one row; the most of {name} in one is {most}."),
        "rack": _("{nodes} nodes are asked in one rack; the most of {name} in one is {most}."),
        "switch": _("{nodes} nodes are asked on one switch; the most of {name} on one is {most}."),
    }
    return texts[level].format(nodes=nodes, name=_name(flavours), most=most)


def _no_driver(flavours: list[GpuFlavour], r: Reader) -> str:
    newest = max((str(facts_of(one).get("driver") or "") for one in flavours), key=version)
    return _("The newest driver on nodes of {name} is {newest}; {asked} is asked.").format(
        name=_name(flavours), newest=newest, asked=_driver(r)
    )

"""From what somebody typed or sent to the values of a request: every field checked, every problem told beside
its field.

Values may come as JSON types or as text; amounts are whole numbers in either form, never fractions, never
words.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils.translation import gettext as _

from portal.accounts.models import Department, User
from portal.accounts.policy import Policy
from portal.kernel.errors import Invalid
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.ask_rules import priority_most
from quotas.selectors.catalogue import mig_table
from quotas.selectors.flavours import find_flavour, flavours_on_offer, is_empty_requirement, unmet
from quotas.services.asking_place import read_place
from quotas.services.asking_run import read_run
from quotas.services.asking_series import read_after, read_replicas, read_series
from quotas.services.asking_time import read_time
from quotas.services.reader import Reader

S = CapacityRequest.Shape


def read_request(
    values: Mapping[str, Any], *, user: User, policy: Policy, draft: bool = False
) -> dict[str, Any]:
    """Cleaned values of a request, by model field; ``flavours``: those that may serve it, in display order;
    ``after``: the requests that it waits for, each with how they have to end.

    Raises Invalid with all problems at once. ``draft`` lets what is still empty pass, never what is wrong.
    """
    r = Reader(values)
    _department(r, user, policy)
    _shape(r, draft)
    flavours = _flavours(r, draft)
    for name, most in (("gpus_per_node", 64), ("nodes", 4096)):
        if (r.out[name] or 0) > most:  # after the pool's own maximum, which says more
            r.wrong(name, _("The maximum is {n}.").format(n=most))
    read_time(r, user, draft)
    read_series(r, user, draft)
    usual = "inference" if r.out["is_service"] else "training"  # what serves is spread over nodes
    r.choice("work_class", CapacityRequest.WorkClass.values, usual)
    _priority(r, policy)
    r.flag("interruptible", True)
    r.whole("cpu_milli", 0, 0, 1_000_000)
    r.whole("memory_mib", 0, 0, 100_000_000)
    flavours = read_place(r, flavours, policy)
    r.text("cost_code", 48)
    r.text(
        "purpose", 2000, needed=None if draft else _("Say in a sentence what it is for: approvers read this.")
    )
    read_run(r, draft)
    after = read_after(r, policy)
    if r.problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=r.problems)
    return {**r.out, "flavours": flavours, "after": after}


def _department(r: Reader, user: User, policy: Policy) -> None:
    key = r.raw("department")
    if isinstance(key, Department):
        found: Department | None = key
    elif not key:
        found = policy.tree.rows.get(user.home_department_id or 0)
        if found is None:
            r.wrong("department", _("Choose the department that you ask for."))
            return
    else:
        try:
            query = Q(uid=uuid.UUID(str(key)))
        except ValueError:
            query = Q(code=str(key))
        found = Department.objects.without_tree_fields().filter(query).first()
    if found is None or found.pk not in policy.asks_for:
        r.wrong("department", _("There is no such department, or you may not ask on its behalf."))
    elif not found.is_open:
        r.wrong("department", _("{name} is closed.").format(name=found.name))
    else:
        r.out["department"] = found


def _priority(r: Reader, policy: Policy) -> None:
    """0 to 100, as far as the department lets its people choose."""
    department = r.out.get("department")
    most = priority_most(policy.tree, department.pk) if department is not None else 100
    asked = r.whole("priority", min(50, most), 0, 100)
    if asked is not None and most < asked <= 100 and department is not None:
        r.wrong("priority", _("{name} allows at most {n}.").format(name=department.name, n=most))


def _shape(r: Reader, draft: bool) -> None:
    """What it takes of cards and nodes, replicas included."""
    shape = r.choice("shape", S.values, "whole")
    service = r.flag("is_service", False)
    read_replicas(r, draft)
    r.whole("gpus_per_node", 1, 1)
    nodes = r.whole("nodes", 1, 1) or 1
    least = r.whole("nodes_min", None, 1)
    if service:
        r.out["nodes"] = r.out["replicas_max"]  # what all replicas take together, each on a node of its own
    if least is not None and least > nodes:
        r.wrong("nodes_min", _("At most the number of nodes asked, {n}.").format(n=nodes))
    if (
        least == nodes
        or service
        or shape in (S.MIG, S.CPU)
        or any(p["pointer"] == "nodes_min" for p in r.problems)
    ):
        r.out["nodes_min"] = None
    r.out |= {"fraction_milli": None, "fraction_mib": None, "mig_profile": "", "mig_count": 0}
    if shape == S.FRACTION:
        milli = r.whole("fraction_milli", None, 1, 1000)
        mib = r.whole("fraction_mib", None, 1)
        if milli is None and mib is None:
            r.wrong("fraction_milli", _("Say how much of a GPU: a share of compute, MiB of memory, or both."))
    elif shape == S.MIG:
        r.text("mig_profile", 24, needed=_("Choose a MIG profile."))
        r.whole("mig_count", 1, 1, 512)
    elif shape == S.CPU and not settings.GPUPOOL_DEMO:
        r.wrong("shape", _("Leases without a GPU are offered in the demonstration only."))


def _flavours(r: Reader, draft: bool) -> list[GpuFlavour]:
    """The named flavour, or all that meet the requirement; checks that the shape exists on them."""
    r.out |= {"flavour": None, "requirement": {}}
    if r.out.get("shape") == S.CPU:
        return []
    key = r.raw("flavour")
    if key:
        found = key if isinstance(key, GpuFlavour) else find_flavour(str(key))
        if found is None:
            r.wrong("flavour", _("There is no such flavour on offer."))
            return []
        r.out["flavour"] = found
        driver = _requirement(r).get("driver")  # all else is the flavour's own
        r.out["requirement"] = {"driver": driver} if driver else {}
        flavours, pointer = [found], "flavour"
    else:
        requirement = _requirement(r)
        if is_empty_requirement(requirement):
            if not draft:
                r.wrong("flavour", _("Choose a flavour, or say what the work needs."))
            return []
        flavours = [f for f in flavours_on_offer() if not unmet(f, requirement)]
        pointer = "requirement"
        if not flavours:
            r.wrong(
                pointer, _("No flavour on offer meets all of this. Ask for less memory or fewer features.")
            )
            return []
        if "memory_mib" in requirement:  # cards report a little less than their name says
            requirement["memory_mib"] = min([requirement["memory_mib"], *(f.memory_mib for f in flavours)])
        r.out["requirement"] = requirement
    return _that_exist(r, flavours, pointer)


def _that_exist(r: Reader, flavours: list[GpuFlavour], pointer: str) -> list[GpuFlavour]:
    """Those flavours of which the pool has enough, else the refusal with the pool's maximum."""
    shape, per_node, nodes = r.out["shape"], r.out["gpus_per_node"] or 1, r.out["nodes"] or 1
    if shape == S.MIG:
        able = [
            f
            for f in flavours
            if f.mig_capable and (t := mig_table(f.mig_table)) and t.get(r.out["mig_profile"])
        ]
        if not able and r.out["mig_profile"]:
            r.wrong(
                "mig_profile",
                _("{name} has no MIG profile {profile}.").format(
                    name=flavours[0].name, profile=r.out["mig_profile"]
                ),
            )
        return able
    if shape == S.FRACTION:
        mib = r.out["fraction_mib"] or 0
        able = [f for f in flavours if mib <= f.memory_mib]
        if not able:
            r.wrong("fraction_mib", _("A card has {n} MiB.").format(n=max(f.memory_mib for f in flavours)))
        return able
    installed = {f.pk: getattr(f, "capacity", None) for f in flavours}
    largest = {pk: c.largest_node_gpus if c is not None else 0 for pk, c in installed.items()}
    total = {pk: c.installed_milli // 1000 if c is not None else 0 for pk, c in installed.items()}
    enough = [f for f in flavours if per_node * nodes <= total[f.pk]]
    if not enough:
        r.wrong(
            "gpus_per_node" if nodes == 1 else "nodes",
            _("The pool maximum is {n}: so many {name} are installed.").format(
                n=max(total.values()), name=max(flavours, key=lambda f: total[f.pk]).name
            ),
        )
        return []
    able = [f for f in enough if not largest[f.pk] or per_node <= largest[f.pk]]
    if not able:
        most = max(largest[f.pk] for f in enough)
        r.wrong(
            "gpus_per_node", _("A node of this flavour has {n}. Ask for more nodes instead.").format(n=most)
        )
    return able


def _requirement(r: Reader) -> dict[str, Any]:
    sent = r.values.get("requirement") or {}
    if not isinstance(sent, Mapping):
        r.wrong("requirement", _("An object is needed here: memory_mib, models, nvlink, mig, fp8, driver."))
        return {}
    unknown = sorted(set(sent) - {"memory_mib", "models", "nvlink", "mig", "fp8", "driver"})
    if unknown:
        r.wrong("requirement", _("Unknown: {names}.").format(names=", ".join(unknown)))
    inner = Reader(sent)
    out = {"memory_mib": inner.whole("memory_mib", 0, 0, 10_000_000) or 0, "models": inner.names("models")}
    out |= {name: inner.flag(name, False) for name in ("nvlink", "mig", "fp8")}
    driver = inner.text("driver", 32)
    if driver:
        out["driver"] = driver
    for problem in inner.problems:
        r.wrong("requirement", problem["detail"])
    return {key: value for key, value in out.items() if value}

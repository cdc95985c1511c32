"""From what somebody typed or sent to the values of a request: every field checked, every problem told beside
its field.

Values may come as JSON types or as text; amounts are whole numbers in either form, never fractions, never
words.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from portal.accounts.models import Department, User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import FieldProblem, Invalid
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.catalogue import mig_table
from quotas.selectors.flavours import find_flavour, flavours_on_offer, is_empty_requirement, unmet
from quotas.selectors.user_limits import limits_of

S = CapacityRequest.Shape
BIGGEST = 2_000_000_000
LONGEST_S = 366 * 86400
SHORTEST_S = 60
CUDA = re.compile(r"^\d{1,2}\.\d{1,2}$")
NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")
RESERVED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_LIBRARY_PATH")


class Reader:
    """Reads single fields and collects their problems."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[FieldProblem] = []
        self.out: dict[str, Any] = {}

    def wrong(self, name: str, detail: object) -> None:
        """Note a problem of a field; the first one of a field stays."""
        if all(problem["pointer"] != name for problem in self.problems):
            self.problems.append({"pointer": name, "detail": detail})

    def raw(self, name: str) -> Any:
        """What was sent; text without blanks around it, "" for nothing."""
        value = self.values.get(name)
        return value.strip() if isinstance(value, str) else ("" if value is None else value)

    def whole(self, name: str, default: int | None, low: int, high: int = BIGGEST) -> int | None:
        """A whole number within [low, high]; nothing sent gives the default."""
        value = self.raw(name)
        if value == "":
            self.out[name] = default
            return default
        number: int | None = None
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        if number is None:
            self.wrong(name, _("A whole number is needed here, for example {n}.").format(n=max(low, 1)))
            self.out[name] = default
            return default
        if number < low:
            self.wrong(name, _("The minimum is {n}.").format(n=low))
        elif number > high:
            self.wrong(name, _("The maximum is {n}.").format(n=high))
        self.out[name] = min(max(number, low), high)
        return number

    def text(self, name: str, longest: int, *, needed: object = None) -> str:
        """Text of limited length; ``needed`` is the error where it is empty."""
        value = self.raw(name)
        if not isinstance(value, str):
            self.wrong(name, _("Text is needed here."))
            value = ""
        if "\x00" in value:
            self.wrong(name, _("This text has a sign in it that cannot be stored."))
            value = value.replace("\x00", "")
        if len(value) > longest:
            self.wrong(name, _("At most {n} signs.").format(n=longest))
            value = value[:longest]
        if not value and needed:
            self.wrong(name, needed)
        self.out[name] = value
        return str(value)

    def choice(self, name: str, choices: list[str], default: str) -> str:
        """One of a few values."""
        value = self.raw(name) or default
        if value not in choices:
            self.wrong(name, _("Choose one of: {choices}.").format(choices=", ".join(choices)))
            value = default
        self.out[name] = value
        return str(value)

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no, as JSON or as a form sends it."""
        value = self.raw(name)
        if value == "":
            self.out[name] = default
        elif isinstance(value, bool):
            self.out[name] = value
        elif str(value).lower() in ("1", "true", "yes", "on"):
            self.out[name] = True
        elif str(value).lower() in ("0", "false", "no", "off"):
            self.out[name] = False
        else:
            self.wrong(name, _("Yes or no is needed here."))
            self.out[name] = default
        return bool(self.out[name])

    def moment(self, name: str) -> datetime | None:
        """An aware time (ISO 8601 with its zone), or None."""
        value = self.raw(name)
        if isinstance(value, str) and value:
            try:
                value = parse_datetime(value)
            except ValueError:
                value = None
            if value is None:
                self.wrong(
                    name,
                    _("A date and time with its zone is needed here, for example 2026-06-17T09:00+08:00."),
                )
        if isinstance(value, datetime) and value.tzinfo is None:
            self.wrong(name, _("The time needs its zone, for example +08:00."))
            value = None
        found = value if isinstance(value, datetime) else None
        self.out[name] = found
        return found


def read_request(
    values: Mapping[str, Any], *, user: User, policy: Policy, draft: bool = False
) -> dict[str, Any]:
    """Cleaned values of a request, by model field, and ``flavours``: those that may serve it, in display
    order.

    Raises Invalid with all problems at once. ``draft`` lets what is still empty pass, never what is wrong.
    """
    r = Reader(values)
    _department(r, user, policy)
    _shape(r)
    flavours = _flavours(r, draft)
    for name, most in (("gpus_per_node", 64), ("nodes", 4096)):
        if (r.out[name] or 0) > most:  # after the pool's own maximum, which says more
            r.wrong(name, _("The maximum is {n}.").format(n=most))
    _when(r, user, draft)
    r.choice("work_class", CapacityRequest.WorkClass.values, "training")
    r.whole("priority", 50, 0, 100)
    r.flag("interruptible", True)
    r.whole("cpu_milli", 0, 0, 1_000_000)
    r.whole("memory_mib", 0, 0, 100_000_000)
    r.text("site_code", 48)
    r.text("cost_code", 48)
    r.text(
        "purpose", 2000, needed=None if draft else _("Say in a sentence what it is for: approvers read this.")
    )
    r.out["datasets"] = _names(r, "datasets")
    _what_runs(r, draft)
    if r.problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=r.problems)
    return {**r.out, "flavours": flavours}


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


def _shape(r: Reader) -> None:
    shape = r.choice("shape", S.values, "whole")
    service = r.flag("is_service", False)
    r.whole("replicas_min", 1, 1, 256)
    highest = r.whole("replicas_max", 1, 1, 256) or 1
    if (r.out["replicas_min"] or 1) > highest:
        r.wrong("replicas_max", _("At least as many as the smallest number of replicas."))
    r.whole("gpus_per_node", 1, 1)
    r.whole("nodes", 1, 1)
    if service:
        r.out["nodes"] = highest  # replicas stand on nodes of their own
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
    out = {"memory_mib": inner.whole("memory_mib", 0, 0, 10_000_000) or 0, "models": _names(inner, "models")}
    out |= {name: inner.flag(name, False) for name in ("nvlink", "mig", "fp8")}
    driver = inner.text("driver", 32)
    if driver:
        out["driver"] = driver
    for problem in inner.problems:
        r.wrong("requirement", problem["detail"])
    return {key: value for key, value in out.items() if value}


def _when(r: Reader, user: User, draft: bool) -> None:
    moment = now()
    start = r.moment("start_at")
    if start is not None and start < moment - timedelta(minutes=5) and not draft:
        r.wrong("start_at", _("This start lies in the past."))
    elif start is not None and start > moment + timedelta(days=366):
        r.wrong("start_at", _("At most a year ahead."))
    review = r.moment("review_at")
    if r.out["is_service"]:
        r.out["duration_s"] = None
        if review is None and not draft:
            r.wrong(
                "review_at", _("A service has no end but a review date: you renew it by then or it stops.")
            )
        elif review is not None and not moment < review <= moment + timedelta(days=366):
            r.wrong("review_at", _("A date within the next year is needed."))
        return
    r.out["review_at"] = None
    length = r.whole("duration_s", None, SHORTEST_S, LONGEST_S)
    if length is None and not draft:
        r.wrong("duration_s", _("How long is it needed? Only a service has no end."))
    longest = limits_of(user.pk)["longest_lease_s"]
    if length is not None and longest is not None and length > longest:
        r.wrong("duration_s", _("Longest lease here: {n} h.").format(n=f"{longest / 3600:g}"))


def _what_runs(r: Reader, draft: bool) -> None:
    kind = r.choice("run_kind", CapacityRequest.RunKind.values, "command")
    needs = {
        "command": _("Say what to run, or choose a hold."),
        "image": _("Name the container image."),
    }
    r.text("command", 20_000, needed=needs["command"] if kind == "command" and not draft else None)
    image = r.text("image", 300, needed=needs["image"] if kind == "image" and not draft else None)
    if image and re.search(r"\s", image):
        r.wrong("image", _("An image name has no blanks."))
    cuda = r.text("cuda_min", 16)
    if cuda and not CUDA.fullmatch(cuda):
        r.wrong("cuda_min", _("A CUDA version is needed here, for example 12.4."))
    _cuda_exists(r, cuda)
    environment = r.values.get("environment") or {}
    if not isinstance(environment, Mapping) or len(environment) > 100:
        r.wrong("environment", _("Names and values, at most 100."))
        environment = {}
    for name, value in environment.items():
        if not NAME.fullmatch(str(name)) or str(name) in RESERVED or not isinstance(value, str | int | float):
            r.wrong("environment", _("{name} cannot be set.").format(name=str(name)[:60]))
    r.out["environment"] = {str(k): str(v)[:4000] for k, v in environment.items()}
    _checkpoint(r)


def _cuda_exists(r: Reader, cuda: str) -> None:
    """Refuse a CUDA version that no node of the chosen flavour can run (where the pool has told what they
    can).
    """
    flavour: GpuFlavour | None = r.out.get("flavour")
    capacity = getattr(flavour, "capacity", None)
    if flavour is None or (
        not cuda
        or capacity is None
        or not capacity.cuda_max
        or any(p["pointer"] == "cuda_min" for p in r.problems)
    ):
        return
    if _version(cuda) > _version(capacity.cuda_max):
        r.wrong(
            "cuda_min",
            _("The drivers on nodes of {name} run CUDA up to {most}; {cuda} is asked.").format(
                name=flavour.name, most=capacity.cuda_max, cuda=cuda
            ),
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _checkpoint(r: Reader) -> None:
    sent = r.values.get("checkpoint") or {}
    if not isinstance(sent, Mapping) or set(sent) - {"signal", "command", "url", "seconds"}:
        r.wrong("checkpoint", _("A signal, command or URL, and the seconds it needs."))
        r.out["checkpoint"] = {}
        return
    inner = Reader(sent)
    out: dict[str, Any] = {name: inner.text(name, 2000) for name in ("command", "url")}
    signal = inner.text("signal", 16).upper()
    if signal and not re.fullmatch(r"SIG[A-Z0-9]{2,10}", signal):
        inner.wrong("signal", _("A signal name is needed here, for example SIGUSR1."))
    out |= {"signal": signal, "seconds": inner.whole("seconds", 120, 1, 3600)}
    for problem in inner.problems:
        r.wrong("checkpoint", problem["detail"])
    hooked = any(out[name] for name in ("signal", "command", "url"))
    r.out["checkpoint"] = {key: value for key, value in out.items() if value} if hooked else {}


def _names(r: Reader, name: str) -> list[str]:
    """A list of short names, sent as a list or as lines or commas."""
    value = r.values.get(name) or []
    parts = re.split(r"[,\n]", value) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        r.wrong(name, _("A list of names is needed here."))
        return []
    return [part.strip()[:200] for part in parts if part.strip()][:100]

"""What-ifs: ask, play, share, forget. The playing goes on in a process of its own, told by a worker.

A question is answered twice by the same engine: side A under what was in force when its period began, side B with the
changes. Beside both stands what was recorded. A worker that dies leaves its question to the next one.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import current_app
from django.db import transaction
from django.db.models import F
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from monitoring.models import Scenario
from monitoring.services.what_if_asking import clean, packed
from monitoring.services.what_if_run import PlayFailed
from monitoring.services.what_if_sides import Answerer
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, NotFound
from portal.notify.services import notify
from portal.ops.actor import Actor
from portal.ops.outbox import load_celery
from portal.ops.services import audit_record

DEAD = timedelta(minutes=2)
"""Without a sign of life for so long, a question's worker is taken for dead. It gives one every few seconds."""

OPEN = (Scenario.State.QUEUED, Scenario.State.RUNNING)
TRIES = 3
"""So often a question is taken up whose workers died."""

AT_ONCE = 3
"""Open questions of one person."""


def may_ask(policy: Policy) -> bool:
    """Those who keep the books and those who administer the pool: it costs the machine minutes."""
    return policy.keeps_books or policy.administers_pool


def scenario_ask(
    *,
    acting_user: Actor,
    name: str,
    params: Mapping[str, Any],
    jobs: bytes | None = None,
    quotas: bytes | None = None,
) -> Scenario:
    """Ask what would have been. ``params`` as `what_if_asking.clean` describes; with source trace two CSV files.

    Invalid for a question that makes no sense, Conflict (`too_many_open`) beyond AT_ONCE open ones. Writes no more
    than the question: the pool is not touched.
    """
    policy = policy_of(acting_user.user)
    policy.require(may_ask(policy))
    if not name.strip():
        raise Invalid.field("name", _("Give it a name."))
    cleaned, trace = clean(params, policy, jobs=jobs, quotas=quotas)
    with transaction.atomic():
        if Scenario.objects.filter(owner=policy.user, state__in=OPEN, removed_at=None).count() >= AT_ONCE:
            raise Conflict(
                code="too_many_open", detail=_("Three of your questions are not answered yet. Wait for one.")
            )
        scenario = Scenario.objects.create(
            name=name.strip()[:120],
            owner=policy.user,
            params=cleaned,
            jobs=packed(jobs) if trace else None,
            quotas=packed(quotas) if trace else None,
        )
        audit_record(
            acting_user=acting_user,
            action="what_if.asked",
            subject=scenario,
            after={"name": scenario.name, **cleaned},
        )
        transaction.on_commit(lambda: _send(scenario.pk), robust=True)
        return scenario


def _send(scenario_id: int) -> None:
    """Ask a worker. Losing it costs half a minute: the sweep asks again."""
    load_celery()
    current_app.send_task("monitoring.play_scenario", args=[scenario_id], retry=False)


def scenario_share(*, acting_user: Actor, scenario: Scenario, shared: bool) -> Scenario:
    """Show it to all who read everything of the books, or to its owner alone. Only the owner may."""
    _own(acting_user, scenario)
    with transaction.atomic():
        changed = Scenario.objects.filter(pk=scenario.pk, shared=not shared).update(
            shared=shared, updated_at=now(), version=F("version") + 1
        )
        if changed:
            audit_record(
                acting_user=acting_user,
                action="what_if.shared",
                subject=scenario,
                before={"shared": not shared},
                after={"shared": shared},
            )
        scenario.refresh_from_db()
    return scenario


def scenario_forget(*, acting_user: Actor, scenario: Scenario) -> None:
    """Take it away; one that is being played ends. Only its owner may. A second time changes nothing."""
    _own(acting_user, scenario)
    with transaction.atomic():
        changed = Scenario.objects.filter(pk=scenario.pk, removed_at=None).update(
            removed_at=now(), jobs=None, quotas=None, updated_at=now()
        )
        if changed:
            audit_record(
                acting_user=acting_user,
                action="what_if.forgotten",
                subject=scenario,
                before={"name": scenario.name},
            )


def _own(acting_user: Actor, scenario: Scenario) -> None:
    if scenario.owner_id != getattr(acting_user.user, "pk", None):
        raise NotFound(code="not_found", detail=_("There is no such what-if."))


def scenario_play(*, scenario_id: int) -> bool:
    """Answer a waiting question; False when another worker has it or it is answered. Its owner is told."""
    taken = Scenario.objects.filter(pk=scenario_id, state=Scenario.State.QUEUED, removed_at=None).update(
        state=Scenario.State.RUNNING, beat_at=now(), done=0, updated_at=now()
    )
    if not taken:
        return False
    scenario = Scenario.objects.select_related("owner").get(pk=scenario_id)
    began, tries = now(), int(scenario.result.get("tries", 0)) + 1
    if tries > TRIES:
        _open(scenario_id).update(
            state=Scenario.State.FAILED, error_code="play_failed", result={}, updated_at=now()
        )
        return False
    _open(scenario_id).update(result={"tries": tries})
    try:
        result = Answerer(
            scenario.params,
            jobs=gzip.decompress(scenario.jobs) if scenario.jobs is not None else None,
            quotas=gzip.decompress(scenario.quotas) if scenario.quotas is not None else None,
            told=lambda done, total: _beat(scenario_id, done, total),
        ).answer()
    except (PlayFailed, Invalid) as error:
        _open(scenario_id).update(
            state=Scenario.State.FAILED, error_code=error.code, result={}, updated_at=now()
        )
        return False
    with transaction.atomic():
        written = _open(scenario_id).update(
            state=Scenario.State.READY,
            result=result,
            done=F("total"),
            seconds=round((now() - began).total_seconds(), 1),
            ready_at=now(),
            updated_at=now(),
        )
        if written:
            notify(
                user_ids=[scenario.owner_id],
                kind="report_ready",
                subject=scenario,
                params={"name": scenario.name, "ref": scenario.ref},
                url=reverse("monitoring:what-if", args=[scenario.uid]),
            )
    return bool(written)


def _open(scenario_id: int) -> Any:
    return Scenario.objects.filter(pk=scenario_id, state=Scenario.State.RUNNING, removed_at=None)


def _beat(scenario_id: int, done: int, total: int) -> bool:
    """Note the progress; False when nobody wants the answer any more."""
    return bool(_open(scenario_id).update(done=done, total=total, beat_at=now()))


def scenarios_sweep() -> int:
    """Take up what dead workers left; safe at any time. Returns how many were asked for again."""
    left = Scenario.objects.filter(state=Scenario.State.RUNNING, beat_at__lt=now() - DEAD, removed_at=None)
    left.update(state=Scenario.State.QUEUED, updated_at=now())
    waiting = Scenario.objects.filter(
        state=Scenario.State.QUEUED, removed_at=None, created_at__lt=now() - timedelta(seconds=30)
    )
    ids = list(waiting.values_list("pk", flat=True))
    for pk in ids:
        _send(pk)
    return len(ids)

"""Things of other people in the upper rooms, for the walk of `tests/portal/test_foreign.py`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from monitoring.models import AlertRule, Finding, MetricSource, Scenario
from pool.models import Allocation, Cluster, ReclaimCase
from portal.kernel.clock import now
from quotas.models import ApprovalStep, CapacityRequest, Delegation, QuotaChange
from tests.pool import builders as pool
from tests.portal import walk
from tests.quotas import build


def _request() -> CapacityRequest:
    home = build.department()
    return pool.queued(home, build.flavour(), who=build.user(home=home))


def _allocation() -> Allocation:
    request = _request()
    return Allocation.objects.create(
        request=request,
        holder=request.requester,
        department=request.department,
        flavour=request.flavour,
        charge_milli=1000,
        state=Allocation.State.RUNNING,
    )


def _case() -> ReclaimCase:
    return ReclaimCase.objects.create(allocation=_allocation(), cause=ReclaimCase.Cause.IDLE)


def _step() -> ApprovalStep:
    request = _request()
    CapacityRequest.objects.filter(pk=request.pk).update(state="in_approval")
    return ApprovalStep.objects.create(
        request=request,
        requester=request.requester,
        position=1,
        role="lead",
        department=request.department,
        state=ApprovalStep.State.OPEN,
        opened_at=now(),
    )


def _change() -> QuotaChange:
    home = build.department()
    return QuotaChange.objects.create(
        department=home, flavour=build.flavour(), requester=build.user(home=home)
    )


def _delegation() -> Delegation:
    return Delegation.objects.create(
        principal=build.user(), deputy=build.user(), starts_at=now(), ends_at=now() + timedelta(days=3)
    )


def _finding() -> Finding:
    allocation = _allocation()
    return Finding.objects.create(
        kind=Finding.Kind.IDLE,
        subject_key=f"a:{allocation.pk}",
        allocation=allocation,
        holder=allocation.holder,
        department=allocation.department,
        subject_label=allocation.ref,
        since=now(),
    )


def _alert_rule() -> AlertRule:
    return AlertRule.objects.create(name=f"r{AlertRule.objects.count()}", metric="gpu_temp_c", threshold=84)


def _cluster() -> Cluster:
    return pool.node(build.flavour(), gpus=1).cluster


def _source() -> MetricSource:
    cluster = _cluster()
    return MetricSource.objects.create(
        name=f"s{MetricSource.objects.count()}",
        cluster=cluster,
        kind=MetricSource.Kind.EXPORTER,
        url="http://{node}:9400/metrics",
    )


def _scenario() -> Scenario:
    return Scenario.objects.create(name="w", owner=build.user(), params={})


def _by_uid(make: Callable[[], Any], **more: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"uid": make().uid, **more}


def register() -> None:
    """Tell the walk about all of them."""
    plain: dict[Callable[[], Any], tuple[str, ...]] = {
        _request: (
            "quotas:request-detail",
            "quotas:request-edit",
            "pool:request-progress",
            "v1:request-detail",
            "v1:request-clone",
            "v1:request-consent",
            "v1:request-events",
            "v1:request-submit",
            "v1:request-withdraw",
        ),
        _allocation: (
            "pool:allocation",
            "pool:allocation-log",
            "pool:allocation-log-download",
            "monitoring:allocation-live",
            "monitoring:allocation-metrics",
            "monitoring:allocation-history",
            "monitoring:allocation-history-csv",
            "v1:allocation-detail",
            "v1:allocation-consent",
            "v1:allocation-extend",
            "v1:allocation-log",
            "v1:allocation-release",
            "v1:allocation-revoke",
            "v1:allocation-still-needed",
            "v1:allocation-history",
        ),
        _case: ("v1:reclaim-case-detail",),
        _finding: ("monitoring:finding", "v1:finding-detail", "v1:finding-act"),
        _alert_rule: ("monitoring:alert-rule", "v1:alert-rule-detail"),
        _cluster: ("pool:cluster", "pool:cluster-edit", "v1:cluster-detail"),
        _source: ("monitoring:source", "monitoring:source-edit", "v1:metric-source-detail"),
        _scenario: ("monitoring:what-if", "v1:what-if"),
        _step: (
            "quotas:approval-detail",
            "quotas:approval-decide",
            "v1:approval-detail",
            "v1:approval-decide",
        ),
        _change: ("quotas:quota-change", "v1:quota-change-detail", "v1:quota-change-withdraw"),
        _delegation: ("quotas:delegation-end", "v1:delegation-revoke"),
    }
    for make, names in plain.items():
        for name in names:
            walk.something_of_others(name, _by_uid(make))
    for act in ("withdraw", "agree", "decline", "submit"):
        walk.something_of_others("quotas:request-act", _by_uid(_request, act=act))
    for act in ("extend", "release", "revoke", "still-needed", "consent", "no-consent"):
        walk.something_of_others("pool:allocation-act", _by_uid(_allocation, act=act))
    for act in ("tell", "dismiss", "reopen", "incident"):
        walk.something_of_others("monitoring:finding-act", _by_uid(_finding, act=act))
    for act in ("check", "fetch", "on", "off"):
        walk.something_of_others("monitoring:source-act", _by_uid(_source, act=act))
    for act in ("share", "unshare", "forget"):
        walk.something_of_others("monitoring:what-if-act", _by_uid(_scenario, act=act))
    walk.something_of_others("quotas:quota-change-act", _by_uid(_change, act="withdraw"))

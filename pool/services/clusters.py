"""Clusters as administrators set them up: what carries them, how it is reached, a check, a discovery, an import.

Settings never hold secrets: those go to ``credentials``. Calls to an outside system are never inside a transaction, and
its failures are errors with its own codes (503 where trying again may help, 409 where it will not).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.executors.base import CheckResult, ExecutorFailure, Found, RetryableFailure, executor_for
from pool.models import Cluster, Node, Site
from pool.services.nodes import require_pool_admin
from pool.services.outside_nodes import NodePlan, nodes_import, nodes_plan
from portal.kernel.errors import Conflict, DomainError, FieldProblem, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.services import audit_record

CODE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")
SECRET_WORDS = re.compile(r"password|passwd|secret|token|private_?key|kubeconfig|credential", re.IGNORECASE)
MOST_SETTINGS = 100


@contextmanager
def outside() -> Iterator[None]:
    """What an executor raises becomes an error that people and programs are shown."""
    try:
        yield
    except ExecutorFailure as error:
        status = 503 if isinstance(error, RetryableFailure) else 409
        raise DomainError(code=error.code, detail=error.detail or error.code, status=status) from error


def cluster_save(
    *,
    acting_user: Actor,
    values: Mapping[str, Any],
    cluster: Cluster | None = None,
    version: int | None = None,
) -> Cluster:
    """Make a cluster, or change one. ``values``: code and executor (both stay once it has nodes), name, site (code),
    settings (a table). Invalid with every problem; Conflict where somebody else changed it meanwhile."""
    require_pool_admin(acting_user)
    code = str(values.get("code") or (cluster.code if cluster is not None else "")).strip()
    kind = str(values.get("executor") or (cluster.executor if cluster is not None else ""))
    name = str(values.get("name") or "").strip()
    site = Site.objects.filter(code=str(values.get("site") or "")).first()
    settings = values.get("settings") or {}
    problems: list[FieldProblem] = []

    def wrong(pointer: str, detail: Any) -> None:
        problems.append({"pointer": pointer, "detail": detail})

    if not CODE.match(code):
        wrong("code", _("Letters, digits, dot, dash and underscore, at most 48."))
    elif Cluster.objects.filter(code=code).exclude(pk=cluster.pk if cluster is not None else None).exists():
        wrong("code", _("This code is taken."))
    if not name or len(name) > 120:
        wrong("name", _("A name of at most 120 characters is needed."))
    if site is None:
        wrong("site", _("There is no such site."))
    if kind not in Cluster.Executor.values:
        wrong("executor", _("There is no such kind."))
    elif cluster is not None and kind != cluster.executor and Node.objects.filter(cluster=cluster).exists():
        wrong("executor", _("It has nodes: its kind stays."))
    else:
        for pointer, text in _settings_problems(kind, settings):
            wrong(pointer, text)
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    fields = {"code": code, "name": name, "site": site, "executor": kind, "settings": settings}
    with transaction.atomic():
        before: dict[str, Any] = {}
        if cluster is None:
            saved = Cluster.objects.create(**fields)
        else:
            before = {"name": cluster.name, "settings": cluster.settings, "executor": str(cluster.executor)}
            rows = Cluster.objects.filter(pk=cluster.pk)
            if version is not None:
                rows = rows.filter(version=version)
            if not advance(rows, **fields):
                raise Conflict(code="version_changed", detail=_("It was changed by somebody else meanwhile."))
            cluster.refresh_from_db()
            saved = cluster
        audit_record(
            acting_user=acting_user,
            action="cluster.changed" if before else "cluster.created",
            subject=saved,
            before=before,
            after={"name": name, "settings": settings, "executor": kind},
        )
    return saved


def _settings_problems(kind: str, settings: Any) -> list[tuple[str, Any]]:
    """(setting, what is wrong) each."""
    if not isinstance(settings, dict) or len(settings) > MOST_SETTINGS:
        return [("settings", _("A table of names and values is needed."))]
    out: list[tuple[str, Any]] = [
        ("settings", _("{name}: secrets are kept apart, as credentials.").format(name=name))
        for name in _names(settings)
        if SECRET_WORDS.search(name)
    ]
    executor = executor_for(Cluster(executor=kind))
    judge = getattr(executor, "settings_wrong", None)
    if judge is not None:
        out += [("settings", f"{name}: {code}") for name, code in judge(settings=settings).items()]
    return out


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def cluster_check(*, acting_user: Actor, cluster: Cluster) -> CheckResult:
    """Ask the outside system whether all is set up; changes nothing."""
    require_pool_admin(acting_user)
    with outside():
        return executor_for(cluster).check(cluster=cluster)


def cluster_discover(*, acting_user: Actor, cluster: Cluster) -> tuple[NodePlan, list[Found]]:
    """What an import would do: the dry run. Changes nothing."""
    require_pool_admin(acting_user)
    with outside():
        found = executor_for(cluster).discover(cluster=cluster)
    return nodes_plan(cluster=cluster, found=found), found


def cluster_import(*, acting_user: Actor, cluster: Cluster, names: list[str] | None = None) -> NodePlan:
    """Look again and take the new nodes in: all, or those named."""
    _plan, found = cluster_discover(acting_user=acting_user, cluster=cluster)
    return nodes_import(acting_user=acting_user, cluster=cluster, found=found, names=names)

"""Large files made by a worker: asked for, made with progress, downloadable for a week, gone after.

A job that a dead worker left is taken up again by the sweep; a file stands under its name only once it is whole.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from celery import current_app
from django.conf import settings
from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import QuerySet
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from monitoring.models import ExportJob
from portal.accounts.models import User
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.kernel.csv_export import machine_csv, people_csv
from portal.kernel.errors import Conflict, DomainError, Invalid, NotFound, Refused
from portal.kernel.tables import Table
from portal.kernel.xlsx_export import TooManyRows, xlsx_write
from portal.notify.services import notify
from portal.ops.actor import Actor
from portal.ops.outbox import load_celery
from portal.ops.services import audit_record
from quotas.selectors import line_rows
from quotas.selectors.about import about
from quotas.selectors.focus import COLUMNS, focus_rows
from quotas.selectors.money import PARAMS, Lines, line_filter
from quotas.selectors.month_report import ledger_mark
from quotas.selectors.running import one_look

KEPT = timedelta(days=7)
DEAD = timedelta(minutes=5)
"""Without a sign of life for so long, a job's worker is taken for dead."""

OPEN_AT_MOST = 5
"""Files of one person that wait or are being made."""

STEP = 2000
BEAT_S = 1.0
"""Rows between two looks at the clock, and seconds between two signs of life: each opens a connection of its own."""

OPEN = (ExportJob.State.QUEUED, ExportJob.State.RUNNING)
KINDS = {"lines_people": "csv", "lines_machines": "csv", "lines_xlsx": "xlsx", "focus": "csv"}


def folder() -> Path:
    """Where files lie: inside the installation's data, readable by its own account only."""
    path = Path(settings.GPUPOOL_DATA_DIR) / "exports"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def path_of(job: ExportJob) -> Path:
    """The finished file."""
    return folder() / f"{job.uid}.{KINDS[job.kind]}"


def export_ask(*, acting_user: Actor, kind: str, params: Mapping[str, str]) -> ExportJob:
    """Ask for a file of ledger lines under a filter, in the active language; a worker makes it.

    Invalid for a kind or filter that is unknown, and for FOCUS without a month; Conflict with too many open ones.
    """
    if kind not in KINDS:
        raise Invalid.field("kind", _("Known files: lines_people, lines_machines, lines_xlsx, focus."))
    policy = policy_of(acting_user.user)
    wanted = {name: str(params[name]) for name in PARAMS if params.get(name)}
    lines = Lines(policy, line_filter(wanted, policy))
    if kind == "focus" and lines.filter.month is None:
        raise Invalid.field("month", _("A FOCUS file is of one month."))
    with transaction.atomic():
        seen = None if policy.reads_money.everything else sorted(policy.reads_money.ids)
        User.objects.select_for_update().get(pk=policy.user.pk)  # one ask of a person at a time
        if exports_of(policy).filter(state__in=OPEN).count() >= OPEN_AT_MOST:
            raise Conflict(
                code="too_many_files",
                detail=_("%(n)s of your files are being made. Wait for one of them.") % {"n": OPEN_AT_MOST},
            )
        job = ExportJob.objects.create(
            kind=kind,
            params={**wanted, "seen": seen},
            owner=acting_user.user,
            language=translation.get_language() or "en",
        )
        audit_record(
            acting_user=acting_user, action="export.asked", subject=job, after={"kind": kind, **wanted}
        )
        transaction.on_commit(lambda: _send(job.pk), robust=True)
        return job


def _send(job_id: int) -> None:
    """Ask a worker. Losing it costs half a minute: the sweep asks again."""
    load_celery()
    current_app.send_task("monitoring.make_export", args=[job_id], retry=False)


def may_fetch(job: ExportJob, policy: Policy) -> bool:
    """Whether the reader may have the file: its owner, as long as they still see all that is in it."""
    seen, scope = job.params.get("seen"), policy.reads_money
    if job.owner_id != policy.user.pk:
        return False
    return scope.everything or (seen is not None and set(seen) <= set(scope.ids))


def exports_of(policy: Policy) -> QuerySet[ExportJob]:
    """What the reader asked for, newest first."""
    return ExportJob.objects.filter(owner_id=policy.user.pk).order_by("-id")


def export_for(policy: Policy, uid: UUID) -> ExportJob:
    """One of the reader's own. NotFound for anybody else's."""
    job = exports_of(policy).filter(uid=uid).first()
    if job is None:
        raise NotFound(code="not_found", detail=_("There is no such file here, or it has expired."))
    return job


def export_open(policy: Policy, uid: UUID) -> tuple[ExportJob, BinaryIO]:
    """The finished file, open for reading. Its owner must still see all that is in it.

    NotFound for a file that is not theirs, has expired or holds what they no longer see; Conflict for one that is
    not there yet (`file_not_ready`) or could not be made (`file_failed`).
    """
    job = export_for(policy, uid)
    if job.state in OPEN:
        raise Conflict(code="file_not_ready", detail=_("The file is still being made."))
    if job.state == ExportJob.State.FAILED:
        raise Conflict(code="file_failed", detail=_("The file could not be made. Ask for it again."))
    gone = NotFound(code="not_found", detail=_("There is no such file here, or it has expired."))
    if job.state != ExportJob.State.READY or not may_fetch(job, policy):
        raise gone
    if job.expires_at is not None and job.expires_at <= now():
        raise gone
    try:
        return job, path_of(job).open("rb")
    except FileNotFoundError as error:
        raise gone from error


def export_make(*, job_id: int) -> bool:
    """Make the file of a waiting job; False when another worker has it or it is made. Its owner is told."""
    taken = ExportJob.objects.filter(pk=job_id, state=ExportJob.State.QUEUED).update(
        state=ExportJob.State.RUNNING, beat_at=now(), done=0, updated_at=now()
    )
    if not taken:
        return False
    job = ExportJob.objects.select_related("owner").get(pk=job_id)
    part: Path | None = None
    try:
        target = path_of(job)
        part = target.with_suffix(f".{os.getpid()}.part")
        with translation.override(job.language), one_look():
            rows = _write(job, part)
        part.replace(target)
    except DomainError as error:
        return _fail(job, part, error.code)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return _fail(job, part, "no_space" if full else "not_written")
    except TooManyRows:
        return _fail(job, part, "too_many_rows")
    except (OperationalError, InterfaceError):
        raise  # the database is away: the sweep takes the job up again
    except Exception:
        _fail(job, part, "not_written")  # a fault of ours comes again with every try
        raise
    _ready(job, target.stat().st_size, rows)
    return True


def _fail(job: ExportJob, part: Path | None, code: str) -> bool:
    if part is not None:
        part.unlink(missing_ok=True)
    ExportJob.objects.filter(pk=job.pk).update(
        state=ExportJob.State.FAILED, error_code=code, updated_at=now()
    )
    return False


def _ready(job: ExportJob, size: int, rows: int) -> None:
    month = job.params.get("month", "")
    name = "-".join(part for part in ("gpu", job.kind.replace("_", "-"), month) if part)
    with transaction.atomic():
        ExportJob.objects.filter(pk=job.pk).update(
            state=ExportJob.State.READY,
            file_name=f"{name}.{KINDS[job.kind]}",
            size=size,
            done=rows,
            total=rows,
            ready_at=now(),
            expires_at=now() + KEPT,
            updated_at=now(),
        )
        notify(
            user_ids=[job.owner_id],
            kind="export_ready",
            subject=job,
            params={"name": f"{name}.{KINDS[job.kind]}", "until": now() + KEPT},
            url=reverse("monitoring:exports"),
        )


def _write(job: ExportJob, part: Path) -> int:
    """The whole file; returns its rows."""
    policy = policy_of(job.owner)
    if not may_fetch(job, policy):
        raise Refused(code="forbidden", detail=_("Your roles do not allow this."))
    lines = Lines(policy, line_filter({k: v for k, v in job.params.items() if k != "seen"}, policy))
    total = (
        lines.sums().count()
        if lines.filter.q
        else sum(lines.sums().values_list("lines", flat=True).iterator())
    )
    if job.kind != "focus":
        total += len(lines.running_cuts())
    _beat(job, 0, total)
    told = _counted(job)
    with part.open("wb") as out:
        part.chmod(0o600)
        if job.kind == "lines_xlsx":
            table = Table(pgettext("sheet", "Lines"), line_rows.sheet_columns())
            table.rows = told(line_rows.sheet_rows(lines.all()))  # type: ignore[assignment]
            head = about(lines.filter, policy, mark=ledger_mark()[0])
            words = {
                "about": pgettext("sheet", "About"),
                "total": _("Total"),
                "milliseconds": _("GPU-milliseconds"),
            }
            xlsx_write(out, about=head, found=[table], made_at=now(), words=words)
        else:
            out.writelines(_csv(job, lines, told))
    return total


Told = Callable[[Iterable[Any]], Iterator[Any]]


def _csv(job: ExportJob, lines: Lines, told: Told) -> Iterable[bytes]:
    if job.kind == "focus":
        return machine_csv(columns=COLUMNS, rows=told(focus_rows(lines)))
    if job.kind == "lines_machines":
        return machine_csv(columns=line_rows.MACHINE_COLUMNS, rows=told(line_rows.machine_rows(lines.all())))
    head = about(lines.filter, lines.policy, mark=ledger_mark()[0])
    return people_csv(
        about=head, columns=line_rows.people_columns(), rows=told(line_rows.people_rows(lines.all()))
    )


def _counted(job: ExportJob) -> Told:
    def told(rows: Iterable[Any]) -> Iterator[Any]:
        last = time.monotonic()
        for number, row in enumerate(rows, start=1):
            yield row
            if number % STEP == 0 and (at := time.monotonic()) - last >= BEAT_S:
                last = at
                _beat(job, number, None)

    return told


def _beat(job: ExportJob, done: int, total: int | None) -> None:
    """Tell how far it is, in a thread with a connection of its own: the one that reads is read-only and sees one
    moment, and others are to see the progress at once.
    """
    values: dict[str, Any] = {"done": done, "beat_at": now()}
    if total is not None:
        values["total"] = total
    beside = threading.Thread(target=_note, args=(job.pk, values))
    beside.start()
    beside.join()


def _note(job_id: int, values: dict[str, Any]) -> None:
    try:
        ExportJob.objects.filter(pk=job_id).update(**values)
    finally:
        connections.close_all()


def exports_sweep() -> dict[str, int]:
    """Take up what dead workers left, drop what has expired; safe at any time."""
    left = ExportJob.objects.filter(state=ExportJob.State.RUNNING, beat_at__lt=now() - DEAD)
    again = list(left.values_list("pk", "uid"))
    for _pk, uid in again:
        for part in folder().glob(f"{uid}.*.part"):
            part.unlink(missing_ok=True)
    left.filter(pk__in=[pk for pk, _uid in again]).update(state=ExportJob.State.QUEUED, updated_at=now())
    waiting = ExportJob.objects.filter(
        state=ExportJob.State.QUEUED, created_at__lt=now() - timedelta(seconds=30)
    )
    for pk in waiting.values_list("pk", flat=True):
        _send(pk)
    gone = 0
    for job in ExportJob.objects.filter(state=ExportJob.State.READY, expires_at__lte=now()):
        path_of(job).unlink(missing_ok=True)
        gone += ExportJob.objects.filter(pk=job.pk, state=ExportJob.State.READY).update(
            state=ExportJob.State.EXPIRED, updated_at=now()
        )
    return {"again": len(again), "expired": gone}

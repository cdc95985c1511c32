"""Notices: once per threshold, in the reader's words, carried out with retries, signed."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from django.core import mail
from django.utils.translation import gettext_lazy as _

from portal.accounts.services import role_grant, user_suspend
from portal.kernel.clock import set_clock
from portal.kernel.errors import Invalid, NotFound, Refused
from portal.notify import kinds
from portal.notify.models import Delivery, Notification, WebhookEndpoint
from portal.notify.selectors import unread_count
from portal.notify.services import (
    deliver_due,
    mark_all_read,
    mark_read,
    notify,
    preferences_save,
    webhook_create,
    webhook_remove,
    webhook_update,
)
from portal.notify.services.deliver import MAX_ATTEMPTS, pause_s
from portal.notify.texts import reading_as, words_of
from portal.ops.services import incident_open
from portal.ops.services.outbox import outbox_deliver
from tests.portal.builders import SYSTEM, actor, admin, department, person

pytestmark = pytest.mark.django_db
T0 = datetime(2026, 6, 16, 6, 3, tzinfo=UTC)
ENDS = datetime(2026, 6, 16, 18, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))
    kinds.register("t.expiring", "Lease %(ref)s ends at %(ends_at)s", "Extend it.", group="taken")
    kinds.register("t.reclaim", "Lease %(ref)s is reclaimed", urgent=True, group="taken")
    kinds.register("t.theme", _("Theme"))


def tell(
    user: Any, subject: Any, kind: str = "t.expiring", threshold: str = "24h", **more: Any
) -> list[Notification]:
    return notify(
        user_ids=[user.pk],
        kind=kind,
        subject=subject,
        threshold=threshold,
        params={"ref": "L-7", "ends_at": ENDS},
        url="/leases/7/",
        **more,
    )


def test_P040_once_per_person_subject_and_threshold_also_when_the_sweep_runs_twice() -> None:
    user, lease = person("lin.yue", email="lin.yue@qinghe.lan"), department("lease")
    assert len(tell(user, lease)) == 1
    assert tell(user, lease) == []
    assert len(tell(user, lease, threshold="2h")) == 1
    assert len(tell(user, department("other"))) == 1
    assert (Notification.objects.count(), Delivery.objects.count()) == (3, 3)
    assert unread_count(user.pk) == 3


def test_without_a_subject_each_is_new() -> None:
    user = person("x")
    assert len(tell(user, None)) == 1
    assert len(tell(user, None)) == 1


def test_inactive_people_hear_nothing() -> None:
    boss, user = admin(), person("x", email="x@qinghe.lan")
    user_suspend(acting_user=actor(boss), user=user, reason="left")
    assert tell(user, department("d")) == []
    assert Delivery.objects.count() == 0


def test_words_are_made_in_the_readers_language_and_zone() -> None:
    zh = person("zh", language="zh-hans", time_zone="Asia/Shanghai")
    ny = person("ny", language="en", time_zone="America/New_York")
    lease = department("lease")
    with set_clock(T0):
        one, two = tell(zh, lease)[0], tell(ny, lease)[0]
        with reading_as(zh):
            assert words_of(one).title.endswith("6月17日\u00a002:00\u00a0(UTC+8)")
        with reading_as(ny):
            assert "16\u00a0Jun" in words_of(two).title
            assert "14:00\u00a0(UTC−4)" in words_of(two).title


def test_odd_params_never_break_a_notice() -> None:
    user = person("x")
    kinds.register("t.odd", "100% sure: %(missing)s", "%(a)d")
    made = notify(user_ids=[user.pk], kind="t.odd", params={"a": "text"})[0]
    assert words_of(made).title
    gone = notify(user_ids=[user.pk], kind="room.that_left", params={})[0]
    assert words_of(gone).title == "room that left"


def test_P043_notices_of_one_sweep_become_one_mail() -> None:
    user = person("lin.yue", email="lin.yue@qinghe.lan", display_name="林\r\n月")
    with set_clock(T0):
        for n in range(5):
            tell(user, department(f"lease{n}"))
        assert deliver_due() == 0, "gathered for a moment"
    with set_clock(T0 + timedelta(seconds=20)):
        assert deliver_due() == 5
        assert deliver_due() == 0
    assert len(mail.outbox) == 1
    message = mail.outbox[0]
    assert message.subject.endswith(", and 4 more")
    assert message.body.count("/leases/7/") == 5
    assert message.to == ['"林  月" <lin.yue@qinghe.lan>']
    assert Delivery.objects.filter(sent_at=None).count() == 0


def test_P044_muted_kinds_send_no_mail_and_urgent_ones_cannot_be_muted() -> None:
    user = person("x", email="x@qinghe.lan")
    preferences_save(acting_user=actor(user), mail_off={"t.expiring"})
    with pytest.raises(Invalid) as caught:
        preferences_save(acting_user=actor(user), mail_off={"t.reclaim"})
    assert caught.value.code == "cannot_be_muted"
    with pytest.raises(Invalid):
        preferences_save(acting_user=actor(user), mail_off={"no.such"})
    tell(user, department("a"))
    assert Delivery.objects.count() == 0
    tell(user, department("b"), kind="t.reclaim")
    assert Delivery.objects.count() == 1
    tell(user, department("c"), urgent=True)
    assert Delivery.objects.count() == 2
    assert unread_count(user.pk) == 3, "the page shows all"


def test_a_mail_that_fails_is_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    user = person("x", email="x@qinghe.lan")

    def fail(self: Any) -> None:
        raise OSError("server away")

    monkeypatch.setattr("portal.notify.services.deliver.EmailMessage.send", fail)
    moment = T0
    with set_clock(T0):
        tell(user, department("d"), kind="t.reclaim")
    tries = 0
    for _i in range(200):
        with set_clock(moment):
            deliver_due()
        row = Delivery.objects.get()
        tries = row.attempts
        if row.failed_at is not None:
            break
        moment += timedelta(minutes=10)
    assert (tries, row.last_error) == (MAX_ATTEMPTS, "OSError: server away")
    assert [pause_s(n) for n in (1, 2, 3, 8, 20)] == [30, 60, 120, 3600, 3600]


def test_P020_anothers_notice_cannot_be_read() -> None:
    user, other = person("a"), person("b")
    notice = tell(user, department("d"))[0]
    with pytest.raises(NotFound):
        mark_read(acting_user=actor(other), notice=notice)
    notice.refresh_from_db()
    assert notice.read_at is None
    mark_read(acting_user=actor(user), notice=notice)
    assert notice.read_at is not None
    lease = department("e")
    tell(user, lease)
    tell(other, lease)
    assert mark_all_read(acting_user=actor(user)) == 1
    assert unread_count(other.pk) == 1


class Receiver(HTTPServer):
    """Keeps what is posted; answers with `status`."""

    status = 200
    seen: list[tuple[dict[str, str], bytes]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.seen.append((dict(self.headers), body))
            self.send_response(server.status)
            if server.status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = Receiver(("127.0.0.1", 0), Handler)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_webhooks_are_signed_and_posted_once_for_all_who_are_told(receiver: Receiver) -> None:
    boss, a, b = admin(), person("a"), person("b")
    endpoint = webhook_create(
        acting_user=actor(boss),
        name="ops",
        url=f"http://127.0.0.1:{receiver.server_port}/h",
        kinds=["t.reclaim"],
    )
    with set_clock(T0):
        notify(user_ids=[a.pk, b.pk], kind="t.reclaim", subject=a, threshold="1", params={"ref": "L-7"})
        notify(user_ids=[a.pk], kind="t.expiring", subject=a, params={"ref": "L-7", "ends_at": ENDS})
        assert deliver_due() == 1
        assert deliver_due() == 0
    assert len(receiver.seen) == 1
    headers, body = receiver.seen[0]
    stamp = (
        headers["X-Gpupool-Timestamp"] if "X-Gpupool-Timestamp" in headers else headers["X-GPUPool-Timestamp"]
    )
    sign = headers.get("X-Gpupool-Signature") or headers["X-GPUPool-Signature"]
    expected = hmac.new(endpoint.secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert sign == f"sha256={expected}"
    assert stamp == str(int(T0.timestamp()))
    told = json.loads(body)
    assert (told["kind"], told["title"], told["users"]) == ("t.reclaim", "Lease L-7 is reclaimed", ["a", "b"])
    assert told["created_at"] == "2026-06-16T06:03:00Z"
    endpoint.refresh_from_db()
    assert endpoint.last_status == "200"


@pytest.mark.parametrize("status", [302, 500])
def test_other_answers_are_tried_again_and_redirects_are_not_followed(
    receiver: Receiver, status: int
) -> None:
    receiver.status = status
    boss, a = admin(), person("a")
    webhook_create(
        acting_user=actor(boss), name="ops", url=f"http://127.0.0.1:{receiver.server_port}/h", kinds=[]
    )
    with set_clock(T0):
        tell(a, a, kind="t.reclaim")
        assert deliver_due() == 0
    row = Delivery.objects.get()
    assert (row.sent_at, row.attempts, row.last_error) == (None, 1, str(status))
    assert row.next_at == T0 + timedelta(seconds=30)
    receiver.status = 204
    with set_clock(T0 + timedelta(seconds=31)):
        assert deliver_due() == 1


def test_a_department_endpoint_hears_of_its_people_only(receiver: Receiver) -> None:
    boss = admin()
    here, there = department("here"), department("there")
    mine, other = person("mine", home_department=here), person("other", home_department=there)
    webhook_create(
        acting_user=actor(boss),
        name="here",
        url=f"http://127.0.0.1:{receiver.server_port}/h",
        kinds=[],
        department=here,
    )
    tell(other, other, kind="t.reclaim")
    assert Delivery.objects.count() == 0
    notify(user_ids=[other.pk, mine.pk], kind="t.reclaim", subject=mine)
    assert Delivery.objects.get().notification.user_id == mine.pk


@pytest.mark.parametrize("url", ["ftp://x/y", "javascript:alert(1)", "http://", "https://u:p@host/", ""])
def test_wrong_addresses_are_refused(url: str) -> None:
    boss = admin()
    with pytest.raises(Invalid) as caught:
        webhook_create(acting_user=actor(boss), name="x", url=url, kinds=[])
    assert caught.value.errors[0]["pointer"] == "url"
    assert not WebhookEndpoint.objects.exists()


def test_only_administrators_set_webhooks() -> None:
    someone = person("x", ("lead", department("d")))
    with pytest.raises(Refused):
        webhook_create(acting_user=actor(someone), name="x", url="https://h/x", kinds=[])
    endpoint = webhook_create(acting_user=SYSTEM, name="x", url="https://h/x", kinds=[])
    with pytest.raises(Refused):
        webhook_update(acting_user=actor(someone), endpoint=endpoint, name="y", url="https://h/y", kinds=[])
    webhook_remove(acting_user=SYSTEM, endpoint=endpoint)
    endpoint.refresh_from_db()
    assert not endpoint.active


def test_roles_and_incidents_are_told_through_the_outbox_once() -> None:
    boss, user = admin(), person("x")
    outbox_deliver()
    Notification.objects.all().delete()
    bound = role_grant(acting_user=actor(boss), user=user, role="finance")
    incident = incident_open(kind="node_lost", dedupe_key="node:1")
    incident_open(kind="node_lost", dedupe_key="node:1")
    outbox_deliver()
    outbox_deliver()
    mine = Notification.objects.get(user=user)
    assert (mine.kind, mine.subject_uid) == ("accounts.role_granted", bound.uid)
    with reading_as(user):
        assert words_of(mine).title == "You are now Finance for the whole installation"
    his = Notification.objects.get(user=boss)
    assert (his.kind, his.subject_uid, his.urgent) == ("ops.incident_opened", incident.uid, True)

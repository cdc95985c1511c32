"""Pages of notices."""

from __future__ import annotations

import pytest

from portal.notify import kinds
from portal.notify.models import Notification, Preference, WebhookEndpoint
from portal.notify.services import notify
from tests.portal.builders import admin, client_of, department, person

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))
    kinds.register("t.one", "First %(what)s", "Body of it", group="request")
    kinds.register("t.urgent", "Urgent <b>%(what)s</b>", urgent=True, group="taken")


def test_the_list_the_bell_and_opening() -> None:
    user = person("x")
    one = notify(user_ids=[user.pk], kind="t.one", params={"what": "thing"}, url="/help/")[0]
    notify(user_ids=[user.pk], kind="t.urgent", params={"what": "<script>"})
    client = client_of(user)
    page = client.get("/notices/")
    body = page.content.decode()
    assert page.context["unread"] == 2
    assert "First thing" in body
    assert "<script>alert" not in body
    assert "&lt;script&gt;" in body
    assert "Urgent &lt;b&gt;" in body
    opened = client.post(f"/notices/{one.uid}/open/")
    assert (opened.status_code, opened["Location"]) == (302, "/help/")
    assert client.get("/notices/?show=unread").context["page"].paginator.count == 1
    assert client.get("/notices/?show=urgent").context["page"].paginator.count == 1
    client.post("/notices/read-all/")
    assert not Notification.objects.filter(read_at=None).exists()


def test_a_notice_leads_nowhere_outside() -> None:
    user = person("x")
    for url in ("https://evil.example/", "//evil.example/", "javascript:alert(1)"):
        made = notify(user_ids=[user.pk], kind="t.one", params={}, url=url)[0]
        assert client_of(user).post(f"/notices/{made.uid}/open/")["Location"] == "/notices/"


def test_P044_preferences_mute_what_may_be_muted() -> None:
    user = person("x")
    client = client_of(user)
    assert client.get("/notices/preferences/").status_code == 200
    assert client.post("/notices/preferences/", {"mail": []}).status_code == 302
    muted = set(Preference.objects.filter(user=user, enabled=False).values_list("kind", flat=True))
    assert "t.one" in muted
    assert "t.urgent" not in muted
    client.post("/notices/preferences/", {"mail": ["t.one"]})
    assert not Preference.objects.filter(user=user, kind="t.one").exists()


def test_webhooks_by_page_show_the_secret_once() -> None:
    client, home = client_of(admin()), department("vision")
    bad = client.post("/notices/webhooks/", {"name": "Hub", "url": "ftp://x"})
    assert bad.status_code == 400
    assert "Hub" in bad.content.decode()
    form = {
        "name": "Hub",
        "url": "https://hub.qinghe.lan/x",
        "kinds": ["t.urgent"],
        "department": str(home.uid),
    }
    made = client.post("/notices/webhooks/", form)
    row = WebhookEndpoint.objects.get()
    assert row.secret in made.content.decode()
    assert made["Cache-Control"] == "no-store"
    assert row.secret not in client.get("/notices/webhooks/").content.decode()
    assert (row.kinds, row.department_id) == (["t.urgent"], home.pk)
    changed = client.post(f"/notices/webhooks/{row.uid}/", {"name": "Hub 2", "url": row.url})
    assert changed.status_code == 302
    row.refresh_from_db()
    assert (row.name, row.kinds, row.active) == ("Hub 2", [], False)
    assert client_of(person("x")).get("/notices/webhooks/").status_code == 403

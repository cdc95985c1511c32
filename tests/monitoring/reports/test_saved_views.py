"""Saved and shared views: order and columns in the address; sent to each receiver in their language and rights."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from monitoring.models import ReportRun, SavedReport
from monitoring.selectors.reports.kinds import kind_of
from monitoring.services.report_runs import next_time, report_save, reports_send
from portal.accounts.models import User
from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.notify.models import Notification
from portal.ops.actor import Actor
from tests.monitoring.reports.story import Story, tell
from tests.quotas.money.build import at, person

pytestmark = pytest.mark.django_db
NOW = at("2026-06-03T09:00")


@pytest.fixture
def story() -> Story:
    return tell()


def test_order_and_columns_live_in_the_address_and_in_saved_views(story: Story) -> None:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    address = reverse("monitoring:report", args=["utilization"])

    def names(query: str) -> tuple[list[str], list[str]]:
        with set_clock(NOW):
            page = client.get(f"{address}?period=2026-05{query}")
        assert page.status_code == 200
        main = page.context["main"]
        return [row[0] for row in main.rows], [column.key for column in main.columns]

    rows, keys = names("")
    assert rows == ["Vision", "Search"]
    assert names("&sort=allocated")[0] == ["Search", "Vision"]
    assert names("&sort=-allocated")[0] == ["Vision", "Search"]
    assert names("&sort=group")[0] == ["Search", "Vision"]
    assert names(f"&hide={keys[1]},{keys[-1]}")[1] == [k for k in keys if k not in (keys[1], keys[-1])]
    for wrong in ("&sort=colour", "&hide=colour", f"&hide={keys[0]}"):
        with set_clock(NOW):
            assert client.get(f"{address}?period=2026-05{wrong}").status_code == 400
    with set_clock(NOW):
        file = client.get(
            reverse("monitoring:report-file", args=["utilization"])
            + f"?period=2026-05&format=machines&sort=allocated&hide={keys[-1]}"
        )
        assert file.content.decode().splitlines()[0].count(",") == len(keys) - 1  # files have every column
        client.post(
            reverse("monitoring:report-save", args=["utilization"]),
            {"name": "Waste first", "period": "2026-05", "sort": "-idle", "hide": keys[-1], "shared": "on"},
        )
        saved = SavedReport.objects.get()
        assert saved.params == {"period": "2026-05", "sort": "-idle", "hide": keys[-1]}
        client.force_login(person("aud", ("auditor", None)))
        listed = client.get(reverse("monitoring:reports")).content.decode()
    assert "Waste first" in listed and "sort=-idle" in listed


def test_a_schedule_reaches_each_receiver_in_their_language_with_their_rights(story: Story) -> None:
    fin, lead = person("fin", ("finance", None)), person("lead", ("lead", story.w.search))
    gone = person("gone", ("finance", None))
    User.objects.filter(pk=fin.pk).update(language="en")
    User.objects.filter(pk=lead.pk).update(language="zh-hans")
    fin.refresh_from_db()
    with set_clock(at("2026-05-31T12:00")):
        report_save(
            acting_user=Actor(user=fin), policy=policy_of(fin), kind=kind_of("utilization"), name="Monthly",
            params={"by": "department"}, every="month", receivers=[fin, lead, gone],
        )  # fmt: skip
        assert reports_send() == 0
    User.objects.filter(pk=gone.pk).update(is_active=False)
    due = next_time("month", at("2026-05-31T12:00"))
    assert due == at("2026-06-01T03:00")
    with set_clock(NOW):
        assert reports_send() == 2
        assert reports_send() == 0
    runs = {run.owner_id: run for run in ReportRun.objects.all()}
    assert set(runs) == {fin.pk, lead.pk}
    assert runs[fin.pk].language == "en" and runs[lead.pk].language == "zh-hans"
    assert runs[fin.pk].content["title"] != runs[lead.pk].content["title"]
    assert {run.params["period"] for run in runs.values()} == {"2026-05"}
    assert [row[0] for row in runs[lead.pk].content["tables"][0]["rows"]] == ["Search"]
    assert [row[0] for row in runs[fin.pk].content["tables"][0]["rows"]] == ["Vision", "Search"]
    assert Notification.objects.filter(kind="report_ready").count() == 2
    with set_clock(at("2026-07-01T04:00")):
        assert reports_send() == 2


def test_the_month_close_shows_what_telemetry_saw(story: Story) -> None:
    """36 of the 68 GPU-hours of May were seen; before the pool was there nothing was held."""
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    with set_clock(NOW):
        close = client.get(reverse("quotas:month-close") + "?month=2026-05").content.decode()
        assert reverse("monitoring:report-coverage") + "?period=2026-05" in close
        seen = client.get(reverse("monitoring:report-coverage") + "?period=2026-05").content.decode()
        assert "52.9 % of allocated time has telemetry" in seen
        none = client.get(reverse("monitoring:report-coverage") + "?period=2026-02").content.decode()
        assert "No held hours are summed for this month." in none

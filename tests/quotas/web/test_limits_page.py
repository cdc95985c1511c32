"""The page of people's limits: units as typed, unlimited as ∞, own limits taken away again."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from portal.ops.models import AuditEvent
from quotas.models import UserLimit
from tests.quotas import build

pytestmark = pytest.mark.django_db


@pytest.fixture
def house():
    return build.House()


def client_of(user):
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def test_limits_are_set_in_the_units_people_type_and_taken_away_again(house):
    client, url = client_of(house.zhao), reverse("quotas:user-limits")
    sent = {"user": house.lin.username, "gpus_at_once_milli": "2.5", "longest_lease_s": "36",
            "money_micro_per_month": "1,200.50",
            "gpu_ms_per_month": "∞", "waiting_at_once": "5", "running_at_once": ""}  # fmt: skip
    assert client.post(url, sent).status_code == 302
    row = UserLimit.objects.get(user=house.lin)
    assert (row.gpus_at_once_milli, row.longest_lease_s, row.money_micro_per_month, row.gpu_ms_per_month,
            row.waiting_at_once, row.running_at_once) == (2500, 36 * 3600, 1_200_500_000, None, 5, None)  # fmt: skip
    page = client.get(url + f"?user={house.lin.username}").content.decode()
    for text in ('name="gpus_at_once_milli" value="2.5"', 'name="gpu_ms_per_month" value="∞"', "¥1,200.50"):
        assert text in page
    assert client.post(url, {"user": house.lin.username, "clear": "1"}).status_code == 302
    assert not UserLimit.objects.exists()
    acts = (
        AuditEvent.objects.filter(object_type="quotas.userlimit")
        .order_by("id")
        .values_list("action", flat=True)
    )
    assert list(acts) == ["user_limit.set", "user_limit.cleared"]


def test_limits_of_everybody_and_wrong_input(house):
    client, url = client_of(house.zhao), reverse("quotas:user-limits")
    assert client.post(url, {"user": "", "gpus_at_once_milli": "8"}).status_code == 302
    assert UserLimit.objects.get().user is None
    for wrong in (
        {"gpus_at_once_milli": "many"},
        {"gpus_at_once_milli": "-1"},
        {"user": "nobody"},
        {"waiting_at_once": "0.5"},
    ):
        answer = client.post(url, {"user": "", "longest_lease_s": "1", **wrong})
        assert answer.status_code == 400
        assert f'value="{next(iter(wrong.values()))}"' in answer.content.decode()  # what was typed stays
    assert UserLimit.objects.get().longest_lease_s is None


def test_only_administrators_set_and_auditors_read(house):
    url = reverse("quotas:user-limits")
    for who, status in ((house.lin, 403), (house.chen, 403), (house.he, 200)):
        assert client_of(who).get(url).status_code == status
        assert client_of(who).post(url, {"gpus_at_once_milli": "1"}).status_code == 403
    assert not UserLimit.objects.exists()


def test_the_queue_of_approvals_is_for_those_who_decide_or_read(house):
    for who, status in ((house.lin, 403), (house.stranger, 403), (house.chen, 200), (house.he, 200)):
        for tab in ("", "?q=team", "?q=all", "?q=done"):
            assert client_of(who).get(reverse("quotas:approvals") + tab).status_code == status

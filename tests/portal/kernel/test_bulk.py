"""Rows by COPY: what comes out is what went in, and only within the transaction of a change."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import IntegrityError, transaction

from pool.models import Site
from portal.kernel.bulk import ids_take, rows_copy, values_copy
from portal.ops.models import OutboxEvent

AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
TRICKY = {"text": 'a\tb\nc\\d "e" \\N 卡', "none": None, "list": [1, 2.5, True], "deep": {"": ""}}


def event(topic: str, **payload: object) -> OutboxEvent:
    return OutboxEvent(topic=topic, payload=payload, key="\\N\t卡", created_at=AT, available_at=AT)


@pytest.mark.django_db
def test_rows_are_what_was_given():
    assert rows_copy([event("t.one", **TRICKY), event("t.two")]) == 2
    one, two = OutboxEvent.objects.order_by("id")
    assert (one.topic, one.payload, one.key, one.created_at) == ("t.one", TRICKY, "\\N\t卡", AT)
    assert (two.topic, two.payload, two.done_at) == ("t.two", {}, None)
    assert rows_copy([]) == 0


@pytest.mark.django_db(transaction=True)
def test_rows_belong_to_a_transaction_and_go_with_it():
    with pytest.raises(RuntimeError):
        rows_copy([event("t.alone")])
    with pytest.raises(IntegrityError), transaction.atomic():
        rows_copy(
            [
                event("t.good"),
                OutboxEvent(topic="t.bad", payload={}, key="k", created_at=None, available_at=AT),
            ]
        )
    assert OutboxEvent.objects.count() == 0


@pytest.mark.django_db
def test_bare_values_get_the_defaults_of_their_model():
    with transaction.atomic():
        ids = ids_take(Site, 2)
        rows = [(ids[0], "bj", "北京\t1"), (ids[1], "sh", "上海")]
        assert values_copy(Site, ("id", "code", "name"), rows) == 2
    one, two = Site.objects.order_by("id")
    assert (one.pk, one.name, two.pk, two.name) == (ids[0], "北京\t1", ids[1], "上海")
    saved = Site.objects.create(code="gz", name="广州")
    assert saved.pk > ids[1]
    for field in Site._meta.concrete_fields:
        if field.attname not in ("id", "uid", "code", "name", "created_at", "updated_at"):
            assert getattr(one, field.attname) == getattr(saved, field.attname), field.attname
    assert one.uid != two.uid
    assert one.created_at == two.created_at <= saved.created_at


@pytest.mark.django_db
def test_rows_may_ask_the_database_while_they_are_made():
    def rows():
        for number in range(2):
            yield 100 + number, f"s{number}", f"{Site.objects.count()} so far"

    with transaction.atomic():
        assert values_copy(Site, ("id", "code", "name"), rows()) == 2
    assert list(Site.objects.order_by("id").values_list("name", flat=True)) == ["0 so far", "0 so far"]

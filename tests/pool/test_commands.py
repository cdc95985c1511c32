"""Commands that others rely on: what they print, and their exit."""

from __future__ import annotations

import io

import pytest
from django.core.management import CommandError, call_command

from quotas.models import QuotaUsage
from quotas.services.usage import quota_debit
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db


def printed(*words: str) -> str:
    out = io.StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


def test_clusters_are_asked_and_what_is_not_good_fails() -> None:
    h800 = build.flavour("h800", installed=None)
    pool.node(h800, 1, where=pool.cluster("c-one"), name="silent")
    out = io.StringIO()
    with pytest.raises(CommandError, match="1 not good"):
        call_command("executor_check", "c-one", stdout=out)
    assert out.getvalue().splitlines() == [
        "c-one (agent): 2 findings", "  BAD agent_enrolled silent", "  ok  agent_heard silent",
    ]  # fmt: skip
    with pytest.raises(CommandError, match="no such cluster: nope; there are c-one"):
        call_command("executor_check", "nope")


def test_a_mig_layout_is_told_only_where_a_program_keeps_it() -> None:
    pool.node(build.flavour("a100", installed=None), 1, name="plain")
    with pytest.raises(CommandError, match="no such node: nope"):
        call_command("mig_layout", "nope")
    for words in (("plain",), ("plain", "all-1g.10gb")):
        with pytest.raises(CommandError, match="layouts_not_kept_there"):
            call_command("mig_layout", *words)


def test_the_books_are_compared_and_a_difference_fails() -> None:
    team, h800 = build.department("vision"), build.flavour("h800", installed=8)
    assert "counters: 0 compared with open leases, 0 differ" in printed("reconcile")
    quota_debit(department_id=team.pk, flavour_id=h800.pk, charge_milli=1000, interruptible=True)
    out = io.StringIO()
    with pytest.raises(CommandError, match="an incident is open"):
        call_command("reconcile", stdout=out)
    assert "  department vision, flavour h800, counter_milli 1000, leases_milli 0" in out.getvalue()
    assert QuotaUsage.objects.get().direct == 1000

"""Behaviours drawn from public bug reports about what is held, counted and given on, each named by its id
(behaviours.json): the real services, from the queue to the end.
"""

from __future__ import annotations

import re
import threading
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.db.models import ProtectedError
from django.test import Client
from rest_framework.test import APIClient

from pool.models import Allocation, Gpu, Lease, LeaseSpan, Node, QueueEntry
from pool.selectors.pages import nodes_listed, pool_figures
from pool.services.allocations import allocations_suspend
from pool.services.conditions import gpu_foreign_use_set
from pool.services.cycle import planner_reset, schedule_cycle
from pool.services.execution import execution_reconcile
from pool.services.expiry import leases_sweep
from pool.services.ladder import case_begin
from pool.services.node_watch import nodes_sweep
from pool.services.nodes import node_retire
from pool.services.polling import cluster_poll
from portal.notify.models import Notification
from portal.notify.texts import reading_as, words_of
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident
from portal.ops.selectors.runs import sweep_last
from portal.ops.services.outbox import outbox_deliver
from portal.ops.services.runs import task_run
from quotas.models import CapacityRequest, FlavourCapacity, QuotaUsage
from tests.pool import builders as pool
from tests.pool.executors.conftest import memory as memory_system
from tests.pool.executors.memory import MemorySystem
from tests.pool.executors.test_memory import MemoryRig
from tests.pool.reclaim import at, gone, moment, running
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
memory = memory_system


@pytest.fixture
def team():
    """A department with a guarantee of eight, and its flavour."""
    with at(0):
        where = build.department("vision", name="Vision")
        h800 = build.flavour("h800", installed=None)
        build.limits(where, h800, 8)
    return where, h800


def used(where: Any) -> int:
    return int(QuotaUsage.objects.get(department=where).direct)


def open_work() -> list[Allocation]:
    return list(Allocation.objects.exclude(state="ended").order_by("id"))


def page_of(user: Any, address: str) -> str:
    """A page's text as this person reads it."""
    answer = signed_in(user).get(address)
    assert answer.status_code == 200, address
    text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", answer.content.decode(), flags=re.S)
    return re.sub(r"\s+", " ", unescape(text))


def signed_in(user: Any) -> Client:
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def test_p002_two_press_at_once_one_gets_the_card_and_the_other_is_told_what_is_free(team):
    """Nobody takes a card by a click: both asks are taken in, the cycle gives the one card to one of them, and the
    other waits with the figures (no 409: its ask is good, it stands in line)."""
    where, h800 = team
    pool.node(h800, 1)
    people = [build.user(home=where) for _ in range(2)]
    for one in people:
        build.role(one, "researcher", where)
    barrier, answers = threading.Barrier(2), [0, 0]

    def press(index: int) -> None:
        client = APIClient()
        client.force_login(people[index], backend="django.contrib.auth.backends.ModelBackend")
        barrier.wait(timeout=30)
        try:
            values = {
                "department": where.code, "flavour": h800.code, "gpus_per_node": 1, "duration_s": 3600,
                "purpose": "now", "command": "python train.py",
            }  # fmt: skip
            answers[index] = client.post("/api/v1/requests/", values, format="json").status_code
            schedule_cycle(cause=f"press {index}")
        finally:
            connection.close()

    threads = [threading.Thread(target=press, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    schedule_cycle()
    assert answers == [201, 201]
    assert (Lease.objects.count(), used(where)) == (1, 1000)
    first, second = CapacityRequest.objects.order_by("state")
    assert (first.state, second.state) == ("allocated", "queued")
    entry = QueueEntry.objects.get(request=second)
    assert (entry.reason, entry.figures["free"], entry.figures["need"]) == ("waiting_for_release", 0, 1)


def test_p007_s145_what_is_over_holds_nothing_and_stays_in_the_history(team):
    where, h800 = team
    with at(0):
        pool.node(h800, 8)
        completed = running(where, h800, 2, purpose="completed")
        failed = running(where, h800, 2, purpose="failed")
        for state in ("rejected", "withdrawn"):
            made = pool.queued(where, h800, 4, purpose=state)
            CapacityRequest.objects.filter(pk=made.pk).update(state=state)
        runs = running(where, h800, 1, purpose="runs")
    with at(60):
        gone(completed, 0)
        gone(failed, 3)
    assert (used(where), [one.pk for one in open_work()]) == (1000, [runs.pk])
    assert QuotaUsage.objects.get(department=where).total == 1000
    reader = build.user(language="en")
    build.role(reader, "auditor")
    listed = signed_in(reader).get("/requests/?of=all&state=all").content.decode()
    for request in CapacityRequest.objects.all():
        assert request.ref in listed, request.purpose
    leases = signed_in(reader).get("/leases/?whose=all&state=all").content.decode()
    assert (completed.ref in leases, failed.ref in leases) == (True, True)


def test_p009_what_was_deleted_by_hand_is_free_in_the_next_cycle_of_the_same_worker(team):
    where, h800 = team
    with at(0):
        node = pool.node(h800, 1)
        pool.node(h800, 2, schedulable="cordoned")  # the quota is not what is waited for
        stuck = running(where, h800, 1)
        waits = pool.queued(where, h800, 1)
        assert schedule_cycle().placed == ()
        LeaseSpan.objects.filter(lease__allocation=stuck).delete()
        Lease.objects.filter(allocation=stuck).update(ended_at=moment(1))
        Allocation.objects.filter(pk=stuck.pk).update(state="ended", ended_at=moment(1))
    with at(1):
        assert [one.request_id for one in open_work()] == []
        assert schedule_cycle().placed != ()
    assert [(one.request_id, one.members.get().node_id) for one in open_work()] == [(waits.pk, node.pk)]


def test_p016_s132_a_card_used_from_outside_is_counted_out_once_and_told(team):
    where, h800 = team
    by = [{"pid": 77, "name": "python", "user": "root", "mem_mib": 40_960, "since": "2026-06-16T06:00:00Z"}]
    with at(0):
        node = pool.node(h800, 4)
        card = node.gpus.order_by("index").first()
        gpu_foreign_use_set(gpu=card, processes=by)
        asks = [pool.queued(where, h800, 1) for _ in range(5)]
        schedule_cycle()
        assert sorted(Lease.objects.values_list("gpu__index", flat=True)) == [1, 2, 3]
        for _ in range(2):  # the scheduler restarts and the node registers again: it is subtracted once
            planner_reset()
            gpu_foreign_use_set(gpu=Gpu.objects.get(pk=card.pk), processes=by)
            assert schedule_cycle().placed == ()
        assert pool_figures()["free"] == 0
        incident = Incident.objects.get(kind="foreign_use")
        assert (incident.facts["index"], incident.facts["processes"]) == (0, by)
        chief = build.user(language="en")
        build.role(chief, "pool_admin")
        assert "used outside the portal" in signed_in(chief).get(f"/nodes/{node.uid}/").content.decode()
        gpu_foreign_use_set(gpu=Gpu.objects.get(pk=card.pk), processes=[])
        schedule_cycle()
    assert Lease.objects.get(gpu=card).allocation.request_id in {one.pk for one in asks}
    assert Lease.objects.count() == 4


def test_s130_after_a_restart_all_that_runs_is_counted_before_anything_starts(team):
    where, h800 = team
    build.limits(where, h800, 4, hard_cap=4)
    with at(0):
        pool.node(h800, 8)
        runs = [running(where, h800, 1, duration_s=60) for _ in range(4)]
    with at(30):
        for one in runs[:2]:
            gone(one, open_nodes=True)
        waits = [pool.queued(where, h800, 1, duration_s=60) for _ in range(6)]
        planner_reset()
        assert len(schedule_cycle().placed) == 2
        planner_reset()
        assert schedule_cycle().placed == ()
    assert used(where) == 4000
    assert [one.request_id for one in open_work()] == [
        runs[2].request_id,
        runs[3].request_id,
        waits[0].pk,
        waits[1].pk,
    ]
    over = CapacityRequest.objects.filter(pk__in=[one.request_id for one in runs[:2]])
    assert set(over.values_list("state", flat=True)) == {"ended"}


def test_s147_a_share_of_a_card_is_asked_again_when_its_node_comes_back(team):
    where, h800 = team
    with at(0):
        node = pool.node(h800, 1, name="n-cycle")
        share = running(where, h800, 1, shape="fraction", fraction_milli=500)
        other = running(where, h800, 1, shape="fraction", fraction_milli=300)
        assert used(where) == 800
    for seconds in (200, 500):
        with at(seconds):
            nodes_sweep()
    assert set(CapacityRequest.objects.values_list("state", flat=True)) == {"queued"}
    assert used(where) == 0
    with at(600):
        Node.objects.filter(pk=node.pk).update(health="ok", last_heartbeat_at=moment(600))
        for one in (share, other):
            pool.report_free(one)
        execution_reconcile()
        schedule_cycle()
    again = {one.request_id: one for one in open_work()}
    assert set(again) == {share.request_id, other.request_id}
    assert {one.members.get().node_id for one in again.values()} == {node.pk}
    assert (used(where), Lease.objects.filter(ended_at=None).count()) == (800, 2)


def test_p074_two_pieces_of_work_with_one_title_are_two_by_their_ids(team):
    where, h800 = team
    with at(0):
        pool.node(h800, 2)
        who = build.user(home=where, language="en")
        old = running(where, h800, 1, who=who, purpose="the same title")
        gone(old)
        Node.objects.update(schedulable="open")
        new = running(where, h800, 1, who=who, purpose="the same title")
    client = signed_in(who)
    for mine, other in ((old, new), (new, old)):
        page = client.get(f"/leases/{mine.uid}/")
        assert page.status_code == 200
        assert (mine.ref in page.content.decode(), other.ref in page.content.decode()) == (True, False)
    chart = client.get(f"/api/v1/allocations/{new.uid}/")
    assert (chart.status_code, chart.json()["ref"]) == (200, new.ref)


def test_p082_a_stop_that_could_not_be_told_shows_the_error_and_is_tried_until_it_is_done(
    memory: MemorySystem,
):
    """The person is suspended while the outside system is away: nothing is shown as done before that confirms it."""
    rig = MemoryRig(memory)
    member = rig.member()
    rig.start(member)
    rig.settle(lambda: Allocation.objects.get(pk=member.allocation_id).state == "running")
    rig.away()
    assert allocations_suspend(user_uid=str(member.allocation.holder.uid), reason="left") == 1
    held = Allocation.objects.get(pk=member.allocation_id)
    assert (held.state, held.end_reason, used(rig.team)) == ("stopping", "suspended", 1000)
    cluster_poll(cluster_id=rig.cluster.pk, nodes=True)
    execution_reconcile()
    rig.cluster.refresh_from_db()
    assert (rig.cluster.away_code, rig.copies(member), held.state) == ("controller_away", 1, "stopping")
    reader = build.user(language="en")
    build.role(reader, "pool_admin")
    page = signed_in(reader).get(f"/leases/{held.uid}/").content.decode()
    assert "The stop is not carried out yet." in page
    assert "controller_away" in page
    rig.back()
    execution_reconcile()
    rig.settle(lambda: Allocation.objects.get(pk=held.pk).state == "ended")
    assert (rig.copies(member), used(rig.team)) == (0, 0)
    assert "not carried out yet" not in signed_in(reader).get(f"/leases/{held.uid}/").content.decode()


def test_p024_p030_capacity_is_the_sum_of_cards_never_nodes_times_one_of_them(team):
    """Seven nodes, one of which has four cards; another site has told nothing yet and shows none, not an error."""
    _where, h800 = team
    with at(0):
        pool.node(h800, 4, name="gpus")
        for number in range(6):
            pool.node(None, 0, name=f"plain-{number}")
        pool.node(None, 0, where=pool.cluster("far", site="gz"), name="silent", health="unknown")
    figures = pool_figures()
    assert (figures["installed"], figures["free"], min(figures.values())) == (4000, 4000, 0)
    assert sum(1 for node in nodes_listed() if node.gpu_total) == 1
    assert nodes_listed().count() == 8
    chief = build.user(language="en")
    build.role(chief, "pool_admin")
    silent = Node.objects.get(name="silent")
    assert "No agent has reported from this node yet." in page_of(chief, f"/nodes/{silent.uid}/")
    assert not re.search(r"\b(NaN|inf|Infinity)\b|-\d+ GPU", page_of(chief, "/operations/"))


def test_p013_each_resource_of_a_node_has_its_own_number(team):
    where, h800 = team
    with at(0):
        node = pool.node(h800, 2, cpu_milli=36_000, memory_mib=512 * 1024)
        running(where, h800, 1, cpu_milli=4000, memory_mib=16 * 1024)
        chief = build.user(language="en")
        build.role(chief, "pool_admin")
        page = page_of(chief, f"/nodes/{node.uid}/")
    assert "Allocated GPUs 1 of 2 1 allocation" in page
    assert "Cores 36 4 allocated" in page
    assert "Host memory 512 GiB 16 GiB allocated" in page


def test_p039_a_node_and_its_cards_are_never_deleted_they_are_retired_and_that_is_kept(team):
    """Nothing is lost with a node: the database refuses to delete it, and taking it out is audited with its reason."""
    _where, h800 = team
    with at(0):
        node = pool.node(h800, 2)
        chief = build.user(language="en")
        build.role(chief, "pool_admin")
        with pytest.raises(ProtectedError):
            node.delete()
        node_retire(acting_user=build.actor(chief), node=node, reason="sold")
    assert node.gpus.count() == 2
    kept = AuditEvent.objects.get(action="node.retired")
    assert (kept.object_uid, kept.reason, kept.actor_name) == (node.uid, "sold", chief.get_full_name())
    assert (pool_figures()["installed"], FlavourCapacity.objects.get().installed_milli) == (0, 0)


def test_p041_each_countdown_follows_its_own_rule_and_what_comes_first_is_told(team):
    """It ends in a day; for idleness it is stopped in an hour already."""
    where, h800 = team
    with at(0):
        pool.node(h800, 1)
        who = build.user(home=where, language="en", time_zone="Asia/Shanghai")
        lease = running(where, h800, 1, who=who, duration_s=86_400)
        case_begin(acting_user=SYSTEM, allocation_id=lease.pk, cause="idle", rule="idle_window", grace_s=3600)
        page = page_of(who, f"/leases/{lease.uid}/")
    assert "Time left 1 d" in page
    assert "ends 17 Jun 14:00" in page
    assert "It is being taken back: Idle. It is stopped at 16 Jun 15:00" in page


def test_p052_one_instant_in_page_notice_and_api(team):
    """06:00 UTC is 14:00 in Shanghai: the page and the notice say so in the reader's zone, the API in UTC."""
    where, h800 = team
    with at(0):
        pool.node(h800, 1)
        who = build.user(home=where, language="en", time_zone="Asia/Shanghai")
        lease = running(where, h800, 1, who=who, duration_s=7200)
        page = page_of(who, f"/leases/{lease.uid}/")
        api = signed_in(who).get(f"/api/v1/allocations/{lease.uid}/").json()
    with at(6000):
        leases_sweep()
        outbox_deliver()
    assert "ends 16 Jun 16:00" in page
    assert api["expires_at"] == "2026-06-16T08:00:00Z"
    with reading_as(who):
        told = [str(words_of(one)) for one in Notification.objects.filter(user=who)]
    assert any("16:00\xa0(UTC+8)" in one or "16:00\\xa0(UTC+8)" in one for one in told), told


def test_p047_no_sweep_for_ten_minutes_is_told_and_schedules_know_no_clock_change(team, settings):
    assert all(isinstance(entry["schedule"], float) for entry in settings.CELERY_BEAT_SCHEDULE.values())
    chief = build.user(language="en")
    build.role(chief, "pool_admin")
    with at(0), task_run("quotas.sweep_queue"):
        pass
    with at(590):
        assert "No periodic work" not in page_of(chief, "/operations/")
    with at(601):
        assert "No periodic work since" in page_of(chief, "/operations/")
        assert sweep_last() == moment(0)

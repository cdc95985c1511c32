"""Who may speak for a node, and which cards it may speak for."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pool.models import AgentToken, AllocationEvent, Gpu, Node
from pool.services.enrolment import agent_token_revoke, enrolment_code_create
from portal.kernel.clock import now
from portal.ops.actor import SYSTEM
from portal.ops.models import AuditEvent, Incident
from tests.pool.agent.builders import allocation
from tests.pool.agent.conftest import FakeNvml, Process, Site, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


def test_a_code_works_once(agent: Process, site: Site, code: str) -> None:
    assert agent.command("enrol", code, "--url", site.url).returncode == 0
    again = agent.command("enrol", code, "--url", site.url)
    assert again.returncode == 1 and "used before" in again.stderr
    wrong = agent.command("enrol", "AAAA-BBBB-CCCC-DDDD", "--url", site.url)
    assert wrong.returncode == 1 and "HTTP 403" in wrong.stderr
    assert AgentToken.objects.count() == 1


def test_an_expired_code_is_refused_and_makes_no_node(agent: Process, site: Site) -> None:
    code = enrolment_code_create(acting_user=SYSTEM, valid_for=timedelta(seconds=1))
    from pool.models import AgentEnrolment

    AgentEnrolment.objects.update(expires_at=now() - timedelta(seconds=1))
    answer = agent.command("enrol", code, "--url", site.url)
    assert answer.returncode == 1 and "no longer valid" in answer.stderr
    assert not Node.objects.exists()


def test_a_wrong_token_is_refused_in_words(enrolled: Process, site: Site) -> None:
    from pool.agent import config

    settings = config.load(str(enrolled.state))
    settings.token = "gpn_wrong"
    config.save(str(enrolled.state), settings)
    enrolled.start()
    status = wait_for(lambda: enrolled.status() if enrolled.status().get("refusal") else None)
    assert status["refusal"]["code"] == "token_unknown" and status["connected"] is False
    assert Node.objects.get().health == "unknown" and not Gpu.objects.exists()


def test_a_revoked_token_disconnects_at_once_and_stays_out(online: Process, site: Site) -> None:
    node = Node.objects.get()
    assert agent_token_revoke(acting_user=SYSTEM, node=node, reason="stolen") == 1
    status = wait_for(lambda: enrolled_status(online))
    assert status["refusal"]["code"] == "token_revoked"
    assert AuditEvent.objects.filter(action="agent.token_revoked").exists()


def enrolled_status(agent: Process) -> dict | None:
    status = agent.status()
    return status if status.get("refusal") and not status["connected"] else None


def test_another_machines_token_is_refused_and_opens_an_incident(enrolled: Process) -> None:
    Node.objects.update(machine_id="another-machine")
    enrolled.start()
    status = wait_for(lambda: enrolled.status() if enrolled.status().get("refusal") else None)
    assert status["refusal"]["code"] == "token_of_another_node"
    assert Incident.objects.get().kind == "agent_token_stolen"
    assert not Gpu.objects.exists()


def test_a_card_of_a_living_node_is_refused_to_another(online: Process, site: Site, nvml: FakeNvml) -> None:
    first = Node.objects.get()
    other = Node.objects.create(
        name="other", cluster=first.cluster, health="ok", last_heartbeat_at=now() + timedelta(minutes=5)
    )
    Gpu.objects.create(uuid="GPU-theirs", node=other, index=0, model_name="A100")
    nvml.set(gpu_1_uuid="GPU-theirs")
    online.end()
    online.start()
    wait_for(lambda: Incident.objects.filter(kind="gpu_uuid_twice").exists())
    assert Gpu.objects.get(uuid="GPU-theirs").node == other


def test_a_card_that_moved_follows_its_uuid(online: Process, nvml: FakeNvml) -> None:
    first = Node.objects.get()
    other = Node.objects.create(name="old-home", cluster=first.cluster, health="lost")
    card = Gpu.objects.create(uuid="GPU-moved", node=other, index=3, model_name="A100", condition="vanished")
    nvml.set(count=3, gpu_2_uuid="GPU-moved")
    online.end()
    online.start()
    wait_for(lambda: Gpu.objects.get(pk=card.pk).node == first)
    card.refresh_from_db()
    assert (card.index, card.condition) == (2, "ok")
    assert AuditEvent.objects.filter(action="gpu.moved").exists()


def test_cards_that_change_places_keep_their_identity(online: Process, nvml: FakeNvml) -> None:
    before = {gpu.uuid: gpu.pk for gpu in Gpu.objects.all()}
    nvml.set(gpu_0_uuid="GPU-test-1", gpu_1_uuid="GPU-test-0")
    online.end()
    online.start()
    wait_for(lambda: Gpu.objects.get(uuid="GPU-test-1").index == 0)
    assert {gpu.uuid: gpu.pk for gpu in Gpu.objects.all()} == before


def test_a_leased_card_that_vanishes_keeps_its_row_and_tells_its_holder(
    online: Process, nvml: FakeNvml
) -> None:
    card = Gpu.objects.get(uuid="GPU-test-1")
    member = allocation(Node.objects.get(), "sleep 60", [card])
    nvml.set(count=1)
    wait_for(lambda: Gpu.objects.get(pk=card.pk).condition == "vanished")
    event = AllocationEvent.objects.get(allocation=member.allocation, kind="gpu_vanished")
    assert event.facts["uuid"] == "GPU-test-1"
    incident = Incident.objects.get(kind="gpu_vanished")
    assert incident.facts["leased"] is True
    nvml.set(count=2)
    wait_for(lambda: Gpu.objects.get(pk=card.pk).condition == "ok")
    incident.refresh_from_db()
    assert incident.state == "closed"


def test_a_broken_nvml_is_not_a_lost_card_and_the_agent_lives_on(online: Process, nvml: FakeNvml) -> None:
    """G114: the collector is broken, the cards are not gone."""
    nvml.set(crash=1)
    wait_for(lambda: Incident.objects.filter(kind="nvml_broken", state="open").exists())
    assert online.process is not None and online.process.poll() is None
    assert set(Gpu.objects.values_list("condition", flat=True)) == {"ok"}
    nvml.set(crash=None)
    wait_for(lambda: Incident.objects.filter(kind="nvml_broken", state="closed").exists())


def test_processes_without_a_lease_are_reported_and_forgotten_when_they_go(
    online: Process, nvml: FakeNvml
) -> None:
    import os

    nvml.set(gpu_0_proc=f"{os.getpid()}:2147483648")
    found = wait_for(lambda: Gpu.objects.get(uuid="GPU-test-0").foreign_use)
    assert found[0]["pid"] == os.getpid() and found[0]["mem_mib"] == 2048 and "args" not in found[0]
    nvml.set(gpu_0_proc=None)
    wait_for(lambda: Gpu.objects.get(uuid="GPU-test-0").foreign_use == [])


def test_an_agent_that_was_refused_takes_up_the_token_of_a_new_enrolment(
    online: Process, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node.objects.get()
    agent_token_revoke(acting_user=SYSTEM, node=node, reason="lost")
    wait_for(lambda: enrolled_status(online))
    online.end()
    again = enrolment_code_create(acting_user=SYSTEM, node=node)
    online.environment["GPUPOOL_AGENT_REFUSED_SECONDS"] = "1"
    online.start()
    wait_for(lambda: enrolled_status(online))
    assert online.command("enrol", again, "--url", site.url).returncode == 0
    wait_for(lambda: online.status()["connected"])
    assert Node.objects.count() == 1 and AgentToken.objects.filter(revoked_at=None).count() == 1

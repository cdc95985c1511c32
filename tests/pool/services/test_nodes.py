"""What people decide about nodes and cards."""

from __future__ import annotations

import pytest

from pool.models import Gpu, Node
from pool.selectors.pages import pool_figures
from pool.services import conditions, nodes
from pool.services.fleet_import import fleet_import, fleet_plan
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import system
from portal.ops.models import AuditEvent, Incident, OutboxEvent
from quotas.models import FlavourCapacity
from tests.portal.builders import actor, admin, client_of, person

pytestmark = pytest.mark.django_db
SYSTEM = system("test")


@pytest.fixture
def node() -> Node:
    text = "node_id,cpu_milli,memory_mib,gpu,model\nn1,96000,786432,4,A10\n"
    fleet_import(acting_user=SYSTEM, plan=fleet_plan(content=text.encode(), filename="n.csv"))
    Node.objects.update(health="ok")
    from pool.services.capacity import capacity_refresh

    capacity_refresh()
    return Node.objects.get()


def healthy() -> int:
    return FlavourCapacity.objects.get().healthy_milli


def test_cordon_needs_a_reason_is_audited_and_takes_capacity_away(node: Node) -> None:
    chief = actor(admin())
    assert healthy() == 4000
    with pytest.raises(Invalid):
        nodes.node_cordon(acting_user=chief, node=node, reason="  ")
    assert Node.objects.get().schedulable == "open"
    nodes.node_cordon(acting_user=chief, node=node, reason="replace GPU 2")
    row = Node.objects.get()
    assert (row.schedulable, row.schedulable_reason, row.version) == ("cordoned", "replace GPU 2", 2)
    assert healthy() == 0
    assert AuditEvent.objects.get(action="node.cordoned").before == {"schedulable": "open"}
    assert OutboxEvent.objects.filter(topic="pool.node_state").count() == 1
    with pytest.raises(Conflict):
        nodes.node_cordon(acting_user=chief, node=row, reason="again")
    assert AuditEvent.objects.filter(action="node.cordoned").count() == 1
    nodes.node_uncordon(acting_user=chief, node=row, reason="done")
    assert healthy() == 4000


def test_people_without_the_role_change_nothing(node: Node) -> None:
    for act in (nodes.node_cordon, nodes.node_retire):
        with pytest.raises(Refused):
            act(acting_user=actor(person()), node=node, reason="x")
    with pytest.raises(Refused):
        conditions.gpu_cordon(acting_user=actor(person()), gpu=node.gpus.first(), cordoned=True, reason="x")
    assert Node.objects.get().schedulable == "open"
    assert not Gpu.objects.filter(cordoned=True).exists()


def test_condition_opens_one_incident_and_closes_it(node: Node) -> None:
    gpu = node.gpus.order_by("index").first()
    assert gpu is not None
    assert conditions.gpu_condition_set(acting_user=SYSTEM, gpu=gpu, condition="fault", reason="xid_79")
    assert not conditions.gpu_condition_set(acting_user=SYSTEM, gpu=gpu, condition="fault", reason="xid_79")
    incident = Incident.objects.get(kind="gpu_fault")
    assert (incident.state, incident.severity, incident.facts["index"]) == ("open", "critical", 0)
    assert healthy() == 3000
    conditions.gpu_condition_set(acting_user=SYSTEM, gpu=gpu, condition="ok")
    assert Incident.objects.get().state == "closed"
    assert healthy() == 4000


def test_pool_figures_add_up_to_what_is_installed(node: Node) -> None:
    first, second, third, _fourth = node.gpus.order_by("index")
    conditions.gpu_condition_set(acting_user=SYSTEM, gpu=first, condition="fault", reason="xid_79")
    conditions.gpu_cordon(acting_user=SYSTEM, gpu=second, cordoned=True, reason="x")
    conditions.gpu_foreign_use_set(
        gpu=third, processes=[{"pid": 1, "name": "python", "user": "bob", "mem_mib": 9}]
    )
    figures = pool_figures()
    assert figures == {
        "installed": 4000,
        "allocated": 0,
        "free": 1000,
        "maintenance": 1000,
        "down": 1000,
        "foreign": 1000,
    }
    assert Incident.objects.filter(kind="foreign_use", state="open").count() == 1


def test_decisions_are_made_by_post_only(node: Node) -> None:
    client = client_of(admin())
    address = f"/nodes/{node.uid}/cordon/"
    assert client.get(address).status_code == 405
    assert Node.objects.get().schedulable == "open"
    assert client.post(address, {"reason": "because"}).status_code == 302
    assert Node.objects.get().schedulable == "cordoned"
    other = client_of(person())
    other.post(f"/nodes/{node.uid}/uncordon/", {"reason": "x"})
    assert Node.objects.get().schedulable == "cordoned"

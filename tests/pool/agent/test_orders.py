"""What an agent is told to run, and how often an order is one order."""

from __future__ import annotations

import pytest
from django.test import Client, RequestFactory
from django.urls import get_script_prefix, set_script_prefix

from pool.executors.agent.spec import start_spec
from pool.executors.base import RetryableFailure, TerminalFailure, executor_for
from pool.models import AgentCommand, AllocationMember, Cluster, Gpu, Lease, MigSlice, Node, Site
from pool.services.commands import command_acked, command_send
from pool.web.agent_views import addresses
from portal.kernel.clock import now
from tests.pool.agent.builders import allocation

pytestmark = pytest.mark.django_db


@pytest.fixture
def node() -> Node:
    site = Site.objects.create(code="s", name="S")
    cluster = Cluster.objects.create(code="c", name="C", site=site)
    return Node.objects.create(name="n1", cluster=cluster, hostname="n1.example", last_heartbeat_at=now())


def card(node: Node, index: int) -> Gpu:
    return Gpu.objects.create(
        uuid=f"GPU-{index}", node=node, index=index, model_name="A100", pci_bus_id=f"0000:{9 - index}0:00.0"
    )


def test_devices_are_told_in_the_order_of_the_bus(node: Node) -> None:
    member = allocation(node, "run me", [card(node, 0), card(node, 1)], environment={"N": 1})
    spec = start_spec(member)
    assert spec["gpu_uuids"] == ["GPU-1", "GPU-0"] and spec["charge_milli"] == 2000
    known = {"N": "1", "GPUPOOL_REQUEST": member.allocation.request.ref}
    assert (spec["command"], spec["hold"], spec["env"]) == ("run me", False, known)
    assert spec["system_account"] == "nobody" and spec["rendezvous"] is None


def test_a_fraction_tells_its_share_and_its_memory(node: Node) -> None:
    member = allocation(node, "x")
    Lease.objects.create(
        allocation=member.allocation, gpu=card(node, 0), charge=250, memory_mib=20480, started_at=now()
    )
    spec = start_spec(member)
    assert (spec["charge_milli"], spec["gpu_mem_limit_mib"], spec["gpu_uuids"]) == (250, 20480, ["GPU-0"])


def test_mig_slices_are_told_by_their_own_uuids_and_looked_at_by_them(node: Node) -> None:
    gpu = card(node, 0)
    member = allocation(node, "x")
    for start in (4, 0):
        part = MigSlice.objects.create(
            gpu=gpu, uuid=f"MIG-{start}", profile="3g.40gb", gpu_instance=start, start=start, size=4
        )
        Lease.objects.create(
            allocation=member.allocation, gpu=gpu, mig_slice=part, charge=428, started_at=now()
        )
    spec = start_spec(member)
    assert spec["mig_uuids"] == ["MIG-0", "MIG-4"] and spec["gpu_uuids"] == ["GPU-0"]
    executor_for(node.cluster).release(member=member)
    assert set(AgentCommand.objects.get(kind="check_free").payload["gpu_uuids"]) == {"MIG-0", "MIG-4"}


def test_a_gang_meets_at_its_first_member(node: Node) -> None:
    member = allocation(node, "torchrun train.py", [card(node, 0)])
    second = Node.objects.create(name="n2", cluster=node.cluster, last_heartbeat_at=now())
    other = AllocationMember.objects.create(allocation=member.allocation, number=1, node=second)
    first_spec, second_spec = start_spec(member)["rendezvous"], start_spec(other)["rendezvous"]
    assert first_spec["master_addr"] == second_spec["master_addr"] == "n1.example"
    assert first_spec["master_port"] == second_spec["master_port"] >= 20000
    assert (first_spec["node_rank"], second_spec["node_rank"], second_spec["nnodes"]) == (0, 1, 2)


def test_what_a_plain_node_cannot_run_is_terminal_and_an_absent_agent_is_not(node: Node) -> None:
    with pytest.raises(TerminalFailure, match="image_not_supported"):
        start_spec(allocation(node, "", run_kind="image", image="pytorch:2"))
    with pytest.raises(TerminalFailure, match="nothing_to_run"):
        start_spec(allocation(node, "  \n"))
    Node.objects.update(last_heartbeat_at=None)
    member = AllocationMember.objects.select_related("node").last()
    assert member is not None
    with pytest.raises(RetryableFailure, match="agent_away"):
        executor_for(node.cluster).start(member=member)
    assert not AgentCommand.objects.exists()


def test_an_order_is_one_however_often_it_is_given_and_a_stop_withdraws_a_start(node: Node) -> None:
    member = allocation(node, "x")
    common = {"node": node, "allocation": member.allocation}
    first = command_send(kind="start", **common)
    assert command_send(kind="start", **common) == first
    stop = command_send(kind="stop", payload={"grace_s": 5}, **common)
    first.refresh_from_db()
    assert first.cancelled_at is not None
    other = Node.objects.create(name="n2", cluster=node.cluster)
    assert not command_acked(node_id=other.pk, uid=str(stop.uid)), "another node cannot acknowledge it"
    assert command_acked(node_id=node.pk, uid=str(stop.uid)) and not command_acked(
        node_id=node.pk, uid=str(stop.uid)
    )
    again = command_send(kind="stop", payload={"grace_s": 0}, **common)
    again.refresh_from_db()
    assert again == stop and again.acked_at is None and again.payload == {"grace_s": 0}


def test_enrolment_over_http_refuses_nonsense_with_problems(client: Client) -> None:
    for body in (b"", b"[]", b'{"code": "X"}', b'{"code": "X", "hostname": "h", "facts": 5}'):
        answer = client.post("/agent/enrol/", body, content_type="application/json")
        assert answer.status_code == 400 and answer["Content-Type"] == "application/problem+json"
    body = b'{"code": "AAAA-BBBB-CCCC-DDDD", "hostname": "h"}'
    answer = client.post("/agent/enrol/", body, content_type="application/json")
    assert answer.status_code == 403 and answer.json()["code"] == "enrolment_code_unknown"
    assert client.get("/agent/enrol/").status_code == 405
    assert client.post("/agent/enrol/", b"x" * 70_000, content_type="application/json").status_code == 413


def test_the_file_and_its_installer_are_served(client: Client) -> None:
    answer = client.get("/agent/agent.pyz")
    assert (
        answer.content.startswith(b"#!/usr/bin/env python3") and "agent.pyz" in answer["Content-Disposition"]
    )
    assert client.get("/agent/agent.pyz", headers={"if-none-match": answer["ETag"]}).status_code == 304
    script = client.get("/agent/install.sh").content.decode()
    assert answer["ETag"].strip('"') in script and "systemd-unit" in script


def test_a_path_prefix_is_kept_in_the_sockets_address() -> None:
    before = get_script_prefix()
    set_script_prefix("/gpu/pool/")
    try:
        request = RequestFactory().post("/agent/enrol/", secure=True, headers={"host": "testserver"})
        assert addresses(request) == ("https://testserver/gpu/pool", "wss://testserver/gpu/pool/agent/ws/")
    finally:
        set_script_prefix(before)

"""The agent socket against agents that are wrong, late, twice, or somebody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pool.agent import ws
from pool.models import (
    AgentCommand,
    AgentToken,
    Allocation,
    AllocationEvent,
    AllocationLog,
    AllocationMember,
    Gpu,
    Node,
)
from pool.services.commands import command_send
from portal.kernel.clock import now
from portal.ops.models import Incident
from tests.pool.agent.builders import allocation
from tests.pool.live.conftest import Voice, say, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations do not follow here; that has tests of its own."""
    monkeypatch.setattr("pool.services.member_reports._follow", lambda member, **what: None)


async def closed(socket: ws.WebSocket) -> int:
    while True:
        try:
            await socket.receive()
        except ws.Closed as error:
            return error.code


def test_without_a_token_with_a_wrong_one_and_before_hello_nothing_is_taken(alpha: Voice) -> None:
    async def refused(socket: ws.WebSocket) -> tuple[str, int]:
        message = await until(socket, "refused")
        return message["code"], await closed(socket)

    assert alpha.talk(refused, token="") == ("token_unknown", 4401)
    assert alpha.talk(refused, token="gpn_nonsense") == ("token_unknown", 4401)

    async def early(socket: ws.WebSocket) -> int:
        await socket.send(json.dumps({"t": "job", "seq": 1}))
        return await closed(socket)

    async def garbage(socket: ws.WebSocket) -> int:
        await socket.send("{not json")
        return await closed(socket)

    assert alpha.talk(early) == 4400 and alpha.talk(garbage) == 4400
    assert not Gpu.objects.exists() and Node.objects.get(name="alpha").health == "unknown"


def test_a_message_that_comes_twice_counts_once(alpha: Voice) -> None:
    member = allocation(alpha.node)
    uid = str(member.allocation.uid)

    async def twice(socket: ws.WebSocket) -> None:
        await alpha.greet(socket)
        for _ in range(2):
            running = {"t": "job", "seq": 10, "allocation": uid, "member": 0, "state": "running", "pid": 7}
            assert await say(socket, **running) == {"t": "ack", "seq": 10}
            assert await say(socket, t="log", seq=11, allocation=uid, member=0, offset=0, size=2, data="a\0")
        assert await say(socket, t="log", seq=12, allocation=uid, member=0, offset=0, size=1, data="other")

    alpha.talk(twice)
    assert [piece.data for piece in AllocationLog.objects.all()] == ["a\ufffd"]
    assert AllocationEvent.objects.filter(kind="member_running").count() == 1
    assert AllocationMember.objects.get(pk=member.pk).state == "running"


def test_a_node_cannot_speak_of_another_nodes_allocation_or_of_none(alpha: Voice, beta: Voice) -> None:
    member = allocation(alpha.node)
    uid = str(member.allocation.uid)

    async def lie(socket: ws.WebSocket) -> None:
        await beta.greet(socket)
        for seq, name in enumerate((uid, "018f0000-0000-7000-8000-000000000000", "no uuid", None), start=1):
            common = {"allocation": name, "member": 0}
            assert await say(socket, t="job", seq=seq * 10, state="exited", exit_code=0, **common)
            assert await say(socket, t="log", seq=seq * 10 + 1, offset=0, data="lie", **common)
            assert await say(socket, t="free", seq=seq * 10 + 2, gpus={"GPU-alpha": {"free": True}}, **common)

    beta.talk(lie)
    member.refresh_from_db()
    assert member.state == "reserved" and not AllocationLog.objects.exists()
    assert not Gpu.objects.filter(uuid="GPU-alpha").exists()


def test_orders_wait_for_the_agent_are_sent_again_and_end_with_its_acknowledgement(alpha: Voice) -> None:
    member = allocation(alpha.node)
    command_send(
        node=alpha.node, kind="start", allocation=member.allocation, payload={"spec": {"hold": True}}
    )

    async def take(socket: ws.WebSocket, acknowledge: bool) -> dict:
        await alpha.greet(socket)
        order = await until(socket, "start")
        if acknowledge:
            await say(socket, t="command_ack", command=order["command"])
            await say(socket, t="log", seq=1, allocation="x", offset=0, data="")  # taken after it, in order
        return order

    first = alpha.talk(lambda socket: take(socket, False))
    again = alpha.talk(lambda socket: take(socket, True))
    assert first == again and first["spec"] == {"hold": True}

    async def nothing_more(socket: ws.WebSocket) -> None:
        await alpha.greet(socket)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(until(socket, "start"), 1)

    alpha.talk(nothing_more)


def test_a_poke_reaches_an_open_connection_at_once(alpha: Voice) -> None:
    member = allocation(alpha.node)

    async def wait(socket: ws.WebSocket) -> float:
        await alpha.greet(socket)
        loop = asyncio.get_running_loop()
        send = loop.run_in_executor(None, lambda: stop_now(member))
        began = loop.time()
        await until(socket, "stop")
        took = loop.time() - began
        await send
        return took

    assert alpha.talk(wait) < 2


async def beside(what: Callable[[], Any]) -> None:
    """Do something with the database in a thread and on a connection of its own."""

    def run() -> None:
        from django.db import connection

        what()
        connection.close()

    await asyncio.get_running_loop().run_in_executor(None, run)


def stop_now(member: AllocationMember) -> None:
    from django.db import connection

    command_send(node=member.node, kind="stop", allocation=member.allocation, payload={"grace_s": 1})
    connection.close()


async def beat(socket: ws.WebSocket, seq: int) -> list[dict]:
    """A heartbeat and a durable message behind it: what was said before that was acknowledged."""
    await socket.send(json.dumps({"t": "heartbeat"}))
    xid = {"kind": "xid", "at": None, "gpu_uuid": None, "data": {"xid": 31}}
    await socket.send(json.dumps({"t": "event", "seq": seq, **xid}))
    found = []
    while (message := json.loads(await socket.receive()))["t"] != "ack":
        found.append(message)
    assert message["seq"] == seq
    return found


def test_an_order_whose_poke_was_lost_comes_with_the_next_heartbeat_and_again_only_when_unanswered(
    alpha: Voice, beta: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.services.commands.node_poke", lambda *what: None)
    member = allocation(alpha.node)

    async def talk(socket: ws.WebSocket) -> None:
        await alpha.greet(socket)
        headers = {"Authorization": f"Bearer {beta.token}"}
        other = await ws.connect(f"ws://127.0.0.1:{alpha.site.port}/agent/ws/", headers)
        await beta.greet(other)
        assert await asyncio.gather(beat(socket, 1), beat(other, 1)) == [[], []]
        await beside(lambda: command_send(node=alpha.node, kind="start", allocation=member.allocation))
        told, others = await asyncio.gather(beat(socket, 2), beat(other, 2))
        assert [order["t"] for order in told] == ["start"] and others == []
        assert told[0]["allocation"] == str(member.allocation.uid)
        assert await beat(socket, 3) == [] and await beat(socket, 4) == []  # it has time to answer
        assert await beat(socket, 5) == told
        await beside(lambda: command_send(node=alpha.node, kind="stop", allocation=member.allocation))
        stop = await beat(socket, 6)
        assert [order["t"] for order in stop] == ["stop"]  # and the start is withdrawn
        await say(socket, t="command_ack", command=stop[0]["command"])
        for seq in range(7, 10):
            assert await beat(socket, seq) == []
        other.abort()

    alpha.talk(talk)
    assert AgentCommand.objects.get(kind="start").attempts == 2
    assert AgentCommand.objects.get(kind="stop").acked_at is not None


def test_a_heartbeat_with_a_token_that_ended_is_refused_and_given_no_order(
    alpha: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.services.commands.node_poke", lambda *what: None)
    member = allocation(alpha.node)

    async def talk(socket: ws.WebSocket) -> list[dict]:
        await alpha.greet(socket)
        assert await beat(socket, 1) == []  # what follows a hello is over
        await beside(lambda: command_send(node=alpha.node, kind="start", allocation=member.allocation))
        await beside(lambda: AgentToken.objects.update(revoked_at=now()))  # and no poke tells of it
        await socket.send(json.dumps({"t": "heartbeat"}))
        found = []
        with pytest.raises(ws.Closed) as ended:
            while True:
                found.append(json.loads(await socket.receive()))
        assert ended.value.code == 4403
        return found

    assert [message["t"] for message in alpha.talk(talk)] == ["refused"]
    assert AgentCommand.objects.get().sent_at is None


def test_a_second_connection_of_a_node_replaces_the_first(alpha: Voice) -> None:
    async def both(first: ws.WebSocket) -> int:
        await alpha.greet(first)
        headers = {"Authorization": f"Bearer {alpha.token}"}
        second = await ws.connect(f"ws://127.0.0.1:{alpha.site.port}/agent/ws/", headers)
        await alpha.greet(second)
        code = await closed(first)
        assert await say(
            second, t="event", seq=5, kind="xid", at=None, gpu_uuid="GPU-alpha", data={"xid": 31}
        )
        second.abort()
        return code

    assert alpha.talk(both) == 4409


def test_a_lost_node_that_is_back_with_a_job_given_up_is_told_to_stop_it(alpha: Voice) -> None:
    member = allocation(alpha.node)
    AllocationMember.objects.update(state="lost")
    Allocation.objects.update(state="stopping")
    Node.objects.filter(pk=alpha.node.pk).update(health="lost")
    uid = str(member.allocation.uid)

    async def back(socket: ws.WebSocket) -> dict:
        alpha.hello["jobs"] = [{"allocation": uid, "member": 0, "state": "running", "pid": 7}]
        await alpha.greet(socket)
        order = await until(socket, "stop")
        ended = {"t": "job", "seq": 3, "allocation": uid, "member": 0, "state": "exited", "signal": 15}
        await say(socket, **ended)
        return order

    assert alpha.talk(back)["allocation"] == uid
    member.refresh_from_db()
    assert member.state == "exited" and member.exit_signal == 15
    assert Node.objects.get(pk=alpha.node.pk).health == "ok"


def test_a_mig_layout_that_changed_keeps_the_history_of_the_old_slices(alpha: Voice) -> None:
    """G091, G103: the layout is what was read last, whatever it was before a boot."""

    def slices(*uuids: str) -> dict:
        parts = [
            {
                "uuid": uuid,
                "profile": "1g.10gb",
                "gi": 7 + n,
                "ci": 0,
                "start": n,
                "size": 1,
                "memory_mib": 9984,
            }
            for n, uuid in enumerate(uuids)
        ]
        return {"capable": True, "enabled": True, "slices": parts}

    for uuids in (("MIG-1", "MIG-2"), ("MIG-3",)):
        alpha.hello["gpus"][0]["mig"] = slices(*uuids)
        alpha.talk(alpha.greet)
    card = Gpu.objects.get()
    assert card.mig_enabled
    assert {row.uuid: row.gone_at is not None for row in card.mig_slices.all()} == {
        "MIG-1": True,
        "MIG-2": True,
        "MIG-3": False,
    }


def test_nonsense_in_a_durable_message_is_noted_and_does_not_block_the_next(alpha: Voice) -> None:
    member = allocation(alpha.node)
    uid = str(member.allocation.uid)

    async def talk(socket: ws.WebSocket) -> None:
        await alpha.greet(socket)
        bad = {"t": "job", "seq": 1, "allocation": uid, "member": 0, "state": "running"}
        assert await say(socket, **bad, pid=10**15)
        assert await say(socket, t="free", seq=2, allocation=uid, member=0, gpus=["not", "a", "map"])
        assert await say(socket, t="job", seq=3, allocation=uid, member=0, state="running", pid=7)

    alpha.talk(talk)
    member.refresh_from_db()
    assert (member.state, member.pid) == ("running", 7)
    incident = Incident.objects.get(kind="agent_message_bad")
    assert incident.occurrences == 2


def test_imported_cards_are_confirmed_one_by_one_and_phantoms_are_not_placed_on(alpha: Voice) -> None:
    for index in range(2):
        Gpu.objects.create(uuid=f"IMPORT-alpha-{index}", node=alpha.node, index=index, model_name="V100")
    first = Gpu.objects.get(index=0)
    alpha.hello["facts"]["nvml"] = {"ok": False, "reason": "no_driver"}
    cards = alpha.hello.pop("gpus")
    alpha.talk(alpha.greet)
    assert set(Gpu.objects.values_list("condition", "condition_reason")) == {("suspect", "not_confirmed")}
    alpha.hello.update(gpus=cards, facts={"nvml": {"ok": True, "reason": None}})
    alpha.talk(alpha.greet)
    first.refresh_from_db()
    assert (first.uuid, first.condition, first.model_name) == ("GPU-alpha", "ok", "NVIDIA A100-SXM4-80GB")
    assert first.flavour is not None and first.flavour.memory_mib == 81920
    assert Gpu.objects.get(uuid="IMPORT-alpha-1").condition == "vanished"

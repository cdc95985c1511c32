"""Heartbeats in groups: who is stamped at once, whom the single way has to judge, and which orders each is given."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection
from django.test.utils import CaptureQueriesContext

from pool.live.heartbeats import group_answers, heartbeat
from pool.models import AgentCommand, AgentToken, Node
from pool.services.agent_inbox import agent_heartbeats
from portal.kernel.clock import now
from portal.kernel.errors import Refused
from tests.pool import builders as b


def scene() -> dict[str, tuple[int, int]]:
    """Nodes last heard of two minutes ago, with a token each: (node, token) by name."""
    beats = {}
    for number, name in enumerate(("one", "two", "lost", "revoked")):
        node = b.node(
            None,
            name=name,
            health="lost" if name == "lost" else "ok",
            last_heartbeat_at=now() - timedelta(minutes=2),
        )
        ended = now() if name == "revoked" else None
        token = AgentToken.objects.create(node=node, hash=f"{number:064d}", revoked_at=ended)
        beats[name] = (node.pk, token.pk)
    return beats


def heard() -> set[str]:
    """Names of the nodes heard of within the last minute."""
    fresh = Node.objects.filter(last_heartbeat_at__gt=now() - timedelta(minutes=1))
    return set(fresh.values_list("name", flat=True))


@pytest.mark.django_db
def test_a_group_stamps_whom_it_can_and_names_the_others() -> None:
    beats = scene()
    foreign = (beats["one"][0], beats["two"][1])  # another node's token
    assert agent_heartbeats(beats=[*beats.values(), foreign]) == {beats["one"], beats["two"]}
    assert heard() == {"one", "two"}


@pytest.mark.django_db(transaction=True)
async def test_one_of_a_group_that_is_refused_or_was_lost_is_judged_alone() -> None:
    beats = await sync_to_async(scene)()
    told = await asyncio.gather(*(heartbeat(*beat) for beat in beats.values()), return_exceptions=True)
    assert told[:3] == [[], [], []]
    assert isinstance(told[3], Refused) and told[3].code == "token_revoked"
    assert await sync_to_async(heard)() == {"one", "two", "lost"}
    assert (await Node.objects.aget(name="lost")).health == "ok"


def order(node_id: int, kind: str = "layout", **values: Any) -> AgentCommand:
    return AgentCommand.objects.create(node_id=node_id, kind=kind, **values)


@pytest.mark.django_db
def test_a_group_gives_each_node_its_own_open_orders_and_nobody_those_of_an_ended_token() -> None:
    beats = scene()
    one, two, revoked = beats["one"], beats["two"], beats["revoked"]
    first, _, second = order(one[0]), order(revoked[0]), order(one[0])
    order(one[0], acked_at=now())
    order(one[0], cancelled_at=now())
    order(beats["lost"][0])
    foreign = (two[0], one[1])  # another node's token
    assert group_answers([*beats.values(), foreign]) == {one: [first, second], two: []}


@pytest.mark.django_db
def test_of_orders_without_number_the_oldest_of_each_node_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.selectors.agents.MOST_COMMANDS", 2)
    beats = scene()
    mine = [order(beats["one"][0]) for _ in range(3)]
    other = order(beats["two"][0])
    answers = group_answers([beats["one"], beats["two"]])
    assert answers == {beats["one"]: mine[:2], beats["two"]: [other]}


@pytest.mark.django_db
def test_a_group_asks_as_little_for_many_agents_with_orders_as_for_one() -> None:
    beats = []
    for number in range(25):
        node = b.node(None, name=f"many-{number}")
        beats.append((node.pk, AgentToken.objects.create(node=node, hash=f"{number:064d}").pk))
        order(node.pk)

    def queries(group: list[tuple[int, int]]) -> list[str]:
        with CaptureQueriesContext(connection) as asked:
            assert [len(orders) for orders in group_answers(group).values()] == [1] * len(group)
        return [query["sql"].split()[0] for query in asked.captured_queries]

    # The transaction (a savepoint, in a test): tokens, nodes, stamps; then the orders.
    assert queries(beats[:1]) == ["SAVEPOINT", "SELECT", "SELECT", "UPDATE", "RELEASE", "SELECT"]
    assert queries(beats) == queries(beats[:1])


@pytest.mark.django_db(transaction=True)
async def test_whom_the_single_way_stamps_is_given_its_orders_too_and_who_is_refused_none() -> None:
    beats = await sync_to_async(scene)()
    made = {name: await sync_to_async(order)(beat[0]) for name, beat in beats.items() if name != "two"}
    twice = [*beats.values(), beats["one"]]  # a connection that was replaced beats beside the new one
    told = await asyncio.gather(*(heartbeat(*beat) for beat in twice), return_exceptions=True)
    assert told[:3] == [[made["one"]], [], [made["lost"]]] and told[4] == told[0]
    assert isinstance(told[3], Refused) and told[3].code == "token_revoked"

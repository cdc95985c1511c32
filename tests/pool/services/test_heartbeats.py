"""Heartbeats in groups: who is stamped at once, and whom the single way has to judge."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async

from pool.live.heartbeats import heartbeat
from pool.models import AgentToken, Node
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
    assert told[:3] == [None] * 3
    assert isinstance(told[3], Refused) and told[3].code == "token_revoked"
    assert await sync_to_async(heard)() == {"one", "two", "lost"}
    assert (await Node.objects.aget(name="lost")).health == "ok"

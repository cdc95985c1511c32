"""Letting a machine in: a one-time code becomes a node and its token; both are kept as hashes only."""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.models import AgentEnrolment, AgentToken, Cluster, Node, Site
from pool.selectors.agents import secret_hash
from pool.services.commands import node_poke
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record

VALID_FOR = timedelta(hours=24)
NODE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")
DEFAULT_CLUSTER = "agents"


@dataclass(frozen=True)
class Enrolled:
    """What a machine gets for its code. `token` exists here in clear text for the only time."""

    node: Node
    token: str


def _may_administer(actor: Actor) -> None:
    if not actor.is_system:
        policy = policy_of(actor.user)
        policy.require(policy.administers_pool)


def _code() -> str:
    """80 random bits in four groups that can be read out over a telephone."""
    text = base64.b32encode(secrets.token_bytes(10)).decode()
    return "-".join(text[start : start + 4] for start in range(0, 16, 4))


def default_cluster() -> Cluster:
    """The cluster of plain Linux nodes that a code without a choice leads to; made with a site when
    missing."""
    found = Cluster.objects.filter(executor=Cluster.Executor.AGENT).order_by("id").first()
    if found is not None:
        return found
    site = Site.objects.order_by("position", "id").first()
    if site is None:
        site, _made = Site.objects.get_or_create(code="main", defaults={"name": "Main site"})
    cluster, _made = Cluster.objects.get_or_create(
        code=DEFAULT_CLUSTER, defaults={"name": "Nodes with agents", "site": site}
    )
    return cluster


def enrolment_code_create(
    *,
    acting_user: Actor,
    note: str = "",
    cluster: Cluster | None = None,
    node: Node | None = None,
    node_name: str = "",
    valid_for: timedelta = VALID_FOR,
) -> str:
    """Make a one-time code and return it; only its hash is kept, so it can be shown once.

    `node` ties it to a known node (imported, or to be enrolled again); `node_name` names a new one; with
    neither the machine's host name is taken.
    """
    _may_administer(acting_user)
    if valid_for <= timedelta(0) or valid_for > timedelta(days=30):
        raise Invalid.field("valid_for", _("A code is valid for up to 30 days."))
    code = _code()
    with transaction.atomic():
        row = AgentEnrolment.objects.create(
            code_hash=secret_hash(code),
            cluster=node.cluster if node is not None else cluster or default_cluster(),
            node=node,
            node_name=node_name.strip(),
            expires_at=now() + valid_for,
            made_by_name=acting_user.name,
        )
        audit_record(
            acting_user=acting_user,
            action="agent.code_created",
            subject=row,
            after={"node": node.name if node else node_name, "expires_at": row.expires_at.isoformat()},
            reason=note,
        )
    return code


def _refuse(code: str, detail: Any) -> Refused:
    return Refused(code=code, detail=detail)


def enrolment_redeem(
    *, code: str, hostname: str, machine_id: str, facts: dict[str, Any], address: str | None = None
) -> Enrolled:
    """Exchange a code for a node and its token, once. An older token of the node ends with this.

    Errors: `enrolment_code_unknown`, `enrolment_code_used`, `enrolment_code_expired` (403);
    `node_name_taken` (409) when a living node of another machine has the name.
    """
    hostname = hostname.strip()[:120]
    if not hostname:
        raise Invalid.field("hostname", _("The machine did not say its name."))
    if not NODE_NAME.match(hostname):
        raise Invalid.field("hostname", _("A name of letters, digits, dot, dash and underscore is needed."))
    with transaction.atomic():
        row = (
            AgentEnrolment.objects.select_for_update(of=("self",))
            .select_related("cluster", "node")
            .filter(code_hash=secret_hash(code.strip().upper()))
            .first()
        )
        if row is None:
            raise _refuse("enrolment_code_unknown", _("This code is not known here."))
        if row.used_at is not None:
            raise _refuse("enrolment_code_used", _("This code was used before; a code works once."))
        if row.expires_at <= now():
            raise _refuse("enrolment_code_expired", _("This code is no longer valid."))
        node = _node_for(row, hostname, machine_id)
        AgentToken.objects.filter(node=node, revoked_at=None).update(revoked_at=now())
        token = "gpn_" + secrets.token_urlsafe(32)
        AgentToken.objects.create(node=node, hash=secret_hash(token))
        advance(
            Node.objects.filter(pk=node.pk),
            machine_id=machine_id[:64],
            hostname=hostname,
            last_seq=0,
        )
        advance(AgentEnrolment.objects.filter(pk=row.pk), used_at=now(), node=node)
        audit_record(
            acting_user=system("agent", via="agent"),
            action="node.enrolled",
            subject=node,
            after={"hostname": hostname, "address": address, "code_by": row.made_by_name},
        )
        outbox_add("pool.node_state", {"node": str(node.uid), "change": "enrolled"})
        transaction.on_commit(lambda: node_poke(node.pk, "agent.revoked"))
    node.refresh_from_db()
    return Enrolled(node, token)


def _node_for(row: AgentEnrolment, hostname: str, machine_id: str) -> Node:
    """The node that this code lets in: the named one, the same machine again, an imported one, or a new
    one."""
    if row.node is not None:
        return Node.objects.select_for_update().get(pk=row.node_id)
    again = (
        Node.objects.select_for_update()
        .filter(cluster=row.cluster, hostname=hostname, machine_id=machine_id)
        .exclude(machine_id="")
        .first()
    )
    if again is not None:
        return again
    name = row.node_name or hostname
    known = Node.objects.select_for_update().filter(name=name).first()
    if known is not None:
        if known.machine_id and known.machine_id != machine_id:
            raise Conflict(
                code="node_name_taken",
                detail=_("A node named %(name)s exists on another machine.") % {"name": name},
            )
        return known
    return Node.objects.create(name=name, cluster=row.cluster, hostname=hostname, machine_id=machine_id[:64])


def agent_token_revoke(*, acting_user: Actor, node: Node, reason: str) -> int:
    """End the node's token at once: its agent is disconnected and refused until it enrols again."""
    _may_administer(acting_user)
    with transaction.atomic():
        ended = AgentToken.objects.filter(node=node, revoked_at=None).update(revoked_at=now())
        if ended:
            audit_record(acting_user=acting_user, action="agent.token_revoked", subject=node, reason=reason)
            transaction.on_commit(lambda: node_poke(node.pk, "agent.revoked"))
    return ended

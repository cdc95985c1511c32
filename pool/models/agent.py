"""Node agents: enrolment codes, tokens, and the commands sent to them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from pool.models.allocation import Allocation
from pool.models.place import Cluster, Node
from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class AgentEnrolment(PublicModel):
    """A one-time code that lets one machine in. Only its hash is kept."""

    code_hash = models.CharField(max_length=64, unique=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="enrolments")
    node_name = models.CharField(max_length=120, blank=True, help_text="empty: the machine's host name")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, null=True, blank=True, related_name="enrolments")
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    made_by_name = models.CharField(max_length=200, blank=True)

    def __str__(self) -> str:
        return f"{self.node_name or '?'} until {self.expires_at:%Y-%m-%d %H:%M}"


class AgentToken(models.Model):
    """A node's token (hash only). One valid token per node."""

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="agent_tokens")
    hash = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(default=now)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node"], condition=Q(revoked_at=None), name="agent_token_one_valid"
            ),
        ]

    def __str__(self) -> str:
        return f"token of {self.node}"


class AgentCommand(PublicModel):
    """A command to a node, kept until the agent acknowledged it; at most one per allocation, member and kind."""

    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="commands")
    allocation = models.ForeignKey(
        Allocation, on_delete=models.PROTECT, null=True, blank=True, related_name="commands"
    )
    member = models.PositiveSmallIntegerField(default=0)
    kind = models.CharField(max_length=16, help_text="start, checkpoint, stop, check_free")
    payload = models.JSONField(default=dict)
    sent_at = models.DateTimeField(null=True, blank=True)
    acked_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    attempts = models.PositiveSmallIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["allocation", "member", "kind"],
                condition=Q(kind__in=["start", "stop"]),
                name="agent_command_once",
            ),
        ]
        indexes = [
            models.Index(
                fields=["node", "id"],
                name="agent_command_open",
                condition=Q(acked_at=None, cancelled_at=None),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.allocation}"

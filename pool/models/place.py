"""Where things are: sites, clusters, nodes, what connects them and what they store."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Site(PublicModel):
    """A data centre of the pool."""

    code = models.CharField(_("code"), max_length=48, unique=True)
    name = models.CharField(_("name"), max_length=120)
    time_zone = models.CharField(_("time zone"), max_length=64, default="Asia/Shanghai")
    simulated = models.BooleanField(default=False)
    position = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["position", "name", "id"]

    def __str__(self) -> str:
        return self.name


class Cluster(PublicModel):
    """Nodes that one executor drives."""

    class Executor(models.TextChoices):
        AGENT = "agent", _("Agent")
        SLURM = "slurm", _("Slurm")
        KUBERNETES = "kubernetes", _("Kubernetes")

    code = models.CharField(_("code"), max_length=48, unique=True)
    name = models.CharField(_("name"), max_length=120)
    site = models.ForeignKey(Site, on_delete=models.PROTECT, related_name="clusters")
    executor = models.CharField(max_length=12, choices=Executor.choices, default=Executor.AGENT)
    settings = models.JSONField(default=dict, help_text="never secrets: those are in ClusterCredential")
    looked_at = models.DateTimeField(null=True, blank=True, help_text="last complete look at a polled system")
    away_since = models.DateTimeField(
        null=True, blank=True, help_text="the outside system did not answer since"
    )
    away_code = models.CharField(max_length=64, blank=True)
    away_detail = models.TextField(blank=True)
    foreign_work = models.JSONField(
        default=list, help_text="what runs there and is not of this pool, last look"
    )

    class Meta:
        ordering = ["name", "id"]

    def __str__(self) -> str:
        return self.name


class ClusterCredential(models.Model):
    """What opens an outside system (a token, a kubeconfig), sealed. It is written by people and read by executors
    alone; no page, API, log or export shows it.
    """

    id = models.BigAutoField(primary_key=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="credentials")
    name = models.CharField(max_length=48)
    sealed = models.TextField()
    set_at = models.DateTimeField(default=now)
    set_by_name = models.CharField(max_length=200, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["cluster", "name"], name="credential_once")]

    def __str__(self) -> str:
        return f"{self.cluster} {self.name}"


class Node(PublicModel):
    """A server. `health` is what was seen of it, `schedulable` what people decided about it."""

    class Health(models.TextChoices):
        UNKNOWN = "unknown", _("Never heard of")
        OK = "ok", _("Healthy")
        LATE = "late", _("Heartbeat late")
        SUSPECT = "suspect", _("Suspect")
        LOST = "lost", _("Lost")

    class Schedulable(models.TextChoices):
        OPEN = "open", pgettext_lazy("node", "Open")
        CORDONED = "cordoned", _("Cordoned")
        DRAINING = "draining", _("Draining")
        MAINTENANCE = "maintenance", _("Maintenance")
        RETIRED = "retired", _("Retired")

    name = models.CharField(_("name"), max_length=120, unique=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="nodes")
    hostname = models.CharField(max_length=255, blank=True)
    address = models.CharField(max_length=255, blank=True, help_text="where gang members reach each other")
    machine_id = models.CharField(max_length=64, blank=True)
    cpu_milli = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveIntegerField(default=0)
    os = models.CharField(max_length=120, blank=True)
    kernel = models.CharField(max_length=120, blank=True)
    driver = models.CharField(max_length=32, blank=True)
    cuda = models.CharField(max_length=16, blank=True)
    nvlink_domain = models.CharField(max_length=64, blank=True)
    switch = models.CharField(max_length=64, blank=True)
    rack = models.CharField(max_length=64, blank=True)
    row = models.CharField(max_length=64, blank=True, help_text="of racks: the coarsest part of a site")
    labels = models.JSONField(default=dict)
    facts = models.JSONField(default=dict, help_text="last hello of the agent, without its jobs")
    simulated = models.BooleanField(default=False)
    test_only = models.BooleanField(default=False, help_text="no GPU: offers CPU-only test leases")
    run_as_root = models.BooleanField(null=True, help_text="null: no agent yet")
    agent_user = models.CharField(max_length=64, blank=True)
    agent_version = models.CharField(max_length=32, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    health = models.CharField(max_length=10, choices=Health.choices, default=Health.UNKNOWN)
    health_since = models.DateTimeField(null=True, blank=True)
    last_heartbeat_at = models.DateTimeField(null=True, blank=True)
    last_seq = models.BigIntegerField(default=0, help_text="last durable message taken from the agent")
    clock_skew_ms = models.IntegerField(null=True)
    schedulable = models.CharField(max_length=12, choices=Schedulable.choices, default=Schedulable.OPEN)
    schedulable_reason = models.TextField(blank=True)
    schedulable_since = models.DateTimeField(null=True, blank=True)
    schedulable_by_name = models.CharField(max_length=200, blank=True)
    maintenance_until = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]
        indexes = [models.Index(fields=["cluster", "name"], name="node_cluster")]

    def __str__(self) -> str:
        return self.name

    @property
    def takes_work(self) -> bool:
        """Whether the scheduler may place here. An imported node without an agent is `unknown`: not yet."""
        return self.schedulable == self.Schedulable.OPEN and self.health in (self.Health.OK, self.Health.LATE)


class NodeFabric(models.Model):
    """A network that a node is on: kind and speed are told apart from GPU memory bandwidth and PCIe."""

    class Kind(models.TextChoices):
        NVLINK = "nvlink", "NVLink"
        INFINIBAND = "infiniband", "InfiniBand"
        ROCE = "roce", "RoCE"
        ETHERNET = "ethernet", "Ethernet"

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="fabrics")
    kind = models.CharField(max_length=12, choices=Kind.choices)
    speed_gbit_s = models.PositiveIntegerField()
    ports = models.PositiveSmallIntegerField(default=1)
    domain = models.CharField(
        max_length=64, blank=True, help_text="island: nodes of one kind and domain reach each other"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "kind"], name="fabric_once")]

    def __str__(self) -> str:
        return f"{self.kind} {self.speed_gbit_s} Gbit/s"


class NodeStorage(models.Model):
    """Storage local to or mounted on a node."""

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="storages")
    kind = models.CharField(max_length=24, help_text="nvme, ssd, hdd, nfs, parallel")
    path = models.CharField(max_length=200, blank=True)
    size_gib = models.PositiveIntegerField(default=0)
    read_mib_s = models.PositiveIntegerField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "kind", "path"], name="storage_once")]

    def __str__(self) -> str:
        return f"{self.kind} {self.size_gib} GiB"


class Dataset(PublicModel):
    """A named data set: the site whose nodes all reach it, or only the nodes that have it cached."""

    code = models.CharField(max_length=80, unique=True)
    name = models.CharField(max_length=200)
    size_gib = models.PositiveIntegerField(default=0)
    site = models.ForeignKey(Site, on_delete=models.PROTECT, null=True, blank=True, related_name="datasets")
    location = models.CharField(max_length=300, blank=True)
    cached_on = models.ManyToManyField(Node, blank=True, related_name="cached_datasets")
    department = models.ForeignKey(
        "accounts.Department", on_delete=models.PROTECT, null=True, blank=True, related_name="+"
    )
    retired_at = models.DateTimeField(null=True, blank=True, help_text="no new request may name it")

    class Meta:
        ordering = ["code"]

    def __str__(self) -> str:
        return self.name

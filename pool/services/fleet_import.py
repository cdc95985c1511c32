"""Import a fleet from CSV or XLSX: dry run first, errors by row and column, all or nothing.

Columns (the short form is that of public cluster traces): `node_id` (or `node`), `cpu_milli`, `memory_mib`, `gpu`
(count), `model`; richer ones add `site`, `cluster`, `gpu_memory_mib`, `driver`, `rack`, `switch`, `nvlink_domain`,
`address`, `fabric`, `fabric_gbit_s`, `fabric_domain`, `storage`, `row`. `fabric` is one network, or several as
`infiniband:400:island-a roce:100` (kind, Gbit/s, island); `storage` is one kind or several as `nvme:3500 nfs` (kind,
GiB). An imported node waits for its agent: its GPUs carry a made-up UUID
(`IMPORT-<node>-<index>`) until the agent reports the real ones, and nothing is placed on it before that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from pool.models import AllocationMember, Cluster, Gpu, Node, NodeFabric, NodeStorage, Site
from pool.services.capacity import capacity_refresh
from pool.services.nodes import require_pool_admin
from portal.kernel.errors import FieldProblem, Invalid
from portal.kernel.tabular import Table, read_table
from portal.ops.actor import Actor
from portal.ops.services import audit_record
from quotas.models import GpuFlavour
from quotas.services.flavours import flavour_ensure

REQUIRED = ("cpu_milli", "memory_mib", "gpu", "model")
OPTIONAL = (
    "node_id",
    "node",
    "site",
    "cluster",
    "gpu_memory_mib",
    "driver",
    "rack",
    "switch",
    "nvlink_domain",
    "address",
    "fabric",
    "fabric_gbit_s",
    "fabric_domain",
    "storage",
    "row",
)
PLACES = ("driver", "row", "rack", "switch", "nvlink_domain", "address")
STORAGE = re.compile(r"^[a-z][a-z0-9_-]{0,23}$")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")
MAX_ROWS = 20_000
MAX_GPUS = 64


@dataclass
class FleetPlan:
    """What an import would do. `problems` empty means it can be applied."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[FieldProblem] = field(default_factory=list)
    new_nodes: int = 0
    known_nodes: int = 0
    gpus: int = 0
    models: dict[str, int] = field(default_factory=dict)
    sites: list[str] = field(default_factory=list)


def fleet_plan(
    *, content: bytes, filename: str, default_site: str = "", default_cluster: str = ""
) -> FleetPlan:
    """Read and judge a fleet file; writes nothing. Problems are named `row N, column C`."""
    table = read_table(content, filename)
    plan = FleetPlan()
    columns = set(table.columns)
    for missing in [c for c in REQUIRED if c not in columns]:
        plan.problems.append({"pointer": missing, "detail": _("This column is missing.")})
    if not columns & {"node_id", "node"}:
        plan.problems.append({"pointer": "node_id", "detail": _("This column is missing.")})
    for unknown in sorted(columns - set(REQUIRED) - set(OPTIONAL)):
        plan.problems.append({"pointer": unknown, "detail": _("No such column is known.")})
    if len(table) > MAX_ROWS:
        plan.problems.append(
            {"pointer": "file", "detail": _("At most %(max)d rows at once.") % {"max": MAX_ROWS}}
        )
    if plan.problems:
        return plan
    _judge_rows(table, plan, default_site, default_cluster)
    if not plan.nodes and not plan.problems:
        plan.problems.append({"pointer": "file", "detail": _("The file has no rows.")})
    return plan


def _judge_rows(table: Table, plan: FleetPlan, default_site: str, default_cluster: str) -> None:
    seen: dict[str, int] = {}
    known = set(Node.objects.values_list("name", flat=True))
    busy = set(
        AllocationMember.objects.filter(allocation__ended_at=None).values_list("node__name", flat=True)
    )
    for row in table:
        number = row.number

        def wrong(column: str, detail: str, number: int = number) -> None:
            plan.problems.append(
                {
                    "pointer": _("row %(row)d, %(column)s") % {"row": number, "column": column},
                    "detail": detail,
                }
            )

        name = row["node_id"] or row["node"]
        if not NAME.match(name):
            wrong("node_id", _("A name of letters, digits, dot, dash and underscore is needed."))
        elif name in seen:
            wrong("node_id", _("This node stands in row %(row)d already.") % {"row": seen[name]})
        elif name in busy:
            wrong("node_id", _("This node has work on it and cannot be imported over."))
        seen.setdefault(name, number)
        figures: dict[str, int] = {}
        for column, most in (("cpu_milli", 4_000_000), ("memory_mib", 1 << 28), ("gpu", MAX_GPUS)):
            figures[column] = _integer(row[column], column, most, wrong)
        for column in ("gpu_memory_mib", "fabric_gbit_s"):
            text = row[column]
            figures[column] = _integer(text, column, 1 << 24, wrong) if text else 0
        model = row["model"]
        if figures["gpu"] > 0 and not model:
            wrong("model", _("A node with GPUs needs a model."))
        if len(model) > 120:
            wrong("model", _("At most 120 characters."))
        networks = _networks(row["fabric"], figures["fabric_gbit_s"], row["fabric_domain"], wrong)
        storage = _storage(row["storage"], wrong)
        site = (row["site"] or default_site or "main").strip()
        cluster = (row["cluster"] or default_cluster or f"{site}-agents").strip()
        for column, text in (("site", site), ("cluster", cluster)):
            if not NAME.match(text) or len(text) > 48:
                wrong(column, _("A name of letters, digits, dot, dash and underscore is needed."))
        plan.nodes.append(
            {
                "name": name,
                "site": site,
                "cluster": cluster,
                "model": model,
                "networks": networks,
                "storage": storage,
                **figures,
                **{c: row[c][:64] for c in PLACES},
            }
        )
        plan.new_nodes += name not in known
        plan.known_nodes += name in known
        plan.gpus += figures["gpu"]
        if figures["gpu"]:
            plan.models[model] = plan.models.get(model, 0) + figures["gpu"]
        if site not in plan.sites:
            plan.sites.append(site)


def _networks(text: str, speed: int, island: str, wrong: Any) -> list[tuple[str, int, str]]:
    """Kind, Gbit/s and island of each network named; a single kind takes both from columns of their own."""
    found: dict[str, tuple[str, int, str]] = {}
    for part in text.lower().split():
        kind, gbit, domain = [*part.split(":"), "", ""][:3]
        if kind not in NodeFabric.Kind.values:
            wrong("fabric", _("Known kinds: nvlink, infiniband, roce, ethernet."))
        elif gbit and not re.fullmatch(r"\d{1,6}", gbit):
            wrong("fabric", _("A network is named as kind:Gbit/s:island, for example infiniband:400:a."))
        elif kind in found:
            wrong("fabric", _("A network of one kind is named once."))
        else:
            found[kind] = (kind, int(gbit) if gbit else speed, (domain or island)[:64])
    return list(found.values())


def _storage(text: str, wrong: Any) -> list[tuple[str, int]]:
    """Kind and GiB of each storage named."""
    found: dict[str, tuple[str, int]] = {}
    for part in text.lower().split():
        kind, size = [*part.split(":"), ""][:2]
        if not STORAGE.match(kind) or (size and not re.fullmatch(r"\d{1,9}", size)):
            wrong("storage", _("Storage is named as kind:GiB, for example nvme:3500."))
        else:
            found[kind] = (kind, int(size or 0))
    return list(found.values())


def _integer(text: str, column: str, most: int, wrong: Any) -> int:
    text = str(text).strip()
    if not re.fullmatch(r"\d{1,12}", text):
        wrong(column, _("A whole number from 0 is needed, not “%(text)s”.") % {"text": text[:40]})
        return 0
    value = int(text)
    if value > most:
        wrong(column, _("At most %(max)d.") % {"max": most})
        return 0
    return value


def fleet_import(*, acting_user: Actor, plan: FleetPlan) -> dict[str, int]:
    """Apply a judged plan in one transaction; a known node is brought up to date, its real GPUs stay."""
    require_pool_admin(acting_user)
    if plan.problems:
        raise Invalid(
            code="import_refused",
            detail=_("The file has errors; nothing was imported."),
            errors=plan.problems,
        )
    with transaction.atomic():
        clusters = _clusters(plan)
        flavours: dict[tuple[str, int], GpuFlavour] = {}
        for item in plan.nodes:
            key = (item["model"], item["gpu_memory_mib"])
            if item["gpu"] and key not in flavours:
                flavours[key] = flavour_ensure(model_name=item["model"], memory_mib=item["gpu_memory_mib"])
        existing = {n.name: n for n in Node.objects.filter(name__in=[n["name"] for n in plan.nodes])}
        fresh: list[Node] = []
        changed: list[Node] = []
        for item in plan.nodes:
            node = existing.get(item["name"]) or Node(name=item["name"])
            node.cluster = clusters[item["cluster"]]
            for column in ("cpu_milli", "memory_mib", *PLACES):
                if item[column]:
                    setattr(node, column, item[column])
            node.test_only = item["gpu"] == 0
            (changed if node.pk else fresh).append(node)
        Node.objects.bulk_create(fresh, batch_size=1000)
        Node.objects.bulk_update(
            changed,
            ["cluster", "cpu_milli", "memory_mib", *PLACES, "test_only"],
            batch_size=500,
        )
        nodes = {n.name: n for n in [*fresh, *changed]}
        have = set(Gpu.objects.filter(node__in=changed).values_list("node_id", "index"))
        gpus = [
            Gpu(
                uuid=f"IMPORT-{item['name']}-{i}",
                node=nodes[item["name"]],
                flavour=flavours[(item["model"], item["gpu_memory_mib"])],
                index=i,
                model_name=item["model"],
                memory_mib=flavours[(item["model"], item["gpu_memory_mib"])].memory_mib,
            )
            for item in plan.nodes
            for i in range(item["gpu"])
            if (nodes[item["name"]].pk, i) not in have
        ]
        Gpu.objects.bulk_create(gpus, batch_size=2000)
        _connect(plan, nodes)
        figures = {"nodes_new": len(fresh), "nodes_known": len(changed), "gpus_new": len(gpus)}
        audit_record(
            acting_user=acting_user,
            action="fleet.imported",
            subject=next(iter(clusters.values())),
            after={**figures, "clusters": sorted(clusters)},
        )
        capacity_refresh()
    return figures


def _connect(plan: FleetPlan, nodes: dict[str, Node]) -> None:
    """Networks and storage as the file says; a node for which it says nothing keeps what it had."""
    networked = [nodes[item["name"]] for item in plan.nodes if item["networks"]]
    stored = [nodes[item["name"]] for item in plan.nodes if item["storage"]]
    NodeFabric.objects.filter(node__in=networked).delete()
    NodeFabric.objects.bulk_create(
        [
            NodeFabric(node=nodes[item["name"]], kind=kind, speed_gbit_s=speed, domain=domain)
            for item in plan.nodes
            for kind, speed, domain in item["networks"]
        ],
        batch_size=1000,
    )
    NodeStorage.objects.filter(node__in=stored).delete()
    NodeStorage.objects.bulk_create(
        [
            NodeStorage(node=nodes[item["name"]], kind=kind, size_gib=size)
            for item in plan.nodes
            for kind, size in item["storage"]
        ],
        batch_size=1000,
    )


def _clusters(plan: FleetPlan) -> dict[str, Cluster]:
    """Sites and clusters named by the file, made where missing."""
    out: dict[str, Cluster] = {}
    for item in plan.nodes:
        if item["cluster"] in out:
            if out[item["cluster"]].site.code != item["site"]:
                raise Invalid.field(
                    "cluster", _("Cluster “%(cluster)s” stands at two sites.") % {"cluster": item["cluster"]}
                )
            continue
        site, _made = Site.objects.get_or_create(code=item["site"], defaults={"name": item["site"]})
        cluster, _made = Cluster.objects.select_related("site").get_or_create(
            code=item["cluster"], defaults={"name": item["cluster"], "site": site}
        )
        if cluster.site_id != site.pk:
            raise Invalid.field(
                "cluster",
                _("Cluster “%(cluster)s” belongs to site “%(site)s”.")
                % {"cluster": item["cluster"], "site": cluster.site.code},
            )
        out[item["cluster"]] = cluster
    return out

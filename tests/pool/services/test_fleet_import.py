"""Import of a fleet: dry run, errors by row and column, all or nothing, and the real file of 1,213 nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.models import Cluster, Gpu, Node, NodeFabric, Site
from pool.services.fleet_import import fleet_import, fleet_plan
from portal.kernel.errors import Invalid, Refused
from portal.ops.actor import system
from portal.ops.models import AuditEvent
from quotas.models import FlavourCapacity
from tests.portal.builders import actor, person

pytestmark = pytest.mark.django_db
SYSTEM = system("test")
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def plan(text: str, **values: str):
    return fleet_plan(content=text.encode(), filename="nodes.csv", **values)


GOOD = "node_id,cpu_milli,memory_mib,gpu,model\nn1,96000,786432,8,A10\nn2,64000,262144,2,T4\n"


def test_dry_run_counts_and_writes_nothing() -> None:
    found = plan(GOOD, default_site="sh")
    assert (found.new_nodes, found.known_nodes, found.gpus, found.problems) == (2, 0, 10, [])
    assert found.models == {"A10": 8, "T4": 2}
    assert Node.objects.count() == Gpu.objects.count() == Site.objects.count() == 0


def test_import_makes_sites_nodes_cards_and_tells_capacity() -> None:
    done = fleet_import(acting_user=SYSTEM, plan=plan(GOOD, default_site="sh"))
    assert done == {"nodes_new": 2, "nodes_known": 0, "gpus_new": 10}
    node = Node.objects.get(name="n1")
    assert (node.cluster.site.code, node.cpu_milli, node.memory_mib, node.health) == (
        "sh",
        96000,
        786432,
        "unknown",
    )
    assert sorted(node.gpus.values_list("uuid", flat=True)) == [f"IMPORT-n1-{i}" for i in range(8)]
    assert not node.takes_work
    capacity = {c.flavour.code: (c.installed_milli, c.healthy_milli) for c in FlavourCapacity.objects.all()}
    assert sorted(capacity.values()) == [(2000, 0), (8000, 0)]
    assert AuditEvent.objects.filter(action="fleet.imported").count() == 1


def test_the_same_file_twice_changes_nothing_but_the_figures() -> None:
    fleet_import(acting_user=SYSTEM, plan=plan(GOOD))
    again = plan(GOOD.replace("96000", "48000"))
    assert (again.new_nodes, again.known_nodes) == (0, 2)
    assert fleet_import(acting_user=SYSTEM, plan=again) == {"nodes_new": 0, "nodes_known": 2, "gpus_new": 0}
    assert Node.objects.get(name="n1").cpu_milli == 48000
    assert Gpu.objects.count() == 10


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("n3,-1,100,1,T4", "cpu_milli"),
        ("n3,1.5,100,1,T4", "cpu_milli"),
        ("n3,abc,100,1,T4", "cpu_milli"),
        ("n3,100,99999999999999,1,T4", "memory_mib"),
        ("n3,100,100,65,T4", "gpu"),
        ("n3,100,100,1,", "model"),
        ("n 3,100,100,1,T4", "node_id"),
        (",100,100,1,T4", "node_id"),
        ("n1,100,100,1,T4", "node_id"),
    ],
)
def test_a_wrong_cell_is_named_and_nothing_is_imported(row: str, column: str) -> None:
    found = plan(GOOD + row + "\n")
    assert [p["pointer"] for p in found.problems] == [f"row 4, {column}"]
    with pytest.raises(Invalid) as refused:
        fleet_import(acting_user=SYSTEM, plan=found)
    assert refused.value.code == "import_refused"
    assert Node.objects.count() == 0


def test_missing_and_unknown_columns_are_named() -> None:
    found = plan("node_id,cpu_milli,gpus\nn1,1,1\n")
    assert {p["pointer"] for p in found.problems} == {"memory_mib", "gpu", "model", "gpus"}


def test_richer_columns_chinese_names_and_gb18030() -> None:
    text = (
        "node,site,cluster,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,driver,rack,fabric,fabric_gbit_s\n"
        "bj-01,bj,bj-a,128000,1048576,8,自研卡,98304,570.1,B-07,infiniband,400\n"
    )
    found = fleet_plan(content=text.encode("gb18030"), filename="f.csv")
    fleet_import(acting_user=SYSTEM, plan=found)
    node = Node.objects.get(name="bj-01")
    assert (node.rack, node.driver, node.cluster.code) == ("B-07", "570.1", "bj-a")
    card = node.gpus.first()
    assert card is not None
    assert (card.model_name, card.memory_mib) == ("自研卡", 98304)
    fabric = NodeFabric.objects.get(node=node)
    assert (fabric.kind, fabric.speed_gbit_s) == ("infiniband", 400)


def test_a_cluster_stands_at_one_site() -> None:
    fleet_import(acting_user=SYSTEM, plan=plan(GOOD, default_site="sh", default_cluster="c1"))
    with pytest.raises(Invalid):
        fleet_import(
            acting_user=SYSTEM,
            plan=plan(GOOD.replace("n1", "m1").replace("n2", "m2"), default_site="bj", default_cluster="c1"),
        )
    assert Cluster.objects.count() == 1
    assert Node.objects.count() == 2
    assert Site.objects.count() == 1


def test_only_pool_administrators_import() -> None:
    with pytest.raises(Refused):
        fleet_import(acting_user=actor(person()), plan=plan(GOOD))
    assert Node.objects.count() == 0


@pytest.mark.shared
@pytest.mark.skipif(not TRACES.exists(), reason="needs ../shared/traces")
def test_the_public_trace_of_1213_nodes_comes_in_whole() -> None:
    found = fleet_plan(
        content=(TRACES / "nodes.csv").read_bytes(), filename="nodes.csv", default_site="openb"
    )
    assert found.problems == []
    assert (len(found.nodes), found.gpus) == (1213, 6212)
    done = fleet_import(acting_user=SYSTEM, plan=found)
    assert done == {"nodes_new": 1213, "nodes_known": 0, "gpus_new": 6212}
    assert found.models["G2"] == 4392
    assert sum(c.installed_milli for c in FlavourCapacity.objects.all()) == 6_212_000

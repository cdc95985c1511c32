"""Data sets: made, changed, taken off, imported; told to quotas; and what nodes offer, told per flavour."""

from __future__ import annotations

import pytest

from pool.models import Dataset, Node, NodeFabric, NodeStorage
from pool.selectors.datasets import datasets_of_node, datasets_visible
from pool.services.capacity import capacity_refresh
from pool.services.datasets import dataset_retire, dataset_save, datasets_import
from pool.services.fleet_import import fleet_import, fleet_plan
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.ops.actor import system
from portal.ops.models import AuditEvent
from quotas.models import FlavourCapacity, PoolName
from tests.pool import builders as pool
from tests.quotas import build

pytestmark = pytest.mark.django_db


@pytest.fixture
def house():
    made = build.House()
    pool.node(made.h800, name="n1", rack="r1", switch="s1", row="A")
    pool.node(made.h800, name="n2", rack="r1", switch="s2", row="A", driver="560.28")
    return made


def save(house, **values):
    wanted = {"code": "laion", "name": "LAION", "site": "bj", **values}
    return dataset_save(acting_user=build.actor(house.zhao), values=wanted)


def state():
    return (
        list(Dataset.objects.order_by("code").values_list("code", "version", "retired_at")),
        list(PoolName.objects.filter(kind="dataset").order_by("code").values_list("code", "active")),
        AuditEvent.objects.filter(action__startswith="dataset.").count(),
    )


def test_a_data_set_is_made_told_and_taken_off(house):
    made = save(house, size_gib="1200", nodes="n1", department="video")
    assert (made.size_gib, made.site.code, [n.name for n in made.cached_on.all()]) == (1200, "bj", ["n1"])
    told = PoolName.objects.get(kind="dataset")
    assert (told.code, told.name, told.department_id, told.facts) == (
        "laion", "LAION", house.video.pk, {"size_gib": 1200, "site": "bj", "nodes": 1},
    )  # fmt: skip
    assert [d.code for d in datasets_visible(build.policy(house.lin))] == ["laion"]
    assert list(datasets_visible(build.policy(house.stranger))) == []
    assert datasets_of_node(build.policy(house.lin), Node.objects.get(name="n2")) == ["laion"]
    dataset_retire(acting_user=build.actor(house.zhao), dataset=made)
    assert not PoolName.objects.get(kind="dataset").active
    with pytest.raises(Conflict):
        dataset_retire(acting_user=build.actor(house.zhao), dataset=made)


@pytest.mark.parametrize(
    ("values", "pointer"),
    [
        ({"code": "a b"}, "code"),
        ({"name": ""}, "name"),
        ({"size_gib": "-1"}, "size_gib"),
        ({"site": "mars"}, "site"),
        ({"site": ""}, "site"),
        ({"nodes": "n9"}, "nodes"),
        ({"department": "nobody"}, "department"),
    ],
)
def test_what_is_wrong_is_told_beside_its_field_and_nothing_changes(house, values, pointer):
    before = state()
    with pytest.raises(Invalid) as error:
        save(house, **values)
    assert [p["pointer"] for p in error.value.errors] == [pointer]
    assert state() == before


def test_only_administrators_change_and_nobody_overwrites_anothers_change(house):
    made = save(house)
    before = state()
    with pytest.raises(Refused):
        dataset_save(acting_user=build.actor(house.lin), values={"code": "x", "name": "X", "site": "bj"})
    with pytest.raises(Conflict):
        dataset_save(
            acting_user=build.actor(house.zhao), values={"name": "Y", "site": "bj"}, dataset=made, version=99
        )
    with pytest.raises(Invalid):
        save(house)  # the code is taken
    assert state() == before


def test_import_is_all_or_nothing_and_brings_known_ones_up_to_date(house):
    save(house)
    good = "编码,名称,大小,数据中心,节点\nlaion,LAION 5B,900,bj,n1 n2\ntokens,Tokens,5,,n2\n".encode(
        "gb18030"
    )
    args = {"acting_user": build.actor(house.zhao), "name": "sets.csv"}
    before = state()
    assert [w.code for w in datasets_import(**args, data=good, dry_run=True)] == ["laion", "tokens"]
    assert state() == before
    datasets_import(**args, data=good, dry_run=False)
    assert [(d.code, d.name, d.cached_on.count()) for d in Dataset.objects.all()] == [
        ("laion", "LAION 5B", 2), ("tokens", "Tokens", 1),
    ]  # fmt: skip
    before = state()
    bad = b"code,name,site\nlaion,Again,bj\nlaion,Twice,bj\nnew,,nowhere\n"
    with pytest.raises(Invalid) as error:
        datasets_import(**args, data=bad, dry_run=False)
    assert [p["pointer"] for p in error.value.errors] == ["3/code", "4/name", "4/site"]
    assert state() == before


def test_what_the_nodes_of_a_flavour_offer_is_told(house):
    n1, n2 = Node.objects.order_by("name")
    NodeFabric.objects.create(node=n1, kind="infiniband", speed_gbit_s=200, domain="a")
    NodeFabric.objects.create(node=n2, kind="infiniband", speed_gbit_s=400, domain="a")
    NodeStorage.objects.create(node=n2, kind="nvme", size_gib=3500)
    capacity_refresh()
    facts = FlavourCapacity.objects.get(flavour=house.h800).facts
    assert facts == {
        "sites": {"bj": 2},
        "fabrics": {"infiniband": 400},
        "storage": ["nvme"],
        "levels": {"row": 2, "rack": 2, "switch": 1},
        "driver": "560.28",
    }
    assert list(PoolName.objects.filter(kind="site").values_list("code", "active")) == [("bj", True)]


def test_a_fleet_file_names_several_networks_and_storages():
    head = "node_id,cpu_milli,memory_mib,gpu,model,row,rack,fabric,fabric_gbit_s,fabric_domain,storage\n"
    row = "n1,96000,786432,8,A10,A,r1,infiniband:400:x roce,100,y,nvme:3500 nfs\n"
    fleet_import(
        acting_user=system("test"),
        plan=fleet_plan(content=(head + row).encode(), filename="n.csv", default_site="sh"),
    )
    node = Node.objects.get(name="n1")
    assert (node.row, node.rack) == ("A", "r1")
    assert list(node.fabrics.order_by("kind").values_list("kind", "speed_gbit_s", "domain")) == [
        ("infiniband", 400, "x"), ("roce", 100, "y"),
    ]  # fmt: skip
    assert list(node.storages.order_by("kind").values_list("kind", "size_gib")) == [
        ("nfs", 0),
        ("nvme", 3500),
    ]
    bad = row.replace("infiniband:400:x roce", "wifi infiniband:fast").replace("nvme:3500", "nvme:big")
    found = fleet_plan(content=(head + bad).encode(), filename="n.csv", default_site="sh")
    assert len(found.problems) == 3
    assert NodeFabric.objects.count() == 2

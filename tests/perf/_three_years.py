"""Three years of an enterprise's books, written by the database itself in a few statements.

Triggers are off while it is filled, foreign keys and indexes are made once after; the sums that a trigger keeps are
made in one statement, and the nightly comparison, which is measured after, checks them.

500 departments in three levels, 2,000 people (each of one department, at one site, with three models), 1,000 cards of
six models at five sites; a million leases of some hours,
evenly over the months, one ledger line each; and in the month before this one leases that hold for the whole month, a
line a day each, until that month has a million lines. The sums of days are derived from the lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

DEPARTMENTS, PEOPLE, CARDS, REQUESTS, MONTHS = 500, 2_000, 1_000, 20_000, 36
SITES = 5
OPEN = 800
FILLED = (
    "quotas_capacityrequest", "quotas_usagespan", "quotas_ledgerentry", "quotas_ledgersum", "monitoring_useday",
    "monitoring_cardday",
)  # fmt: skip


@dataclass
class Books:
    """What is asked for: people, an ordinary month, the month of a million lines, a department with much in it."""

    finance: Any
    ordinary: date
    big: date
    division: Any
    sizes: dict[str, int]


def _copy(
    cursor: Any, table: str, template: int, values: dict[str, str], source: str, where: str = "true"
) -> int:
    """Rows like one that exists, with other values: `source` is a FROM clause, `values` its expressions by column."""
    cursor.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND is_generated = 'NEVER'",
        [table],
    )
    columns = [name for (name,) in cursor.fetchall() if name != "id"]
    asked = ", ".join(values.get(name, f't."{name}"') for name in columns)
    names = ", ".join(f'"{name}"' for name in columns)
    cursor.execute(
        f"INSERT INTO {table} ({names}) SELECT {asked} FROM {source}, {table} t WHERE t.id = {template} AND {where}"
    )
    return int(cursor.rowcount)


@contextlib.contextmanager
def _loading(cursor: Any, *tables: str) -> Iterator[None]:
    """While many rows go into some tables: no triggers; indexes and foreign keys are made (and checked) once, after."""
    cursor.execute(
        "SELECT format('ALTER TABLE %%s DROP CONSTRAINT %%I', c.conrelid::regclass, c.conname), "
        "format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', c.conrelid::regclass, c.conname, "
        "pg_get_constraintdef(c.oid)) "
        "FROM pg_constraint c WHERE c.contype IN ('f', 'u') AND c.conrelid::regclass::text = ANY(%s) "
        "ORDER BY c.contype = 'f'",
        [list(tables)],
    )
    constraints = cursor.fetchall()
    cursor.execute(
        "SELECT format('DROP INDEX %%s', i.indexrelid::regclass), pg_get_indexdef(i.indexrelid) FROM pg_index i "
        "WHERE i.indrelid::regclass::text = ANY(%s) AND NOT i.indisprimary "
        "AND NOT EXISTS (SELECT 1 FROM pg_constraint c WHERE c.conindid = i.indexrelid)",
        [list(tables)],
    )
    again = [*cursor.fetchall(), *constraints]
    cursor.execute("SET synchronous_commit = off; SET work_mem = '128MB'; SET maintenance_work_mem = '512MB'")
    for table in tables:
        cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
    for drop, _make in again:
        cursor.execute(drop)
    yield
    for _drop, make in again:
        cursor.execute(make)
    for table in tables:
        cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
    cursor.execute("RESET synchronous_commit; RESET work_mem; RESET maintenance_work_mem")


def _sums(cursor: Any) -> None:
    """What the ledger's trigger would have kept."""
    key = "booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code, cost_code"
    cursor.execute(
        f"INSERT INTO quotas_ledgersum ({key}, gpu_ms, amount_micro, power_micro, lines) "
        f"SELECT {key}, sum(gpu_ms)::bigint, sum(amount_micro)::bigint, 0, count(*) "
        f"FROM quotas_ledgerentry GROUP BY {key}"
    )


def build(leases: int, big_lines: int) -> Books:
    """Fill the (empty, migrated) database."""
    from django.db import connection

    from portal.accounts.models import Department, DepartmentName, RoleBinding, User
    from portal.kernel.clock import now as clock
    from quotas.engine.billing import month_bounds
    from quotas.models import CapacityRequest, PriceRate
    from quotas.selectors.billing_time import billing_zone, month_of, previous_month
    from quotas.services.flavours import flavour_ensure

    now = clock()
    present = month_of(now)
    big = previous_month(present)
    months = [big]
    while len(months) < MONTHS:
        months.append(previous_month(months[-1]))
    ordinary, first = months[2], months[-1]
    begin = month_bounds(first.year, first.month, billing_zone())[0] - timedelta(days=1)
    root = Department.objects.create(code="org", name="Organisation", created_at=begin)
    tops = Department.objects.bulk_create(
        Department(code=f"d{i}", name=f"Division {i}", parent=root) for i in range(24)
    )
    leaves = Department.objects.bulk_create(
        Department(code=f"t{i}", name=f"Team {i}", parent=tops[i % 24], cost_center=f"CC-{i:04d}")
        for i in range(DEPARTMENTS - 25)
    )
    paths = [(root, root.name), *((t, f"{root.name} / {t.name}") for t in tops)]
    paths += [(d, f"{root.name} / {d.parent.name} / {d.name}") for d in leaves]
    DepartmentName.objects.bulk_create(
        DepartmentName(department=d, name=d.name, path=p, during=(begin, None)) for d, p in paths
    )
    people = User.objects.bulk_create(
        User(username=f"u{i}", display_name=f"Person {i:04d}", email=f"u{i}@example.org", password="!",
             home_department=leaves[i % len(leaves)], language="en")
        for i in range(PEOPLE)
    )  # fmt: skip
    RoleBinding.objects.create(user=people[0], role="finance", valid_from=begin)
    flavours = [
        flavour_ensure(model_name=name, memory_mib=mib)
        for name, mib in (
            ("NVIDIA H800", 81559), ("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA H20", 97871), ("NVIDIA L40S", 46068),
            ("NVIDIA L20", 46068), ("NVIDIA A30", 24576),
        )
    ]  # fmt: skip
    for i, flavour in enumerate(flavours):
        PriceRate.objects.create(
            flavour=flavour, micro_per_gpu_hour=(i + 2) * 2_000_000, during=(begin, None)
        )
    template = CapacityRequest.objects.create(
        requester=people[0], department=leaves[0], flavour=flavours[0], state="ended", charge_milli=1000
    )
    ids = {
        "dept0": leaves[0].pk, "depts": len(leaves), "user0": people[0].pk, "people": PEOPLE,
        "flavour0": flavours[0].pk, "req0": template.pk, "reqs": REQUESTS,
    }  # fmt: skip
    with connection.cursor() as cursor:
        _fleet(cursor, flavours, now)
        with _loading(cursor, *FILLED):
            _copy(
                cursor, "quotas_capacityrequest", template.pk,
                {
                    "uid": "gen_random_uuid()", "client_token": "''",
                    "department_id": f"{ids['dept0']} + g % {ids['depts']}",
                    "requester_id": f"{ids['user0']} + g % {PEOPLE}",
                },
                f"generate_series(1, {REQUESTS - 1}) g",
            )  # fmt: skip
            _leases(cursor, ids, flavours, months, leases, big, big_lines, people[0], leaves[0])
            _sums(cursor)
            _days(cursor, first, present)
        cursor.execute("ANALYZE")
        sizes = {"departments": DEPARTMENTS, "people": PEOPLE, "cards": CARDS}
        for name, table in (
            ("leases", "quotas_usagespan"), ("lines", "quotas_ledgerentry"), ("sums", "quotas_ledgersum"),
            ("use_days", "monitoring_useday"), ("card_days", "monitoring_cardday"),
        ):  # fmt: skip
            cursor.execute(f"SELECT count(*) FROM {table}")
            sizes[name] = cursor.fetchone()[0]
        cursor.execute("SELECT count(*) FROM quotas_ledgerentry WHERE booked_month = %s", [big])
        sizes["big_month_lines"] = cursor.fetchone()[0]
    return Books(people[0], ordinary, big, tops[0], sizes)


def _fleet(cursor: Any, flavours: list[Any], now: Any) -> None:
    from pool.models import Cluster, Gpu, Node, Site

    for i in range(SITES):
        site = Site.objects.create(code=f"site{i}", name=f"Site {i}")
        cluster = Cluster.objects.create(code=f"c{i}", name=f"Cluster {i}", site=site)
        nodes = Node.objects.bulk_create(
            Node(name=f"s{i}n{n}", hostname=f"s{i}n{n}", cluster=cluster, health="ok", last_heartbeat_at=now)
            for n in range(CARDS // SITES // 8)
        )
        Gpu.objects.bulk_create(
            Gpu(uuid=f"GPU-{i}-{n}", node=nodes[n // 8], flavour=flavours[n % len(flavours)], index=n % 8,
                model_name=flavours[n % len(flavours)].name, memory_mib=80_000, last_seen_at=now)
            for n in range(CARDS // SITES)
        )  # fmt: skip


def _leases(
    cursor: Any,
    ids: dict[str, int],
    flavours: list[Any],
    months: list[date],
    leases: int,
    big: date,
    big_lines: int,
    user: Any,
    department: Any,
) -> None:
    """Spans first, then their lines as the cutting would make them: one a local day."""
    from quotas.engine.billing import month_bounds
    from quotas.models import LedgerEntry, UsageSpan
    from quotas.selectors.billing_time import billing_zone, next_month

    start, _end = month_bounds(months[-1].year, months[-1].month, billing_zone())
    model = UsageSpan.objects.create(
        key="00000000-0000-0000-0000-000000000001", request_id=ids["req0"], department=department, user=user,
        flavour=flavours[0], site_code="site0", node_name="s0n0", gpu_label="s0n0/0", charge_milli=1000,
        started_at=start, ended_at=start, accrued_to=start,
    )  # fmt: skip
    person = f"((g * 7) % {ids['people']})"
    common = {
        "uid": "gen_random_uuid()", "key": "gen_random_uuid()",
        "request_id": f"{ids['req0']} + g % {ids['reqs']}",
        "department_id": f"{ids['dept0']} + {person} % {ids['depts']}",
        "user_id": f"{ids['user0']} + {person}",
        "flavour_id": f"{ids['flavour0']} + ({person} + (g / {ids['people']}) % 3) % {len(flavours)}",
        "site_code": f"'site' || ({person} % {SITES})",
        "node_name": f"'s' || ({person} % {SITES}) || 'n' || (g % 25)",
        "gpu_label": f"'s' || ({person} % {SITES}) || 'n' || (g % 25) || '/' || (g % 8)",
        "charge_milli": "1000",
    }  # fmt: skip
    for month in months[1:]:
        first = f"('{month}'::date + (g % 28))::timestamp AT TIME ZONE '{billing_zone().key}'"
        begun = f"{first} + (g * 61 % 43200) * interval '1 second'"
        ended = f"{begun} + (3600 + g * 37 % 28800) * interval '1 second'"
        _copy(
            cursor, "quotas_usagespan", model.pk,
            {**common, "started_at": begun, "ended_at": ended, "accrued_to": ended},
            f"generate_series(1, {leases // (MONTHS - 1)}) g",
        )  # fmt: skip
    days = (next_month(big) - big).days
    low, high = month_bounds(big.year, big.month, billing_zone())
    _copy(
        cursor, "quotas_usagespan", model.pk,
        {**common, "started_at": f"'{low}'::timestamptz", "ended_at": f"'{high}'::timestamptz",
         "accrued_to": f"'{high}'::timestamptz"},
        f"generate_series(1, {-(-big_lines // days)}) g",
    )  # fmt: skip
    cursor.execute("ANALYZE quotas_usagespan")
    line = LedgerEntry.objects.create(
        uid="00000000-0000-0000-0000-000000000002", span=model, department_id_ref=department.pk,
        department_path="-", user_id_ref=user.pk, user_name="-", flavour=flavours[0], flavour_name="-",
        starts_at=start, ends_at=start, local_day=months[-1], gpu_ms=0, micro_per_gpu_hour=0, amount_micro=0,
        currency="CNY", booked_month=months[-1],
    )  # fmt: skip
    zone = billing_zone().key
    ms = "(extract(epoch FROM d.ends_at - d.starts_at) * 1000)::bigint"
    for month in (*months[1:], big):
        low, high = month_bounds(month.year, month.month, billing_zone())
        _copy(
            cursor, "quotas_ledgerentry", line.pk,
            {
                "uid": "gen_random_uuid()", "span_id": "s.id", "request_id_ref": "s.request_id",
                "department_id_ref": "s.department_id", "department_path": "n.path", "user_id_ref": "s.user_id",
                "user_name": "u.display_name", "cost_code": "p.cost_center", "flavour_id": "s.flavour_id",
                "flavour_name": "f.name", "site_code": "s.site_code", "node_name": "s.node_name",
                "gpu_label": "s.gpu_label", "charge_milli": "s.charge_milli", "starts_at": "d.starts_at",
                "ends_at": "d.ends_at", "local_day": f"(d.starts_at AT TIME ZONE '{zone}')::date", "gpu_ms": ms,
                "micro_per_gpu_hour": "r.micro_per_gpu_hour", "rate_uid": "r.uid",
                "amount_micro": f"({ms} * r.micro_per_gpu_hour + 1800000) / 3600000",
                "booked_at": "d.ends_at", "booked_month": f"'{month}'::date",
            },
            "quotas_usagespan s JOIN accounts_department p ON p.id = s.department_id "
            "JOIN accounts_departmentname n ON n.department_id = p.id JOIN accounts_user u ON u.id = s.user_id "
            "JOIN quotas_gpuflavour f ON f.id = s.flavour_id JOIN quotas_pricerate r ON r.flavour_id = f.id, "
            "LATERAL (SELECT greatest(s.started_at, x) AS starts_at, "
            "least(s.ended_at, x + interval '1 day') AS ends_at "
            f"FROM generate_series(date_trunc('day', s.started_at AT TIME ZONE '{zone}') AT TIME ZONE '{zone}', "
            "s.ended_at - interval '1 microsecond', interval '1 day') x) d",
            f"s.started_at >= '{low}' AND s.started_at < '{high}' AND s.ended_at > s.started_at",
        )  # fmt: skip
    cursor.execute("ANALYZE quotas_ledgerentry")
    _copy(
        cursor, "quotas_usagespan", model.pk,
        {**common, "started_at": "now() - interval '3 hours'", "accrued_to": "now() - interval '3 hours'",
         "ended_at": "NULL"},
        f"generate_series(1, {OPEN}) g",
    )  # fmt: skip
    cursor.execute(
        "WITH RECURSIVE up (d, f, m) AS (SELECT department_id, flavour_id, sum(charge_milli) FROM quotas_usagespan "
        "WHERE ended_at IS NULL GROUP BY 1, 2 UNION ALL SELECT p.parent_id, up.f, up.m FROM up JOIN "
        "accounts_department p ON p.id = up.d WHERE p.parent_id IS NOT NULL) SELECT d, f, sum(m) FROM up GROUP BY 1, 2"
    )
    from quotas.models import QuotaUsage

    QuotaUsage.objects.bulk_create(
        QuotaUsage(department_id=d, flavour_id=f, total=m, charged=m, updated_at=start)
        for d, f, m in cursor.fetchall()
    )


def _days(cursor: Any, first: date, present: date) -> None:
    """Sums of days as the lines have them: a tenth of each use idle, cards installed all day."""
    cursor.execute(
        "INSERT INTO monitoring_useday (local_day, span_id, request_id_ref, department_id_ref, department_path, "
        "user_id_ref, user_name, cost_code, flavour_id, site_code, node_name, gpu_label, allocated_ms, idle_ms, "
        "unknown_ms, amount_micro, idle_micro) SELECT local_day, span_id, request_id_ref, department_id_ref, "
        "department_path, user_id_ref, user_name, cost_code, flavour_id, site_code, node_name, gpu_label, gpu_ms, "
        "gpu_ms / 10, 0, amount_micro, amount_micro / 10 FROM quotas_ledgerentry WHERE gpu_ms > 0"
    )
    cursor.execute(
        "INSERT INTO monitoring_cardday (local_day, gpu_id, flavour_id, site_code, node_name, installed_ms, down_ms, "
        "maintenance_ms, allocated_ms, stranded_ms) SELECT d::date, g.id, g.flavour_id, s.code, n.name, 86400000, 0, "
        "0, 0, 0 FROM generate_series(%s::date, %s::date, '1 day') d, pool_gpu g JOIN pool_node n ON n.id = g.node_id "
        "JOIN pool_cluster c ON c.id = n.cluster_id JOIN pool_site s ON s.id = c.site_id",
        [first, present],
    )
    cursor.execute(
        "INSERT INTO monitoring_builtday (local_day, ledger_mark, built_at, whole) SELECT d::date, "
        "(SELECT max(id) FROM quotas_ledgerentry), now(), true FROM generate_series(%s::date, %s::date, '1 day') d",
        [first, present],
    )

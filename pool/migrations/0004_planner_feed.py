"""What the planner keeps in memory learns of changes here: one row a changed thing, written by triggers.

`xid` is the transaction that made the change. A reader that has seen the database as of a snapshot S has to read
the rows whose `xid` is not visible in S: those and no others were committed after it (pool/services/feed.py has the
argument). `pool_planner_mark` has one row: rows of transactions before `cleaned_below` may be gone.
"""

from django.db import migrations

TABLES = """
CREATE TABLE pool_planner_feed (
    id bigserial PRIMARY KEY,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    kind text NOT NULL,
    key bigint NOT NULL
);
CREATE INDEX pool_planner_feed_xid ON pool_planner_feed (xid);
CREATE TABLE pool_planner_mark (
    id smallint PRIMARY KEY CHECK (id = 1),
    cleaned_below xid8 NOT NULL DEFAULT '0',
    entries_by uuid
);
INSERT INTO pool_planner_mark (id) VALUES (1);
"""
TABLES_BACK = "DROP TABLE pool_planner_feed; DROP TABLE pool_planner_mark;"

WAITS_OR_HOLDS = "{row}.state IN ('queued', 'allocated')"
NODE = (
    "name", "cluster_id", "cpu_milli", "memory_mib", "driver", "cuda", "nvlink_domain", "row", "rack", "switch",
    "test_only", "health", "schedulable", "maintenance_until",
)  # fmt: skip
GPU = (
    "node_id", "flavour_id", "index", "uuid", "memory_mib", "nvlink", "mig_enabled", "condition", "condition_reason",
    "cordoned", "foreign_use",
)  # fmt: skip
USAGE = (
    "direct", "direct_noninterruptible", "guaranteed", "borrow_limit", "lend_limit", "hard_cap", "weight", "granted",
    "department_id", "flavour_id",
)  # fmt: skip
ALLOCATION = (
    "state", "department_id", "flavour_id", "holder_id", "charge_milli", "interruptible", "priority", "started_at",
    "reserved_at", "expires_at", "stop_asked_at", "grace_until", "request_id",
)  # fmt: skip
# table → (kind, expression of the key, columns whose change counts; None: any, condition on the row or "")
FED = {
    "quotas_capacityrequest": ("request", "{row}.id", None, WAITS_OR_HOLDS),
    "pool_allocation": ("allocation", "{row}.id", ALLOCATION, ""),
    "pool_allocationmember": (
        "allocation", "{row}.allocation_id", ("node_id", "cpu_milli", "memory_mib", "number", "given_up_at"), "",
    ),
    "pool_lease": ("allocation", "{row}.allocation_id", None, ""),
    "pool_node": ("node", "{row}.id", NODE, ""),
    "pool_gpu": ("node", "{row}.node_id", GPU, ""),
    "pool_migslice": ("gpu", "{row}.gpu_id", None, ""),
    "pool_nodefabric": ("node", "{row}.node_id", None, ""),
    "pool_nodestorage": ("node", "{row}.node_id", None, ""),
    "pool_dataset_cached_on": ("node", "{row}.node_id", None, ""),
    "pool_dataset": ("place", "0", ("code", "site_id", "location"), ""),
    "pool_cluster": ("place", "0", ("site_id",), ""),
    "pool_site": ("place", "0", ("code",), ""),
    "accounts_department": ("tree", "0", ("parent_id", "name", "closed_at"), ""),
    "quotas_gpuflavour": ("flavour", "0", None, ""),
    "quotas_flavourcapacity": ("quota", "{row}.flavour_id", ("installed_milli",), ""),
    "quotas_quotausage": ("quota", "{row}.flavour_id", USAGE, ""),
    "quotas_userlimit": ("user", "0", None, ""),
    "pool_keptplace": ("kept", "0", None, ""),
    "pool_reclaimcase": ("allocation", "{row}.allocation_id", None, ""),
    "pool_departmentmode": ("mode", "0", None, ""),
    "pool_reclaimconsent": ("mode", "0", None, ""),
    "pool_schedulingpolicy": ("policy", "0", ("active",), ""),
}  # fmt: skip


def _forward() -> str:
    parts = [TABLES]
    parts.append(
        "CREATE FUNCTION pool_planner_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO pool_planner_feed (kind, key) VALUES ('all', 0); RETURN NULL; END $$;"
    )
    for table, (kind, key, columns, only) in FED.items():
        new, old = key.format(row="NEW"), key.format(row="OLD")
        both = (
            f"IF {old} IS DISTINCT FROM {new} THEN INSERT INTO pool_planner_feed (kind, key) "
            f"VALUES ('{kind}', {old}); END IF; "
            if key != "0"
            else ""
        )
        parts.append(
            f"CREATE FUNCTION {table}_feed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF TG_OP = 'DELETE' THEN INSERT INTO pool_planner_feed (kind, key) VALUES ('{kind}', {old}); "
            f"RETURN NULL; END IF; "
            f"IF TG_OP = 'UPDATE' THEN {both}END IF; "
            f"INSERT INTO pool_planner_feed (kind, key) VALUES ('{kind}', {new}); RETURN NULL; END $$;"
        )
        on_new, on_old = only.format(row="NEW"), only.format(row="OLD")
        differs = (
            "OLD.* IS DISTINCT FROM NEW.*"
            if columns is None
            else " OR ".join(f'OLD."{name}" IS DISTINCT FROM NEW."{name}"' for name in columns)
        )
        either = f" AND ({on_old} OR {on_new})" if only else ""
        for when, condition in (
            ("INSERT", on_new), ("DELETE", on_old), ("UPDATE", f"({differs}){either}"),
        ):  # fmt: skip
            clause = f" WHEN ({condition})" if condition else ""
            parts.append(
                f"CREATE TRIGGER {table}_feed_{when.lower()} AFTER {when} ON {table} FOR EACH ROW{clause} "
                f"EXECUTE FUNCTION {table}_feed();"
            )
        parts.append(
            f"CREATE TRIGGER {table}_feed_truncate AFTER TRUNCATE ON {table} FOR EACH STATEMENT "
            f"EXECUTE FUNCTION pool_planner_all();"
        )
    return "\n".join(parts)


def _backward() -> str:
    parts = []
    for table in FED:
        parts += [
            f"DROP TRIGGER {table}_feed_{when} ON {table};"
            for when in ("insert", "delete", "update", "truncate")
        ]
        parts.append(f"DROP FUNCTION {table}_feed();")
    return "\n".join([*parts, "DROP FUNCTION pool_planner_all();", TABLES_BACK])


class Migration(migrations.Migration):
    dependencies = [
        ("pool", "0003_decisions"),
        ("quotas", "0005_request_features"),
        ("accounts", "0001_initial"),
    ]
    operations = [migrations.RunSQL(_forward(), _backward())]

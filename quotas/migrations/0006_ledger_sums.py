"""Sums of ledger lines, kept by the database with every insert."""

import django.db.models.deletion
from django.db import migrations, models

KEY = "booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code, cost_code"
SUMS = "sum(gpu_ms)::bigint, sum(amount_micro)::bigint, count(*)"
FORWARD = f"""
CREATE FUNCTION quotas_ledger_sum() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quotas_ledgersum ({KEY}, gpu_ms, amount_micro, lines)
    SELECT {KEY}, {SUMS} FROM added GROUP BY {KEY};
    RETURN NULL;
END $$;
CREATE TRIGGER quotas_ledgerentry_sums AFTER INSERT ON quotas_ledgerentry
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION quotas_ledger_sum();
INSERT INTO quotas_ledgersum ({KEY}, gpu_ms, amount_micro, lines)
    SELECT {KEY}, {SUMS} FROM quotas_ledgerentry GROUP BY {KEY};
"""
BACKWARD = """
DROP TRIGGER quotas_ledgerentry_sums ON quotas_ledgerentry;
DROP FUNCTION quotas_ledger_sum();
"""


class Migration(migrations.Migration):
    dependencies = [("quotas", "0005_request_features")]
    operations = [
        migrations.CreateModel(
            name="LedgerSum",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("booked_month", models.DateField()),
                ("local_day", models.DateField()),
                (
                    "kind",
                    models.CharField(
                        choices=[("usage", "Usage"), ("correction", "Correction")], max_length=12
                    ),
                ),
                ("department_id_ref", models.BigIntegerField()),
                ("user_id_ref", models.BigIntegerField(null=True)),
                ("site_code", models.CharField(blank=True, max_length=48)),
                ("cost_code", models.CharField(blank=True, max_length=48)),
                ("gpu_ms", models.BigIntegerField()),
                ("amount_micro", models.BigIntegerField()),
                ("lines", models.BigIntegerField()),
                (
                    "flavour",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="ledger_sums",
                        to="quotas.gpuflavour",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["booked_month", "department_id_ref"], name="ledger_sum_month"),
                    models.Index(fields=["local_day", "department_id_ref"], name="ledger_sum_day"),
                ],
            },
        ),
        migrations.RunSQL(FORWARD, BACKWARD),
    ]

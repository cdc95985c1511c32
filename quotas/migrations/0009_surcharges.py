"""Surcharges of the price book: power on every hour held, and idle hours as lines of their own."""

from django.db import migrations, models

KEY = "booked_month, local_day, kind, department_id_ref, user_id_ref, flavour_id, site_code, cost_code"
SUMS = "sum(gpu_ms)::bigint, sum(amount_micro)::bigint"
# What a line has for power: its hours at its rate's power price, rounded half up once, away from 0 where it takes back.
POWER = (
    "sum(coalesce(sign(gpu_ms) * floor((2 * abs(gpu_ms)::numeric * r.power_micro_per_gpu_hour + 3600000) / 7200000), 0))"
    "::bigint"
)
FUNCTION = """
CREATE OR REPLACE FUNCTION quotas_ledger_sum() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quotas_ledgersum ({key}, gpu_ms, amount_micro, {power}lines)
    SELECT {key}, {sums}, {power_of}count(*) FROM added {join}GROUP BY {key};
    RETURN NULL;
END $$;
"""
JOIN = (
    "LEFT JOIN (SELECT uid, power_micro_per_gpu_hour FROM quotas_pricerate WHERE power_micro_per_gpu_hour > 0) r "
    "ON r.uid = added.rate_uid "
)
FORWARD = FUNCTION.format(key=KEY, sums=SUMS, power="power_micro, ", power_of=f"{POWER}, ", join=JOIN)
BACKWARD = FUNCTION.format(key=KEY, sums=SUMS, power="", power_of="", join="")


class Migration(migrations.Migration):
    dependencies = [("quotas", "0008_rate_department")]
    operations = [
        migrations.RemoveConstraint(
            model_name="ledgerentry",
            name="ledger_kind",
        ),
        migrations.AddField(
            model_name="ledgerentry",
            name="surcharge_ms",
            field=models.BigIntegerField(
                default=0,
                help_text="GPU-milliseconds that a surcharge is of; the line of their use counts them as hours",
            ),
        ),
        migrations.AddField(
            model_name="ledgersum",
            name="power_micro",
            field=models.BigIntegerField(default=0, help_text="the part of it that is for power"),
        ),
        migrations.AddField(
            model_name="pricerate",
            name="idle_micro_per_gpu_hour",
            field=models.BigIntegerField(
                default=0, help_text="surcharge on GPU-hours that were held idle, by telemetry"
            ),
        ),
        migrations.AddField(
            model_name="pricerate",
            name="power_micro_per_gpu_hour",
            field=models.BigIntegerField(
                default=0,
                help_text="surcharge for power and cooling, on top of the price of every GPU-hour held",
            ),
        ),
        migrations.AlterField(
            model_name="ledgerentry",
            name="kind",
            field=models.CharField(
                choices=[("usage", "Usage"), ("idle", "Idle surcharge"), ("correction", "Correction")],
                default="usage",
                max_length=12,
            ),
        ),
        migrations.AlterField(
            model_name="ledgerentry",
            name="micro_per_gpu_hour",
            field=models.BigIntegerField(help_text="power included"),
        ),
        migrations.AlterField(
            model_name="ledgersum",
            name="kind",
            field=models.CharField(
                choices=[("usage", "Usage"), ("idle", "Idle surcharge"), ("correction", "Correction")],
                max_length=12,
            ),
        ),
        migrations.AddConstraint(
            model_name="ledgerentry",
            constraint=models.UniqueConstraint(
                models.F("span"),
                models.F("local_day"),
                condition=models.Q(("kind", "idle")),
                name="ledger_idle_once",
            ),
        ),
        migrations.AddConstraint(
            model_name="ledgerentry",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("corrects__isnull", False), ("kind", "correction")),
                    models.Q(("gpu_ms__gte", 0), ("kind", "usage"), ("surcharge_ms", 0)),
                    models.Q(
                        ("gpu_ms", 0), ("kind", "idle"), ("span__isnull", False), ("surcharge_ms__gte", 0)
                    ),
                    _connector="OR",
                ),
                name="ledger_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="pricerate",
            constraint=models.CheckConstraint(
                condition=models.Q(("idle_micro_per_gpu_hour__gte", 0), ("power_micro_per_gpu_hour__gte", 0)),
                name="rate_surcharges_not_negative",
            ),
        ),
        migrations.RunSQL(FORWARD, BACKWARD),
    ]

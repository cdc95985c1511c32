"""Raw samples: partitioned by UTC day; partitions are made and dropped by monitoring.services.partitions."""

from django.db import migrations

FORWARD = """
CREATE TABLE monitoring_gpusample (
    at timestamptz NOT NULL,
    gpu_id bigint NOT NULL,
    slot smallint NOT NULL DEFAULT 0,
    util_pm smallint,
    sm_pm smallint,
    mem_used_mib integer,
    mem_total_mib integer,
    temp_c smallint,
    power_mw integer,
    PRIMARY KEY (gpu_id, slot, at)
) PARTITION BY RANGE (at);
CREATE INDEX monitoring_gpusample_at ON monitoring_gpusample USING brin (at);
"""
BACKWARD = "DROP TABLE monitoring_gpusample;"


class Migration(migrations.Migration):
    dependencies = [("monitoring", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]

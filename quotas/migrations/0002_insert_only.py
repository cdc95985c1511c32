"""The ledger takes inserts only; corrections are new rows."""

from django.db import migrations

FORWARD = """
CREATE TRIGGER quotas_ledgerentry_insert_only BEFORE UPDATE OR DELETE ON quotas_ledgerentry
    FOR EACH ROW EXECUTE FUNCTION gpupool_insert_only();
CREATE TRIGGER quotas_ledgerentry_no_truncate BEFORE TRUNCATE ON quotas_ledgerentry
    FOR EACH STATEMENT EXECUTE FUNCTION gpupool_insert_only();
"""
BACKWARD = """
DROP TRIGGER quotas_ledgerentry_insert_only ON quotas_ledgerentry;
DROP TRIGGER quotas_ledgerentry_no_truncate ON quotas_ledgerentry;
"""


class Migration(migrations.Migration):
    dependencies = [("quotas", "0001_initial"), ("ops", "0002_insert_only")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]

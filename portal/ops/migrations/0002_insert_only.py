"""The audit trail takes inserts only. The function is shared by the ledger (quotas 0002)."""

from django.db import migrations

FORWARD = """
CREATE FUNCTION gpupool_insert_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' AND current_setting('gpupool.allow_truncate', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% on % is refused: it takes inserts only', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER ops_auditevent_insert_only BEFORE UPDATE OR DELETE ON ops_auditevent
    FOR EACH ROW EXECUTE FUNCTION gpupool_insert_only();
CREATE TRIGGER ops_auditevent_no_truncate BEFORE TRUNCATE ON ops_auditevent
    FOR EACH STATEMENT EXECUTE FUNCTION gpupool_insert_only();
"""
BACKWARD = """
DROP TRIGGER ops_auditevent_insert_only ON ops_auditevent;
DROP TRIGGER ops_auditevent_no_truncate ON ops_auditevent;
DROP FUNCTION gpupool_insert_only();
"""


class Migration(migrations.Migration):
    dependencies = [("ops", "0001_initial")]
    operations = [migrations.RunSQL(FORWARD, BACKWARD)]

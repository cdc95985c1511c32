from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("pool", "0004_planner_feed")]

    operations = [
        migrations.AlterField(
            model_name="allocation",
            name="end_reason",
            field=models.CharField(
                blank=True,
                choices=[
                    ("finished", "Finished by itself"),
                    ("failed", "Ended with an error"),
                    ("released", "Released by its holder"),
                    ("expired", "Time was up"),
                    ("revoked", "Revoked by an administrator"),
                    ("reclaimed", "Reclaimed"),
                    ("preempted", "Preempted"),
                    ("node_lost", "Node lost"),
                    ("start_failed", "Could not start"),
                    ("suspended", "Holder suspended"),
                    ("idle", "Idle"),
                    ("over_quota", "Over quota"),
                    ("maintenance", "Maintenance"),
                ],
                max_length=16,
            ),
        ),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("pool", "0006_queue_lines")]

    operations = [
        migrations.AlterField(
            model_name="maintenancewindow",
            name="state",
            field=models.CharField(
                choices=[
                    ("planned", "Planned"),
                    ("announced", "Announced"),
                    ("running", "Under way"),
                    ("ended", "Over"),
                    ("cancelled", "Called off"),
                ],
                default="planned",
                max_length=10,
            ),
        ),
    ]

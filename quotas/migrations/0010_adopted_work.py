from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("quotas", "0009_surcharges"),
    ]

    operations = [
        migrations.AlterField(
            model_name="capacityrequest",
            name="run_kind",
            field=models.CharField(
                choices=[
                    ("command", "Command"),
                    ("image", "Container image"),
                    ("hold", "Hold: I work on the GPU myself"),
                    ("adopted", "Work that ran there before the pool took it in"),
                ],
                default="command",
                max_length=8,
            ),
        ),
    ]

"""What a surcharge on idle hours would have brought."""

from __future__ import annotations

from monitoring.models import UseDay
from monitoring.selectors.reports.base import Ask
from portal.kernel.units import cost_micro


def idle_surcharge(ask: Ask, micro_per_gpu_hour: int) -> tuple[int, int]:
    """(idle GPU-milliseconds, micro units) of a question: rounded half up once per lease and day, as it is booked."""
    found = UseDay.objects.filter(ask.uses(), idle_ms__gt=0).values_list("idle_ms", flat=True)
    hours = money = 0
    for idle_ms in found.iterator(chunk_size=5000):
        hours += idle_ms
        money += cost_micro(idle_ms, micro_per_gpu_hour)
    return hours, money

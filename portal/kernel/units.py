"""Units of the whole product: milli-GPU, GPU-milliseconds and micro-currency, all integers.

``milli_gpu``: 1000 is one whole card. ``gpu_ms``: a whole card for one millisecond. ``micro``: a millionth
of the currency unit. Floats never carry any of them. Pure Python: engines import this module and nothing
else of ours.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation

MILLI_PER_GPU = 1000
MS_PER_SECOND = 1000
MS_PER_HOUR = 3_600_000
MS_PER_DAY = 86_400_000
MICRO = 1_000_000
MIB_PER_GIB = 1024

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def scaled_int(value: Decimal | int | str, scale: int) -> int:
    """``value`` times ``scale`` as an exact integer; ValueError when it is not one, not a number or not
    finite.

    Floats are refused on purpose: they cannot say whether 0.1 was meant.
    """
    if isinstance(value, float):
        raise ValueError("a float has no exact value here")
    try:
        number = Decimal(value) * scale
    except (InvalidOperation, ValueError, TypeError) as error:
        raise ValueError(f"not a number: {value!r}") from error
    if not number.is_finite() or number != number.to_integral_value():
        raise ValueError(f"not a whole number of 1/{scale}: {value!r}")
    return int(number)


def milli_from_gpus(gpus: Decimal | int | str) -> int:
    """Milli-GPU from a number of cards: ``"0.5"`` → 500. ValueError below a thousandth of a card."""
    return scaled_int(gpus, MILLI_PER_GPU)


def gpus_from_milli(milli: int) -> Decimal:
    """Cards as an exact decimal without trailing zeros: 500 → ``Decimal("0.5")``, 2000 → ``Decimal("2")``."""
    return _trimmed(Decimal(milli) / MILLI_PER_GPU)


def micro_from_money(amount: Decimal | int | str) -> int:
    """Micro-currency from a decimal amount; ValueError with more than six decimal places."""
    return scaled_int(amount, MICRO)


def money_from_micro(micro: int) -> Decimal:
    """The exact decimal amount of a number of micro units."""
    return Decimal(micro) / MICRO


def gpu_hours(gpu_ms: int) -> Decimal:
    """GPU-hours of a number of GPU-milliseconds, exact to 28 digits; round it only where it is shown."""
    return Decimal(gpu_ms) / MS_PER_HOUR


def round_half_up(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` to the nearest integer, halves away from zero; ``denominator`` > 0."""
    if numerator < 0:
        return -round_half_up(-numerator, denominator)
    return (2 * numerator + denominator) // (2 * denominator)


def ceil_div(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` rounded up; ``denominator`` > 0."""
    return -(-numerator // denominator)


def cost_micro(gpu_ms: int, micro_per_gpu_hour: int) -> int:
    """What ``gpu_ms`` cost at a price per GPU-hour, in micro-currency, rounded half up once."""
    return round_half_up(gpu_ms * micro_per_gpu_hour, MS_PER_HOUR)


def to_ms(moment: datetime) -> int:
    """Milliseconds since 1970 (UTC) of an aware time, cut below a millisecond. ValueError for a naive one."""
    if moment.tzinfo is None:
        raise ValueError("a naive time has no place here")
    return (moment - EPOCH) // _MILLISECOND


def from_ms(moment_ms: int) -> datetime:
    """The aware UTC time of a number of milliseconds since 1970; exact inverse of ``to_ms`` at millisecond
    grain.
    """
    return EPOCH + timedelta(milliseconds=moment_ms)


def _trimmed(number: Decimal) -> Decimal:
    whole = number.to_integral_value()
    return whole.quantize(Decimal(1)) if number == whole else number.normalize()

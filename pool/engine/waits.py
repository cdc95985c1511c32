"""When a waiting request probably starts, from history: a range, where no promise of the plan says it better.

The plain guess is how long its line (its department's requests for one flavour) took to start as much as stands there
now, the request included: a long line is measured over a long time, a short one over the last half hour at least.
How far guesses were off is learnt: the ratio of the true wait to the guess, by kind of request (line and size, then
size, then all). The range told is the guess times the spread of those ratios, and reaches from two fifths to one and a
half of the guess at least: ratios of the same hours agree with each other more than with what comes next. Who still
waits counts as well once they have waited longer than half of the others did: a pool that fills up is noticed before
its first waits have ended. Times are milliseconds, amounts milli-GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Hashable

RATE_OVER_MS = 1_800_000
"""A rate is taken over so long at least."""
UNKNOWN_MS = 7_200_000
"""A line that never started anything is taken to need so long for each card."""
LATEST = 300
"""Ratios remembered of each kind."""
ENOUGH = 20
"""A kind with fewer says nothing."""
LOW_PERMILLE, HIGH_PERMILLE = 50, 950
LEAST_LOW_PERMILLE, LEAST_HIGH_PERMILLE = 400, 1500
WIDER_PERMILLE = 1300
"""The upper end allows for so much more than the worst that counts."""
LEAST_GUESS_MS = 60_000

Kind = tuple[Hashable, ...]


class Outlook:
    """What arrivals and starts so far tell of waits. Feed it events in order of time."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Hashable, int, int, int, int]] = {}
        self._line_milli: Counter[Hashable] = Counter()
        self._starts: dict[Hashable, _Starts] = {}
        self._ratios: dict[Kind, deque[int]] = {}
        self._spreads: dict[Kind, tuple[int, int] | None] = {}
        self._so_far: dict[Kind, list[int]] | None = None

    def arrive(self, key: Hashable, line: Hashable, milli: int, at: int) -> int:
        """A request came in line; returns what stands in its line now, itself included."""
        self._line_milli[line] += milli
        ahead = self._line_milli[line]
        self._waiting[key] = (line, milli, at, self._guess(line, ahead, at), size_class(milli))
        self._so_far = None
        return ahead

    def start(self, key: Hashable, at: int) -> None:
        """It started; how long it waited is learnt, unless it did not wait at all."""
        line, milli, since, guess, size = self._waiting.pop(key)
        self._so_far = None
        self._line_milli[line] -= milli
        self._starts.setdefault(line, _Starts()).add(at, milli)
        if at <= since:
            return
        for kind in _kinds(line, size):
            ratios = self._ratios.setdefault(kind, deque(maxlen=LATEST))
            ratios.append((at - since) * 1000 // guess)

    def leave(self, key: Hashable) -> None:
        """It left the line without a start."""
        line, milli, *_ = self._waiting.pop(key)
        self._so_far = None
        self._line_milli[line] -= milli

    def settle(self, at: int) -> None:
        """Gather what the waits so far tell at a moment. It holds for every ``span`` until the next event."""
        found: dict[Kind, list[int]] = {}
        for line, _, since, guess, size in self._waiting.values():
            for kind in _kinds(line, size):
                found.setdefault(kind, []).append((at - since) * 1000 // guess)
        self._so_far, self._spreads = found, {}

    def span(self, line: Hashable, milli: int, ahead_milli: int, at: int) -> tuple[int, int] | None:
        """(earliest, latest) moment for a request of ``milli`` with ``ahead_milli`` up to and with it in line; None
        where too little is known.
        """
        if self._so_far is None:
            self.settle(at)
        guess = self._guess(line, ahead_milli, at)
        for kind in _kinds(line, size_class(milli)):
            if kind not in self._spreads:
                self._spreads[kind] = self._spread(kind)
            spread = self._spreads[kind]
            if spread is not None:
                return at + guess * spread[0] // 1000, at + guess * spread[1] * WIDER_PERMILLE // 1_000_000
        return None

    def _spread(self, kind: Kind) -> tuple[int, int] | None:
        ratios = sorted(self._ratios.get(kind, ()))
        if len(ratios) < ENOUGH:
            return None
        half = ratios[len(ratios) // 2]
        so_far = (self._so_far or {}).get(kind, ())
        ratios = sorted([*ratios, *(one for one in so_far if one > half)])
        low = ratios[len(ratios) * LOW_PERMILLE // 1000]
        high = ratios[min(len(ratios) - 1, len(ratios) * HIGH_PERMILLE // 1000)]
        return min(low, LEAST_LOW_PERMILLE), max(high, LEAST_HIGH_PERMILLE)

    def _guess(self, line: Hashable, ahead_milli: int, at: int) -> int:
        starts = self._starts.get(line)
        took = ahead_milli * UNKNOWN_MS // 1000 if starts is None else starts.took(ahead_milli, at)
        return max(LEAST_GUESS_MS, took)


class _Starts:
    """What a line started: moments, and all milli-GPU up to and with each."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.sums: list[int] = [0]

    def add(self, at: int, milli: int) -> None:
        self.at.append(at)
        self.sums.append(self.sums[-1] + milli)

    def took(self, milli: int, now: int) -> int:
        """How long it took to start the last ``milli``: by the rate since then, over ``RATE_OVER_MS`` at least."""
        window = bisect_right(self.at, now - RATE_OVER_MS)
        first = max(0, min(window, bisect_right(self.sums, self.sums[-1] - milli) - 1, len(self.at) - 1))
        since = max(RATE_OVER_MS, 0 if first == window else now - self.at[max(0, first - 1)])
        return milli * since // max(1, self.sums[-1] - self.sums[first])


def size_class(milli: int) -> int:
    """Powers of two of cards: work of like size waits alike. Shares of a card are one class."""
    cards = -(-milli // 1000)
    return bisect_left((1, 2, 4, 8, 16, 32, 64, 128), cards) if milli >= 1000 else -1


def _kinds(line: Hashable, size: int) -> tuple[Kind, Kind, Kind]:
    return (line, size), (size,), ()

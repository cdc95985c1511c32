"""The layouts action: drained split cards are split anew for requests that find no slice of their profile.

It comes last, and only for requests that nothing else helped: a new layout is carried out by an administrator, so it
promises nothing and holds nothing back. Only cards that nobody stands on, is to start on, or is kept a place on count
as drained. Which layout: see ``layout``.
"""

from __future__ import annotations

from collections import Counter

from pool.engine.layout import layout_for
from pool.engine.round import Blocked, Round

MOST = 32
"""At most this many cards are asked to be split anew in one plan."""


def run(round_: Round) -> None:
    """Plan layouts for blocked requests for slices, in line order."""
    waiting = [one for one in round_.blocked if one.lacks is not None and one.reason.code == "no_slice_free"]
    if not waiting:
        return
    in_use = _in_use(round_)
    wanted: Counter[tuple[str | None, str]] = Counter()
    for one in waiting:
        if one.lacks is not None:
            wanted[one.lacks.flavour, one.request.profile] += one.request.per_node
    for blocked in waiting:
        if len(round_.layouts) >= MOST:
            return
        _plan(round_, blocked, wanted, in_use)


def _plan(round_: Round, blocked: Blocked, wanted: Counter[tuple[str | None, str]], in_use: set[int]) -> None:
    request, need, world = blocked.request, blocked.lacks, round_.world
    facts = world.facts.get(need.flavour or "") if need is not None else None
    if need is None or facts is None or facts.geometry is None or not world.fits_quota(request, need):
        return
    others = {profile: count for (flavour, profile), count in wanted.items() if flavour == need.flavour}
    others[request.profile] -= request.per_node
    view = world.state.view(None, request_id=request.id)
    found = layout_for(world.state, view, request, need, facts.geometry, others, in_use)
    for layout in found or ():
        round_.layouts.append(layout)
        in_use.add(layout.gpu_id)


def _in_use(round_: Round) -> set[int]:
    """Cards that somebody stands on now (what is ending does still), starts on, or has a place kept on."""
    members = [member for one in round_.world.running.values() for member in one.members]
    members += [member for one in round_.placed for member in one.place.members]
    members += [member for kept in (*round_.keeps.values(), *round_.new_keeps) for member in kept.members]
    return {take.gpu_id for member in members for take in member.takes}

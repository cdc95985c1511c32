"""Names of nodes in pure trees: database ids (int) or the labels of a case file (str), with one order over
both.
"""

from __future__ import annotations

from typing import TypeAlias

NodeId: TypeAlias = int | str


def id_key(node_id: NodeId) -> tuple[int, int, str]:
    """Sort key for ids of either type: numbers first, then text; used for every last tie-break."""
    return (0, node_id, "") if isinstance(node_id, int) else (1, 0, node_id)

"""``{% load ui %}``: the components of every page. See docs/design.md, and the living page at ``/design/``.

The parts live in ``portal.web.tags``: atoms (icon, badge, figure, na, money, local_time …), bars (qbar, quota,
meter, sumbar, stat, spark), blocks (card, callout, blank, dialog, steps, timeline, tabs, chart …), lists (filters,
sortable, pager, chip, segmented) and forms (field, form_errors).
"""

from portal.web.tags import atoms, bars, blocks, forms, lists
from portal.web.tags.base import register

__all__ = ["atoms", "bars", "blocks", "forms", "lists", "register"]

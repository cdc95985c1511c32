"""How forms draw their widgets: Django's templates, but for lists of choices, which are written out directly.

Django renders two templates for every option of a list. A list of 200 departments costs more so than the rest of its
page; written out it costs what its text costs, and reads the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.forms.renderers import DjangoTemplates
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

SELECT = "django/forms/widgets/select.html"


class Renderer(DjangoTemplates):
    """Django's renderer with lists of choices of its own."""

    def render(
        self, template_name: str, context: dict[str, Any], request: HttpRequest | None = None
    ) -> SafeString:
        """HTML of one widget, form or error list."""
        if template_name == SELECT:
            return _select(context["widget"])
        return mark_safe(super().render(template_name, context, request))


def _attrs(attrs: Mapping[str, Any]) -> SafeString:
    """As Django's attrs.html: False leaves one out, True gives it without a value."""
    shown = (
        (f" {name}", "" if value is True else format_html('="{}"', value))
        for name, value in attrs.items()
        if value is not False
    )
    return format_html_join("", "{}{}", shown)


def _option(option: Mapping[str, Any]) -> SafeString:
    return format_html(
        '<option value="{}"{}>{}</option>',
        str(option["value"]),
        _attrs(option["attrs"]) if option["attrs"] else "",
        option["label"],
    )


def _select(widget: Mapping[str, Any]) -> SafeString:
    parts = []
    for group, options, _index in widget["optgroups"]:
        inside = format_html_join("\n", "{}", ((_option(option),) for option in options))
        parts.append(format_html('<optgroup label="{}">{}</optgroup>', group, inside) if group else inside)
    body = format_html_join("\n", "{}", ((part,) for part in parts))
    return format_html('<select name="{}"{}>\n{}\n</select>', widget["name"], _attrs(widget["attrs"]), body)

"""Form fields: label above, help below, the error beside the field and tied to it."""

from __future__ import annotations

from typing import Any

from django import forms
from django.forms import BoundField
from django.template import Context
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext

from portal.web.tags.base import EMPTY, attr, register, svg


def _describe(context: Context, bound: BoundField, help_text: object) -> tuple[str, SafeString]:
    """The ids that describe a field and the help and error lines with those ids."""
    ident = bound.auto_id or bound.html_name
    ids, lines = [], []
    if help_text:
        ids.append(f"{ident}-help")
        lines.append(format_html('<p class="help" id="{}-help">{}</p>', ident, help_text))
    if bound.errors:
        ids.append(f"{ident}-error")
        text = format_html_join(" ", "{}", ((e,) for e in bound.errors))
        lines.append(
            format_html(
                '<p class="error" id="{}-error">{}<span>{}</span></p>', ident, svg(context, "warn"), text
            )
        )
    return " ".join(ids), mark_safe("".join(lines))


@register.simple_tag(takes_context=True)
def field(
    context: Context,
    bound: BoundField,
    unit: object = "",
    label: object = "",
    help: object = "",
    **attrs: Any,
) -> SafeString:
    """``{% field form.duration unit=_("hours") %}``: a whole field. Checkboxes, radios and lists of checkboxes are
    laid out by their widget; other keyword arguments become attributes of the control (``_`` becomes ``-``:
    ``hx_get=url`` → ``hx-get``). A field that is not required is marked optional."""
    widget = bound.field.widget
    if widget.is_hidden:
        return bound.as_widget()
    ident = bound.auto_id or bound.html_name
    describe, lines = _describe(context, bound, help or bound.help_text)
    name = label or bound.label
    extra: dict[str, Any] = {key.replace("_", "-"): value for key, value in attrs.items()}
    extra["aria-describedby"] = describe or None
    extra["aria-invalid"] = "true" if bound.errors else None
    optional = EMPTY
    if not bound.field.required and not isinstance(widget, forms.CheckboxInput):
        optional = format_html('<span class="opt">{}</span>', gettext("(optional)"))

    if isinstance(widget, forms.CheckboxInput):
        control = bound.as_widget(attrs=_clean(extra))
        hint = help or bound.help_text
        small = format_html('<small id="{}-help">{}</small>', ident, hint) if hint else EMPTY
        error = _describe(context, bound, "")[1]
        return format_html(
            '<div class="field"><label class="check" for="{}">{}<span>{}</span>{}</label>{}</div>',
            ident,
            control,
            name,
            small,
            error,
        )

    if isinstance(widget, forms.RadioSelect | forms.CheckboxSelectMultiple):
        choices = format_html_join(
            "", "<label>{}<span>{}</span></label>", ((w.tag(), w.choice_label) for w in bound.subwidgets)
        )
        return format_html(
            '<fieldset class="field"{}{}><legend>{} {}</legend><div class="choice">{}</div>{}</fieldset>',
            attr("aria-describedby", describe),
            attr("data-invalid", "true" if bound.errors else ""),
            name,
            optional,
            choices,
            lines,
        )

    extra["class"] = f"input {widget.attrs.get('class', '')}".strip()
    control = bound.as_widget(attrs=_clean(extra))
    if unit:
        control = format_html('<div class="input-group">{}<span class="unit">{}</span></div>', control, unit)
    return format_html(
        '<div class="field"><label for="{}">{} {}</label>{}{}</div>', ident, name, optional, control, lines
    )


def _clean(attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes without the empty ones, except that an empty ``aria-describedby`` keeps Django from adding its own."""
    kept = {k: v for k, v in attrs.items() if v is not None}
    if attrs.get("aria-describedby") is None:
        kept.pop("aria-describedby", None)
    return kept


@register.simple_tag(takes_context=True)
def form_errors(context: Context, form: forms.BaseForm) -> SafeString:
    """``{% form_errors form %}``: above a form that came back: what concerns the whole form, and how many fields
    to look at. Nothing when there is no error."""
    if not form.is_bound or not form.errors:
        return EMPTY
    general = format_html_join("", "<p>{}</p>", ((e,) for e in form.non_field_errors()))
    links = [
        format_html('<a href="#{}">{}</a>', form[name].auto_id, form[name].label)
        for name in form.errors
        if name in form.fields and not form[name].is_hidden
    ]
    hidden = [
        e for name in form.errors if name in form.fields and form[name].is_hidden for e in form[name].errors
    ]
    general += format_html_join("", "<p>{}</p>", ((e,) for e in hidden))
    where = (
        format_html(
            "<p>{} {}</p>", gettext("To look at:"), format_html_join(", ", "{}", ((a,) for a in links))
        )
        if links
        else EMPTY
    )
    head = general or format_html("<p><strong>{}</strong></p>", gettext("Not saved."))
    return format_html(
        '<div class="callout" data-tone="bad" role="alert">{}<div>{}{}</div></div>',
        svg(context, "warn"),
        head,
        where,
    )


@register.filter
def widget_value(bound: BoundField) -> Any:
    """The value that a field shows, as text for templates that draw the control themselves."""
    return bound.value()

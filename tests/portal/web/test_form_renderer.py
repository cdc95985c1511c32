"""Lists of choices are written out by ourselves: they read as Django's own."""

import re

from django import forms
from django.forms.renderers import DjangoTemplates
from django.utils.safestring import mark_safe

from portal.web.form_renderer import Renderer

CHOICES = [
    ("", "–"),
    ("a&b", "<b>quoted\"'"),
    (1, mark_safe("one<br>")),
    ("Group & more", [("x", "X"), (None, "nothing")]),
]


class Choosing(forms.Form):
    one = forms.ChoiceField(
        choices=CHOICES, widget=forms.Select(attrs={"data-x": 'a"b', "disabled": True, "hidden": False})
    )
    more = forms.MultipleChoiceField(choices=CHOICES, required=False)
    yes = forms.NullBooleanField()


def _flat(html: str) -> str:
    return re.sub(r">\s+<", "><", html)


def test_lists_of_choices_read_as_django_draws_them():
    for data in (None, {}, {"one": "1", "more": ["a&b", "x"], "yes": "true"}):
        ours, theirs = Choosing(data, renderer=Renderer()), Choosing(data, renderer=DjangoTemplates())
        for name in ("one", "more", "yes"):
            extra = {"class": "input", "aria-describedby": "help"}
            assert _flat(ours[name].as_widget(attrs=extra)) == _flat(theirs[name].as_widget(attrs=extra))

"""The component tags: what they escape, what they say to screen readers, what they keep of the address."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django import forms
from django.core.paginator import Paginator
from django.template import Context, Template
from django.test import RequestFactory
from django.utils import timezone, translation

from portal.kernel.clock import set_clock
from portal.web import icons, states


def draw(source: str, path: str = "/x/", headers: dict[str, str] | None = None, **context: Any) -> str:
    """A template with the library, rendered in English for a request to `path`."""
    request = RequestFactory().get(path, headers=headers or {})
    with translation.override("en"):
        return Template("{% load ui i18n %}" + source).render(Context({"request": request, **context}))


def test_an_icon_is_drawn_once_a_page_and_whole_in_a_fragment() -> None:
    page = draw('{% icon "play" %}{% icon "play" %}{% icon_symbols "x" %}')
    assert page.count('href="#i-play"') == 2
    assert page.count("<symbol") == 2
    fragment = draw('{% icon "play" %}', headers={"HX-Request": "true"})
    assert "<use" not in fragment
    assert "<path" in fragment


def test_an_unknown_icon_is_an_error() -> None:
    with pytest.raises(KeyError):
        draw('{% icon "no-such" %}')


def test_a_badge_has_colour_icon_and_word() -> None:
    html = draw('{% badge "in_use" "gpu" %}')
    assert 'data-tone="ok"' in html
    assert "#i-play" in html
    assert "In use" in html


def test_an_unknown_state_shows_its_own_words() -> None:
    html = draw('{% badge "half_open" %}')
    assert "Half open" in html
    assert 'data-tone="mute"' in html


def test_every_look_has_a_known_icon_and_tone() -> None:
    for table in (states.COMMON, *states.KINDS.values()):
        for key, look in table.items():
            assert look.icon in icons.symbols(), key
            assert look.tone in states.TONES, key


def test_missing_is_never_zero() -> None:
    assert "N/A" in draw('{% figure v "W" reason="not supported" %}', v=None)
    assert 'data-tip="not supported"' in draw('{% figure v "W" reason="not supported" %}', v=None)
    assert draw('{% figure v "W" %}', v=0) == "0\u00a0W"
    assert "N/A" in draw('{% meter v label="Memory" %}', v=None)
    assert "N/A" in draw('{% stat "Power" v %}', v=None)


def test_hostile_text_is_escaped_everywhere() -> None:
    bad = "<script>alert(1)</script>"
    source = (
        "{% badge bad %}{% na bad %}{% card title=bad sub=bad foot=bad %}x{% endcard %}"
        "{% blank 'empty' title=bad text=bad %}{% quota bad 1000 2000 3000 %}{% meter 3 label=bad %}"
        "{% stat bad bad bad %}{% copyable bad %}{% chip bad 'q' %}{% steps steps %}{% effects rows %}"
        "{% chart 'c' figure label=bad %}{% dialog id='d' title=bad %}x{% enddialog %}"
    )
    html = draw(
        source,
        path="/x/?q=" + "%3Cscript%3E",
        bad=bad,
        steps=[{"s": "now", "title": bad, "note": bad}],
        rows=[(bad, bad)],
        figure={"data": [{"name": bad}]},
    )
    assert "<script>alert" not in html
    assert "</script>alert" not in html


def test_P012_quota_bar_speaks_its_figures_also_without_a_limit_at_it_and_above_it() -> None:
    assert "22 used of 24 guaranteed; 0 borrowed; 0 lent; limit 32" in draw("{% qbar 22000 24000 32000 %}")
    assert "over by 2" in draw("{% qbar 22000 16000 20000 borrowed=4000 %}")
    assert "20 used of 16 guaranteed; 4 borrowed; 0 lent; limit 20" in draw("{% qbar 20000 16000 20000 %}")
    assert "0 used of 16 guaranteed" in draw("{% qbar 0 16000 20000 %}")
    unlimited = draw("{% qbar 9000 8000 %}")
    assert "data-open" in unlimited
    assert "limit none" in unlimited
    assert 'style="--cap:1"' in draw("{% qbar 0 0 0 %}")  # nothing granted: no division by zero in the style


def test_P050_P051_instants_show_their_wall_clock_with_the_zone_at_hand_and_nothing_is_a_dash() -> None:
    at = datetime(2026, 6, 16, 6, 3, 12, tzinfo=UTC)
    with timezone.override("Asia/Shanghai"), set_clock(at + timedelta(minutes=1)):
        shown = draw("{{ t|local_time }} {{ t|time_ago }}", t=at)
        assert "16 Jun 14:03" in shown.replace("\u00a0", " ")
        assert 'datetime="2026-06-16T06:03:12+00:00" title="2026-06-16 14:03:12 UTC+8"' in shown
        assert "1 min ago" in shown.replace("\u00a0", " ")
        for source in ("{{ t|local_time }}", "{{ t|duration }}"):
            assert draw(source, t=None) == "–"


def test_pager_keeps_the_query_and_counts() -> None:
    page = Paginator(range(214), 50).get_page(2)
    html = draw("{% pager page %}", path="/x/?state=queued&page=2&q=a%26b", page=page)
    assert "51–100 of 214" in html
    assert "?state=queued&amp;page=3&amp;q=a%26b" in html
    assert 'aria-current="page">2<' in html


def test_sortable_head_turns_around_and_drops_the_page() -> None:
    html = draw('{% sortable "age" "Age" numeric=True %}', path="/x/?sort=age&page=4")
    assert 'aria-sort="ascending"' in html
    assert 'href="?sort=-age"' in html
    assert "aria-sort" not in draw('{% sortable "age" "Age" %}')


class SampleForm(forms.Form):
    hours = forms.IntegerField(label="Duration", help_text="Longest: 168 h.", min_value=1)
    note = forms.CharField(required=False)
    agree = forms.BooleanField(required=False)
    kind = forms.ChoiceField(choices=[("a", "A"), ("b", "B")], widget=forms.RadioSelect)


def test_field_ties_help_and_error_to_its_control() -> None:
    form = SampleForm({"hours": "zwölf", "kind": "a"})
    html = draw('{% field form.hours unit="hours" %}', form=form)
    assert 'aria-describedby="id_hours-help id_hours-error"' in html
    assert 'aria-invalid="true"' in html
    assert 'value="zwölf"' in html
    assert "Enter a whole number." in html
    assert '<label for="id_hours">' in html


def test_field_of_each_kind() -> None:
    form = SampleForm()
    assert "(optional)" in draw("{% field form.note %}", form=form)
    assert 'class="check"' in draw("{% field form.agree %}", form=form)
    radios = draw("{% field form.kind %}", form=form)
    assert "<fieldset" in radios
    assert radios.count('type="radio"') == 2
    assert 'hx-get="/fit/"' in draw('{% field form.note hx_get="/fit/" %}', form=form)


def test_form_errors_lead_to_the_fields() -> None:
    html = draw("{% form_errors form %}", form=SampleForm({"kind": "a"}))
    assert 'href="#id_hours"' in html
    assert draw("{% form_errors form %}", form=SampleForm()) == ""


def test_chart_figure_is_json_that_cannot_break_out() -> None:
    html = draw('{% chart "c" figure %}', figure={"data": [{"name": "</script><b>"}], "layout": {}})
    assert html.count("</script>") == 1
    assert "\\u003C/script" in html


def test_spark_breaks_where_data_is_missing() -> None:
    html = draw("{% spark values %}", values=[1, 2, None, 3, 4])
    assert html.count('class="ln"') == 2

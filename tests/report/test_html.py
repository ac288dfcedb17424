"""The page: whole in itself, sound for any run, and no text of a user can become a tag."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lmi_bench.core.load import Load
from lmi_bench.report.html import SCRIPTS, render_html
from lmi_bench.report.view import build_view

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>{{ 7*7 }}"
VOID = {"meta", "link", "br", "wbr", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements, attributes and texts of a page; complains where tags do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.elements, self.texts = [], [], []
        self.scripts, self.styles = [], []
        self.feed(text)
        self.close()
        assert self.stack == [], f"unclosed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
        elif self.stack and self.stack[-1] == "style":
            self.styles.append(data)
        else:
            self.texts.append(data)

    def having(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def page(sweep):
    return Page(render_html(build_view([sweep])))


def test_nothing_is_loaded_from_anywhere(page):
    """Every src, href and the like is a place in the page itself or data in it."""
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "poster", "data", "background"):
            value = attributes.get(name)
            if value is not None:
                assert value.startswith(("#", "data:")), f"<{tag} {name}={value!r}>"
    assert page.styles
    for style in page.styles:
        assert "@import" not in style
        assert "url(" not in style


def test_the_policy_allows_exactly_the_scripts_that_are_there(page):
    """A browser computes the same hashes over the text between the tags."""
    (policy,) = [each["content"] for each in page.having("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    kinds = [attributes.get("type") for attributes in page.having("script")]
    run = [text for text, kind in zip(page.scripts, kinds, strict=True) if kind is None]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert len(run) == len(SCRIPTS)
    assert "default-src 'none'" in policy
    assert re.findall(r"sha256-([^']+)", policy) == digests


def test_plotly_is_inlined_once_and_the_page_stays_small(page):
    sizes = sorted(len(script) for script in page.scripts)
    assert sizes[-2] < 100_000 < 1_000_000 < sizes[-1] < 1_400_000


def test_a_report_of_many_levels_and_candidates_is_below_one_and_a_half_megabytes(runs_of, recommendation):
    """12 levels, one of 1,800 requests, and 300 candidates: what is drawn has a fixed size."""
    run = runs_of("", loads=tuple(range(1, 13)))
    run.records[-1] = run.records[-1] * 50
    recommendation["candidates"] *= 100
    page = render_html(build_view([run], [recommendation]))
    assert len(page.encode()) < 1_500_000
    assert "200 more candidates are in the file" in page


def test_the_figures_have_one_set_of_data_and_words_for_those_who_cannot_see_them(page):
    charts = [a for a in page.having("div") if a.get("class") == "chart"]
    assert len(charts) == 5 + 5
    kinds = [attributes.get("type") for attributes in page.having("script")]
    data = json.loads(page.scripts[kinds.index("application/json")])
    assert kinds.count("application/json") == 1
    drawn = {a["id"] for a in charts if a["data-view"] == "chart"}
    assert drawn == {each["anchor"] for each in data["charts"]}
    assert all(chart["aria-label"] for chart in charts)


def test_anchors_lead_somewhere(page):
    ids = {attributes["id"] for _, attributes in page.elements if attributes.get("id")}
    links = {a["href"][1:] for a in page.having("a") if a["href"].startswith("#")}
    assert links
    assert links <= ids


def test_the_page_holds_all_its_parts(page):
    for part in (
        "Knee",
        "Best throughput",
        "Concurrent requests",
        "Latency, ms/token",
        "TTFT, ms",
        "ITL, ms",
        "errors",
        "Service-level objectives",
        "Load generator's self-check",
        "Definitions",
        "(last token - first token) / (output tokens - 1)",
        "Environment",
        "Schema version",
        "Scenario hash",
        "2026-01-02T03:04:05+00:00",
        "llama-2-7b",
        "lmi-bench sweep --out runs/a",
        "32 GiB",
    ):
        assert part in page.text, part


def test_a_percentile_without_support_says_why_on_hover(page):
    hints = [a["title"] for a in page.having("td") if "na" in (a.get("class") or "")]
    assert "needs 29 samples, has 3" in hints


def test_hostile_names_stay_text(runs_of, recommendation):
    """In the title, model, target, label, SLO, host, reasons and the charts' JSON."""
    run = runs_of(HOSTILE, loads=(1, 2), more={"model": HOSTILE, "target": HOSTILE, "slo": [HOSTILE]})
    run.manifest.host[HOSTILE] = HOSTILE
    run.levels[1] = replace(run.levels[1], valid=False, invalid_reason=HOSTILE)
    recommendation["recommended"]["instance"] = HOSTILE
    recommendation["rejected"][0]["reason"] = HOSTILE
    recommendation[HOSTILE] = HOSTILE
    page = Page(render_html(build_view([run], [recommendation], labels=[HOSTILE])))
    assert page.having("img") == []
    plain = [a for a in page.having("script") if a.get("type") is None]
    assert len(plain) == len(SCRIPTS)
    assert not any(name.startswith("on") for _, a in page.elements for name in a)
    assert HOSTILE in page.text


def test_a_single_level_works(runs_of):
    page = Page(render_html(build_view([runs_of("one", loads=(8,))])))
    assert "needs at least two usable levels" in page.text
    assert len([a for a in page.having("div") if a.get("class") == "chart"]) == 10


def test_a_run_without_a_finished_level_works(runs_of):
    page = Page(render_html(build_view([runs_of("empty", loads=())])))
    assert "no level was valid and complete" in page.text
    assert page.scripts == []


def test_levels_of_failures_work(runs_of):
    run = runs_of("failed", loads=(1, 2))
    run.levels[:] = [
        replace(
            line,
            errors=line.requests,
            errors_by_kind={"connect": line.requests},
            throughput_tokens_per_s=None,
            latency={},
            mean_concurrency=None,
        )
        for line in run.levels
    ]
    run.records[:] = [() for _ in run.levels]
    text = Page(render_html(build_view([run]))).text
    assert "3 of 3 requests failed (3 connect)" in text


def test_a_rate_sweep_is_shown_over_its_rates(runs_of):
    run = runs_of("rates", loads=(1, 2, 4))
    run.levels[:] = [replace(line, load=Load(rate_per_s=line.load.value / 2)) for line in run.levels]
    text = Page(render_html(build_view([run]))).text
    assert "Request rate, req/s" in text
    assert "0.5 req/s" in text


def test_several_runs_are_compared_with_own_labels(sweep, faster_sweep):
    page = Page(render_html(build_view([sweep, faster_sweep], labels=["old", "new"])))
    assert "2 runs compared" in page.text
    assert "Runs side by side" in [a["aria-label"] for a in page.having("div") if a.get("role") == "group"]
    assert {"run-1", "run-2"} <= {a.get("id") for a in page.having("section")}
    assert "old" in page.text
    assert "new" in page.text


def test_a_recommendation_alone_has_its_charts_and_its_numbers_as_text(recommendation):
    page = Page(render_html(build_view([], [recommendation])))
    run = [a for a in page.having("script") if a.get("type") is None]
    assert len(run) == len(SCRIPTS) - 1  # none for the curves of runs
    assert [a["data-view"] for a in page.having("div") if a.get("data-view")] == [
        "cost",
        "stairs",
        "roofline",
        "pace",
        "memory",
    ]
    for part in (
        "2 × ml.g5.12xlarge",
        "USD 14.18",
        "1.62 for 1M output tokens",
        "2,430",
        "300 to 610",
        "weights need 25.1 GiB",
        "tgi-2023",
    ):
        assert part in page.text, part


def test_an_slo_breaks_before_its_limit_and_not_inside_its_number(runs_of):
    run = runs_of("", loads=(16,), more={"slo": ["ttft_p90<=1s"]})
    assert "ttft_p90<wbr>&lt;=1000ms" in render_html(build_view([run]))


def test_the_same_view_gives_the_same_page(sweep):
    view = build_view([sweep])
    assert render_html(view) == render_html(view)

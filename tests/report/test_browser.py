"""The page in a browser: drawn, usable by keyboard and in any medium, and without an error."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmi_bench.report.html import render_html
from lmi_bench.report.live import LivePage, serve
from lmi_bench.report.view import build_view
from tests.report.browser import Browser, found

pytestmark = pytest.mark.skipif(found() is None, reason="no Chromium is installed")

DRAWN = "[...document.querySelectorAll('.chart')].every((c) => c.querySelector('.main-svg'))"
CHART = "document.getElementById('chart-ttft-ms')"
# Of each text with too little contrast (WCAG AA: 4.5, or 3 where it is large): what it says.
FAINT = """(() => {
  const parts = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const faint = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const says = walker.currentNode.data.trim();
    if (!says || element.closest("script, style, svg, noscript")) continue;
    const style = getComputedStyle(element);
    const both = [light(parts(style.color)), light(ground(element))];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) faint.push(says);
  }
  return faint;
})()"""
# Of each element that a screen reader cannot name or place: what it is.
NAMELESS = """(() => {
  const wrong = [];
  const all = (query) => [...document.querySelectorAll(query)];
  const ids = all("[id]").map((each) => each.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push("twice: " + id);
  for (const each of all(".chart, [role=group], nav, aside")) {
    if (!each.getAttribute("aria-label")) wrong.push("no label: " + each.outerHTML.slice(0, 90));
  }
  for (const each of all("select")) if (!each.labels.length) wrong.push("no label: " + each.id);
  for (const each of all("a[href], summary")) {
    if (!each.textContent.trim()) wrong.push("empty: " + each.outerHTML);
  }
  for (const each of all("main th")) if (!each.scope) wrong.push("no scope: " + each.textContent);
  for (const each of all("[aria-labelledby]")) {
    if (!document.getElementById(each.getAttribute("aria-labelledby"))) wrong.push(each.outerHTML);
  }
  const levels = all("h1, h2, h3, h4").map((each) => Number(each.tagName[1]));
  levels.forEach((at, i) => { if (i && at > levels[i - 1] + 1) wrong.push("skips to h" + at); });
  for (const each of all(".scroll, .chart")) if (each.tabIndex) wrong.push("no tab: " + each.id);
  if (all("main").length !== 1 || all("h1").length !== 1) wrong.push("not one main and h1");
  if (!document.documentElement.lang) wrong.push("no language");
  return wrong;
})()"""


@pytest.fixture(scope="module")
def page(sweep, faster_sweep, plan, tmp_path_factory):
    """The address of a report with everything in it."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(build_view([sweep, faster_sweep], [plan])), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driven = Browser(tmp_path_factory.mktemp("chromium"))
    yield driven
    driven.close()


@pytest.fixture(scope="module")
def opened(browser, page):
    """The browser at the page, which is wide and light."""
    browser.open(page)
    browser.until(DRAWN)
    return browser


@pytest.fixture(autouse=True)
def silent(browser):
    """No test may leave an error or a warning in the console."""
    yield
    assert browser.console == []


def test_every_chart_is_drawn_and_names_its_axes(opened):
    charts = opened.js("[...document.querySelectorAll('.chart')].map((c) => [c.id, c.data.length])")
    assert len(charts) == 15
    assert all(traces > 0 for _, traces in charts)


def test_hovering_shows_the_level_and_its_value(opened):
    opened.js(f"{CHART}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = opened.js(
        f"(() => {{ const p = [...{CHART}.querySelectorAll('.point')].at(-1)"
        ".getBoundingClientRect(); return [p.x + p.width / 2, p.y + p.height / 2]; })()"
    )
    opened.mouse(*box)
    opened.until(f"!!{CHART}.querySelector('.hovertext')")
    shown = opened.js(f"{CHART}.querySelector('.hovertext').textContent")
    assert "concurrency 64" in shown
    assert "ms" in shown


def test_the_keyboard_hides_a_series_and_the_address_shows_the_same_view_again(opened, page):
    opened.js(f"{CHART}.focus()")
    opened.key("2")
    opened.until(f"{CHART}.data[2].visible === 'legendonly'")
    opened.js(
        "(() => { const s = document.getElementById('explore-metric'); s.value = 'itl_ms';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    link = opened.js("location.hash")
    assert "chart-ttft-ms.hidden=2.3" in link
    assert "explore-metric=itl_ms" in link
    opened.open(page + link)
    opened.until(DRAWN)
    assert opened.js(f"{CHART}.data[2].visible") == "legendonly"
    title = "document.getElementById('view-cdf').layout.xaxis.title.text"
    assert opened.js(title) == "Inter-token latency, ms"
    opened.js(f"{CHART}.focus()")
    opened.key("2")
    opened.until(f"{CHART}.data[2].visible === true && !location.hash.includes('hidden')")


def test_another_run_has_its_own_levels(opened):
    opened.js(
        "(() => { const s = document.getElementById('explore-run'); s.value = '1';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert opened.js("document.getElementById('explore-level').options.length") == 7
    assert opened.js("document.getElementById('explore-level').selectedOptions[0].text") == ("concurrency 64")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_and_every_chart_the_colours_of_the_theme(opened, scheme):
    opened.show(1200, scheme)
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    opened.until(f"{CHART}.layout.xaxis.title.font.color === {ink}")
    assert opened.js(FAINT) == []
    if scheme == "dark":
        assert opened.js(ink) == "#e8ebf0"


def test_a_screen_reader_finds_a_name_for_everything(opened):
    assert opened.js(NAMELESS) == []


def test_axe_finds_no_serious_issue(opened):
    """Contrast, which takes most of its time, has a test of its own above; AXE_JS=axe.min.js runs
    all rules of another release."""
    package, named = find_spec("axe_core_python"), os.environ.get("AXE_JS")
    if package is None and named is None:
        pytest.skip("axe-core-python is not installed")
    file = Path(named) if named else Path(package.origin).with_name("axe.min.js")
    opened.js(file.read_text(encoding="utf-8"))
    contrast = "true" if named else "false"
    for scheme in ("light", "dark") if named else ("light",):
        opened.show(1200, scheme)
        found = opened.js(
            "axe.run({resultTypes: ['violations'], rules: {'color-contrast': {enabled: "
            f"{contrast}}}}}}}).then((r) => r.violations.map((v) => [v.impact, v.id,"
            "v.nodes.map((n) => n.html.slice(0, 200))]))"
        )
        assert [each for each in found if each[0] in ("serious", "critical")] == []


def test_a_narrow_page_scrolls_only_its_tables_and_breaks_no_slo_inside_its_number(opened):
    opened.show(360)
    opened.until("document.getElementById('chart-ttft-ms').clientWidth < 360")
    whole = "document.documentElement"
    assert opened.js(f"{whole}.scrollWidth - {whole}.clientWidth") == 0
    lines = """[...document.querySelectorAll('.detail wbr')].map((mark) => {
      const range = document.createRange(), text = mark.nextSibling;
      range.setStart(text, 0);
      range.setEnd(text, text.data.match(/^<=[0-9.]+m?s/)[0].length);
      return range.getClientRects().length;
    })"""
    found = opened.js(lines)
    assert found
    assert set(found) == {1}
    wide = "[...document.querySelectorAll('.scroll')].filter((e) =>"
    wide += " e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)"
    assert opened.js(f"{wide}.every((e) => getComputedStyle(e).overflowX === 'auto')")
    opened.until(f"{wide}.length > 0 && {wide}.every((e) => e.matches('[data-wide]'))")
    opened.show(1200)


def test_print_opens_what_is_folded_and_shows_intervals(opened):
    opened.show(1047, "dark", media="print")  # A4 in landscape, less its margins
    opened.js("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.js("[...document.querySelectorAll('details')].every((each) => each.open)")
    shown = opened.js("[...document.querySelectorAll('td small')].map((e) => e.checkVisibility() && e.textContent)")
    right = "Math.max(...[...document.querySelectorAll('table')].map((t) => t.getBoundingClientRect()"
    assert opened.js(f"{right}.right))") <= 1047
    assert "300 to 610" in shown
    assert all(shown)
    assert opened.js("getComputedStyle(document.body).color") == "rgb(22, 25, 31)"
    opened.js("window.dispatchEvent(new Event('afterprint'))")
    assert not opened.js("[...document.querySelectorAll('details')].some((each) => each.open)")
    opened.show(1200)


def test_the_page_of_a_running_sweep_grows_and_the_reader_keeps_the_place(browser, runs_of):
    """A level between two others is added: choices and hidden series are kept by their names."""
    live = LivePage()

    def shown(loads, **more):
        live.show(render_html(build_view([runs_of("run", loads=loads)]), live=True), **more)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serve(listening, live)
        shown(())
        browser.open(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        assert browser.js("document.querySelectorAll('.chart').length") == 0
        shown((1, 4))
        rows = "document.querySelector('#run-1 tbody').rows.length"
        browser.until(f"{rows} === 2 && document.getElementById('view-cdf')?.data")
        browser.js("""(() => {
          const level = document.getElementById("explore-level");
          level.value = "1";
          level.dispatchEvent(new Event("change"));
          const cdf = document.getElementById("view-cdf");
          window.Plotly.restyle(cdf, { visible: "legendonly" }, [1]);
          document.querySelector("details").open = true;
          document.getElementById("generator").scrollIntoView({ behavior: "instant" });
          window.before = [cdf, document.querySelector("#definitions tbody tr"), level];
          cdf.focus({ preventScroll: true });
        })()""")
        place = "Math.round(document.getElementById('generator').getBoundingClientRect().top)"
        before = browser.js(place)
        shown((1, 2, 4), ended=True)
        browser.until(f"{rows} === 3")
        assert browser.js("window.before.every((each) => each.isConnected)")
        assert browser.js("document.activeElement === window.before[0]")
        assert browser.js("document.querySelector('details').open")
        assert abs(browser.js(place) - before) <= 2
        assert browser.js("window.before[2].selectedOptions[0].text") == "concurrency 4"
        hidden = "window.before[0].data.map((each) => [each.name, each.visible === 'legendonly'])"
        browser.until(f"{hidden}.length === 3")
        assert browser.js(hidden) == [["concurrency 1", False], ["concurrency 2", False], ["concurrency 4", True]]
        browser.until("document.getElementById('live').textContent.startsWith('The sweep is over')")


def test_a_chart_is_drawn_when_it_is_near_or_linked_to_or_printed(browser, page):
    """Nothing is drawn for want of something else to do here: the browser is never idle."""
    never = "window.requestIdleCallback = () => 0"
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=never)["identifier"]
    waiting = "[...document.querySelectorAll('.chart')].filter((c) => !c.data).map((c) => c.id)"
    cost = "recommendation-1-cost"
    browser.open(f"{page}#{cost}?recommendation-1-latency=itl_p50_ms&{cost}.hidden=1")
    browser.until(f"!{waiting}.includes('{cost}')")
    shown = f"document.getElementById('{cost}')"
    assert browser.js(f"{shown}.layout.yaxis.title.text") == "ITL p50, ms"
    assert browser.js(f"{shown}.data[1].visible") == "legendonly"
    browser.until(f"Math.abs({shown}.getBoundingClientRect().top) < 900")  # it scrolls smoothly
    assert browser.js(waiting), "charts far from the place are not drawn"
    browser.js("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.js(waiting) == []
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)

"""The figures that the page's own scripts give to plotly.js, without a browser."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from py_mini_racer import MiniRacer

from lmi_bench.report.html import render_html

_DRAWN = re.compile(r'<div class="chart" id="([^"]+)".* data-view="([^"]+)" data-of="([^"]*)"')
_DATA = re.compile(r'<script type="application/json" id="figures">(.*)</script>')
# What a browser has and the language has not.
_BROWSER = """
const elements = {};
const window = globalThis;
const document = { getElementById: (id) => elements[id] ?? null };
const structuredClone = (value) => JSON.parse(JSON.stringify(value));
"""


def figures_of(view, **chosen):
    """The figure of each chart and view of a report's page by its id.

    chosen  values of the page's selects by their ids, `_` for `-`
    """
    page = render_html(view)
    elements = {name.replace("_", "-"): {"value": value} for name, value in chosen.items()}
    (elements["figures"],) = ({"textContent": text} for text in _DATA.findall(page))
    places = [{"id": anchor, "dataset": {"view": name, "of": of}} for anchor, name, of in _DRAWN.findall(page)]
    engine = MiniRacer()
    engine.eval(_BROWSER)
    for name in ("draw.js", "charts.js", "views.js"):
        script = files("lmi_bench.report") / "page" / name
        engine.eval(script.read_text(encoding="utf-8"))
    engine.eval(f"Object.assign(elements, {json.dumps(elements)}); lmi.load();")
    drawn = f"{json.dumps(places)}.map((each) => [each.id, lmi.views[each.dataset.view](each)])"
    return dict(json.loads(engine.eval(f"JSON.stringify({drawn})")))

"""Renders one HTML file that opens from disk, without network or other files.

plotly.js (the basic bundle: lines, bars and pies), style and the figures' data are inside. The
page's content-security policy blocks loading, and allows only the scripts written here, by their
hashes: a name that slips through the escaping still cannot run.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lmi_bench.report.charts import PALETTE, Chart, build_charts, chart_data
from lmi_bench.report.explore import QUANTILES
from lmi_bench.report.values import ReportView

SCRIPTS = ["vendor/plotly-basic.min.js", "draw.js", "charts.js", "views.js", "page.js"]


def render_html(view: ReportView, *, live: bool = False) -> str:
    """The report as one self-contained page; a live one asks its server for newer figures."""
    import jinja2
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup, escape

    folder = files("lmi_bench.report") / "page"
    charts = build_charts(view)
    figures = figures_data(view, charts)
    names = [*SCRIPTS, "live.js"] if live else SCRIPTS
    if not (live or charts):
        has_views = figures["runs"] or figures["fleets"]
        names = [name for name in SCRIPTS if has_views and name != "charts.js"]
    scripts = [_inline((folder / name).read_text("utf-8")) for name in names]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((folder / "page.html.j2").read_text("utf-8"))
    return template.render(
        view=view,
        charts=charts,
        figures=figures,
        figures_json=htmlsafe_json_dumps(figures, allow_nan=False, separators=(",", ":")),
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        style=Markup((folder / "style.css").read_text("utf-8")),  # noqa: S704
        policy=_policy(scripts, live=live),
        live=live,
        breakable=lambda text: escape(text).replace(Markup("&lt;="), Markup("<wbr>&lt;=")),
    )


def figures_data(view: ReportView, charts: Sequence[Chart]) -> dict[str, Any]:
    """The data of every figure of the page, for its scripts to draw."""
    fleets = [
        {
            "anchor": each.anchor,
            "keys": (keys := list(dict.fromkeys(key for row in each.explored for key in row))),
            "rows": [[row.get(key) for key in keys] for row in each.explored],
            "rate": each.rate_per_s,
            "roof": each.roof,
        }
        for each in view.recommendations
        if each.explored
    ]
    layout = (files("lmi_bench.report") / "page" / "layout.json").read_text("utf-8")
    return {
        "charts": [chart_data(chart) for chart in charts],
        "runs": [run.explored for run in view.runs if run.explored["levels"]],
        "fleets": fleets,
        "palette": PALETTE,
        "quantiles": QUANTILES,
        "layout": json.loads(layout),
    }


def _inline(script: str) -> str:
    """A script for an inline element; read as text it has the line ends that the parser sees."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: list[str], *, live: bool) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed or chr(39) + 'none' + chr(39)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if live else "")
    )

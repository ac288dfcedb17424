"""Renders one HTML file that opens from disk, without network or other files.

plotly.js (the basic bundle: lines, bars and pies), style and figures are inside. The page's
content-security policy blocks loading, and allows only the scripts written here, by their hashes:
a name that slips through the escaping still cannot run.
"""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from lmi_bench.report.charts import PALETTE, build_charts
from lmi_bench.report.explore import QUANTILES
from lmi_bench.report.plotly_figure import base_layout, plotly_figure
from lmi_bench.report.values import ReportView


def render_html(view: ReportView, *, live: bool = False) -> str:
    """The report as one self-contained page; a live one asks its server for newer figures."""
    import jinja2
    from markupsafe import Markup, escape

    folder = files("lmi_bench.report") / "page"
    charts = build_charts(view)
    explored = _explored(view)
    names = ["vendor/plotly-basic.min.js", "views.js", "page.js"]
    names = [*names, "live.js"] if live else names if charts or explored else []
    scripts = [_inline((folder / name).read_text("utf-8")) for name in names]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((folder / "page.html.j2").read_text("utf-8"))
    return template.render(
        view=view,
        charts=charts,
        figures={chart.anchor: Markup(_json(plotly_figure(chart))) for chart in charts},  # noqa: S704
        explored=explored,
        data=Markup(_json(explored)),  # noqa: S704
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        style=Markup((folder / "style.css").read_text("utf-8")),  # noqa: S704
        policy=_policy(scripts, live=live),
        live=live,
        breakable=lambda text: escape(text).replace(Markup("&lt;="), Markup("<wbr>&lt;=")),
    )


def _explored(view: ReportView) -> dict[str, Any]:
    """The data of the views that the page draws by the reader's choice; empty if there is none."""
    runs = [run.explored for run in view.runs if run.explored["levels"]]
    advice = [each for each in view.recommendations if each.explored]
    fleets = [
        {
            "anchor": each.anchor,
            "keys": (keys := list(dict.fromkeys(key for row in each.explored for key in row))),
            "rows": [[row.get(key) for key in keys] for row in each.explored],
            "rate": each.rate_per_s,
            "roof": each.roof,
        }
        for each in advice
    ]
    common = {"palette": PALETTE, "quantiles": QUANTILES, "layout": base_layout()}
    return {"runs": runs, "fleets": fleets, **common} if runs or fleets else {}


def _inline(script: str) -> str:
    """A script for an inline element, with the line ends that the parser will see."""
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _json(figure: dict[str, Any]) -> str:
    """JSON that no parser of HTML can mistake for a tag."""
    text = json.dumps(figure, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(scripts: list[str], *, live: bool) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed or chr(39) + 'none' + chr(39)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if live else "")
    )

"use strict";
// What all figures of the page share: their data, and the parts that they are made of.
// window.lmi.views[name](place) -> a figure of plotly, whose colours may be var(--ink) and the like.
(() => {
  const all = {}; // runs, fleets, charts, palette, quantiles, layout (`report/html.py`)
  const load = () => {
    const source = document.getElementById("figures");
    const found = source ? JSON.parse(source.textContent) : {};
    for (const each of found.fleets ?? []) {
      each.rows = each.rows.map((row) => Object.fromEntries(each.keys.map((key, at) => [key, row[at]])));
    }
    Object.assign(all, found);
  };
  const chosen = (id) => document.getElementById(id)?.value;
  const run = () => all.runs[Number(chosen("explore-run") ?? 0)] ?? all.runs[0];

  // Text that plotly shows as it is: it reads a few HTML tags in its texts.
  const text = (value) =>
    String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  // Four digits, all digits of a whole number, and no exponent.
  const figure = (value) =>
    value.toLocaleString("en-US", Math.abs(value) < 9999.5 ? { maximumSignificantDigits: 4 } : { maximumFractionDigits: 0 });
  const colour = (at) => all.palette.at(at % all.palette.length);
  const shade = (hex, opacity) =>
    `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join()},${opacity})`;

  const layout = (x, y, more = {}) => {
    const base = structuredClone(all.layout);
    base.xaxis.title.text = x;
    base.yaxis.title.text = y;
    for (const axis of ["xaxis", "yaxis"]) {
      Object.assign(base[axis], more[axis]);
    }
    return { ...base, ...more, xaxis: base.xaxis, yaxis: base.yaxis };
  };
  const logAxis = (ends, ticks) => ({
    type: "log", rangemode: "normal",
    ...(ends ? { range: ends.map(Math.log10) } : {}),
    ...(ticks ? { tickvals: ticks, ticktext: ticks.map((tick) => String(Number(tick.toPrecision(6)))) } : {}),
  });
  const line = (name, x, y, at, more = {}) => ({
    type: "scatter",
    mode: "lines+markers",
    name: text(name),
    x,
    y,
    line: { color: colour(at), width: 2 },
    marker: { color: colour(at), size: 6 },
    ...more,
  });
  const mark = (color, width, dash, more) => ({ type: "line", line: { color, width, dash }, ...more });
  const note = (words, color, more) => ({
    text: text(words), showarrow: false, yanchor: "bottom", font: { size: 11, color }, ...more,
  });

  window.lmi = {
    all, load, chosen, run, text, figure, colour, shade, layout, logAxis, line, mark, note,
    levels: () => (all.runs?.length ? run().levels : []),
    views: {},
  };
})();

"use strict";
// The charts of the runs' curves (`report/charts.py`): over load, or latency over throughput.
(() => {
  const { lmi } = window;
  const { all, text, figure, shade, layout, logAxis, line, mark, note } = lmi;
  const STYLES = {
    mean: ["solid", "circle"],
    p50: ["dashdot", "triangle-up"],
    p90: ["dash", "diamond"],
    p99: ["dot", "square"],
  };
  const LEGEND_LENGTH = 36;

  const short = (load) => String(Number(load.toPrecision(6)));
  const loadName = (axis, load) => (axis === "concurrency" ? `concurrency ${short(load)}` : `${short(load)} req/s`);

  // A run's label; a long one keeps both ends, since runs of one target differ at the end.
  const nameOf = ({ label, simulated }) => {
    const [letters, kept] = [[...label], LEGEND_LENGTH / 2];
    const fits = letters.length <= LEGEND_LENGTH;
    const shown = fits ? label : `${letters.slice(0, kept - 1).join("")}…${letters.slice(-kept).join("")}`;
    return simulated ? `${shown} (predicted)` : shown;
  };

  // Round markers; a cross where the level is invalid or was cut short.
  const styleOfRun = (chart, run, color) => ({
    line: { color, width: 2.5, dash: run.simulated ? "dash" : "solid" },
    marker: {
      color,
      size: run.valid.map((valid) => (valid ? 8 : 11)),
      symbol: run.valid.map((valid) => (!valid ? "x-thin-open" : run.simulated ? "circle-open" : "circle")),
      line: { width: 2, color },
    },
    ...(chart.over_load ? {} : {
      mode: "lines+markers+text",
      text: run.loads.map(short),
      textposition: "top left",
      textfont: { size: 11, color: "var(--muted)" },
    }),
  });

  // A line for each statistic of a run; of one run in colours of their own, of several in the run's.
  const styleOfStatistic = (chart, { statistic, run, colour }, at) => {
    const alone = chart.runs.length === 1;
    const [dash, symbol] = STYLES[statistic];
    const color = alone ? lmi.colour(at) : colour;
    return {
      connectgaps: false,
      legendgroup: alone ? statistic : String(run),
      showlegend: alone || statistic === "mean",
      line: { color, width: 2, dash },
      marker: { color, size: 7, symbol },
    };
  };

  // How a series is drawn, and its name in the legend.
  const drawn = (chart, series, at) => {
    const [run, { statistic }] = [chart.runs[series.run], series];
    if (chart.stacked) {
      return [statistic, { stackgroup: "parts", line: { color: series.colour } }];
    }
    if (!statistic) {
      return [nameOf(run), styleOfRun(chart, run, series.colour)];
    }
    const name = chart.runs.length === 1 ? statistic : `${nameOf(run)}, ${statistic}`;
    return [name, styleOfStatistic(chart, series, at)];
  };

  // The load of each level, its state, and the interval of its prediction.
  const levelNames = (run, { band }) =>
    run.loads.map((load, at) => {
      const state = run.valid[at] ? "" : " (invalid or cut short)";
      const between = band[at] ? `, 80 % ${band[at].map(figure).join(" to ")}` : "";
      return `${loadName(run.axis, load)}${state}${between}`;
    });

  // The 80 % interval of a prediction as an area; it is hidden together with its line.
  const area = ({ x, band, colour }, legendgroup) => {
    const points = band.map((ends, at) => [x[at], ends]).filter(([place, ends]) => ends && place !== null);
    const back = [...points].reverse();
    return points.length < 2 ? [] : [{
      type: "scatter", mode: "lines",
      x: [...points, ...back].map(([place]) => place),
      y: [...points.map(([, ends]) => ends[1]), ...back.map(([, ends]) => ends[0])],
      fill: "toself", fillcolor: shade(colour, 0.13), line: { width: 0 },
      legendgroup, showlegend: false, hoverinfo: "skip",
    }];
  };

  // Loads that are a knee, with the titles of their rules, and whether it is the recommended one.
  const kneesOf = (run) =>
    [...new Set(run.knees.map(([load]) => load))].map((load) => {
      const here = run.knees.filter((knee) => knee[0] === load);
      return { load, title: here.map(([, title]) => title).join(" + "), best: here.some((knee) => knee[2]) };
    });

  // Diamonds at the levels that are knees; of several runs only the recommended ones.
  const diamonds = (run, { x, y, colour }, several) =>
    kneesOf(run).filter(({ load, best }) => run.loads.includes(load) && (best || !several)).map(({ load, title, best }) => {
      const at = run.loads.indexOf(load);
      const name = several ? `Knee of ${run.label}` : best ? "Recommended knee" : title;
      return {
        type: "scatter", mode: "markers", name: text(`${name}: ${short(load)}`), showlegend: !several,
        x: [x[at]], y: [y[at]],
        marker: {
          symbol: best ? "diamond" : "diamond-open",
          size: best ? 17 : 15,
          color: several ? colour : "var(--accent)",
          line: { width: 2, color: best ? "var(--ink)" : "var(--accent)" },
        },
        hovertemplate: `${loadName(run.axis, load)}<br>${text(title)}<extra></extra>`,
      };
    });

  // Upright lines at the knees of the only run.
  const kneeMarks = (run) =>
    kneesOf(run).sort((one, other) => one.load - other.load).map(({ load, title, best }, at) => {
      const color = best ? "var(--accent)" : "var(--muted)";
      return {
        // "between": a grid line is at the same load
        shape: mark(color, best ? 2 : 1.5, "dash", { x0: load, x1: load, y0: 0, y1: 1, yref: "paper", layer: "between" }),
        annotation: note(`${title} ${figure(load)} `, color, {
          x: Math.log10(load), y: 0.02 + 0.08 * (at % 3), yref: "paper", xanchor: "right",
          bgcolor: "var(--card)", // the lines of smaller loads pass behind it
        }),
      };
    });

  // Limits across the chart; one that would flatten the curves is only named.
  const limitMarks = ({ limits, top_ms }) =>
    limits.map(([limit, words], at) => {
      const isFar = limit > 3 * top_ms;
      const place = { x: 0.01, xref: "paper", xanchor: "left", y: limit };
      return {
        shape: isFar ? null : mark("var(--bad)", 1.5, "dot", { x0: 0, x1: 1, xref: "paper", y0: limit, y1: limit, layer: "below" }),
        annotation: note(isFar ? `${words}, above the chart` : words, "var(--bad)",
          isFar ? { ...place, yref: "paper", y: 0.92 - 0.08 * at } : place),
      };
    });

  const loadAxis = (runs) => {
    const loads = [...new Set(runs.flatMap((run) => run.loads))].sort((one, other) => one - other);
    const pad = 10 ** 0.08;
    return logAxis([loads[0] / pad, loads.at(-1) * pad], loads);
  };

  lmi.views.chart = (place) => {
    const chart = all.charts.find((each) => each.anchor === place.id);
    const { runs, over_load, has_knees } = chart;
    const several = runs.length > 1;
    const unit = chart.y_title.split(" ").at(-1);
    const hover = `%{y:,.4g} ${unit}<extra>%{fullData.name}</extra>`;
    const data = chart.series.flatMap((series, at) => {
      const [name, style] = drawn(chart, series, at);
      const shown = line(name, series.x, series.y, at, {
        legendgroup: `run ${at}`,
        customdata: levelNames(runs[series.run], series),
        hovertemplate: `%{customdata}<br>${over_load ? "" : "%{x:,.4g} tok/s<br>"}${hover}`,
        ...style,
      });
      const knees = has_knees && !over_load ? diamonds(runs[series.run], series, several) : [];
      return [...area(series, shown.legendgroup), shown, ...knees];
    });
    const marks = [...(has_knees && over_load ? kneeMarks(runs[0]) : []), ...limitMarks(chart)];
    return {
      data,
      layout: layout(chart.x_title, chart.y_title, {
        ...(over_load ? { xaxis: loadAxis(runs) } : {}),
        // a legend of so many would leave no room; hovering names the run
        ...(over_load && runs.length > all.palette.length ? { showlegend: false } : {}),
        shapes: marks.map((each) => each.shape).filter(Boolean),
        annotations: marks.map((each) => each.annotation),
      }),
    };
  };
})();

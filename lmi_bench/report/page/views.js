"use strict";
// The views whose data the reader chooses: levels in detail, candidates, rooflines.
(() => {
  const { all, chosen, run, text, colour, shade, layout, logAxis, line, mark, note, views } = window.lmi;
  const titles = {
    ttft_ms: "Time to first token, ms",
    itl_ms: "Inter-token latency, ms",
    latency_ms_per_token: "Latency, ms/token",
    e2e_ms: "End-to-end latency, ms",
    ttft_p90_ms: "TTFT p90, ms",
    itl_p50_ms: "ITL p50, ms",
    latency_per_token_p90_ms: "Latency p90, ms/token",
  };
  const level = () => run().levels[Number(chosen("explore-level"))] ?? run().levels.at(-1);
  const metric = () => chosen("explore-metric") ?? "ttft_ms";

  // The points that no other beats: more of x (or less, with `least`) and more of y, or less.
  const front = (points, least) =>
    points
      .filter(
        (one) =>
          !points.some(
            (other) =>
              other !== one &&
              (least.x ? other.x <= one.x : other.x >= one.x) &&
              (least.y ? other.y <= one.y : other.y >= one.y) &&
              (other.x !== one.x || other.y !== one.y)
          )
      )
      .sort((one, other) => one.x - other.x);
  const frontLine = (points) => ({
    type: "scatter",
    mode: "lines",
    name: "Pareto front",
    x: points.map((point) => point.x),
    y: points.map((point) => point.y),
    line: { color: "var(--accent)", width: 2, dash: "dash" },
    hoverinfo: "skip",
  });

  const cdf = () => {
    const key = metric();
    const data = run().levels.map((each, at) =>
      line(each.name, each.quantiles[key] ?? [], all.quantiles.map((q) => q * 100), at, {
        opacity: each === level() ? 1 : 0.45,
        line: { color: colour(at), width: each === level() ? 4 : 1.5 },
        hovertemplate: "%{y:.3g} % within %{x:,.4g}<extra>%{fullData.name}</extra>",
      })
    );
    return { data, layout: layout(titles[key], "Share of samples, %", { yaxis: { range: [0, 102] } }) };
  };

  const fan = () => {
    const key = metric();
    const levels = run().levels.filter((each) => each.quantiles[key]);
    const x = levels.map((each) => each.load);
    const of = (q) => levels.map((each) => each.quantiles[key][all.quantiles.indexOf(q)]);
    const data = [[0.01, 0.99], [0.05, 0.95], [0.1, 0.9], [0.25, 0.75]].flatMap(([low, high], at) => [
      { type: "scatter", mode: "lines", x, y: of(low), line: { width: 0 }, showlegend: false, hoverinfo: "skip" },
      {
        type: "scatter", mode: "lines", x, y: of(high), line: { width: 0 }, fill: "tonexty",
        fillcolor: shade(colour(0), 0.12 + 0.09 * at), name: `p${low * 100} to p${high * 100}`,
        hovertemplate: `p${high * 100} %{y:,.4g}<extra></extra>`,
      },
    ]);
    data.push(line("p50", x, of(0.5), 0, { hovertemplate: "p50 %{y:,.4g}<extra></extra>" }));
    const axis = x.length > 1 ? logAxis(null, x) : { rangemode: "normal" };
    return { data, layout: layout("Load (concurrent requests or req/s)", titles[key], { xaxis: axis }) };
  };

  const timeline = () => {
    const { bin_s, in_flight, tokens_per_s, errors, server } = level();
    const x = in_flight.map((_, at) => (at + 0.5) * bin_s);
    const data = [
      line("in flight", x, in_flight, 0, { mode: "lines", line: { color: colour(0), width: 2, shape: "hvh" } }),
      line("output tok/s", x, tokens_per_s, 1, { mode: "lines", yaxis: "y2" }),
      ...Object.entries(server)
        .filter(([name]) => name !== "kv_usage_frac")
        .map(([name, mean], at) =>
          line(`server: ${name}, mean`, [0, bin_s * x.length], [mean, mean], 2 + at, {
            mode: "lines", line: { color: colour(2 + at), width: 2, dash: "dot" },
          })
        ),
      ...Object.entries(errors).map(([kind, y], at) => ({
        type: "bar", name: text(`errors: ${kind}`), x, y, marker: { color: colour(7 - at) },
      })),
    ];
    const right = { ...structuredClone(all.layout.yaxis), overlaying: "y", side: "right", showgrid: false, tickmode: "auto" };
    right.title.text = "Output tok/s";
    return {
      data,
      layout: layout("Seconds since the level's start", "Requests", {
        yaxis2: right, barmode: "stack",
        annotations: server.kv_usage_frac === undefined ? [] : [
          note(`server: KV cache ${(100 * server.kv_usage_frac).toPrecision(3)} % full, mean`, "var(--muted)", {
            x: 1, y: 1.02, xref: "paper", yref: "paper", xanchor: "right",
          }),
        ],
      }),
    };
  };

  const lanes = () => {
    const s = (us) => us && us / 1e6;
    const rows = level().lanes.map(([sent, first, end, ...rest]) => [s(sent), s(first), s(end), ...rest]);
    const place = (row, at) => row[4] ?? at + 1;  // of a session: the lane of its agent
    const inSessions = rows.some((row) => row.length > 4);
    const part = (name, from, to, colour) => ({
      type: "bar", orientation: "h", name,
      y: rows.map(place),
      base: rows.map(from),
      customdata: rows.map((row) => row[5] ?? "request"),
      x: rows.map((row) => Math.max(0, to(row) - from(row))),
      marker: { color: colour },
      hovertemplate: `%{customdata} ${inSessions ? "" : "%{y}"}: ${name} %{x:.3g} s<extra></extra>`,
    });
    const first = (row) => row[1] ?? row[2];
    const data = [
      part("until the first token", (row) => row[0], first, "var(--muted)"),
      part("answer", first, (row) => row[2], colour(0)),
    ];
    const failed = rows.flatMap((row, at) => (row[3] === "ok" ? [] : [[row[2], place(row, at), row[3]]]));
    if (failed.length) {
      data.push({
        type: "scatter", mode: "markers", name: "failed",
        x: failed.map((each) => each[0]), y: failed.map((each) => each[1]),
        text: failed.map((each) => text(each[2])), marker: { symbol: "x", size: 9, color: "var(--bad)" },
      });
    }
    return {
      data,
      layout: layout("Seconds since the level's start", inSessions ? "Agents of the sessions" : "Request", {
        barmode: inSessions ? "overlay" : "stack", bargap: 0.25, yaxis: { autorange: "reversed", rangemode: "normal" },
      }),
    };
  };

  const interactivity = () => {
    const data = all.runs.flatMap((each, at) => {
      const median = all.quantiles.indexOf(0.5);
      const points = each.levels
        .filter((one) => one.usable && one.quantiles.itl_ms && one.throughput)
        .map((one) => ({ x: 1000 / one.quantiles.itl_ms[median], y: one.throughput / (each.gpus ?? 1), name: one.name }));
      return [
        line(each.label, points.map((p) => p.x), points.map((p) => p.y), at, {
          text: points.map((p) => text(p.name)),
          mode: "markers",
          hovertemplate: "%{text}<br>%{x:,.4g} tok/s/user<br>%{y:,.4g} tok/s<extra>%{fullData.name}</extra>",
        }),
        { ...frontLine(front(points, {})), name: text(`front of ${each.label}`), line: { color: colour(at), width: 2, dash: "dash" } },
      ];
    });
    const unit = all.runs.every((each) => each.gpus) ? "tok/s per GPU" : "tok/s (per GPU where their number is known)";
    return { data, layout: layout("Output tok/s per user (1000 / ITL p50 in ms)", `Output ${unit}`) };
  };

  const interval = (figures, color) => ({
    type: "data", symmetric: false, thickness: 1, width: 2, color,
    array: figures.map(([value, , high]) => high - value),
    arrayminus: figures.map(([value, low]) => value - low),
  });
  const advice = (place) => all.fleets.find((each) => each.anchor === place.dataset.of);
  const fleet = (place) => advice(place).rows;
  const named = (row) =>
    `${row.instances} × ${row.instance}, TP ${row.tensor_parallel} × ${row.replicas}`;
  const gpus = (row) => (row.instances - row.spare) * row.tensor_parallel * row.replicas;
  const scattered = (points, least, x, y, bars) => {
    const kinds = [
      ["meets the SLOs", (row) => row.meets && !row.chosen, colour(0), "circle", 8],
      ["misses an SLO", (row) => !row.meets && !row.chosen, "var(--bad)", "x", 8],
      ["named above", (row) => row.chosen, "var(--good)", "star", 16],
    ];
    const data = kinds.flatMap(([name, keep, color, symbol, size]) => {
      const here = points.filter((point) => keep(point.row));
      return here.length === 0 ? [] : [{
        type: "scatter", mode: "markers", name,
        x: here.map((p) => p.x), y: here.map((p) => p.y),
        text: here.map((p) => text(named(p.row)) + (bars ? `<br>80 % ${p.low} to ${p.high} ${y.unit}` : "")), marker: { color, symbol, size },
        hovertemplate: `%{text}<br>%{x:,.4g} ${x.unit}<br>%{y:,.4g} ${y.unit}<extra></extra>`,
        ...(bars ? { error_y: interval(here.map((p) => [p.y, p.low, p.high]), color) } : {}),
      }];
    });
    const best = front(points.filter((point) => point.row.meets), least);
    return { data: [frontLine(best), ...data], layout: layout(x.title, y.title) };
  };

  const cost = (place) => {
    const key = chosen(`${place.dataset.of}-latency`) ?? "ttft_p90_ms";
    const points = fleet(place)
      .filter((row) => row.price_usd_per_hour !== null && row[key]?.[0] != null)
      .map((row) => ({ row, x: row.price_usd_per_hour, y: row[key][0], low: row[key][1], high: row[key][2] }));
    return scattered(points, { x: true, y: true }, { title: "Price of the fleet, USD/h", unit: "USD/h" },
      { title: titles[key], unit: titles[key].split(", ")[1] }, true);
  };

  const pace = (place) => {
    const byPrice = chosen(`${place.dataset.of}-pace`) === "usd";
    const points = fleet(place)
      .filter((row) => row.itl_p50_ms?.[0] && row.throughput_tokens_per_s?.[0])
      .map((row) => ({
        row,
        x: 1000 / row.itl_p50_ms[0],
        y: byPrice ? row.usd_per_1m_output_tokens : row.throughput_tokens_per_s[0] / gpus(row),
      }))
      .filter((point) => point.y !== null);
    const y = byPrice ? "USD per 1M output tokens" : "tok/s per GPU";
    return scattered(points, { y: byPrice }, { title: "Output tok/s per user", unit: "tok/s/user" },
      { title: y, unit: y });
  };

  // A machine carries the lower end of its capacity, as the planner counts; spare ones come on top.
  const stairs = (place) => {
    const rows = fleet(place).filter((row) => row.price_usd_per_hour && row.capacity_rate_per_s?.[1]);
    const planned = advice(place).rate;
    const of = (row, end) => row.capacity_rate_per_s[end] / Math.max(1, row.instances - row.spare);
    const kinds = new Map(); // the first is the best of its accelerator and degree
    for (const row of [...rows].sort((one, other) => other.chosen - one.chosen)) {
      const kind = `${row.accelerator} ${row.tensor_parallel}`;
      kinds.set(kind, kinds.get(kind) ?? row);
    }
    const [chosen, ...others] = kinds.values();
    const near = others.filter((row) => row.price_usd_per_hour < 4 * chosen.price_usd_per_hour);
    const best = chosen ? [chosen, ...near].slice(0, 5) : [];
    const reach = 3 * Math.max(planned ?? 0, ...best.slice(0, 1).map((row) => of(row, 1)));
    const steps = (row, end) => {
      const found = { x: [], y: [], machines: [] };
      for (let k = 1; k <= 200 && (k - 1) * of(row, end) < reach; k += 1) {
        const price = ((k + row.spare) * row.price_usd_per_hour) / row.instances;
        for (const x of [(k - 1) * of(row, end), Math.min(reach, k * of(row, end))]) {
          found.x.push(x);
          found.y.push(price);
          found.machines.push(k + row.spare);
        }
      }
      return found;
    };
    const data = best.flatMap((row, at) => {
      const { x, y, machines } = steps(row, 1);
      const shown = line(`${row.instance}, TP ${row.tensor_parallel}`, x, y, at, {
        mode: "lines", customdata: machines, legendgroup: `fleet ${at}`,
        line: { color: colour(at), width: row.chosen ? 4 : 2 },
        hovertemplate: `%{customdata} × ${text(row.instance)}<br>up to %{x:,.3g} req/s<br>USD %{y:,.4g}/h<extra></extra>`,
      });
      const wide = steps(row, 2);
      return row.chosen
        ? [shown, {
            ...shown, name: "the same, upper end", x: wide.x, y: wide.y,
            customdata: wide.machines, fill: "none", line: { color: colour(at), width: 1.5, dash: "dot" },
          }]
        : [shown];
    });
    const accent = "var(--accent)";
    const marks = planned ? {
      shapes: [mark(accent, 1.5, "dash", { xref: "x", x0: planned, x1: planned, yref: "paper", y0: 0, y1: 1 })],
      annotations: [note(" planned load", accent, { x: planned, y: 1, yref: "paper", xanchor: "left", yanchor: "top" })],
    } : {};
    return { data, layout: layout("Load, req/s", "Price of the fleet, USD/h", marks) };
  };

  const roofline = (place) => {
    const roof = place.dataset.of ? advice(place).roof : run().roof;
    if (!roof) {
      return { data: [], layout: layout("", "", { annotations: [{ text: "not known for this run: no data sheet of its machine", showarrow: false }] }) };
    }
    const { device, peak, bandwidth, points } = roof;
    const knee = peak / bandwidth;
    const xs = points.map((point) => point.x[0]);
    const [from, to] = [Math.min(0.5, ...xs) / 2, 4 * Math.max(knee, ...xs)];
    const ys = points.map((point) => point.y);
    const data = [
      line(`${device}: what its data sheet allows`, [from, knee, to], [from * bandwidth, peak, peak], 1, {
        hovertemplate: "%{x:,.3g} FLOP/byte<br>at most %{y:,.4g} TFLOP/s<extra></extra>",
      }),
      line(place.dataset.of ? "working point" : "levels", xs, ys.map((y) => y[0]), 0, {
        mode: points.length > 1 ? "lines+markers" : "markers",
        marker: { color: colour(0), size: points.length > 1 ? 8 : 14, symbol: points.length > 1 ? "circle" : "star" },
        text: points.map((p) => `${text(p.name)}, ${p.batch.toPrecision(3)} sequences a step`),
        error_x: interval(points.map((point) => point.x), colour(0)),
        error_y: interval(ys, colour(0)),
        hovertemplate: "%{text}<br>%{x:,.3g} FLOP/byte<br>%{y:,.4g} TFLOP/s of decoding<extra></extra>",
      }),
    ];
    const low = Math.min(from * bandwidth, ...ys.flat()) / 2;
    return {
      data,
      layout: layout("FLOP for each byte read, decoding", "TFLOP/s of one device", {
        xaxis: logAxis([from, to]), yaxis: logAxis([low, 2 * peak]),
      }),
    };
  };

  const memory = (place) => {
    const rows = new Map();
    const first = fleet(place).find((row) => row.chosen)?.accelerator; // its degrees come first
    const name = (row) =>
      `${Number(row.accelerator !== first)} ${row.accelerator} ${String(row.tensor_parallel).padStart(3)}`;
    const byName = (one, other) => name(one).localeCompare(name(other));
    for (const row of fleet(place).filter((each) => each.memory[0]).sort(byName)) {
      const key = `${row.accelerator}, TP ${row.tensor_parallel}`;
      if (!rows.has(key) && (rows.size < 16 || row.chosen)) {
        rows.set(key, row.memory);
      }
    }
    const bar = (name, of, color) => ({
      type: "bar", name, x: [...rows.keys()].map(text), y: [...rows.values()].map(of),
      marker: { color }, hovertemplate: `%{x}<br>${name} %{y:.3g} GiB<extra></extra>`,
    });
    return {
      data: [
        bar("weights", (m) => m[1], colour(0)),
        bar("KV cache", (m) => m[2], colour(2)),
        bar("rest: activations, reserve", (m) => Math.max(0, m[0] - m[1] - m[2]), "var(--grid)"),
      ],
      layout: layout("", "GiB of one GPU", { barmode: "stack", xaxis: { type: "category", rangemode: "normal" } }),
    };
  };

  // A view without a value says so; the roofline gives its own reason.
  const orNothing = (view) => (place) => {
    const figure = view(place);
    if (!figure.data.some((trace) => trace.x && trace.x.length)) {
      figure.layout.annotations = [
        ...(figure.layout.annotations ?? []),
        note("nothing to draw: no value is known", "var(--muted)", {
          x: 0.5, y: 0.5, xref: "paper", yref: "paper", xanchor: "center",
        }),
      ];
    }
    return figure;
  };
  const own = { cdf, fan, timeline, lanes, interactivity, cost, pace, memory, stairs };
  Object.assign(views, { roofline }, Object.fromEntries(
    Object.entries(own).map(([name, view]) => [name, orNothing(view)])
  ));
})();

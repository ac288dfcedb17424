"use strict";
// Draws the figures in the page's own colours when they come near the window, the others when there
// is time; and again when the theme, a choice or the medium changes. Choices, hidden series and
// zooms are kept in the address, so that a link shows the view.
(() => {
  const { lmi } = window;
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  let places = [];
  let choices = [];
  const stale = new Map(); // what is to be drawn again, and the names of its hidden series if known
  const near = new Set();
  const sizes = new WeakMap(); // of what is drawn
  const config = {
    displaylogo: false,
    // On a narrow page the buttons would lie on the legend.
    displayModeBar: window.matchMedia("(min-width: 640px)").matches,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  const themed = (value, style) => {
    if (typeof value === "string") {
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) {
      return value.map((each) => themed(each, style));
    }
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([key, each]) => [key, themed(each, style)])
      );
    }
    return value;
  };

  // The address: #section?chart-ttft-ms.hidden=1.3&explore-level=2
  const split = () => window.location.hash.slice(1).split("?");
  const read = () => new URLSearchParams(split()[1] ?? "");
  let state = read();
  const keep = (key, value) => {
    if (value === "") {
      state.delete(key);
    } else {
      state.set(key, value);
    }
    const query = state.toString();
    const wanted = `#${split()[0]}${query ? `?${query}` : ""}`;
    if (wanted !== (window.location.hash || "#")) {
      window.history.replaceState(null, "", wanted);
    }
  };

  const hiddenIn = (data) => data.flatMap((each, at) => (each.visible === "legendonly" ? [at] : []));

  // hidden: names of the series to hide; undefined: those of the address
  const figureOf = (place, style, hidden) => {
    const figure = themed(lmi.views[place.dataset.view](place), style);
    if (hidden) {
      const places = figure.data.flatMap((each, at) => (hidden.includes(each.name) ? [at] : []));
      keep(`${place.id}.hidden`, places.join("."));
    }
    for (const at of (state.get(`${place.id}.hidden`) ?? "").split(".").filter(Boolean)) {
      if (figure.data[Number(at)]) {
        figure.data[Number(at)].visible = "legendonly";
      }
    }
    const zoom = (state.get(`${place.id}.zoom`) ?? "").split(",").map(Number);
    if (zoom.length === 4 && zoom.every(Number.isFinite)) {
      Object.assign(figure.layout.xaxis, { range: zoom.slice(0, 2), autorange: false });
      Object.assign(figure.layout.yaxis, { range: zoom.slice(2), autorange: false });
    }
    return figure;
  };

  const sizeOf = (place) => `${place.clientWidth} ${place.clientHeight}`;
  const drawStale = (wanted) => {
    const style = window.getComputedStyle(document.documentElement);
    for (const place of [...wanted].filter((each) => stale.has(each))) {
      const figure = figureOf(place, style, stale.get(place));
      const bar = config.displayModeBar && place.dataset.view !== "chart" ? "hover" : config.displayModeBar;
      const isNew = !place.data;
      stale.delete(place);
      sizes.set(place, sizeOf(place));
      window.Plotly.react(place, figure.data, figure.layout, { ...config, displayModeBar: bar });
      if (isNew) {
        listen(place);
      }
    }
  };
  const whenIdle = window.requestIdleCallback ?? ((work) => window.setTimeout(work, 30));
  let isWaiting = false;
  const drawRest = () => {
    if (!isWaiting && stale.size > 0 && document.readyState === "complete") {
      isWaiting = true;
      whenIdle(() => {
        isWaiting = false;
        drawStale([...stale.keys()].slice(0, 1));
        drawRest();
      });
    }
  };
  const draw = (hidden = new Map()) => {
    stale.clear();
    places.forEach((place) => stale.set(place, hidden.get(place)));
    drawStale(near);
    drawRest();
  };
  const approached = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        near[isIntersecting ? "add" : "delete"](target);
      }
      drawStale(near);
    },
    { rootMargin: "200px" }
  );

  const choose = () => {
    for (const select of choices) {
      if (select.id === "explore-level") {
        const levels = lmi.levels();
        select.replaceChildren(...levels.map((each, at) => new Option(each.name, String(at))));
        select.value = String(levels.length - 1);
      }
      const wanted = state.get(select.id);
      if (wanted !== null && [...select.options].some((option) => option.value === wanted)) {
        select.value = wanted;
      }
    }
  };

  const toggle = (place, at) => {
    const { visible, legendgroup } = place.data[at];
    const together = place.data.flatMap((each, other) =>
      other === at || (legendgroup && each.legendgroup === legendgroup) ? [other] : []
    );
    const wanted = visible === "legendonly" ? true : "legendonly";
    window.Plotly.restyle(place, { visible: wanted }, together);
  };

  const listen = (place) => {
    place.on("plotly_restyle", () => {
      keep(`${place.id}.hidden`, hiddenIn(place.data).join("."));
    });
    place.on("plotly_relayout", (changed) => {
      const { xaxis, yaxis } = place.layout;
      if (Object.keys(changed).some((key) => key.endsWith(".autorange"))) {
        keep(`${place.id}.zoom`, "");
        draw();
      } else if (Object.keys(changed).some((key) => key.includes("axis.range"))) {
        keep(`${place.id}.zoom`, [...xaxis.range, ...yaxis.range].map((end) => end.toPrecision(5)).join());
      }
    });
    place.addEventListener("keydown", (event) => {
      const named = place.data.flatMap((each, at) =>
        each.showlegend === false || !each.name ? [] : [at]
      );
      const at = named[Number(event.key) - 1];
      if (/^[1-9]$/.test(event.key) && at !== undefined) {
        toggle(place, at);
      }
    });
  };
  const listenTo = (select) => {
    select.addEventListener("change", () => {
      keep(select.id, select.value);
      if (select.id === "explore-run") {
        keep("explore-level", "");
        choose();
      }
      draw();
    });
  };
  window.addEventListener("hashchange", () => {
    if (split().length > 1) {
      state = read();
      choose();
      draw();
    } else if (state.toString()) {
      keep("", ""); // a link of the menu keeps what was chosen
    }
    document.getElementById(split()[0])?.scrollIntoView();
  });

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (!target.isConnected) {
        resized.unobserve(target);
      } else if (!target.matches(".chart")) {
        target.toggleAttribute("data-wide", target.scrollWidth > target.clientWidth + 1);
      } else if (sizes.has(target) && sizes.get(target) !== sizeOf(target)) {
        sizes.set(target, sizeOf(target));
        window.Plotly.Plots.resize(target);
      }
    }
  });

  // Draws what the page holds: once, and after each change of the page of a running sweep.
  lmi.show = () => {
    const known = [...places, ...choices];
    const names = (place) => hiddenIn(place.data).map((at) => place.data[at].name);
    const drawn = places.filter((place) => place.data);
    const hidden = new Map(drawn.map((place) => [place, names(place)])); // series may be added
    const all = (query) => [...document.querySelectorAll(query)];
    const level = document.getElementById("explore-level")?.selectedOptions[0]?.text;
    [places, choices] = [all(".chart"), all(".controls select")];
    lmi.load();
    const at = lmi.levels().findIndex((each) => each.name === level);
    if (at >= 0 && state.has("explore-level")) {
      keep("explore-level", String(at));
    }
    choose();
    draw(hidden);
    places.filter((each) => !known.includes(each)).forEach((each) => approached.observe(each));
    choices.filter((each) => !known.includes(each)).forEach(listenTo);
    [...all(".scroll"), ...places].forEach((each) => resized.observe(each));
  };
  lmi.show();
  window.addEventListener("load", drawRest);
  if (split().length > 1) {
    document.getElementById(split()[0])?.scrollIntoView();
  }

  media.addEventListener("change", () => draw());
  const forPrint = (printing) => () => {
    document.documentElement.classList.toggle("printing", printing);
    for (const each of document.querySelectorAll("details")) {
      if (printing && !each.open) {
        each.open = true;
        each.dataset.opened = "print";
      } else if (!printing && each.dataset.opened) {
        each.open = false;
        delete each.dataset.opened;
      }
    }
    draw();
    drawStale(places);
  };
  window.addEventListener("beforeprint", forPrint(true));
  window.addEventListener("afterprint", forPrint(false));
})();

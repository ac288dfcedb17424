"use strict";
// Draws the figures in the page's own colours, and again when the theme changes or it is printed.
(() => {
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
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

  const draw = () => {
    const style = window.getComputedStyle(document.documentElement);
    for (const place of document.querySelectorAll(".chart")) {
      const source = document.getElementById(place.id + "-figure");
      const figure = themed(JSON.parse(source.textContent), style);
      window.Plotly.react(place, figure.data, figure.layout, config);
    }
  };

  draw();
  const resized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      window.Plotly.Plots.resize(entry.target);
    }
  });
  for (const place of document.querySelectorAll(".chart")) {
    resized.observe(place);
  }
  media.addEventListener("change", draw);
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
  };
  window.addEventListener("beforeprint", forPrint(true));
  window.addEventListener("afterprint", forPrint(false));
})();

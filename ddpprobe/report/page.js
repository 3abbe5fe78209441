"use strict";
// Draws the plots. Python describes them (plotly's JSON) with colours named after the custom
// properties of page.css; here they become the colours of the reader's light or dark mode.
(() => {
  const root = document.documentElement;
  const note = (what) => { root.dataset.errors = `${root.dataset.errors ?? ""}${what}\n`; };
  window.addEventListener("error", (event) => note(event.message));
  window.addEventListener("unhandledrejection", (event) => note(event.reason));

  const figures = JSON.parse(document.getElementById("figures").textContent);
  const narrow = window.matchMedia("(max-width: 640px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = {};
  const tint = /(<span style="color:)(--[\w-]+)(?=">)/g;

  // Only what stands under a key that is a colour is one: a module may well be called "--bad".
  function themed(value, key, colour) {
    if (typeof value === "string") {
      if (/color/i.test(key) && value.startsWith("--")) return colour(value);
      if (key !== "text") return value;
      const broken = value.replace("\n", narrow.matches ? "<br>" : " "); // where a title may break
      return broken.replace(tint, (_, before, name) => before + colour(name));
    }
    if (Array.isArray(value)) return value.map((each) => themed(each, key, colour));
    if (value === null || typeof value !== "object" || "bdata" in value) return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k, colour)]));
  }

  function shortened(name, most) {
    const characters = name.match(/&(?:amp|lt|gt);|[^]/gu) ?? []; // an escaped one counts as one
    return characters.length <= most ? name : `…${characters.slice(1 - most).join("")}`;
  }

  // As many names as fit beside a heat map and below it, evenly apart.
  function ticks(axis, names, most, text) {
    const every = Math.max(1, Math.ceil(names.length / most));
    const shown = names.filter((_, i) => i % every === 0); // by name: step 10 is not the tenth
    return { ...axis, tickmode: "array", tickvals: shown, ticktext: shown.map(text) };
  }

  function layoutOf(figure, colour, width) {
    const { layout, height } = figure;
    const axes = {};
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis/.test(k))) {
      axes[key] = {
        gridcolor: colour("--grid"), linecolor: colour("--rule"), tickcolor: colour("--rule"),
        ...layout[key],
      };
    }
    if (layout.meta?.rows) {
      const { x, y } = figure.data[0];
      const most = Math.max(10, Math.floor(width / 26));
      axes.yaxis = ticks(axes.yaxis, y, Math.max(height - 90, 60) / 14, (name) => shortened(name, most));
      axes.xaxis = ticks(axes.xaxis, x, Math.max(3, width / 110), (name) => name.replace(/ to .*/, ""));
    } else if (narrow.matches) axes.xaxis = { ...axes.xaxis, nticks: 5 };
    return {
      paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"), hovermode: layout.meta?.rows ? "closest" : "x unified",
      hoversubplots: "axis", dragmode: narrow.matches ? false : "zoom", bargap: 0.3,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--rule"), font: { color: colour("--ink") }, namelength: -1 },
      ...layout, ...axes, height: height + (narrow.matches && layout.meta?.rows ? 46 : 0), autosize: true,
    };
  }

  // On a narrow screen the colour bar lies above the map instead of beside it.
  function dataOf(figure) {
    if (!narrow.matches) return figure.data;
    return figure.data.map((trace) => trace.colorbar === undefined ? trace : {
      ...trace,
      colorbar: {
        ...trace.colorbar, orientation: "h", x: 0.5, y: 1.01, yanchor: "bottom", xanchor: "center",
        title: { ...trace.colorbar.title, side: "top" },
      },
    });
  }

  function draw(where) {
    const box = document.querySelector(`[data-plot="${where}"]`);
    const figure = figures[where][chosen[where] ?? 0];
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const layout = layoutOf(figure, colour, box.clientWidth);
    if (narrow.matches && layout.meta?.rows) layout.margin = { ...layout.margin, t: 58 };
    const config = {
      responsive: true, displaylogo: false, typesetMath: false, scrollZoom: false,
      displayModeBar: narrow.matches ? false : "hover",
      showSendToCloud: false, plotlyServerURL: "", // the default offers to upload the chart
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: `ddpprobe-${where}`, scale: 2 },
    };
    box.style.minHeight = "";
    return Plotly.react(box, themed(dataOf(figure), "", colour), themed(layout, "", colour), config);
  }

  async function drawAll() {
    for (const where of Object.keys(figures)) await draw(where);
    root.dataset.drawn = String(document.querySelectorAll(".plot .main-svg").length > 0 ? Object.keys(figures).length : 0);
  }

  for (const select of document.querySelectorAll("[data-choice]")) {
    chosen[select.dataset.choice] = Number(select.value); // a browser may remember a choice
    select.addEventListener("change", () => {
      chosen[select.dataset.choice] = Number(select.value);
      draw(select.dataset.choice);
    });
  }
  for (const query of [narrow, dark]) query.addEventListener("change", drawAll);
  drawAll();
})();

"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const hidden = new Set();
  const PRINT_WIDTH_PX = 640;
  const NARROW_PX = 520;
  let printing = false;

  // Colours stand in the style sheet alone; figures name them.
  function palette() {
    const css = getComputedStyle(root);
    const value = (name) => css.getPropertyValue("--" + name).trim();
    const colors = { "@heat": [0, 1, 2, 3, 4].map((i) => [i / 4, value("heat" + i)]) };
    for (const name of ["ink", "muted", "grid", "surface"]) colors["@" + name] = value(name);
    for (let i = 0; i < 8; i++) colors["@run" + i] = value("run" + i);
    return colors;
  }

  function colored(value, colors) {
    if (typeof value === "string") return Object.hasOwn(colors, value) ? colors[value] : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((v) => colored(v, colors));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, colored(v, colors)]));
    return value;
  }

  // Panels side by side become panels one above the other where there is no room.
  function stacked(figure) {
    const layout = figure.layout;
    const axes = Object.keys(layout).filter((key) => key.startsWith("xaxis"));
    if (axes.length < 2 || !layout.annotations || layout.annotations.length !== axes.length) return figure.height;
    const share = 1 / axes.length;
    const height = figure.panel_height;
    const title = 30 / (height * axes.length);
    axes.forEach((key, i) => {
      const top = 1 - i * share - (i ? title : 0);
      layout[key].domain = [0, 1];
      Object.assign(layout[key.replace("x", "y")], { domain: [1 - (i + 1) * share, top], showticklabels: true });
      Object.assign(layout.annotations[i], { x: 0, y: top });
    });
    return height * axes.length;
  }

  function layoutOf(figure, colors, width) {
    const own = figure.layout;
    const axis = {
      gridcolor: colors["@grid"], linecolor: colors["@grid"], zerolinecolor: colors["@grid"], tickcolor: colors["@grid"],
      tickfont: { size: 11.5, color: colors["@muted"] }, automargin: true, ticks: "", separatethousands: true,
    };
    const layout = {
      ...own,
      height: figure.height,
      width,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colors["@ink"] },
      margin: { l: 8, r: 16, t: 12, b: 8, ...own.margin },
      showlegend: false, hovermode: "closest", bargap: 0.3, dragmode: width < NARROW_PX ? false : "zoom",
      hoverlabel: { bgcolor: colors["@surface"], bordercolor: colors["@grid"], font: { color: colors["@ink"], size: 12 }, namelength: 40 },
    };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      const title = layout[key].title;
      layout[key] = { ...axis, ...layout[key] };
      if (title) layout[key].title = { font: { size: 12, color: colors["@muted"] }, standoff: 8, ...title };
    }
    if (layout.coloraxis) {
      const bar = layout.coloraxis.colorbar;
      bar.tickfont = { size: 11, color: colors["@muted"] };
      bar.title = { ...bar.title, font: { size: 11, color: colors["@muted"] } };
    }
    return layout;
  }

  function draw() {
    const colors = palette();
    for (const [key, source] of Object.entries(figures)) {
      const target = document.getElementById("plot-" + key);
      const figure = colored(source, colors);
      const width = printing ? PRINT_WIDTH_PX : target.clientWidth;
      const narrow = width < NARROW_PX;
      if (narrow) figure.height = stacked(figure);
      target.style.height = figure.height + "px";
      for (const trace of figure.data)
        if (trace.type === "scatter") trace.visible = !hidden.has(trace.meta.run);
      Plotly.react(target, figure.data, layoutOf(figure, colors, width), {
        displaylogo: false, displayModeBar: false, showTips: false, doubleClick: "reset",
      });
      target.dataset.width = String(width);
    }
    root.dataset.ready = "1";
  }

  for (const chip of document.querySelectorAll(".chip"))
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      chip.setAttribute("aria-pressed", String(!hidden.has(run)));
      draw();
    });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);

  // What changes a plot's width is not always the window. The first change is followed before it is seen, a whole row
  // of them (a window that is being pulled) when it is over.
  let pending = 0, last = -Infinity;
  const plots = [...document.querySelectorAll(".plot")];
  const follow = () => {
    if (printing || plots.every((plot) => String(plot.clientWidth) === plot.dataset.width)) return;
    draw();
    last = performance.now();
  };
  const observer = new ResizeObserver(() => {
    clearTimeout(pending);
    if (performance.now() - last > 300) follow();
    else pending = setTimeout(follow, 150);
  });
  for (const plot of plots) observer.observe(plot);

  // On paper: light, everything open, plots as wide as the sheet.
  let before = null;
  addEventListener("beforeprint", () => {
    const closed = [...document.querySelectorAll("details:not([open])")];
    before = { theme: root.dataset.theme, closed };
    root.dataset.theme = "light";
    for (const details of closed) details.open = true;
    printing = true;
    draw();
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    for (const details of before.closed) details.open = false;
    before = null;
    printing = false;
    draw();
  });

  draw();
})();

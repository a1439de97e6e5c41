// The page of runs: charts that are drawn once they come into sight, their legends, the theme, and later steps.
"use strict";
(() => {
  const LEAST_PAUSE = 2000, END = 1e9;
  const root = document.documentElement;
  const { charts, figures, isLive } = JSON.parse(document.getElementById("numbers").textContent);
  const boxes = [...document.querySelectorAll(".plot")];
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const drawings = boxes.map((box, at) => ({ box, chart: charts[at], hidden: new Set(), isLog: 0, plot: null, done: Promise.resolve() }));

  // The colours of the theme, and which lines are shown.
  function adorn({ plot, chart, hidden }) {
    const muted = getComputedStyle(document.querySelector(".subtitle")).color;
    const line = getComputedStyle(document.querySelector("nav")).borderBottomColor;
    const colours = { axis_label_text_color: muted, major_label_text_color: muted, axis_line_color: line, major_tick_line_color: line, grid_line_color: line };
    for (const model of plot.references()) {
      for (const [name, colour] of Object.entries(colours)) if (name in model) model[name] = colour;
      if (model.type === "GlyphRenderer" && chart.lines[model.name]) model.visible = !hidden.has(chart.lines[model.name].name);
    }
  }

  function fill({ plot, chart }) {
    chart.lines.forEach(({ x, y }, at) => {
      const source = plot.select_one(`line ${at}`);
      if (source.data.x !== x) source.data = { x, y: y.map((value) => value ?? NaN) };
    });
  }

  // Writes the values at the pointer into the legend: of each name the value at the nearest number of the last line.
  function tell({ box, chart: { lines, unit } }, at) {
    const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
    for (const entry of box.parentElement.querySelectorAll(".entry")) {
      const { x, y } = lines.findLast(({ name }) => name === entry.dataset.name);
      const near = x.reduce((best, each, place) => (Math.abs(each - at) < Math.abs(x[best] - at) ? place : best), 0);
      const value = y[near] === null ? "not finite" : digits.format(y[near] * (unit === "%" ? 100 : 1)) + unit;
      entry.dataset.value = at === null || !x.length ? "" : `${value} at ${digits.format(x[near])}`;
    }
  }

  function draw(drawing) {
    drawing.done = drawing.done.then(async () => {
      drawing.plot?.document.remove_root(drawing.plot);
      const content = Bokeh.require("document").Document.from_json(figures[drawing.chart.figures[drawing.isLog]].doc);
      const [plot] = content.roots();
      drawing.plot = plot;
      // The height around a value that never changes.
      const most = drawing.chart.lines.reduce((all, { y }) => y.reduce((each, value) => Math.max(each, Math.abs(value)), all), 0);
      plot.y_range.default_span = 2 * most || 2;
      fill(drawing);
      adorn(drawing);
      // A finger that is dragged scrolls the page.
      if (matchMedia("(pointer: coarse)").matches) plot.toolbar.active_drag = null;
      await Bokeh.embed.add_document_standalone(content, drawing.box);
      plot.on_event("doubletap", () => plot.reset.emit());
      for (const event of ["mousemove", "tap"]) plot.on_event(event, ({ x }) => tell(drawing, x));
      plot.on_event("mouseleave", () => tell(drawing, null));
      root.dataset.drawn = String(drawings.filter((each) => each.plot).length);
    });
  }

  const sight = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    sight.unobserve(target);
    draw(drawings[boxes.indexOf(target)]);
  }), { rootMargin: isLive ? "300px" : "100000px" });
  if (drawings.length) Bokeh.logger.set_level("error");
  for (const drawing of drawings) {
    const figure = drawing.box.parentElement;
    sight.observe(drawing.box);
    figure.querySelector(".logarithmic")?.addEventListener("click", ({ target }) => {
      drawing.isLog = 1 - drawing.isLog;
      target.ariaPressed = String(Boolean(drawing.isLog));
      draw(drawing);
    });
    for (const entry of figure.querySelectorAll(".entry")) entry.addEventListener("click", () => {
      if (!drawing.hidden.delete(entry.dataset.name)) drawing.hidden.add(entry.dataset.name);
      entry.ariaPressed = String(!drawing.hidden.has(entry.dataset.name));
      if (drawing.plot) adorn(drawing);
    });
  }

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  function recolour() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
    drawings.filter(({ plot }) => plot).forEach(adorn);
  }
  function store(theme) {
    try { return theme ? localStorage.setItem("theme", theme) : localStorage.getItem("theme"); } catch { return null; }
  }
  if (isLive && store()) root.dataset.theme = store();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store(root.dataset.theme);
    recolour();
  });
  prefersDark.addEventListener("change", recolour);
  root.dataset.drawn = "0";
  recolour();

  function filterRuns() {
    const words = (document.getElementById("filter")?.value ?? "").toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("form tbody tr")) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  }
  document.addEventListener("input", filterRuns);
  document.querySelector("pre.tail")?.scrollTo(0, END);
  if (!isLive) return;

  // Takes over the texts of a newer page; what is open, ticked or in focus stays.
  function takeTexts(newer) {
    for (const part of document.querySelectorAll("[data-live]")) {
      const later = newer.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
      later.querySelectorAll("details").forEach((each, at) => { each.open = part.querySelectorAll("details")[at]?.open ?? false; });
      const ticked = [...part.querySelectorAll("input:checked")].map(({ value }) => value);
      const tail = part.querySelector("pre.tail");
      const scrolled = tail && tail.scrollTop + tail.clientHeight < tail.scrollHeight - 8 ? tail.scrollTop : END;
      const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
      if (later.querySelector("tbody") && part.querySelector("#filter")) {
        part.querySelector("tbody").replaceWith(later.querySelector("tbody"));
      } else if (later.innerHTML !== part.innerHTML) part.replaceChildren(...later.childNodes);
      for (const box of part.querySelectorAll("[name=run]")) box.checked = ticked.includes(box.value);
      part.querySelector("pre.tail")?.scrollTo(0, scrolled);
      if (focused) document.getElementById(focused)?.focus();
    }
    filterRuns();
  }

  function takePoints(newer) {
    newer.forEach(({ lines }, at) => lines.forEach(({ x, y }, which) => {
      const line = charts[at].lines[which];
      // A line to which nothing was added is not drawn again.
      if (x.length !== line.x.length || x.at(-1) !== line.x.at(-1)) Object.assign(line, { x, y });
    }));
    drawings.filter(({ plot }) => plot).forEach(fill);
  }

  const shapeOf = (page, all) => JSON.stringify([[...page.querySelectorAll("[data-live]")].map(({ dataset }) => dataset.live),
    all.map(({ title, lines }) => [title, lines.map(({ name, role }) => [name, role])])]);
  async function look() {
    const query = new URLSearchParams(location.search);
    query.set("figures", "no");
    const answer = await fetch(`${location.pathname}?${query}`);
    const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!answer.ok) throw new Error(newer.body.textContent);
    const data = JSON.parse(newer.getElementById("numbers").textContent);
    if (shapeOf(newer, data.charts) !== shapeOf(document, charts)) return location.reload();
    takePoints(data.charts);
    takeTexts(newer);
  }

  async function follow() {
    const began = performance.now();
    const link = document.getElementById("link");
    if (!document.hidden) {
      try {
        await look();
        link.textContent = "live";
      } catch (error) {
        link.textContent = error instanceof TypeError ? "connection lost, trying again" : error.message;
      }
    }
    setTimeout(follow, Math.max(LEAST_PAUSE, 10 * (performance.now() - began)));
  }
  setTimeout(follow, LEAST_PAUSE);
})();

// Draws the charts of a page by BokehJS; a page of `watch` also asks for new points and texts every two seconds.
"use strict";
(() => {
  const PAUSE = 2000, GREY = "#74808f";
  const PALETTE = ["#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685"];
  const content = document.getElementById("numbers");
  let charts = content ? JSON.parse(content.textContent) : [];
  const boxes = [...document.querySelectorAll(".plot")];
  const sources = boxes.map(() => []);

  // Columns of a data source; JSON has null for a value that is not finite, which is a gap in the line.
  const columnsOf = ({ x, y }) => ({ x, y: y.map((each) => each ?? NaN) });

  function drawLine(plot, source, { name, role, colour }) {
    const style = { source, name, color: PALETTE[colour % PALETTE.length] };
    const glyphs = [];
    if (role !== "dots") glyphs.push(plot.line({ field: "x" }, { field: "y" }, {
      ...style, line_width: role === "line" || role === "mean" ? 2 : 1, line_alpha: role === "faint" ? 0.45 : 1, line_dash: role === "dashed" ? "dashed" : "solid",
    }));
    if (role === "points" || role === "dots") glyphs.push(plot.scatter({ field: "x" }, { field: "y" }, { ...style, size: 6 }));
    return glyphs;
  }

  function draw(at) {
    const { x_name, has_log_x, categories, is_percent, markers, lines } = charts[at];
    const hover = new Bokeh.HoverTool({ mode: "vline", tooltips: [["", `$name: ${is_percent ? "@y{0.0%}" : "@y"} at @x`]] });
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    const plot = new Bokeh.Plotting.figure({
      sizing_mode: "stretch_both", toolbar_location: null, x_axis_label: x_name, x_axis_type: has_log_x ? "log" : "auto",
      x_range: categories.length ? categories : undefined, background_fill_color: null, border_fill_color: null, outline_line_color: null,
      tools: [hover, zoom],
    });
    plot.on_event("doubletap", () => plot.reset.emit());
    // A finger that is dragged scrolls the page.
    plot.toolbar.active_drag = matchMedia("(pointer: coarse)").matches ? null : zoom;
    for (const axis of [...plot.xaxes, ...plot.yaxes]) {
      if (axis.axis_label === "step") axis.ticker.min_interval = 1;
      Object.assign(axis, { axis_label_text_color: GREY, major_label_text_color: GREY, axis_line_color: GREY, major_tick_line_color: GREY, minor_tick_line_color: null });
    }
    if (is_percent) plot.yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]%" });
    for (const grid of [...plot.xgrids, ...plot.ygrids]) Object.assign(grid, { grid_line_color: GREY, grid_line_alpha: 0.25 });
    for (const location of markers) plot.add_layout(new Bokeh.Span({ location, dimension: "height", line_color: GREY, line_dash: "dashed" }));
    sources[at] = lines.map((line) => new Bokeh.ColumnDataSource({ data: columnsOf(line) }));
    const renderers = lines.map((line, number) => drawLine(plot, sources[at][number], line));
    // Values and mean of a metric have one name, which hides both.
    const names = [...new Set(lines.map(({ name }) => name))];
    const items = names.map((label) => new Bokeh.LegendItem({ label, renderers: renderers.filter((_, number) => lines[number].name === label).flat() }));
    hover.renderers = renderers.filter((_, number) => lines[number].role !== "mean").flat();
    plot.add_layout(new Bokeh.Legend({
      items, click_policy: "hide", orientation: "horizontal", ncols: 2, location: "top_left", label_text_color: GREY, label_text_font_size: "12px",
      background_fill_color: null, border_line_color: null, padding: 0, margin: 4,
    }), "below");
    return Bokeh.Plotting.show(plot, boxes[at]);
  }

  // Charts are drawn when they come into sight.
  const sight = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
      sight.unobserve(target);
      draw(boxes.indexOf(target));
    }
  }, { rootMargin: "400px" });
  boxes.forEach((box) => sight.observe(box));
  if (boxes.length) Bokeh.logger.set_level("error");
  addEventListener("beforeprint", () => boxes.forEach((box, at) => { if (!sources[at].length) draw(at); }));
  if (!("live" in document.documentElement.dataset)) return;

  // Names of the charts and lines and of the parts of the page whose texts change: a page with other ones is loaded anew.
  const outline = (page, itsCharts) => JSON.stringify([[...page.querySelectorAll("[data-part]")].map(({ dataset }) => dataset.part),
    itsCharts.map(({ title, lines }) => [title, lines.map(({ name }) => name)])]);

  async function look() {
    const query = new URLSearchParams(location.search);
    query.set("library", "no");
    const answer = await fetch(`${location.pathname}?${query}`);
    const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!answer.ok) throw new Error(newer.body.textContent);
    const later = JSON.parse(newer.getElementById("numbers")?.textContent ?? "[]");
    if (outline(newer, later) !== outline(document, charts)) return location.reload();
    later.forEach(({ lines }, at) => lines.forEach((line, number) => {
      const { x } = charts[at].lines[number];
      // A line without a new point is not drawn again.
      if (sources[at].length && (x.length !== line.x.length || x.at(-1) !== line.x.at(-1))) sources[at][number].data = columnsOf(line);
    }));
    charts = later;
    const ticked = new Set([...document.querySelectorAll("input:checked")].map(({ value }) => value));
    for (const part of document.querySelectorAll("[data-part]")) {
      const text = newer.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
      const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
      if (text.innerHTML !== part.innerHTML) part.replaceChildren(...text.childNodes);
      for (const box of part.querySelectorAll("input")) box.checked = ticked.has(box.value);
      if (focused) document.getElementById(focused)?.focus();
    }
  }

  async function follow() {
    const began = performance.now(), link = document.getElementById("link");
    try {
      if (!document.hidden) await look();
      link.textContent = "live";
    } catch (error) {
      link.textContent = error instanceof TypeError ? "connection lost, trying again" : error.message;
    }
    setTimeout(follow, Math.max(PAUSE, 4 * (performance.now() - began)));
  }
  setTimeout(follow, PAUSE);
})();

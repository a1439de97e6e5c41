// Charts of BokehJS for reports and for the page of `watch`: lines, heat maps and parallel coordinates.
// `look` has the page's colours (text, muted, line) and font, how numbers are printed (tick, value, number), whether there
// is a legend, whether the vertical axis is logarithmic, and `hidden`, the set of names that are not shown.
"use strict";
const plots = (() => {
  const field = (name) => ({ field: name });
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function made(tag, name, ...children) {
    const element = document.createElement(tag);
    element.className = name;
    element.append(...children);
    return element;
  }

  // The parts of a chart in its box: a legend, the drawing and what is told at the pointer.
  function lay(box) {
    const parts = { legend: made("div", "legend"), canvas: made("div", "canvas"), tip: made("div", "tip") };
    parts.tip.hidden = true;
    parts.canvas.append(parts.tip);
    // Without Ctrl the wheel scrolls the page.
    parts.canvas.addEventListener("wheel", (event) => event.ctrlKey || event.stopPropagation(), { capture: true });
    box.replaceChildren(parts.legend, parts.canvas);
    return parts;
  }

  function range(start, end, bounds = null) {
    return new Bokeh.Models.Range1d({ start, end, bounds });
  }

  function emptyPlot({ x, y, isLogX = false, isLogY = false, tools = [] }) {
    const scale = (isLog) => new Bokeh.Models[isLog ? "LogScale" : "LinearScale"]();
    return new Bokeh.Models.Plot({
      x_range: x, y_range: y, x_scale: scale(isLogX), y_scale: scale(isLogY), sizing_mode: "stretch_both",
      toolbar: new Bokeh.Models.Toolbar({ tools, logo: null }), toolbar_location: null, background_fill_color: null,
      border_fill_color: null, outline_line_color: null, min_border: 4, min_border_right: 20,
    });
  }

  function axis(look, { format, name = null, isLog = false, isWhole = false, ticks = 5, at = null }) {
    const formatter = new Bokeh.Models.BasicTickFormatter();
    formatter.doFormat = (values) => values.map((value) => format(value));
    const fixed = at && new Bokeh.Models.FixedTicker({ ticks: at });
    const linear = { desired_num_ticks: ticks, num_minor_ticks: 0, min_interval: isWhole ? 1 : 0 };
    return new Bokeh.Models[isLog ? "LogAxis" : "LinearAxis"]({
      formatter, axis_label: name, axis_line_color: look.line, major_tick_line_color: look.line,
      ticker: fixed || (isLog ? new Bokeh.Models.LogTicker({ num_minor_ticks: 0 }) : new Bokeh.Models.BasicTicker(linear)),
      minor_tick_line_color: null, major_label_text_color: look.muted, major_label_text_font: look.font,
      major_label_text_font_size: "11px", axis_label_text_color: look.muted, axis_label_text_font: look.font,
      axis_label_text_font_size: "11px", axis_label_text_font_style: "normal", axis_label_standoff: 2,
    });
  }

  // Draws a plot; the function that is returned removes it.
  async function mount(parts, plot) {
    const content = new (Bokeh.require("document").Document)();
    content.add_root(plot);
    await Bokeh.embed.add_document_standalone(content, parts.canvas);
    return () => content.remove_root(plot);
  }

  // Calls `tell` with a place in numbers of the axes; it returns lines of text, the first a heading, or null.
  function tellAtPointer(parts, plot, tell) {
    const hide = () => { parts.tip.hidden = true; };
    const show = ({ x, y, sx, sy }) => {
      const rows = tell(x, y);
      if (!rows) return hide();
      parts.tip.replaceChildren(...rows.map((row) => made("div", "row", ...row)));
      parts.tip.hidden = false;
      const { clientWidth: width, clientHeight: height } = parts.canvas;
      const left = sx + 14 + parts.tip.offsetWidth > width ? sx - 14 - parts.tip.offsetWidth : sx + 14;
      parts.tip.style.left = `${Math.max(left, 0)}px`;
      parts.tip.style.top = `${clamp(sy + 10, 0, Math.max(height - parts.tip.offsetHeight, 0))}px`;
    };
    plot.on_event("mousemove", show);
    plot.on_event("tap", show);
    plot.on_event("mouseleave", hide);
  }

  function swatch(colour) {
    const mark = made("i", "swatch");
    mark.style.backgroundColor = colour;
    return mark;
  }

  function addLegend(parts, lines, hidden, changed) {
    for (const [name, colour] of new Map(lines.map((line) => [line.name, line.colour]))) {
      const button = made("button", "entry", swatch(colour), name);
      button.type = "button";
      button.ariaPressed = String(!hidden.has(name));
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.ariaPressed = String(!hidden.has(name));
        changed();
      });
      parts.legend.append(button);
    }
  }

  // NaN leaves a gap, but points are joined over it.
  function columns({ points, role }, isLog) {
    const isDrawn = (y) => y !== null && (!isLog || y > 0);
    const known = role === "points" ? points.filter(([, y]) => isDrawn(y)) : points;
    return { x: known.map(([x]) => x), y: known.map(([, y]) => (isDrawn(y) ? y : NaN)) };
  }

  function glyphs(plot, line, isLog) {
    const { Line, Scatter, ColumnDataSource } = Bokeh.Models;
    const source = new ColumnDataSource({ data: columns(line, isLog) });
    const stroke = {
      line_color: line.colour, line_width: ["faint", "dashed"].includes(line.role) ? 1 : 2,
      line_alpha: line.role === "faint" ? 0.45 : 1, line_dash: line.role === "dashed" ? "dashed" : "solid", line_join: "round",
    };
    const drawn = [plot.add_glyph(new Line({ x: field("x"), y: field("y"), ...stroke }), source)];
    if (line.role === "points" || line.points.length === 1) {
      const dots = { size: { value: 7 }, fill_color: line.colour, line_color: null };
      drawn.push(plot.add_glyph(new Scatter({ x: field("x"), y: field("y"), ...dots }), source));
    }
    return { line, source, drawn };
  }

  // From the least to the greatest number of all lines, with room for the halves of points at both ends.
  function extentOf(lines, isLog) {
    const numbers = lines.flatMap((line) => (line.points.length ? [line.points[0][0], line.points.at(-1)[0]] : []));
    const low = numbers.length ? Math.min(...numbers) : 0, high = numbers.length ? Math.max(...numbers) : 1;
    const margin = lines.some(({ role }) => role === "points") && !isLog ? (high - low) / 100 : 0;
    return [low - margin, high > low ? high + margin : low + 1];
  }

  // What the vertical axis shows: values of the lines within the horizontal axis, with a margin.
  function heightOf(series, start, end, isLog) {
    let low = Infinity, high = -Infinity;
    for (const { source } of series) {
      const { x, y } = source.data;
      for (let at = 0; at < x.length; at += 1) {
        if (x[at] < start || x[at] > end || !Number.isFinite(y[at])) continue;
        low = Math.min(low, y[at]);
        high = Math.max(high, y[at]);
      }
    }
    if (low > high) return isLog ? [1, 10] : [0, 1];
    if (isLog) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
    const margin = low === high ? Math.abs(low) / 2 || 1 : (high - low) * 0.05;
    return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
  }

  function nearest(numbers, x, isLog) {
    const distance = (number) => (isLog ? Math.abs(Math.log(number / x)) : Math.abs(number - x));
    let best = 0;
    for (let at = 1; at < numbers.length; at += 1) if (distance(numbers[at]) < distance(numbers[best])) best = at;
    return best;
  }

  // Values of all lines at the number that is next to the pointer, from high to low; of lines of one name the last.
  function valuesAt(series, x, isLog) {
    const places = series.filter(({ source }) => source.data.x.length).map((each) => [each, nearest(each.source.data.x, x, isLog)]);
    if (!places.length) return null;
    const all = places.map(([{ source }, at]) => source.data.x[at]);
    const shown = all[nearest(all, x, isLog)];
    const found = places.filter((_, place) => all[place] === shown);
    const named = new Map(found.map(([{ line, source }, at]) => [line.name, [line, source.data.y[at]]]));
    return { x: shown, values: [...named.values()].sort(([, one], [, other]) => other - one) };
  }

  function addMarkers(plot, markers, look) {
    for (const [step, word] of markers) {
      plot.add_layout(new Bokeh.Models.Span({ location: step, dimension: "height", line_color: look.muted, line_dash: "dashed" }));
      plot.add_layout(new Bokeh.Models.Label({
        x: step, y: 6, y_units: "screen", x_offset: 12, text: word, angle: Math.PI / 2, text_color: look.muted,
        text_font: look.font, text_font_size: "10px",
      }));
    }
  }

  // Ctrl and the wheel or two fingers enlarge a part, dragging moves it, and a double click shows all again.
  // A finger that is dragged scrolls the page.
  function zoomTools() {
    const tools = [new Bokeh.Models.WheelZoomTool({ dimensions: "width" })];
    if (!matchMedia("(pointer: coarse)").matches) tools.push(new Bokeh.Models.PanTool({ dimensions: "width" }));
    return tools;
  }

  async function drawLines(box, shape, look) {
    const { name, is_log: isLog, is_whole: isWhole } = shape.x;
    const parts = lay(box), tools = zoomTools();
    let [first, last] = extentOf(shape.lines, isLog);
    const x = range(first, last, [first, last]), y = range(0, 1);
    const plot = emptyPlot({ x, y, isLogX: isLog, isLogY: look.logarithmic, tools });
    plot.toolbar.active_scroll = tools[0];
    plot.add_layout(axis(look, { format: (value) => look.number(value), name, isLog, isWhole, ticks: 6 }), "below");
    const vertical = axis(look, { format: look.tick, isLog: look.logarithmic, ticks: 4 });
    plot.add_layout(vertical, "left");
    plot.add_layout(new Bokeh.Models.Grid({ axis: vertical, dimension: 1, grid_line_color: look.line }));
    const order = ["faint", "dashed", "line", "points"];
    const sorted = [...shape.lines].sort((one, other) => order.indexOf(one.role) - order.indexOf(other.role));
    const series = sorted.map((line) => glyphs(plot, line, look.logarithmic));
    addMarkers(plot, shape.markers ?? [], look);
    const pointed = new Bokeh.Models.Span({ location: first, dimension: "height", line_color: look.muted, visible: false });
    plot.add_layout(pointed);
    const shown = () => series.filter(({ line }) => !look.hidden.has(line.name));
    const fit = () => {
      const [start, end] = heightOf(shown(), x.start, x.end, look.logarithmic);
      y.setv({ start, end });
    };
    const change = () => {
      for (const { line, drawn } of series) for (const each of drawn) each.visible = !look.hidden.has(line.name);
      fit();
    };
    x.change.connect(fit);
    change();
    if (look.legend) addLegend(parts, shape.lines, look.hidden, change);
    plot.on_event("doubletap", () => x.setv({ start: first, end: last }));
    plot.on_event("mouseleave", () => { pointed.visible = false; });
    tellAtPointer(parts, plot, (at) => {
      const found = at >= x.start && at <= x.end ? valuesAt(shown(), at, isLog) : null;
      pointed.visible = found !== null;
      if (!found) return null;
      pointed.location = found.x;
      const rows = found.values.map(([line, value]) => [swatch(line.colour), line.name, made("b", "", look.value(value))]);
      return [[`${name} ${look.number(found.x)}`], ...rows.slice(0, 24)];
    });
    const close = await mount(parts, plot);

    // New points of the same lines; a part that was enlarged stays.
    function update(lines) {
      const isWholeShown = x.start === first && x.end === last;
      [first, last] = extentOf(lines, isLog);
      shape = { ...shape, lines };
      for (const each of series) {
        each.line = lines.find((line) => line.name === each.line.name && line.role === each.line.role);
        each.source.data = columns(each.line, look.logarithmic);
      }
      x.setv({ bounds: [first, last], ...(isWholeShown ? { start: first, end: last } : {}) });
      fit();
    }
    const zoom = () => (x.start === first && x.end === last ? null : { start: x.start, end: x.end });
    return { close, update, zoom, enlarge: (part) => x.setv(part) };
  }

  // A colour of a scale of several, at a share from 0 to 1 of its length.
  function shade(colours, share) {
    const place = clamp(share, 0, 1) * (colours.length - 1), low = Math.min(Math.floor(place), colours.length - 2);
    const part = (colour, at) => parseInt(colour.slice(at, at + 2), 16);
    const mixed = [1, 3, 5].map((at) => Math.round(part(colours[low], at) + (place - low) * (part(colours[low + 1], at) - part(colours[low], at))));
    return `rgb(${mixed.join()})`;
  }

  function addScale(parts, { texts, colours }) {
    const ramp = made("i", "ramp");
    ramp.style.background = `linear-gradient(to right, ${colours.join()})`;
    parts.legend.append(made("span", "scale", texts[0], ramp, texts[1]));
  }

  async function drawMap(box, shape, look) {
    const { scale, columns: names, rows, cells } = shape;
    const parts = lay(box);
    addScale(parts, scale);
    const x = range(-0.5, names.length - 0.5), y = range(-0.5, rows.length - 0.5);
    const plot = emptyPlot({ x, y });
    const texts = (all) => (value) => all[Math.round(value)] ?? "";
    plot.add_layout(axis(look, { format: texts(names), name: shape.x, isWhole: true, ticks: 12 }), "below");
    plot.add_layout(axis(look, { format: texts(rows), name: "layer", isWhole: true, ticks: rows.length }), "left");
    const fill = cells.map((cell) => shade(scale.colours, (cell[2] - scale.low) / (scale.high - scale.low)));
    const data = { x: cells.map(([column]) => column), y: cells.map(([, row]) => row), fill };
    const cell = { width: { value: 1 }, height: { value: 1 }, fill_color: field("fill"), line_color: field("fill"), line_width: 0.5 };
    plot.add_glyph(new Bokeh.Models.Rect({ x: field("x"), y: field("y"), ...cell }), new Bokeh.Models.ColumnDataSource({ data }));
    const values = new Map(cells.map(([column, row, , value]) => [`${column} ${row}`, value]));
    tellAtPointer(parts, plot, (atX, atY) => {
      const column = Math.round(atX), row = Math.round(atY);
      const value = values.get(`${column} ${row}`);
      return value === undefined ? null : [[`layer ${rows[row]}, ${shape.x} ${names[column]}`, made("b", "", look.value(value))]];
    });
    return { close: await mount(parts, plot) };
  }

  // An axis of parallel coordinates: the height from 0 to 1 of a value, and its labels with their heights.
  function coordinate({ is_log: isLog, choices, ends }, values, look) {
    if (choices.length) {
      const height = (choice) => (choices.length === 1 ? 0.5 : choices.indexOf(choice) / (choices.length - 1));
      return { height, labels: choices.map((choice) => [choice, height(choice)]) };
    }
    const number = isLog ? Math.log : (value) => value;
    const low = number(ends[0] ?? Math.min(...values)), high = number(ends[1] ?? Math.max(...values));
    const height = (value) => (high === low ? 0.5 : (number(value) - low) / (high - low));
    const at = (share) => (isLog ? Math.exp(low + share * (high - low)) : low + share * (high - low));
    return { height, labels: (high === low ? [0.5] : [0, 0.25, 0.5, 0.75, 1]).map((share) => [look.number(at(share), 3), share]) };
  }

  async function drawParallel(box, { axes, rows, colours }, look) {
    const { ColumnDataSource, MultiLine, Segment, Text } = Bokeh.Models;
    const parts = lay(box), last = axes.length - 1, scales = axes.map((each, at) => coordinate(each, rows.map((row) => row[at]), look));
    const tool = new Bokeh.Models.BoxSelectTool({ renderers: [] });
    const plot = emptyPlot({ x: range(-0.35, last + 0.35), y: range(-0.08, 1.16), tools: [tool] });
    if (!matchMedia("(pointer: coarse)").matches) plot.toolbar.active_drag = tool;
    const heights = rows.map((row) => row.map((value, at) => scales[at].height(value)));
    const values = rows.map((row) => row[last]), least = Math.min(...values), span = Math.max(...values) - least || 1;
    const colour = values.map((value) => shade(colours, (value - least) / span));
    const lines = new ColumnDataSource({ data: { xs: rows.map((row) => row.map((_, at) => at)), ys: heights, colour, alpha: rows.map(() => 0.8) } });
    plot.add_glyph(new MultiLine({ xs: field("xs"), ys: field("ys"), line_color: field("colour"), line_alpha: field("alpha"), line_width: 2 }), lines);
    const places = axes.map((_, at) => at);
    const posts = new ColumnDataSource({ data: { x: places, low: places.map(() => 0), high: places.map(() => 1) } });
    plot.add_glyph(new Segment({ x0: field("x"), x1: field("x"), y0: field("low"), y1: field("high"), line_color: look.muted }), posts);
    const labels = scales.flatMap((scale, at) => scale.labels.map(([text, height]) => [at, height, text]));
    const write = (found, style) => {
      const data = { x: found.map(([at]) => at), y: found.map(([, height]) => height), text: found.map(([, , text]) => text) };
      const font = { text_color: look.muted, text_font: look.font, text_font_size: "11px", text_baseline: "middle" };
      plot.add_glyph(new Text({ x: field("x"), y: field("y"), text: field("text"), ...font, ...style }), new ColumnDataSource({ data }));
    };
    write(labels, { x_offset: 6 });
    write(axes.map(({ name }, at) => [at, 1.1, name]), { text_align: "center", text_color: look.text });
    narrow(plot, { heights, lines, look });
    tellAtPointer(parts, plot, (x, y) => {
      const left = clamp(Math.floor(x), 0, Math.max(last - 1, 0)), share = clamp(x - left, 0, 1);
      const gaps = heights.map((row) => Math.abs(row[left] + share * ((row[left + 1] ?? row[left]) - row[left]) - y));
      const row = nearest(gaps, 0, false);
      if (!(gaps[row] < 0.03)) return null;
      const text = (value) => (typeof value === "string" ? value : look.number(value, 5));
      return axes.map(({ name }, at) => [at === last ? swatch(colour[row]) : "", name, made("b", "", text(rows[row][at]))]);
    });
    return { close: await mount(parts, plot) };
  }

  // Keeps the rows that pass through the boxes that are dragged, one for each axis; a double click keeps all.
  function narrow(plot, { heights, lines, look }) {
    const kept = new Map();
    const redraw = () => {
      const isKept = (row) => [...kept].every(([at, { bottom, top }]) => row[at] >= bottom && row[at] <= top);
      lines.data = { ...lines.data, alpha: heights.map((row) => (isKept(row) ? 0.8 : 0.06)) };
    };
    plot.on_event("selectiongeometry", ({ geometry: { x0, x1, y0, y1 }, final }) => {
      const at = Math.round((x0 + x1) / 2);
      if (!final || at < Math.min(x0, x1) - 0.2 || at > Math.max(x0, x1) + 0.2 || at < 0 || at >= heights[0].length) return;
      if (kept.has(at)) kept.get(at).visible = false;
      const sides = { left: at - 0.04, right: at + 0.04, bottom: Math.min(y0, y1), top: Math.max(y0, y1) };
      kept.set(at, new Bokeh.Models.BoxAnnotation({ ...sides, fill_color: look.muted, fill_alpha: 0.25, line_color: look.muted }));
      plot.add_layout(kept.get(at));
      redraw();
    });
    plot.on_event("doubletap", () => {
      for (const box of kept.values()) box.visible = false;
      kept.clear();
      redraw();
    });
  }

  function draw(box, shape, look) {
    Bokeh.logger.set_level("error");
    return { lines: drawLines, map: drawMap, parallel: drawParallel }[shape.kind](box, shape, look);
  }

  return { draw };
})();

// Curves over steps, drawn by Apache ECharts. Tooltips are drawn on the canvas, so no text of a run becomes HTML.
import { number } from "./page.js";

const PALETTE = ["#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685"];

export function colour(place) {
  return PALETTE[place % PALETTE.length];
}

function themed() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), faint: of("--faint"), line: of("--line"), panel: of("--panel") };
}

// The centred moving average of `smooth` in runs/curves.py, over about 1 / (1 - weight) points on both sides.
export function smoothed(values, weight) {
  const most = Math.round(weight / (1 - weight));
  if (!most) return values;
  return values.map((value, place) => {
    if (value === null) return null;
    const reach = Math.min(most, place, values.length - 1 - place);
    const near = values.slice(place - reach, place + reach + 1).filter((each) => each !== null);
    return near.reduce((total, each) => total + each, 0) / near.length;
  });
}

function points(steps, values) {
  return steps.map((step, place) => [step, values[place]]);
}

// Whether single points are shown: evaluations are few and far between, and a line needs two points.
function isSparse(steps) {
  const span = steps.length > 2 ? (steps.at(-1) - steps[0]) / (steps.length - 1) : Infinity;
  return steps.length < 60 && span > 1.5;
}

function seriesOf(line, weight) {
  const shade = colour(line.place);
  const sparse = isSparse(line.steps);
  const base = {
    type: "line", name: line.name, symbol: "circle", symbolSize: sparse ? 5 : 3, showSymbol: sparse,
    color: shade, connectNulls: false, emphasis: { disabled: true },
  };
  const drawn = smoothed(line.values, weight);
  const main = {
    ...base, z: 3, data: points(line.steps, drawn),
    lineStyle: { width: 1.8, color: shade, type: line.dashed ? "dashed" : "solid" },
  };
  if (!weight || line.dashed) return [main];
  const raw = points(line.steps, line.values);
  return [
    { ...base, z: 1, data: raw, silent: true, showSymbol: false, tooltip: { show: false },
      lineStyle: { width: 1, color: shade, opacity: 0.28 } },
    main,
  ];
}

function optionOf(lines, settings) {
  const { text, faint, line, panel } = themed();
  const axis = {
    axisLine: { lineStyle: { color: line } }, axisTick: { show: false }, splitLine: { lineStyle: { color: line } },
    axisLabel: { color: faint, hideOverlap: true, fontSize: 11 },
  };
  return {
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif" },
    grid: { left: 4, right: 14, top: 10, bottom: 2, containLabel: true },
    tooltip: {
      trigger: "axis", renderMode: "richText", confine: true, backgroundColor: panel, borderColor: line,
      textStyle: { color: text, fontSize: 12 }, axisPointer: { lineStyle: { color: faint } },
      order: "valueDesc",
      formatter: (found) => tooltipText(found),
    },
    xAxis: { type: "value", min: "dataMin", max: "dataMax", minInterval: 1, splitNumber: 4, ...axis,
      splitLine: { show: false } },
    yAxis: { type: settings.log ? "log" : "value", scale: true, splitNumber: 4, ...axis,
      axisLabel: { ...axis.axisLabel, formatter: (value) => number(value, 3) } },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, moveOnMouseMove: true,
      filterMode: "none" }],
    series: lines.flatMap((each) => seriesOf(settings.log ? positive(each) : each, settings.smoothing)),
  };
}

function positive(line) {
  return { ...line, values: line.values.map((value) => (value !== null && value > 0 ? value : null)) };
}

function tooltipText(found) {
  if (!found.length) return "";
  const seen = new Map();
  for (const each of found) seen.set(each.seriesName, each.value[1]);
  const rows = [...seen].slice(0, 12).map(([name, value]) => `${shortened(name, 44)}   ${number(value)}`);
  return [`step ${found[0].value[0].toLocaleString("en")}`, ...rows].join("\n");
}

export function shortened(name, most) {
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

// One chart in a box. `lines` are {name, steps, values, place, dashed}; a box that is out of sight is drawn once it
// comes into sight.
export class Chart {
  constructor(box) {
    this.box = box;
    this.inSight = false;
    this.waiting = null;
    this.chart = null;
    this.observer = new IntersectionObserver(([entry]) => {
      this.inSight = entry.isIntersecting;
      if (this.inSight && this.waiting) this.draw(...this.waiting);
    }, { rootMargin: "200px" });
    this.observer.observe(box);
    this.resizer = new ResizeObserver(() => this.chart && this.chart.resize());
    this.resizer.observe(box);
  }

  draw(lines, settings) {
    this.waiting = [lines, settings];
    if (!this.inSight || !this.box.clientWidth) return;
    this.waiting = null;
    this.chart ??= echarts.init(this.box, null, { renderer: "canvas" });
    const zoom = this.chart.getOption()?.dataZoom?.[0];
    const option = optionOf(lines, settings);
    if (zoom) Object.assign(option.dataZoom[0], { start: zoom.start, end: zoom.end });
    this.chart.setOption(option, { notMerge: true, lazyUpdate: false });
  }

  close() {
    this.observer.disconnect();
    this.resizer.disconnect();
    this.chart?.dispose();
  }
}

// A small curve without axes, as SVG.
export function sparkline(values) {
  const width = 96, height = 26, space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  if (values.length < 2) return svg;
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const path = document.createElementNS(space, "polyline");
  const at = values.map((value, place) => {
    const x = 1 + (place / (values.length - 1)) * (width - 2);
    return `${x.toFixed(1)},${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`;
  });
  path.setAttribute("points", at.join(" "));
  svg.append(path);
  return svg;
}

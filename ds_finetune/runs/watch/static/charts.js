// Curves over steps, drawn by plots.js, which reports have too.
import { number } from "./page.js";

const PALETTE = ["#3b7ddd", "#e0701a", "#17966b", "#9460d8", "#d8446a", "#128fa6", "#a67c1b", "#6b7685"];

export function colour(place) {
  return PALETTE[place % PALETTE.length];
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

// Whether single points are shown: evaluations are few and far between, and a line needs two points.
function isSparse(steps) {
  const span = steps.length > 2 ? (steps.at(-1) - steps[0]) / (steps.length - 1) : Infinity;
  return steps.length < 60 && span > 1.5;
}

function shapeOf(lines, settings) {
  return {
    kind: "lines", x: { name: "step", is_log: false, is_whole: true },
    lines: lines.flatMap((line) => rolesOf(line, settings.smoothing)),
  };
}

// A line, and its values behind it where it is smoothed.
function rolesOf(line, weight) {
  const rolled = (role, values) => ({
    name: shortened(line.name, 44), role, colour: colour(line.place), points: line.steps.map((step, at) => [step, values[at]]),
  });
  const main = rolled(isSparse(line.steps) ? "points" : "line", smoothed(line.values, weight));
  return weight ? [rolled("faint", line.values), main] : [main];
}

function look(settings) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    text: of("--text"), muted: of("--faint"), line: of("--line"), font: "system-ui, sans-serif", legend: false,
    logarithmic: settings.log, hidden: new Set(), tick: (value) => number(value, 3), value: number,
    number: (value) => value.toLocaleString("en"),
  };
}

export function shortened(name, most) {
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

// One chart in a box. `lines` are {name, steps, values, place}; a box that is out of sight is drawn once it comes into
// sight. New points are added to what is drawn; other lines, settings or colours are drawn anew.
export class Chart {
  constructor(box) {
    this.box = box;
    this.inSight = this.isClosed = false;
    this.waiting = null;
    this.drawn = null;
    this.drawing = Promise.resolve();
    this.observer = new IntersectionObserver(([entry]) => {
      this.inSight = entry.isIntersecting;
      if (this.inSight && this.waiting) this.draw(...this.waiting);
    }, { rootMargin: "200px" });
    this.observer.observe(box);
  }

  draw(lines, settings) {
    this.waiting = [lines, settings];
    if (this.inSight && this.box.clientWidth) this.drawing = this.drawing.then(() => this.drawLatest());
  }

  async drawLatest() {
    if (!this.waiting || this.isClosed) return;
    const [lines, settings] = this.waiting;
    this.waiting = null;
    const shape = shapeOf(lines, settings), colours = look(settings);
    const kind = JSON.stringify([colours, shape.lines.map(({ points, ...line }) => line)]);
    if (kind === this.kind) {
      this.drawn.update(shape.lines);
      return;
    }
    const part = this.drawn?.zoom();
    this.drawn?.close();
    this.drawn = await plots.draw(this.box, shape, colours);
    this.kind = kind;
    if (part) this.drawn.enlarge(part);
  }

  close() {
    this.isClosed = true;
    this.observer.disconnect();
    this.drawing.then(() => this.drawn?.close());
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

// One run, or several over each other: curves that grow, and what else their folders hold.
import { addressOf, ago, badge, bytes, duration, element, number, request } from "./page.js";
import { Chart, colour, shortened } from "./charts.js";

const FIRST = ["rollout/reward", "eval/reward", "train/loss", "eval/loss", "train/accuracy", "train/grad_norm", "optim/lr", "perf/tokens_per_second"];
const BESIDE = { "rollout/reward": ["eval/reward"], "train/loss": ["eval/loss"], "train/accuracy": ["eval/accuracy"] };
const POINTS = 800;
const MORE = 1.5;

export class RunView {
  constructor(place, names) {
    this.place = place;
    this.names = names;
    this.curves = new Map(names.map((name) => [name, {}]));
    this.details = new Map();
    this.charts = new Map();
    this.settings = stored();
    this.isClosed = this.isLoading = this.isAsked = false;
    this.build();
  }

  build() {
    this.head = element("div", { class: "head" });
    this.grid = element("div", { class: "grid" });
    this.rest = element("div", { class: "rest" });
    this.problem = element("p", { class: "problem", role: "alert", hidden: true });
    this.smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, id: "smoothing",
      oninput: () => this.set({ smoothing: Number(this.smooth.value) }) });
    this.smooth.value = this.settings.smoothing;
    this.log = element("input", { type: "checkbox", id: "log", onchange: () => this.set({ log: this.log.checked }) });
    this.log.checked = this.settings.log;
    this.all = element("input", { type: "checkbox", id: "all", onchange: () => this.set({ all: this.all.checked }) });
    this.all.checked = this.settings.all;
    const bar = element("div", { class: "bar" },
      element("a", { class: "button", href: "#", id: "back" }, "← Runs"),
      element("label", { class: "field" }, "Smoothing", this.smooth),
      element("label", { class: "field" }, this.log, "Log scale"),
      element("label", { class: "field" }, this.all, "All metrics"));
    this.place.replaceChildren(bar, this.problem, this.head,
      element("section", { "aria-label": "Curves" }, this.grid), this.rest);
  }

  set(change) {
    Object.assign(this.settings, change);
    try { localStorage.setItem("curves", JSON.stringify(this.settings)); } catch { /* storage is switched off */ }
    this.draw();
  }

  async load() {
    await Promise.all([this.loadCurves(), this.refresh()]);
  }

  // One request for the curves of all runs; calls while it is under way lead to one more.
  async loadCurves() {
    this.isAsked = true;
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      while (this.isAsked && !this.isClosed) {
        this.isAsked = false;
        const found = await request("/api/curves", this.names, { points: POINTS });
        if (this.isClosed) return;
        for (const name of this.names) this.curves.set(name, found[name].curves);
        this.draw();
      }
    } catch (error) {
      this.fail(error);
    } finally {
      this.isLoading = false;
    }
  }

  async loadDetails() {
    const found = await Promise.all(this.names.map((name) => request("/api/run", [name])));
    if (this.isClosed) return;
    this.names.forEach((name, place) => this.details.set(name, found[place]));
    this.problem.hidden = true;
    this.drawDetails();
  }

  async refresh() {
    try {
      await this.loadDetails();
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    if (this.isClosed) return;
    this.problem.hidden = false;
    this.problem.textContent = error.message;
  }

  // New points of a run from the stream. A curve that has grown long is asked for again, with fewer points.
  add(name, curves) {
    if (curves === null) return this.loadCurves();
    const known = this.curves.get(name);
    let isLong = false;
    for (const [metric, added] of Object.entries(curves)) {
      const curve = (known[metric] ??= { steps: [], values: [] });
      const last = curve.steps.at(-1) ?? -1;
      added.steps.forEach((step, place) => {
        if (step <= last) return;
        curve.steps.push(step);
        curve.values.push(added.values[place]);
      });
      isLong ||= curve.steps.length > MORE * POINTS;
    }
    if (isLong) return this.loadCurves();
    this.draw();
  }

  metrics() {
    const found = new Set();
    for (const curves of this.curves.values()) for (const metric of Object.keys(curves)) found.add(metric);
    const beside = this.names.length === 1 ? Object.entries(BESIDE).flatMap(([main, others]) => (found.has(main) ? others : [])) : [];
    const first = FIRST.filter((metric) => found.has(metric) && !beside.includes(metric));
    const rest = [...found].filter((metric) => !FIRST.includes(metric) && !beside.includes(metric)).sort();
    return this.settings.all ? [...first, ...rest] : first;
  }

  draw() {
    const wanted = this.metrics();
    for (const [metric, chart] of this.charts) {
      if (metric === "rank times" || wanted.includes(metric)) continue;
      chart.close();
      chart.box.closest("figure").remove();
      this.charts.delete(metric);
    }
    for (const metric of wanted) {
      const chart = this.charts.get(metric) ?? this.addChart(metric);
      const lines = this.lines(metric);
      chart.draw(lines, this.settings);
      chart.caption.textContent = lastText(lines, this.names.length === 1);
    }
    wanted.forEach((metric) => this.grid.append(this.charts.get(metric).box.closest("figure")));
    this.drawRankTimes();
  }

  addChart(metric, title = metric) {
    const box = element("div", { class: "chart", role: "img", "aria-label": `Curve of ${title}` });
    const caption = element("span", { class: "last" });
    const figure = element("figure", { "data-metric": metric }, element("figcaption", {}, element("strong", {}, title), caption), box);
    this.grid.append(figure);
    const chart = new Chart(box);
    chart.caption = caption;
    this.charts.set(metric, chart);
    return chart;
  }

  lines(metric) {
    const single = this.names.length === 1;
    const lines = [];
    this.names.forEach((name, place) => {
      const curves = this.curves.get(name);
      if (curves[metric]) lines.push({ name: single ? metric : name, place, ...curves[metric] });
      for (const other of single ? BESIDE[metric] ?? [] : []) {
        if (curves[other]) lines.push({ name: other, place: 1, ...curves[other] });
      }
    });
    return lines;
  }

  drawRankTimes() {
    const times = this.names.length === 1 ? this.details.get(this.names[0])?.rank_times : null;
    if (!times?.steps) return;
    const chart = this.charts.get("rank times") ?? this.addChart("rank times", "Step seconds per rank");
    const lines = Object.entries(times.lines).map(([name, values], place) => ({ name, place, values, steps: times.steps }));
    chart.draw(lines, { smoothing: 0, log: false });
    const slowest = times.last.indexOf(Math.max(...times.last));
    chart.caption.textContent = `slowest: rank ${slowest}, ${number(times.last[slowest], 3)} s`;
    this.grid.append(chart.box.closest("figure"));
  }

  drawDetails() {
    const open = new Set([...this.rest.querySelectorAll("details[open]")].map((each) => each.dataset.name));
    const scrolled = this.rest.querySelector("pre.log")?.scrollTop;
    const all = this.names.map((name) => this.details.get(name));
    this.head.replaceChildren(...(all.length === 1 ? headOf(all[0]) : [comparisonOf(all)]));
    this.rest.replaceChildren(...(all.length === 1 ? sectionsOf(all[0], open) : [differencesOf(all)]));
    const log = this.rest.querySelector("pre.log");
    if (log) log.scrollTop = this.scrolledUp ? scrolled : log.scrollHeight;
    log?.addEventListener("scroll", () => { this.scrolledUp = log.scrollTop + log.clientHeight < log.scrollHeight - 8; });
    this.drawRankTimes();
  }

  recolour() {
    this.draw();
  }

  close() {
    this.isClosed = true;
    for (const chart of this.charts.values()) chart.close();
  }
}

function stored() {
  const settings = { smoothing: 0, log: false, all: false };
  try {
    const found = JSON.parse(localStorage.getItem("curves") ?? "{}");
    if (Number.isFinite(found.smoothing)) settings.smoothing = Math.min(Math.max(found.smoothing, 0), 0.98);
    settings.log = found.log === true;
    settings.all = found.all === true;
  } catch { /* storage is switched off, or holds something else */ }
  return settings;
}

function lastText(lines, single) {
  const parts = lines.filter((line) => line.values.length).map((line) => number(line.values.findLast((value) => value !== null)));
  if (!single) return "";
  return parts.length > 1 ? `${parts[0]}   held out ${parts[1]}` : parts[0] ?? "";
}

function headOf(run) {
  const steps = run.steps ? `${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")} steps` : `${run.step.toLocaleString("en")} steps`;
  const facts = [
    steps, run.seconds_left !== null && `${duration(run.seconds_left)} left`, run.ranks > 1 && `${run.ranks} ranks`,
    run.phase && run.state === "running" && run.phase !== "step" && `in ${run.phase}`,
    run.started_at && `started ${ago(run.started_at)}`, `last sign ${ago(run.updated_at)}`,
  ].filter(Boolean);
  return [
    element("h2", {}, run.name, " ", badge(run.state)),
    run.steps ? element("progress", { max: run.steps, value: run.step, "aria-label": steps }) : null,
    element("p", { class: "facts" }, facts.map((fact) => element("span", {}, fact))),
    run.reason ? element("p", { class: "reason", "data-state": run.state }, run.reason) : null,
    run.problems.length ? element("ul", { class: "problems" }, run.problems.map((text) => element("li", {}, text))) : null,
  ].filter(Boolean);
}

function sectionsOf(run, open) {
  const section = (name, content, isOpen = false) => content && element(
    "details", { "data-name": name, open: isOpen || open.has(name) }, element("summary", {}, name), content);
  return [
    run.watchdog && section("Report of the watchdog", element("pre", {}, run.watchdog), true),
    run.log && element("section", { class: "panel" }, element("h3", {}, "End of the log"), element("pre", { class: "log", tabindex: 0, "aria-label": "End of the log" }, run.log)),
    run.samples.length > 0 && element("section", { class: "panel" }, element("h3", {}, "Generated samples"), samplesOf(run.samples)),
    run.rollouts.length > 0 && element("section", { class: "panel" }, element("h3", {}, "Sampled answers and their rewards"), samplesOf(run.rollouts, "before")),
    section("Plan", Object.keys(run.plan).length > 0 && pairsOf(run.plan)),
    section("Configuration", run.config && element("pre", {}, run.config)),
    section("Checkpoints and exports", (run.checkpoints.length > 0 || Object.keys(run.exports).length > 0) && savedOf(run)),
    section("Notices", run.notices.length > 0 && tableOf(["Step", "Notice"], run.notices.map(([step, text]) => [step.toLocaleString("en"), text]))),
    section("Starts and versions", (run.starts.length > 0 || Object.keys(run.versions).length > 0) && startsOf(run)),
  ].filter(Boolean);
}

function samplesOf(samples, when = "after") {
  const step = samples.at(-1).step;
  const shown = samples.filter((sample) => sample.step === step);
  return element("div", { class: "samples" }, element("p", { class: "sub" }, `${when} step ${step.toLocaleString("en")}`),
    shown.map((sample) => element("dl", {},
      element("dt", {}, "Prompt"), element("dd", {}, element("pre", {}, sample.prompt)),
      element("dt", {}, "Answer"), element("dd", { class: sample.expected && sample.answer.trim() === sample.expected.trim() ? "right" : "" }, element("pre", {}, sample.answer || " ")),
      sample.expected && [element("dt", {}, "Expected"), element("dd", {}, element("pre", {}, sample.expected))],
      sample.scores && [element("dt", {}, "Scores"), element("dd", {}, sample.scores)])));
}

function pairsOf(tree) {
  return element("dl", { class: "pairs" }, Object.entries(tree).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, String(text))]));
}

function savedOf(run) {
  return element("div", {},
    run.checkpoints.length > 0 && tableOf(["Checkpoint", "Size", "Held-out loss"], run.checkpoints.map((each) => [`step ${each.step.toLocaleString("en")}`, bytes(each.num_bytes), number(each.eval_loss)])),
    Object.keys(run.exports).length > 0 && tableOf(["Export", "State"], Object.entries(run.exports)));
}

function startsOf(run) {
  const starts = run.starts.map((start) => [start.time ? new Date(start.time * 1000).toLocaleString("en-GB") : "–", start.after_step ? `after step ${start.after_step}` : "from the beginning", start.host ?? "–", String(start.ranks ?? "–"), start.command ?? "–"]);
  return element("div", {},
    starts.length > 0 && tableOf(["Start", "", "Host", "Ranks", "Command"], starts), Object.keys(run.versions).length > 0 && pairsOf(run.versions));
}

function tableOf(heads, rows) {
  return element("div", { class: "scroll" }, element("table", { class: "plain" },
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) => element("td", {}, cell)))))));
}

function comparisonOf(all) {
  const rows = all.map((run, place) => {
    const mark = element("span", { class: "mark" });
    mark.style.backgroundColor = colour(place);
    return [element("span", { class: "named" }, mark, element("a", { href: addressOf([run.name]) }, run.name)), badge(run.state),
      run.step.toLocaleString("en"), number(run.loss), number(run.tokens_per_second), String(run.ranks)];
  });
  return element("div", {}, element("h2", {}, `${all.length} runs`), tableOf(["Run", "State", "Step", "Loss", "Tokens/s", "Ranks"], rows));
}

function differencesOf(all) {
  const keys = [...new Set(all.flatMap((run) => Object.keys(run.settings)))];
  const differing = keys.filter((key) => key !== "output_dir" && new Set(all.map((run) => run.settings[key] ?? "")).size > 1);
  const rows = differing.map((key) => [key, ...all.map((run) => run.settings[key] ?? "–")]);
  return element("section", { class: "panel" }, element("h3", {}, "What differs in the configuration"),
    rows.length ? tableOf(["Key", ...all.map((run) => shortened(run.name, 32))], rows) : element("p", { class: "sub" }, "Nothing but output_dir."));
}

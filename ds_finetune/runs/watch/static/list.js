// The list of runs: states, steps, a preview of the loss, and ticks for comparing.
import { addressOf, ago, badge, duration, element, number } from "./page.js";
import { sparkline } from "./charts.js";

export class RunList {
  constructor(place, ticked, most) {
    this.place = place;
    this.ticked = ticked;
    this.most = most;
    this.rows = new Map();
    this.shown = new Map();
    this.filter = "";
    this.body = element("tbody");
    this.count = element("p", { class: "count", role: "status" });
    this.compare = element("a", { class: "button primary", href: "#", id: "compare", "aria-disabled": "true" }, "Compare");
    this.search = element("input", {
      type: "search", id: "filter", placeholder: "Filter by name, state or model  ( / )", "aria-label": "Filter runs",
      oninput: () => { this.filter = this.search.value.toLowerCase(); this.arrange(); },
    });
    this.empty = element("p", { class: "empty", hidden: true });
    const heads = ["", "Run", "State", "Progress", "Loss", "Tokens/s", "Last sign"];
    const table = element("table", { class: "runs" },
      element("thead", {}, element("tr", {}, heads.map((head, place) => element("th", { scope: "col" },
        place ? head : element("span", { class: "hidden-text" }, "Ticked"))))),
      this.body);
    place.replaceChildren(
      element("div", { class: "bar" }, this.search, this.count, this.compare), table, this.empty);
  }

  update(rows) {
    this.rows = rows;
    for (const name of [...this.ticked]) if (!rows.has(name)) this.ticked.delete(name);
    for (const [name, line] of this.shown) {
      if (rows.has(name)) continue;
      line.remove();
      this.shown.delete(name);
    }
    for (const [name, row] of rows) {
      const text = JSON.stringify(row);
      const line = this.shown.get(name) ?? this.added(name);
      if (line.text === text) continue;
      line.text = text;
      this.fill(line, row);
    }
    this.arrange();
  }

  added(name) {
    const tick = element("input", {
      type: "checkbox", "aria-label": `Compare ${name}`, onchange: () => {
        if (tick.checked) this.ticked.add(name); else this.ticked.delete(name);
        this.showTicks();
      },
    });
    tick.checked = this.ticked.has(name);
    const line = element("tr", {}, element("td", { class: "tick" }, tick));
    line.cells_ = {};
    for (const kind of ["name", "state", "progress", "loss", "speed", "seen"]) {
      line.cells_[kind] = element("td", { class: kind });
      line.append(line.cells_[kind]);
    }
    line.cells_.name.append(element("a", { href: addressOf([name]) }, name), element("span", { class: "sub" }));
    this.shown.set(name, line);
    return line;
  }

  fill(line, row) {
    const cells = line.cells_;
    cells.name.lastChild.textContent = row.model;
    const reason = row.reason && row.state !== "unknown" ? element("span", { class: "sub reason", title: row.reason }, row.reason) : null;
    cells.state.replaceChildren(...[badge(row.state), reason].filter(Boolean));
    const steps = row.steps ? `${row.step.toLocaleString("en")} / ${row.steps.toLocaleString("en")}` : row.step.toLocaleString("en");
    const part = row.steps ? element("progress", { max: row.steps, value: row.step, "aria-label": `${steps} steps` }) : null;
    const left = row.seconds_left === null ? "" : `${duration(row.seconds_left)} left`;
    cells.progress.replaceChildren(element("span", { class: "steps" }, steps), ...[part].filter(Boolean),
      element("span", { class: "sub" }, row.phase && row.phase !== "step" && row.state === "running" ? row.phase : left));
    cells.loss.replaceChildren(sparkline(row.preview), element("span", { class: "value" }, number(row.loss)));
    cells.speed.textContent = number(row.tokens_per_second);
    cells.seen.dataset.at = row.updated_at;
    cells.seen.textContent = ago(row.updated_at);
  }

  arrange() {
    let visible = 0;
    const lines = [...this.rows].sort(([, a], [, b]) => rank(a) - rank(b) || b.updated_at - a.updated_at);
    const focused = document.activeElement;
    let before = null;
    for (const [name, row] of lines) {
      const line = this.shown.get(name);
      const text = `${name} ${row.state} ${row.model}`.toLowerCase();
      line.hidden = !this.filter.split(/\s+/).every((word) => text.includes(word));
      visible += !line.hidden;
      const wanted = before ? before.nextSibling : this.body.firstChild;
      if (wanted !== line) this.body.insertBefore(line, wanted);
      before = line;
    }
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus();
    this.empty.hidden = visible > 0;
    this.empty.textContent = this.rows.size ? "No run matches the filter." : "There is no run in this folder yet. A run appears here as soon as it has its folder.";
    this.body.parentElement.hidden = !visible;
    const running = [...this.rows.values()].filter((row) => row.state === "running").length;
    this.count.textContent = `${visible === this.rows.size ? visible : `${visible} of ${this.rows.size}`} runs, ${running} running`;
    this.showTicks();
  }

  showTicks() {
    const many = this.ticked.size > this.most;
    const ready = this.ticked.size > 1 && !many;
    this.compare.textContent = many ? `At most ${this.most}` : this.ticked.size ? `Compare ${this.ticked.size}` : "Compare";
    this.compare.setAttribute("aria-disabled", String(!ready));
    if (ready) this.compare.href = addressOf([...this.ticked]);
    else this.compare.removeAttribute("href");
  }

  tick() {
    for (const cell of this.body.querySelectorAll("td.seen")) cell.textContent = ago(Number(cell.dataset.at));
  }
}

const ORDER = { running: 0, hung: 1 };

function rank(row) {
  return ORDER[row.state] ?? 2;
}

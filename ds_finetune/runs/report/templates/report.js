"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const boxes = [...document.querySelectorAll(".plot")];
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const whole = new Intl.NumberFormat("en");
  const digits = (value, most) => new Intl.NumberFormat("en", { maximumSignificantDigits: most }).format(value);

  function text(value, kind, most) {
    if (value === null || value === undefined || Number.isNaN(value)) return "not finite";
    if (kind === "percent") return `${digits(value * 100, most)}%`;
    if (kind === "seconds") return `${digits(value, most)} s`;
    if (kind === "gib") return `${digits(value, most)} GiB`;
    if (kind === "ratio") return `${digits(value, most)}x`;
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(Math.min(most - 1, 3)).replace(/\.?0+e/, "e");
    if (size >= 1e4 && most < 5) return compact.format(value);
    return digits(value, most);
  }

  function look({ number }) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    return {
      text: colour("--text"), muted: colour("--muted"), line: colour("--line"),
      font: getComputedStyle(document.body).fontFamily, legend: true,
      tick: (value) => text(value, number, 4), value: (value) => text(value, number, 5),
      number: (value, most) => (Number.isInteger(value) ? whole.format(value) : text(value, "number", most ?? 3)),
    };
  }

  // A chart that is drawn again for another theme or scale keeps the names that are hidden and the part that is enlarged.
  class Drawing {
    constructor(plot, index) {
      this.plot = plot;
      this.chart = charts[index];
      this.hidden = new Set();
      this.isLogarithmic = false;
      this.done = Promise.resolve();
      plot.style.height = `${plot.dataset.height}px`;
      const button = plot.parentElement.querySelector(".logarithmic");
      if (button) button.addEventListener("click", () => {
        this.isLogarithmic = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(this.isLogarithmic));
        this.draw();
      });
    }

    draw() {
      this.done = this.done.then(async () => {
        const part = this.shown?.zoom?.();
        this.shown?.close();
        const settings = { ...look(this.chart), logarithmic: this.isLogarithmic, hidden: this.hidden };
        this.shown = await plots.draw(this.plot, this.chart.plot, settings);
        if (part) this.shown.enlarge(part);
      });
      return this.done;
    }
  }

  async function drawFirst(plot, index) {
    const drawing = new Drawing(plot, index);
    drawn.push(drawing);
    await drawing.draw();
    root.dataset.drawn = String(Number(root.dataset.drawn) + 1);
  }

  // A chart in a closed part has no size; it is drawn when the part is opened.
  function drawInSight(plot, index) {
    const folded = plot.closest("details");
    if (folded) folded.addEventListener("toggle", () => drawFirst(plot, index), { once: true });
    else drawFirst(plot, index);
  }

  function recolour() {
    drawn.forEach((drawing) => drawing.draw());
    label();
  }

  function label() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  }

  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    recolour();
  });
  prefersDark.addEventListener("change", recolour);
  root.dataset.drawn = "0";
  if (charts.length) boxes.forEach(drawInSight);
  label();
})();

"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
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

  function theme(dark) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const muted = colour("--muted"), line = colour("--line");
    const axis = {
      axisLine: { lineStyle: { color: line } },
      axisTick: { lineStyle: { color: line } },
      axisLabel: { color: muted, fontSize: 11 },
      nameTextStyle: { color: muted, fontSize: 11 },
      splitLine: { lineStyle: { color: line } },
    };
    return {
      darkMode: dark,
      backgroundColor: "transparent",
      textStyle: { color: colour("--text"), fontFamily: getComputedStyle(document.body).fontFamily },
      legend: {
        textStyle: { color: colour("--text"), fontSize: 12 },
        inactiveColor: muted,
        pageIconColor: colour("--text"),
        pageIconInactiveColor: line,
        pageTextStyle: { color: muted },
      },
      tooltip: {
        backgroundColor: colour("--background"),
        borderColor: line,
        textStyle: { color: colour("--text"), fontSize: 12 },
      },
      visualMap: { textStyle: { color: muted, fontSize: 11 } },
      markLine: { lineStyle: { color: muted }, label: { color: muted } },
      parallelAxis: axis,
      valueAxis: axis,
      logAxis: axis,
      categoryAxis: axis,
    };
  }

  function withFormats({ option, number }) {
    const isMap = option.series.length > 0 && option.series[0].type === "heatmap";
    if (isMap) {
      const word = option.xAxis.name;
      const lines = ({ value }) =>
        `layer ${option.yAxis.data[value[1]]}, ${word} ${option.xAxis.data[value[0]]}: <b>${text(value[3], number, 3)}</b>`;
      return { ...option, tooltip: { ...option.tooltip, formatter: lines } };
    }
    if (option.parallelAxis) {
      const label = { formatter: (value) => text(value, "number", 3) };
      const named = option.parallelAxis.map((axis) => (axis.type === "category" ? axis : { ...axis, axisLabel: label }));
      return { ...option, parallelAxis: named };
    }
    const axisText = (value) => text(value, number, 4);
    if (option.xAxis.name !== "step") {
      const named = { axisLabel: { ...option.xAxis.axisLabel, formatter: (value) => text(value, "number", 3) } };
      const pointer = { axisPointer: { label: { formatter: ({ value }) => `${option.xAxis.name} ${text(value, "number", 3)}` } } };
      return {
        ...option,
        tooltip: { ...option.tooltip, valueFormatter: (value) => text(value, number, 5) },
        xAxis: { ...option.xAxis, ...named, ...pointer },
        yAxis: { ...option.yAxis, axisLabel: { ...option.yAxis.axisLabel, formatter: axisText } },
      };
    }
    return {
      ...option,
      tooltip: { ...option.tooltip, valueFormatter: (value) => text(value, number, 5) },
      xAxis: {
        ...option.xAxis,
        axisLabel: { ...option.xAxis.axisLabel, formatter: (value) => new Intl.NumberFormat("en").format(value) },
        axisPointer: { label: { formatter: ({ value }) => `step ${new Intl.NumberFormat("en").format(Math.round(value))}` } },
      },
      yAxis: { ...option.yAxis, axisLabel: { ...option.yAxis.axisLabel, formatter: axisText } },
    };
  }

  function draw(plot, index) {
    plot.style.height = `${plot.dataset.height}px`;
    const chart = echarts.init(plot, theme(isDark()));
    chart.setOption(withFormats(charts[index]));
    drawn.push(chart);
    new ResizeObserver(() => chart.resize()).observe(plot);
    const button = plot.parentElement.querySelector(".logarithmic");
    if (button) button.addEventListener("click", () => {
      const isLogarithmic = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLogarithmic));
      chart.setOption({ yAxis: { type: isLogarithmic ? "log" : "value" } });
    });
  }

  // A chart in a closed part has no size; it is drawn when the part is opened.
  function drawInSight(plot, index) {
    const folded = plot.closest("details");
    if (folded) folded.addEventListener("toggle", () => draw(plot, index), { once: true });
    else draw(plot, index);
  }

  function recolour() {
    drawn.forEach((chart) => chart.setTheme(theme(isDark())));
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
  if (charts.length) plots.forEach(drawInSight);
  recolour();
  root.dataset.drawn = String(drawn.length);
})();

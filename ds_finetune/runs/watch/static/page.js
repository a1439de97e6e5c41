// Small helpers: elements without innerHTML (texts of runs are never read as HTML), requests, numbers and times.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export async function request(path, runs = [], options = {}) {
  const query = new URLSearchParams(options);
  for (const run of runs) query.append("run", run);
  const answer = await fetch(`${path}?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()) || answer.statusText);
  return answer.json();
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${Math.max(Math.round(seconds), 0)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(time) {
  return time ? `${duration(Date.now() / 1000 - time)} ago` : "";
}

export function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

export function badge(state) {
  return element("span", { class: "badge", "data-state": state }, state);
}

// The address after # says what is shown: "" is the list, "run=a&run=b" are one or several runs.
export function shownRuns() {
  return new URLSearchParams(location.hash.slice(1)).getAll("run");
}

export function addressOf(runs) {
  const query = new URLSearchParams();
  for (const run of runs) query.append("run", run);
  return `#${query}`;
}

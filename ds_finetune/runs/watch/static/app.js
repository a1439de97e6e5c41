// The page: what is shown follows the address, and what the server streams.
import { addressOf, element, request, shownRuns } from "./page.js";
import { RunList } from "./list.js";
import { RunView } from "./runs.js";

const main = document.getElementById("main");
const linkState = document.getElementById("link-state");
const ticked = new Set();
let rows = new Map();
let most = 20;
let view = null;
let stream = null;
let refreshing = 0;
let refreshedAt = 0;

function show() {
  const names = shownRuns();
  view?.close?.();
  document.title = names.length ? `${names.join(", ")} · ds-finetune watch` : "ds-finetune watch";
  if (names.length) {
    view = new RunView(main, names);
    view.load();
  } else {
    view = new RunList(main, ticked, most);
    view.update(rows);
  }
  listen(names);
}

function listen(names) {
  stream?.close();
  const query = new URLSearchParams();
  for (const name of names) query.append("run", name);
  stream = new EventSource(`/api/stream?${query}`);
  stream.onopen = () => link("live", "live");
  stream.onerror = () => {
    const isOver = stream.readyState === EventSource.CLOSED;
    link("lost", isOver ? "not connected" : "connection lost, trying again");
    if (isOver) setTimeout(() => stream && listen(shownRuns()), 3000);
  };
  stream.addEventListener("points", (event) => {
    const { run, curves } = JSON.parse(event.data);
    // The first event of a run has no curves: steps may have been added since they were asked for.
    if (view instanceof RunView) view.add(run, curves);
  });
  stream.addEventListener("runs", (event) => take(JSON.parse(event.data), names));
}

function take({ changed, names: all }, names) {
  for (const row of changed) rows.set(row.name, row);
  const known = new Set(all);
  rows = new Map([...rows].filter(([name]) => known.has(name)));
  if (view instanceof RunList) view.update(rows);
  else if (names.some((name) => !known.has(name)) || changed.some((row) => names.includes(row.name))) refreshSoon();
}

// What a run holds beside its curves is asked for again when its row has changed, at most every two seconds.
function refreshSoon() {
  if (refreshing) return;
  refreshing = setTimeout(() => {
    refreshing = 0;
    refreshedAt = Date.now();
    if (view instanceof RunView) view.refresh();
  }, Math.max(0, refreshedAt + 2000 - Date.now()));
}

function link(state, text) {
  linkState.dataset.state = state;
  linkState.textContent = text;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function labelTheme() {
  const button = document.getElementById("theme");
  button.textContent = isDark() ? "☀" : "☾";
  button.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
}

document.getElementById("theme").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* storage is switched off */ }
  labelTheme();
  view?.recolour?.();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { labelTheme(); view?.recolour?.(); });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input[type=search]");
  if (event.key === "/" && !isTyping && view instanceof RunList) {
    event.preventDefault();
    view.search.focus();
  } else if (event.key === "Escape" && isTyping) {
    view.search.value = view.filter = "";
    view.arrange();
    view.search.blur();
  } else if (event.key === "Escape" && view instanceof RunView) {
    location.hash = "";
  } else if (event.key === "c" && !isTyping && view instanceof RunList && view.compare.hasAttribute("href")) {
    location.hash = addressOf([...ticked]).slice(1);
  }
});

addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
// A page out of sight needs no stream. Browsers open six connections to a server at most, all tabs together.
function pause() {
  stream?.close();
  stream = null;
  link("wait", "paused");
}

function resume() {
  if (stream || !view || document.visibilityState === "hidden") return;
  listen(shownRuns());
  if (view instanceof RunView) view.load();
}

document.addEventListener("visibilitychange", () => (document.visibilityState === "hidden" ? pause() : resume()));
addEventListener("pagehide", pause);
addEventListener("pageshow", resume);
setInterval(() => view?.tick?.(), 10000);

labelTheme();
try {
  const { folder, runs, most_compared: limit } = await request("/api/runs");
  document.getElementById("folder").textContent = folder;
  document.getElementById("folder").title = folder;
  rows = new Map(runs.map((row) => [row.name, row]));
  most = limit;
  show();
} catch (error) {
  main.replaceChildren(element("p", { class: "problem", role: "alert" }, `The runs cannot be read: ${error.message}`));
  link("lost", "not connected");
}

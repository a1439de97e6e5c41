// Sets the colours before anything is drawn. A plain script: modules run after the first paint.
"use strict";
{
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* storage is switched off */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

"use strict";
// Hovering or focusing a method lights it up everywhere; a click on the legend keeps it lit.
const parts = [...document.querySelectorAll("[data-run]")];
let kept = null;
function light(run) {
  for (const part of parts) {
    part.classList.toggle("dim", run !== null && part.dataset.run !== run);
    part.classList.toggle("lit", run !== null && part.dataset.run === run);
  }
}
for (const part of parts) {
  part.addEventListener("mouseenter", () => light(part.dataset.run));
  part.addEventListener("mouseleave", () => light(kept));
  part.addEventListener("focus", () => light(part.dataset.run));
  part.addEventListener("blur", () => light(kept));
}
const keys = [...document.querySelectorAll(".legend button")];
function keep(run) {
  kept = run;
  for (const key of keys) key.setAttribute("aria-pressed", String(key.dataset.run === kept));
  light(kept);
}
for (const key of keys) key.addEventListener("click", () => keep(kept === key.dataset.run ? null : key.dataset.run));
addEventListener("keydown", (event) => { if (event.key === "Escape") keep(null); });

// A heading sorts by its column; rows without a value there, and runs that failed, stay last.
const scales = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };
function valueOf(row, column) {
  const cell = row.cells[column];
  if (!cell || cell.classList.contains("why")) return null;
  const text = cell.dataset.v ?? cell.textContent.trim();
  const told = text.replace(/(\d),(?=\d{3})/g, "$1").match(/^[-+]?[\d.]+(?:e[-+]?\d+)?(?:\s*(B|kB|MB|GB))?/);
  if (text === "" || text === "-") return null;
  return told && !/[a-z(]/i.test(text.slice(told[0].length)) ? parseFloat(told[0]) * (scales[told[1]] ?? 1) : text;
}
for (const heading of document.querySelectorAll("th button")) {
  heading.addEventListener("click", () => {
    const th = heading.closest("th"), body = th.closest("table").tBodies[0];
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [valueOf(row, th.cellIndex), row]);
    rows.sort(([a, one], [b, other]) => {
      const last = one.classList.contains("failed") - other.classList.contains("failed") || (a === null) - (b === null);
      if (last || a === null) return last;
      const numbers = typeof a === "number" && typeof b === "number";
      return (up ? 1 : -1) * (numbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    });
    body.append(...rows.map(([, row]) => row));
  });
}
addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });

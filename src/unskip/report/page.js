// Tables sort by the column whose head is pressed: numbers as numbers, what is missing last.
"use strict";
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const column = head.cellIndex;
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
    };
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return sign * a.localeCompare(b, undefined, { numeric: true });
    };
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort((a, b) => compare(a[0], b[0]));
    body.append(...rows.map((each) => each[1]));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  });
}

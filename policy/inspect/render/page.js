"use strict";
(() => {
  const root = document.documentElement;
  window.addEventListener("error", (event) => { root.dataset.error = event.message; });
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const search = document.getElementById("search");

  // A link to a module opens what it is folded into.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    for (let node = target; node; node = node.parentElement.closest("details")) node.open = true;
    if (target) target.scrollIntoView({ block: "center" });
  };
  window.addEventListener("hashchange", reveal);

  // Search: what holds every word stays, and so do the modules around it.
  const texts = new Map();
  const textOf = (element) => {
    if (!texts.has(element)) {
      const own = element.matches(".node") ? element.querySelector("summary").textContent : element.textContent;
      texts.set(element, `${element.dataset.path ?? ""} ${own}`.toLowerCase());
    }
    return texts.get(element);
  };
  const items = all(".finding, .node, tbody tr");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let matches = 0;
    for (const item of items) {
      const matched = words.every((word) => textOf(item).includes(word));
      item.hidden = !matched;
      matches += matched && !item.matches(".node");
    }
    for (const node of all(".node:not([hidden])")) {
      for (let above = node.parentElement.closest(".node"); above; above = above.parentElement.closest(".node")) {
        above.hidden = false;
        if (words.length) above.open = true;
      }
    }
    for (const kind of all(".kind")) kind.hidden = !kind.querySelector(".finding:not([hidden])");
    const total = items.filter((item) => !item.matches(".node")).length;
    document.getElementById("matches").textContent = words.length ? `${matches} of ${total} rows` : "";
  };
  search?.addEventListener("input", filter);
  for (const button of all("[data-search]")) {
    button.addEventListener("click", () => {
      search.value = button.dataset.search;
      filter();
      document.getElementById("operations").scrollIntoView();
    });
  }

  // Sorting: numbers from the largest, texts from the first.
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b));
  for (const heading of all("th")) {
    heading.firstElementChild.addEventListener("click", () => {
      const table = heading.closest("table");
      const rows = all("tbody tr", table);
      const column = heading.cellIndex;
      const falls = heading.ariaSort === "none" ? rows[0]?.cells[column].dataset.value !== undefined
        : heading.ariaSort === "ascending";
      for (const other of all("th", table)) other.ariaSort = "none";
      heading.ariaSort = falls ? "descending" : "ascending";
      rows.sort((a, b) => compare(valueOf(a, column), valueOf(b, column)) * (falls ? -1 : 1));
      table.tBodies[0].append(...rows);
    });
  }

  // Folding: all at once, and by arrow keys, as trees are used elsewhere.
  for (const button of all("[data-fold]")) {
    button.addEventListener("click", () => {
      for (const node of all(".node")) node.open = button.dataset.fold === "open";
    });
  }
  document.querySelector(".tree")?.addEventListener("keydown", (event) => {
    const summary = event.target.closest("summary");
    if (!summary) return;
    const node = summary.parentElement;
    const shown = all(".tree summary").filter((other) => other.checkVisibility());
    const next = {
      ArrowDown: () => shown[shown.indexOf(summary) + 1],
      ArrowUp: () => shown[shown.indexOf(summary) - 1],
      ArrowRight: () => { if (node.open) return shown[shown.indexOf(summary) + 1]; node.open = true; return summary; },
      ArrowLeft: () => {
        if (node.open) { node.open = false; return summary; }
        return node.parentElement.closest(".node")?.firstElementChild;
      },
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next()?.focus();
  });

  reveal();
  root.dataset.ready = "true";
})();

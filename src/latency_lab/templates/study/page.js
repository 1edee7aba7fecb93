// Sorting: a click on a heading sorts its table by that column; numbers by value, rows without one last.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    if (table.tBodies[0].rows[0]?.cells[column]?.classList.contains("number")) heading.classList.add("number");
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const order = new Intl.Collator("en", { numeric: true });
      const numeric = [...body.rows].some((row) => row.cells[column].dataset.key !== undefined);
      const key = (row) => row.cells[column].dataset.key;
      const compare = (a, b) => {
        if (!numeric) return (down ? -1 : 1) * order.compare(a.cells[column].textContent, b.cells[column].textContent);
        if (key(a) === undefined || key(b) === undefined) return (key(a) === undefined) - (key(b) === undefined);
        return (down ? -1 : 1) * (key(a) - key(b));
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}

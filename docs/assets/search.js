// A search field above each table in `<div class="searchable">`: a row is shown if it contains all words of the field.
for (const part of document.querySelectorAll(".searchable")) {
  const rows = [...part.querySelectorAll("tbody tr")];
  const field = document.createElement("input"), count = document.createElement("output");
  field.type = "search";
  field.placeholder = "Search the table";
  field.setAttribute("aria-label", field.placeholder);
  const search = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  };
  field.addEventListener("input", search);
  part.prepend(field, count);
  search();
}

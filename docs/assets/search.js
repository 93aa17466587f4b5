// A search field above each table in `<div class="searchable">`: a row is shown if it contains all words of the field.
// "_" and "-" are ignored, so that the model type `llava_onevision` finds LlavaOnevisionForConditionalGeneration.
const plain = text => text.toLowerCase().replace(/[_-]/g, "");
for (const part of document.querySelectorAll(".searchable")) {
  const rows = [...part.querySelectorAll("tbody tr")];
  const field = document.createElement("input"), count = document.createElement("output");
  field.type = "search";
  field.placeholder = "Search the table";
  field.setAttribute("aria-label", field.placeholder);
  const search = () => {
    const words = plain(field.value).split(/\s+/);
    for (const row of rows) {
      const text = plain(row.textContent);
      row.hidden = !words.every(word => text.includes(word));
    }
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  };
  field.addEventListener("input", search);
  part.prepend(field, count);
  search();
}

const detail = document.querySelector("#detail");
for (const event of ["focusin", "pointerover"])
  detail && document.addEventListener(event, (e) => {
    const title = e.target.closest("[title]")?.title ?? e.target.querySelector(":scope > title, .sample > title")?.textContent;
    if (title) detail.textContent = title;
  });
for (const gallery of document.querySelectorAll("[data-pages]")) {
  const packs = [...gallery.querySelectorAll("details")];
  const size = 10, pages = Math.ceil(packs.length / size);
  const label = gallery.querySelector("output");
  let page = 0;
  const show = () => {
    packs.forEach((pack, i) => { pack.hidden = Math.floor(i / size) !== page; });
    label.textContent = `page ${page + 1} of ${pages}`;
  };
  for (const button of gallery.querySelectorAll("button"))
    button.addEventListener("click", () => {
      page = Math.min(pages - 1, Math.max(0, page + Number(button.value)));
      show();
    });
  show();
}

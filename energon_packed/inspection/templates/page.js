const detail = document.querySelector("#detail");
for (const event of ["focusin", "pointerover"])
  detail && document.addEventListener(event, (e) => {
    const title = e.target.closest("[title]")?.title ?? e.target.querySelector(":scope > title, .sample > title")?.textContent;
    if (title) detail.textContent = title;
  });
const items = [...document.querySelectorAll("[data-item]")];
const keys = document.querySelector("#keys");
const step = (by) => {
  const active = document.activeElement.closest("[data-item]");
  const linked = items.findIndex((item) => item.id && "#" + item.id === location.hash);
  const place = active ? items.indexOf(active) + by : Math.max(0, linked);
  items[Math.min(items.length - 1, Math.max(0, place))]?.focus();
};
const follow = (rel) => document.querySelector(`a[rel=${rel}]`)?.click();
const actions = {
  j: () => step(1), k: () => step(-1), n: () => follow("next"), p: () => follow("prev"),
  "/": () => document.querySelector("input[type=search]")?.focus(), "?": () => keys.open || keys.showModal(),
};
if (keys) {
  document.querySelector("#help").addEventListener("click", actions["?"]);
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, select, textarea") || !(e.key in actions)) return;
    e.preventDefault();
    actions[e.key]();
  });
}

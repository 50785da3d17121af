// Draw what the page holds.

for (const figure of document.querySelectorAll("figure.view")) {
  const data = JSON.parse(document.getElementById(figure.dataset.source).textContent);
  VIEWS[figure.dataset.kind](figure, data);
}
document.querySelectorAll("table").forEach((table) => {
  if (table.tHead) liven(table);
});

// Sections open by a link to them, or all together, and stay as they are when a page loads again.
const sections = [...document.querySelectorAll("main section > details")];
const nav = document.querySelector("nav");
const open = new Set(kept("sections", sections.filter((d) => d.open).map((d) => d.parentElement.id)));
const toTarget = () => {
  const target = document.getElementById(location.hash.slice(1));
  const details = target && target.querySelector("details");
  if (details) details.open = true;
};
for (const details of sections) {
  const { id } = details.parentElement;
  details.open = open.has(id);
  details.addEventListener("toggle", () => {
    open[details.open ? "add" : "delete"](id);
    keep("sections", [...open]);
  });
}
nav.addEventListener("click", (event) => {
  if (event.target.hash === location.hash) toTarget();
});
addEventListener("hashchange", toTarget);
toTarget();
if (sections.length > 1) {
  const button = make("button", { type: "button" }, "Open all");
  button.addEventListener("click", () => {
    const some = sections.some((d) => !d.open);
    sections.forEach((d) => { d.open = some; });
    button.textContent = some ? "Close all" : "Open all";
  });
  nav.append(button);
}

const redrawAll = () => redraws.forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => {
  document.documentElement.dataset.print = "";
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  redrawAll();
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.print;
  redrawAll();
});

const refresh = Number(document.body.dataset.refresh);
if (refresh > 0) {
  let on = kept("refresh", true);
  const button = toggle("Refresh while it trains", on, () => {
    on = !on;
    keep("refresh", on);
    button.setAttribute("aria-pressed", String(on));
  });
  document.querySelector("header").append(make("p", { class: "tools" }, button));
  setInterval(() => { if (on) location.reload(); }, refresh * 1000);
}

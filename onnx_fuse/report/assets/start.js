// Draw what the page holds.

for (const figure of document.querySelectorAll("figure.view")) {
  const data = JSON.parse(document.getElementById(figure.dataset.source).textContent);
  VIEWS[figure.dataset.kind](figure, data);
}
document.querySelectorAll("table").forEach((table) => {
  if (table.tHead) liven(table);
});

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

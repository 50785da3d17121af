// What every drawing uses: elements, numbers that read well, tips, and drawing anew.

const VIEWS = {};
const redraws = [];

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// "inf" and "nan" come as strings, since JSON has no numbers for them.
function number(value) {
  return typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value;
}

const SCALES = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]],
  B: [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
  "FLOP/s": [[1e12, "TFLOP/s"], [1e9, "GFLOP/s"], [1e6, "MFLOP/s"], [1, "FLOP/s"]],
};

function short(value) {
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function withUnit(value, unit) {
  const scale = SCALES[unit];
  if (!scale || !Number.isFinite(value)) return short(value) + (unit ? ` ${unit}` : "");
  const [size, name] = scale.find(([s]) => Math.abs(value) >= s) || scale[scale.length - 1];
  return `${short(value / size)} ${name}`;
}

function toggle(label, pressed, act) {
  const button = make("button", { type: "button", "aria-pressed": String(pressed) }, label);
  button.addEventListener("click", () => act(button));
  return button;
}

// Two or more buttons of which one is pressed.
function choice(label, options, chosen, act) {
  const buttons = options.map(([value, text]) =>
    toggle(text, value === chosen, () => {
      buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(options[i][0] === value)));
      act(value);
    }));
  return make("span", { class: "pair", role: "group", "aria-label": label }, ...buttons);
}

class Tip {
  constructor(figure) {
    this.box = make("div", { class: "tip", hidden: true });
    this.said = make("p", { class: "unseen", "aria-live": "polite" });
    figure.append(this.box, this.said);
    this.figure = figure;
  }
  show(text, x, y, aloud) {
    this.box.textContent = text;
    this.box.hidden = false;
    const width = this.figure.clientWidth;
    this.box.style.left = `${Math.max(0, Math.min(x + 14, width - this.box.offsetWidth))}px`;
    this.box.style.top = `${y + 14}px`;
    if (aloud) this.said.textContent = text.replaceAll("\n", ", ");
  }
  hide() {
    this.box.hidden = true;
  }
}

// Draw now, when the width changes, when the colours do, and for the printer.
function keepDrawn(figure, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (figure.clientWidth && figure.clientWidth !== width) {
      width = figure.clientWidth;
      draw();
    }
  }).observe(figure);
  redraws.push(draw);
}

// What the reader chose outlives a page that loads itself again.
function kept(key, start) {
  try {
    const found = sessionStorage.getItem(`onnx-fuse ${key}`);
    return found === null ? start : JSON.parse(found);
  } catch {
    return start;
  }
}
function keep(key, value) {
  try {
    sessionStorage.setItem(`onnx-fuse ${key}`, JSON.stringify(value));
  } catch {
    return; // a page from a file may have no storage
  }
}

// ---- tables: sorted by a click on a heading, and searched where they are long ----

const SEARCHED = 30;

function liven(table) {
  const bodies = [...table.tBodies];
  const rows = bodies.flatMap((b) => [...b.rows]);
  if (rows.length < 2) return;
  if (bodies.length === 1) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const text = head.textContent;
      if (!text) return;
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => sort(table, rows, head, column));
      head.replaceChildren(button);
    });
  }
  if (rows.length <= SEARCHED) return;
  const search = make("input", {
    type: "search", placeholder: `Search ${rows.length} rows`,
    "aria-label": `Search the table ${table.caption ? table.caption.textContent : ""}`,
  });
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  table.parentElement.before(make("div", { class: "tools" }, search));
}

function sort(table, rows, head, column) {
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => {
    const text = row.cells[column] ? row.cells[column].textContent : "";
    const found = Number.parseFloat(text.replaceAll(",", ""));
    return Number.isNaN(found) ? text : found;
  };
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (typeof x === typeof y) return x < y ? -1 : x > y ? 1 : 0;
    return typeof x === "number" ? 1 : -1;
  };
  table.tBodies[0].append(...[...rows].sort((a, b) => (down ? order(b, a) : order(a, b))));
}

// Lines, points and columns over two axes; and bars, one a row.

// Round numbers between two: 1, 2 or 5 times a power of ten; on a log axis powers of ten.
function ticks(low, high, count, log) {
  if (log) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const step = Math.max(1, Math.ceil((last - first) / count));
    const found = [];
    for (let e = first; e <= last; e += step) {
      for (const m of last - first <= 2 ? [1, 2, 5] : [1]) found.push(m * 10 ** e);
    }
    return found.filter((x) => x >= low * 0.999 && x <= high * 1.001);
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9) + 1e-300; k += 1) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

// Round numbers of bytes: multiples of a power of two.
function byteTicks(low, high) {
  if (!(high > low)) return [low];
  let step = 2 ** Math.floor(Math.log2((high - low) / 4));
  if ((high - low) / step > 6) step *= 2;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) found.push(v);
  return found;
}

class Axis {
  // values: all that the axis must hold; from, to: pixels
  constructor(values, log, from, to, zero) {
    const good = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let [low, high] = [Infinity, -Infinity];
    for (const v of good) {
      low = Math.min(low, v);
      high = Math.max(high, v);
    }
    if (!good.length) [low, high] = log ? [0.1, 1] : [0, 1];
    if (zero && !log) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (low === high) {
      [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 2 || 0.5), high + (Math.abs(high) / 2 || 0.5)];
    }
    Object.assign(this, { low, high, log, from, to });
  }
  at(value) {
    const f = this.log ? Math.log10 : (x) => x;
    return this.from + ((f(value) - f(this.low)) / (f(this.high) - f(this.low))) * (this.to - this.from);
  }
  ticks(count, unit) {
    if (unit === "B" && !this.log) return byteTicks(this.low, this.high);
    return ticks(this.low, this.high, count, this.log);
  }
  holds(value) {
    return Number.isFinite(value) && (!this.log || value > 0);
  }
}

const CHART_HEIGHT = 300;
const LETTER = 7; // pixels of a letter, at most on average

// Words under an axis, without those that would touch the one before or leave the drawing.
function words(places, y, width) {
  let end = -Infinity;
  const shown = [];
  for (const [at, text] of places) {
    const half = (text.length * LETTER) / 2;
    const x = Math.min(at, width - half);
    if (x - half < end + 6) continue;
    end = x + half;
    shown.push(drawn("text", { x, y, "text-anchor": "middle" }, text));
  }
  return shown;
}

VIEWS.chart = (figure, data) => {
  const state = kept(data.title, { x: Boolean(data.x.log), y: Boolean(data.y.log) });
  const tools = make("div", { class: "tools" }, make("figcaption", {}, data.title),
    make("span", { class: "gap" }));
  for (const axis of ["x", "y"]) {
    if (data[axis].choose) {
      tools.append(choice(`${data[axis].label} axis`,
        [[false, `${axis} linear`], [true, `${axis} log`]], state[axis], (log) => {
          state[axis] = log;
          keep(data.title, state);
          draw();
        }));
    }
  }
  const svg = drawn("svg", { role: "img", tabindex: "0", height: CHART_HEIGHT });
  svg.setAttribute("aria-label", `${figure.getAttribute("aria-label")}. Arrow keys read the points.`);
  const series = data.series.map((s, i) => ({
    ...s, y: s.y.map(number), x: s.x ? s.x.map(number) : s.y.map((_, k) => k + 1),
    colour: s.colour || `var(--s${(i % 5) + 1})`,
  }));
  figure.append(tools, svg);
  if (series.length > 1 || series[0].name) {
    figure.append(make("ul", { class: "legend" }, ...series.map((s) =>
      make("li", {}, make("i", { style: `color:${s.colour}`,
        class: s.kind === "points" ? "dot" : s.dashed ? "dashes" : s.thin ? "thin" : null }), s.name))));
  }
  const tip = new Tip(figure, svg);
  let place = null;
  let cursor = -1;

  function draw() {
    const width = figure.clientWidth || 600;
    svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    const y = new Axis(series.flatMap((s) => s.y).concat((data.lines || []).map((l) => l.y)),
      state.y, CHART_HEIGHT - 40, data.y.label ? 22 : 12, data.y.zero);
    const parts = [];
    const said = (t) => data.y.unit ? withUnit(t, data.y.unit) : short(t);
    const rows = y.ticks(5, data.y.unit);
    const left = Math.max(36, ...rows.map((t) => said(t).length * LETTER + 12));
    const x = new Axis(series.flatMap((s) => s.x), state.x, left, width - 12, false);
    for (const t of rows) {
      parts.push(drawn("line", { class: "grid", x1: left, x2: width - 12, y1: y.at(t), y2: y.at(t) }));
      parts.push(drawn("text", { x: left - 8, y: y.at(t) + 4, "text-anchor": "end" }, said(t)));
    }
    parts.push(...words(x.ticks(Math.max(3, Math.floor(width / 80)), data.x.unit).map((t) => [x.at(t),
      data.x.unit ? withUnit(t, data.x.unit) : short(t)]), CHART_HEIGHT - 22, width));
    parts.push(drawn("text", { x: width - 12, y: CHART_HEIGHT - 4, "text-anchor": "end" }, data.x.label));
    parts.push(drawn("text", { x: 0, y: 4 }, data.y.label));
    for (const line of data.lines || []) {
      if (!y.holds(line.y)) continue;
      parts.push(drawn("line", { x1: left, x2: width - 12, y1: y.at(line.y), y2: y.at(line.y),
        stroke: "var(--bad)", "stroke-dasharray": "4 3" }));
      parts.push(drawn("text", { x: width - 14, y: y.at(line.y) - 5, "text-anchor": "end" }, line.name));
    }
    place = [];
    for (const s of series) {
      const points = s.x.map((v, k) => [v, s.y[k], k]).filter(([a, b]) => x.holds(a) && y.holds(b));
      const at = points.map(([a, b, k]) => [x.at(a), y.at(b), k]);
      if (s.kind === "columns") {
        const wide = Math.max(1, (width - left - 12) / Math.max(s.x.length, 1) - 1);
        for (const [px, py, k] of at) {
          parts.push(drawn("rect", { x: px - wide / 2, width: wide, y: py,
            height: Math.max(0, CHART_HEIGHT - 40 - py),
            fill: s.bad && s.bad[k] ? "var(--bad)" : s.colour }));
        }
      } else if (s.kind === "points") {
        for (const [px, py] of at) {
          parts.push(drawn("circle", { cx: px, cy: py, r: 4, fill: s.colour, "fill-opacity": 0.65 }));
        }
      } else {
        parts.push(drawn("polyline", { points: at.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" "),
          fill: "none", stroke: s.colour, "stroke-width": s.thin ? 1 : 1.75,
          "stroke-opacity": s.thin ? 0.5 : 1, "stroke-linejoin": "round",
          "stroke-dasharray": s.dashed ? "6 4" : "none" }));
        if (s.dots) {
          parts.push(...at.map(([px, py]) => drawn("circle", { cx: px, cy: py, r: 3, fill: s.colour })));
        }
      }
      place.push(...at.map(([px, py, k]) => [px, py, s, k]));
    }
    place.sort((a, b) => a[0] - b[0]);
    svg.replaceChildren(...parts);
  }

  function read(index, aloud) {
    const [px, py, s, k] = place[index];
    cursor = index;
    const head = s.labels ? s.labels[k] : `${data.x.label} ${short(s.x[k])}`;
    const lines = [head];
    const others = s.labels ? [s] : series.filter((o) => o.kind !== "points" || o === s);
    for (const other of others) {
      const j = other === s ? k : other.x.indexOf(s.x[k]);
      if (j >= 0) {
        lines.push(`${other.name ? `${other.name}: ` : ""}${withUnit(other.y[j], data.y.unit)}`);
      }
    }
    tip.show(lines.join("\n"), px, py, aloud);
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const [mx, my] = [event.clientX - box.left, event.clientY - box.top];
    let [best, index] = [Infinity, -1];
    place.forEach(([px, py, s], i) => {
      const far = Math.abs(px - mx) + Math.abs(py - my) * (s.kind === "points" ? 1 : 0.02);
      if (far < best) [best, index] = [far, i];
    });
    if (index >= 0 && best < 80) read(index, false);
    else tip.hide();
  });
  svg.addEventListener("pointerleave", () => tip.hide());
  svg.addEventListener("blur", () => tip.hide());
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !place.length) return;
    event.preventDefault();
    read(Math.min(place.length - 1, Math.max(0, cursor + step)), true);
  });
  keepDrawn(figure, draw);
};

const FIRST_BARS = 20;

VIEWS.bars = (figure, data) => {
  const ends = data.rows.flatMap((r) => [r[1], r[5] || 0]).map((v) => Math.abs(number(v)));
  const top = Math.max(...ends.filter(Number.isFinite), 1e-300);
  const total = data.rows.reduce((sum, r) => sum + number(r[1]), 0);
  const body = make("tbody");
  const line = ([label, value, note, over, low, high]) => {
    const share = (100 * Math.min(Math.abs(number(value)), top)) / top;
    const bar = make("i", { style: `width:${share}%`, class: over ? "over" : null });
    const error = high === undefined ? null : make("b", {
      style: `left:${(100 * low) / top}%;width:${(100 * (high - low)) / top}%`,
      title: `${withUnit(low, data.unit)} … ${withUnit(high, data.unit)}`,
    });
    return make("tr", {}, make("td", {}, label), make("td", {}, make("div", {}, bar, error)),
      make("td", { class: "number" }, withUnit(number(value), data.unit)),
      make("td", { class: "number" }, data.share ? `${((100 * number(value)) / (total || 1)).toFixed(1)} %` : note || ""));
  };
  const fill = (count) => body.replaceChildren(...data.rows.slice(0, count).map(line));
  fill(FIRST_BARS);
  const table = make("table", {}, make("caption", {}, data.title), body);
  figure.append(make("div", { class: "scroll" }, table));
  if (data.rows.length > FIRST_BARS) {
    let all = false;
    const more = make("button", { type: "button" }, `Show all ${data.rows.length}`);
    more.addEventListener("click", () => {
      all = !all;
      fill(all ? data.rows.length : FIRST_BARS);
      more.textContent = all ? `Show the first ${FIRST_BARS}` : `Show all ${data.rows.length}`;
    });
    figure.append(make("div", { class: "tools" }, more));
  }
};

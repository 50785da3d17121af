// Rectangles on a plane: a timeline (lanes over time), or memory (addresses over the calls).

const LANE = 26;

VIEWS.plane = (figure, data) => {
  const lanes = data.y.lanes || null;
  const height = lanes ? lanes.length * LANE + 44 : 340;
  const full = [data.x.low || 0, data.x.high];
  let [low, high] = full;
  const tools = make("div", { class: "tools" }, make("figcaption", {}, data.title),
    make("span", { class: "gap" }),
    make("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.5) }, "+"),
    make("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(2) }, "−"),
    make("button", { type: "button", onclick: () => show(...full) }, "All"));
  const svg = drawn("svg", { role: "img", tabindex: "0", height });
  svg.setAttribute("aria-label",
    `${figure.getAttribute("aria-label")}. Arrow keys read the rectangles, plus and minus zoom.`);
  figure.append(tools, svg);
  if (data.kinds.length > 1) {
    figure.append(make("ul", { class: "legend" }, ...data.kinds.map((name, i) =>
      make("li", {}, make("i", { style: `color:var(--s${(i % 5) + 1})` }), name))));
  }
  const tip = new Tip(figure, svg);
  const longest = lanes ? Math.max(...lanes.map((name) => name.length)) : 0;
  let width = 600;
  let cursor = -1;
  let y = null;
  let left = 72;

  const across = (v) => left + ((v - low) / (high - low)) * (width - left - 8);
  const boxOf = ([x0, x1, y0, y1]) => {
    const [a, b] = [Math.max(across(x0), left), Math.min(across(x1), width - 8)];
    if (lanes) return [a, y0 * LANE + 3, b - a, LANE - 6];
    return [a, y.at(y1), b - a, Math.max(y.at(y0) - y.at(y1), 0.5)];
  };

  function draw() {
    width = figure.clientWidth || 600;
    if (lanes) left = Math.min(16 + longest * 6.6, width * 0.38);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const bottom = height - 40;
    y = lanes ? null : new Axis([0, data.y.high], false, bottom, 8, true);
    const parts = [];
    if (lanes) {
      lanes.forEach((name, i) => parts.push(drawn("text",
        { x: left - 8, y: i * LANE + LANE / 2 + 4, "text-anchor": "end" },
        name.length * 6.6 > left ? `${name.slice(0, Math.floor(left / 7) - 2)}…` : name)));
    } else {
      for (const t of y.ticks(5, data.y.unit)) {
        parts.push(drawn("line", { class: "grid", x1: left, x2: width - 8, y1: y.at(t), y2: y.at(t) }));
        parts.push(drawn("text", { x: left - 8, y: y.at(t) + 4, "text-anchor": "end" }, withUnit(t, data.y.unit)));
      }
    }
    parts.push(...words(ticks(low, high, Math.max(3, Math.floor(width / 90)), false)
      .map((t) => [across(t), withUnit(t, data.x.unit)]), height - 20, width));
    parts.push(drawn("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, data.x.label));
    for (const rect of data.rects) {
      if (rect[1] < low || rect[0] > high) continue;
      const [bx, by, bw, bh] = boxOf(rect);
      parts.push(drawn("rect", { x: bx, y: by, width: Math.max(bw, 0.7), height: bh, rx: 1,
        fill: `var(--s${(rect[4] % 5) + 1})`, "fill-opacity": 0.55,
        stroke: "var(--paper)", "stroke-width": bw > 4 && bh > 3 ? 0.7 : 0 }));
    }
    if (data.line) {
      const points = data.line.map(([a, b]) => `${across(a)},${y.at(b)}`).join(" ");
      parts.push(drawn("polyline", { points, fill: "none", stroke: "var(--ink)", "stroke-width": 1.25 }));
    }
    for (const mark of data.marks || []) {
      if (mark.x < low || mark.x > high) continue;
      const at = across(mark.x);
      parts.push(drawn("line", { class: "cursor", x1: at, x2: at, y1: 0, y2: bottom }));
      const right = at > width / 2;
      parts.push(drawn("text", { class: "mark", x: at + (right ? -6 : 6), y: 12,
        "text-anchor": right ? "end" : "start" }, mark.label));
    }
    svg.replaceChildren(...parts);
  }

  function show(a, b) {
    const least = (full[1] - full[0]) / 1e5;
    const span = Math.max(Math.min(b - a, full[1] - full[0]), least);
    low = Math.min(Math.max(a, full[0]), full[1] - span);
    high = low + span;
    draw();
  }
  function zoom(factor, at = (low + high) / 2) {
    show(at - (at - low) * factor, at + (high - at) * factor);
  }
  function read(index, px, py, aloud) {
    cursor = index;
    tip.show(data.rects[index][5], px, py, aloud);
  }
  const under = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    drag = [under(event)[0], low, high];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", () => { drag = null; });
  svg.addEventListener("pointermove", (event) => {
    const [mx, my] = under(event);
    if (drag) {
      const moved = ((drag[0] - mx) / (width - left - 8)) * (drag[2] - drag[1]);
      show(drag[1] + moved, drag[2] + moved);
      return;
    }
    const index = data.rects.findLastIndex((rect) => {
      const [bx, by, bw, bh] = boxOf(rect);
      return mx >= bx - 1 && mx <= bx + Math.max(bw, 1) + 1 && my >= by && my <= by + Math.max(bh, 2);
    });
    if (index >= 0) read(index, mx, my, false);
    else tip.hide();
  });
  svg.addEventListener("pointerleave", () => tip.hide());
  svg.addEventListener("blur", () => tip.hide());
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== svg) return;
    event.preventDefault();
    const at = low + ((under(event)[0] - left) / (width - left - 8)) * (high - low);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  }, { passive: false });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && data.rects.length) {
      const next = Math.min(data.rects.length - 1, Math.max(0, cursor + step));
      const [x0, x1] = data.rects[next];
      if (x0 > high || x1 < low) show(x0 - (high - low) / 2, x0 + (high - low) / 2);
      const [bx, by] = boxOf(data.rects[next]);
      read(next, bx, by, true);
    } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") show(...full);
    else return;
    event.preventDefault();
  });
  keepDrawn(figure, draw);
};

// A graph, or two side by side: canvases that draw only what is in sight, and a panel of details.

const BOX = 30;
const READABLE = 0.5; // scale from which the boxes have names
const FAR = 0.06; // scale below which an edge is a straight line

class Board {
  constructor(view, data, index) {
    this.view = view;
    this.data = data;
    this.index = index;
    this.canvas = make("canvas", {
      tabindex: "0", role: "application",
      "aria-label": `${data.title}: graph. Up and down arrows follow the edges, left and right go `
        + "to neighbours, Enter shows the node, plus and minus zoom, 0 shows all.",
    });
    this.element = make("div", { class: "board" }, make("h3", {}, this.title()), this.canvas);
    this.wide = data.nodes.map((node) => data.wide[node[0]]);
    this.order = data.y.map((_, i) => i).sort((a, b) => data.y[a] - data.y[b] || data.x[a] - data.x[b]);
    this.into = data.nodes.map(() => []);
    this.outof = data.nodes.map(() => []);
    this.reach = data.edges.map((edge) => {
      this.outof[edge[0]].push(edge[1]);
      this.into[edge[1]].push(edge[0]);
      const ys = edge.filter((_, i) => i > 1 && i % 2 === 1);
      return [Math.min(...ys), Math.max(...ys)];
    });
    this.scale = 1;
    this.x = 0;
    this.y = 0;
    this.lit = new Set();
    this.listen();
  }
  title() {
    const own = this.data.nodes.filter((n) => !["input", "output"].includes(this.data.ops[n[0]]));
    return `${this.data.title}: ${own.length.toLocaleString("en")} nodes`;
  }

  // ---- the place that is in sight ----

  resize() {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ratio = ratio;
    if (!this.placed && this.width) {
      this.placed = true;
      this.begin();
    }
  }
  begin() { // the inputs, at a scale at which names can be read
    this.scale = Math.min(1, Math.max(this.width / (this.data.width + 40), 0.7));
    const top = this.order.slice(0, 8).map((i) => this.data.x[i]);
    this.x = top.reduce((a, b) => a + b, 0) / top.length - this.width / 2 / this.scale;
    this.y = -20 / this.scale;
    this.later();
  }
  all() {
    this.scale = Math.min(this.width / (this.data.width + 40), this.height / (this.data.height + 40), 1);
    this.x = this.data.width / 2 - this.width / 2 / this.scale;
    this.y = this.data.height / 2 - this.height / 2 / this.scale;
    this.later();
  }
  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const scale = Math.min(3, Math.max(this.scale * factor, 0.004));
    this.x += px / this.scale - px / scale;
    this.y += py / this.scale - py / scale;
    this.scale = scale;
    this.later();
  }
  look(node) {
    this.scale = Math.max(this.scale, 0.8);
    this.x = this.data.x[node] - this.width / 2 / this.scale;
    this.y = this.data.y[node] + BOX / 2 - this.height / 2 / this.scale;
    this.later();
  }
  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  // ---- drawing ----

  first(y) { // place in `order` of the first node at or below y
    let [low, high] = [0, this.order.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.data.y[this.order[middle]] < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  draw() {
    if (!this.width) return;
    const { data, view } = this;
    const ink = view.inks();
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const k = this.scale * this.ratio;
    pen.setTransform(k, 0, 0, k, -this.x * k, -this.y * k);
    const [left, right] = [this.x, this.x + this.width / this.scale];
    const [top, bottom] = [this.y, this.y + this.height / this.scale];
    const readable = this.scale >= READABLE;
    const chosen = view.chosen && view.chosen.board === this ? view.chosen.node : -1;
    for (const bright of [false, true]) {
      pen.beginPath();
      data.edges.forEach((edge, i) => {
        if (this.reach[i][1] < top || this.reach[i][0] > bottom) return;
        if ((edge[0] === chosen || edge[1] === chosen) !== bright) return;
        pen.moveTo(edge[2], edge[3]);
        if (this.scale < FAR) {
          pen.lineTo(edge[edge.length - 2], edge[edge.length - 1]);
          return;
        }
        for (let j = 4; j < edge.length; j += 2) {
          const [x0, y0, x1, y1] = [edge[j - 2], edge[j - 1], edge[j], edge[j + 1]];
          if (x0 === x1 || !readable) pen.lineTo(x1, y1);
          else pen.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
        }
      });
      pen.strokeStyle = bright ? ink.accent : ink.edge;
      pen.lineWidth = (bright ? 2 : 1) / Math.max(this.scale, 0.35);
      pen.stroke();
    }
    pen.font = "12.5px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let at = this.first(top - BOX); at < this.order.length; at += 1) {
      const i = this.order[at];
      const [x, y, wide] = [data.x[i], data.y[i], this.wide[i]];
      if (y > bottom) break;
      if (x + wide / 2 < left || x - wide / 2 > right) continue;
      const look = view.look(this, i, ink);
      const faint = view.wanted && !view.wanted(this, i) && i !== chosen && !this.lit.has(i);
      pen.globalAlpha = faint ? 0.25 : 1;
      pen.beginPath();
      const round = data.ops[data.nodes[i][0]] === "input" || data.ops[data.nodes[i][0]] === "output";
      pen.roundRect(x - wide / 2, y, wide, BOX, round ? BOX / 2 : 5);
      const afar = look.line === ink.line ? ink.edge : look.line; // there only the colour counts
      pen.fillStyle = readable ? look.fill : afar;
      pen.fill();
      const marked = i === chosen || this.lit.has(i);
      pen.strokeStyle = marked ? ink.accent : look.line;
      pen.lineWidth = marked ? 3 / Math.min(1, this.scale * 1.2) : 1;
      pen.setLineDash(look.gone && !marked ? [4, 3] : []);
      pen.stroke();
      pen.setLineDash([]);
      if (readable) {
        pen.fillStyle = look.text;
        pen.fillText(data.ops[data.nodes[i][0]], x, y + BOX / 2 + 0.5);
      }
      pen.globalAlpha = 1;
    }
  }

  // ---- what the reader does ----

  hit(px, py) {
    const [x, y] = [this.x + px / this.scale, this.y + py / this.scale];
    const slack = 3 / this.scale;
    for (let at = this.first(y - BOX - slack); at < this.order.length; at += 1) {
      const i = this.order[at];
      if (this.data.y[i] > y + slack) break;
      if (Math.abs(this.data.x[i] - x) <= this.wide[i] / 2 + slack) return i;
    }
    return -1;
  }
  listen() {
    const held = new Map();
    let moved = 0;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, at(event));
      if (held.size === 1) moved = 0;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const before = held.get(event.pointerId);
      if (!before) {
        this.canvas.style.cursor = this.hit(...at(event)) >= 0 ? "pointer" : "grab";
        return;
      }
      const now = at(event);
      moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
      if (held.size === 1) {
        this.x -= (now[0] - before[0]) / this.scale;
        this.y -= (now[1] - before[1]) / this.scale;
      } else {
        const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
        const far = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
        this.zoom(far(now) / far(before), other[0], other[1]);
      }
      held.set(event.pointerId, now);
      this.later();
    });
    const release = (event) => {
      if (held.delete(event.pointerId) && moved < 6 && event.type === "pointerup") {
        const node = this.hit(...at(event));
        this.view.choose(node >= 0 ? this : null, node, { look: false });
      }
    };
    this.canvas.addEventListener("pointerup", release);
    this.canvas.addEventListener("pointercancel", release);
    this.canvas.addEventListener("wheel", (event) => {
      const zooms = event.ctrlKey || event.metaKey;
      if (!zooms && document.activeElement !== this.canvas) return; // the page scrolls
      event.preventDefault();
      if (zooms) this.zoom(Math.exp(-event.deltaY / 200), ...at(event));
      else {
        this.x += event.deltaX / this.scale;
        this.y += event.deltaY / this.scale;
        this.later();
      }
    }, { passive: false });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(1.8, ...at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }
  key(event) {
    const node = this.view.chosen && this.view.chosen.board === this ? this.view.chosen.node : -1;
    const go = (next) => this.view.choose(this, next, { look: true });
    const beside = (step) => {
      if (node < 0) return;
      const row = this.order.filter((i) => this.data.y[i] === this.data.y[node]);
      const next = row[row.indexOf(node) + step];
      if (next !== undefined) go(next);
    };
    const keys = {
      ArrowDown: () => { if (node < 0) go(this.order[0]); else if (this.outof[node].length) go(this.outof[node][0]); },
      ArrowUp: () => { if (node >= 0 && this.into[node].length) go(this.into[node][0]); },
      ArrowRight: () => beside(1),
      ArrowLeft: () => beside(-1),
      Home: () => go(this.order[0]),
      End: () => go(this.order[this.order.length - 1]),
      Enter: () => { if (node >= 0) this.view.panel.focus(); else go(this.order[0]); },
      Escape: () => this.view.choose(null, -1, {}),
      "+": () => this.zoom(1.3), "=": () => this.zoom(1.3), "-": () => this.zoom(1 / 1.3),
      0: () => this.all(),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  }
}

class GraphView {
  constructor(figure, data) {
    this.figure = figure;
    this.bodies = data.bodies;
    this.boards = data.graphs.map((graph, i) => new Board(this, graph, i));
    this.chosen = null;
    this.wanted = null;
    this.metric = "";
    const counts = new Map();
    const last = this.boards[this.boards.length - 1].data;
    for (const group of last.group) if (group) counts.set(group, (counts.get(group) || 0) + 1);
    this.groups = [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    // from orange to magenta: red is left to what failed
    this.hues = new Map(this.groups.map((name, i) => [name, 40 + ((0.625 + i * 0.618) % 1) * 280]));
    this.counts = counts;
    this.panel = make("div", { class: "panel", tabindex: "-1", "aria-live": "polite", role: "region", "aria-label": "Node" });
    this.found = make("div", { class: "found" });
    const boards = make("div", { class: "boards", style: `--boards:${this.boards.length}` },
      ...this.boards.map((b) => b.element), this.panel);
    figure.append(this.tools(), this.found, boards);
    this.describe();
    keepDrawn(figure, () => {
      this.shades = null;
      for (const board of this.boards) {
        board.resize();
        board.later();
      }
      for (const chip of this.chips) {
        const look = this.hue(chip.dataset.group);
        chip.firstChild.style.background = look.fill;
        chip.firstChild.style.borderColor = look.line;
      }
    });
  }

  // ---- colours ----

  inks() {
    if (!this.shades) {
      this.shades = {
        accent: colour("--accent"), edge: colour("--edge"), paper: colour("--paper"),
        text: colour("--ink"), line: colour("--soft"), gone: colour("--raised"),
        dark: matchMedia("(prefers-color-scheme: dark)").matches
          && !("print" in document.documentElement.dataset),
      };
    }
    return this.shades;
  }
  hue(group) {
    const h = this.hues.get(group);
    return this.inks().dark
      ? { fill: `hsl(${h} 40% 24%)`, line: `hsl(${h} 55% 60%)`, text: `hsl(${h} 60% 90%)` }
      : { fill: `hsl(${h} 75% 91%)`, line: `hsl(${h} 50% 45%)`, text: `hsl(${h} 60% 18%)` };
  }
  look(board, node, ink) {
    if (this.metric) {
      const value = (board.data.metrics[this.metric] || [])[node];
      if (value === null || value === undefined) return { fill: ink.paper, line: ink.line, text: ink.text };
      const share = this.share(number(value));
      return ink.dark
        ? { fill: `hsl(8 ${20 + 60 * share}% ${16 + 26 * share}%)`, line: ink.line, text: "#fff" }
        : { fill: `hsl(8 ${30 + 60 * share}% ${97 - 37 * share}%)`, line: ink.line, text: "#1b1f24" };
    }
    const group = board.data.group[node];
    if (this.hues.has(group)) return this.hue(group);
    return { fill: group === "-" ? ink.gone : ink.paper, line: ink.line, text: ink.text, gone: group === "-" };
  }
  share(value) {
    if (!Number.isFinite(value)) return 1;
    if (!(value > 0)) return 0;
    const [low, high] = this.range;
    return Math.max(0, Math.min(1, Math.log(value / low) / Math.log(high / low || 2)));
  }

  // ---- tools ----

  tools() {
    const each = (act) => () => this.boards.forEach(act);
    const search = make("input", { type: "search", placeholder: "Search nodes", "aria-label": "Search nodes by operator or name" });
    search.addEventListener("input", () => this.search(search.value));
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && this.found.querySelector("button")) this.found.querySelector("button").click();
    });
    this.chips = this.groups.map((group) => {
      const chip = make("button", { type: "button", class: "chip", "aria-pressed": "false", "data-group": group },
        make("i"), `${group} ${this.counts.get(group)}`);
      chip.addEventListener("click", () => this.pick(chip.getAttribute("aria-pressed") === "true" ? "" : group));
      return chip;
    });
    const row = make("div", { class: "tools" }, search,
      make("button", { type: "button", "aria-label": "Zoom in", onclick: each((b) => b.zoom(1.3)) }, "+"),
      make("button", { type: "button", "aria-label": "Zoom out", onclick: each((b) => b.zoom(1 / 1.3)) }, "−"),
      make("button", { type: "button", onclick: each((b) => b.begin()) }, "Top"),
      make("button", { type: "button", onclick: each((b) => b.all()) }, "All"));
    if (document.fullscreenEnabled) {
      row.append(make("button", { type: "button", onclick: () => document.fullscreenElement
        ? document.exitFullscreen() : this.figure.requestFullscreen() }, "Full screen"));
    }
    const metrics = [...new Set(this.boards.flatMap((b) => Object.keys(b.data.metrics)))];
    if (metrics.length) {
      const select = make("select", { "aria-label": "Colour by" },
        make("option", { value: "" }, "Colour by fusion"),
        ...metrics.map((name) => make("option", { value: name }, `Colour by ${name}`)));
      select.addEventListener("change", () => this.measure(select.value));
      row.append(select);
    }
    return make("div", {}, row, make("div", { class: "tools" }, ...this.chips));
  }
  measure(metric) {
    this.metric = metric;
    const values = this.boards.flatMap((b) => b.data.metrics[metric] || [])
      .map(number).filter((v) => Number.isFinite(v) && v > 0);
    const high = Math.max(...values, 1e-300);
    this.range = [Math.max(Math.min(...values, high), high / 1e4), high];
    this.boards.forEach((b) => b.later());
  }
  pick(group) {
    for (const chip of this.chips) chip.setAttribute("aria-pressed", String(chip.dataset.group === group));
    this.wanted = group ? (board, node) => board.data.group[node] === group : null;
    this.boards.forEach((b) => b.later());
  }
  search(text) {
    const wanted = text.trim().toLowerCase();
    const hits = [];
    for (const board of this.boards) {
      board.data.nodes.forEach((node, i) => {
        const words = `${board.data.ops[node[0]]} ${node[1]}`.toLowerCase();
        if (wanted && words.includes(wanted)) hits.push([board, i]);
      });
    }
    const known = new Set(hits.map(([board, i]) => `${board.index}/${i}`));
    this.wanted = wanted ? (board, i) => known.has(`${board.index}/${i}`) : null;
    const shown = hits.slice(0, 24).map(([board, i]) => this.button(board, i, this.boards.length > 1));
    const rest = wanted ? make("span", { class: "soft", role: "status" },
      hits.length > 24 ? `${hits.length} found, the first 24 shown` : `${hits.length} found`) : null;
    this.found.replaceChildren(...(rest ? [rest] : []), ...shown);
    this.boards.forEach((b) => b.later());
  }
  button(board, node, withTitle) {
    const [op, name] = board.data.nodes[node];
    const text = `${withTitle ? `${board.data.title} · ` : ""}${board.data.ops[op]} ${name}`;
    return make("button", { type: "button", onclick: () => this.choose(board, node, { look: true }) }, text);
  }

  // ---- the node that is chosen, and what it became or came from ----

  choose(board, node, { look }) {
    this.chosen = board ? { board, node } : null;
    this.boards.forEach((b) => b.lit.clear());
    if (board && this.boards.length === 2) {
      const [before, after] = this.boards;
      if (board === after) {
        for (const i of after.data.from[node] || []) before.lit.add(i);
      } else {
        for (const [i, from] of Object.entries(after.data.from)) {
          if (from.includes(node)) after.lit.add(Number(i));
        }
      }
      const other = board === after ? before : after;
      if (other.lit.size) other.look([...other.lit][Math.floor(other.lit.size / 2)]);
    }
    if (board && look) board.look(node);
    this.describe();
    this.boards.forEach((b) => b.later());
  }
  describe() {
    if (!this.chosen) {
      this.panel.replaceChildren(make("p", { class: "soft" },
        "Choose a node: click it, find it by its name, or use the arrow keys in a graph. "
        + "Drag to move. In a graph that has the focus the wheel scrolls, and with Ctrl it zooms."));
      return;
    }
    const { board, node } = this.chosen;
    const { data } = board;
    const [op, name, ins, outs] = data.nodes[node];
    const facts = make("dl");
    const add = (term, ...content) => {
      if (content.length) facts.append(make("dt", {}, term), ...content.map((c) => make("dd", {}, c)));
    };
    const group = data.group[node];
    if (this.boards.length === 2 && board === this.boards[0] && !["input", "output"].includes(data.ops[op])) {
      const words = { "": "stays", "-": "was folded away" };
      add("became", words[group] || `part of ${group}`);
    }
    for (const [term, text] of Object.entries(data.facts[node] || {})) add(term, text);
    const value = (v) => v < 0 ? "not given" : make("span", {}, `${data.values[v][0]} `,
      make("span", { class: "soft" }, data.types[data.values[v][1]]));
    add("reads", ...ins.map(value));
    add("computes", ...outs.map(value));
    add("attributes", ...Object.entries(data.attributes[node] || {}).map(([k, v]) => `${k} = ${v}`));
    add("read by", ...board.outof[node].slice(0, 12).map((i) => this.button(board, i, false)));
    add("reads from", ...board.into[node].slice(0, 12).map((i) => this.button(board, i, false)));
    const parts = [make("h3", {}, data.ops[op]), make("div", { class: "soft" }, name), facts];
    if (this.boards.length === 2) {
      const other = this.boards[1 - board.index];
      const lit = [...other.lit];
      if (lit.length) {
        const many = lit.length > 12 ? ` (the first 12 of ${lit.length})` : "";
        add(board.index ? `made of${many}` : `part of${many}`,
          ...lit.slice(0, 12).map((i) => this.button(other, i, false)));
      }
    }
    const last = board.index === this.boards.length - 1;
    const body = last && board.data.group[node] && this.bodies[data.ops[op]];
    if (body) parts.push(make("details", {}, make("summary", {}, "Body in standard operators"), make("pre", {}, body)));
    this.panel.replaceChildren(...parts);
    this.panel.scrollTop = 0;
  }
}

VIEWS.graph = (figure, data) => {
  figure.view = new GraphView(figure, data);
};

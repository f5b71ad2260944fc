// The expert heat map: one row a MoE layer, one column an expert, and next to each row how even its load is.
//
// Counts are of all tokens since the start; what is shown are shares of a layer. L layers, E experts.

const RECENT = 10; // seconds
const TOP = 8; // times an even share: never needs a colour of its own above that
const LEFT = 26; // css pixels for the layer's number
const RIGHT = 94; // and for its balance
const HEAD = 18;
const WIDEST = 40; // css pixels of a cell, so that a model with few experts has a small map
const STRIP = 72; // css pixels of height: the map above the chat, on a phone
// From little to much, on dark ground in both themes; lightness goes one way only, so that it reads without colour vision.
const RAMP = ["#14222c", "#133f57", "#0f6776", "#1f9680", "#6fc06d", "#cddd52", "#fff8b0"];
const GROUND = "#0b1216";

const SHADES = 256;
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// A map has up to 30,000 cells, drawn once a second: colours are mixed once.
const TABLE = Array.from({ length: SHADES }, (_, i) => mix(i));

function mix(shade) {
  const place = (shade / (SHADES - 1)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const [from, to] = [rgb(RAMP[low]), rgb(RAMP[low + 1])];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * (place - low))).join(", ")})`;
}

const doublings = (times) => Math.log2(1 + times);

/** The least and the greatest load in these counts, as times an even share: the ends of the colours. An even share is
 * always between them, and what is almost even does not look uneven. */
export function range(counts) {
  let [low, high] = [0.9, 1.1];
  for (const row of counts) {
    const mean = row.reduce((a, b) => a + b, 0) / row.length;
    if (!mean) continue;
    low = Math.min(low, Math.min(...row) / mean);
    high = Math.max(high, Math.max(...row) / mean);
  }
  return { low, high: Math.min(TOP, high), cut: high > TOP };
}

/** Of a load that is so many times an even share, in a range. */
export function colour(times, { low, high }) {
  const place = (doublings(times) - doublings(low)) / (doublings(high) - doublings(low));
  return TABLE[Math.round(Math.max(0, Math.min(1, place)) * (SHADES - 1))];
}

/** Of one layer: its sum, the largest load over the mean, and the entropy of the shares over that of even ones. */
export function balance(counts) {
  const sum = counts.reduce((a, b) => a + b, 0);
  if (!sum) return { sum, peak: 0, even: 0 };
  const entropy = -counts.reduce((a, n) => a + (n ? (n / sum) * Math.log(n / sum) : 0), 0);
  const even = counts.length > 1 ? entropy / Math.log(counts.length) : 1;
  return { sum, peak: (Math.max(...counts) * counts.length) / sum, even };
}

export class ExpertMap {
  constructor() {
    this.canvas = document.getElementById("cells");
    this.label = document.getElementById("cell");
    this.note = document.getElementById("experts-note");
    this.history = []; // [performance.now(), counts]: what changed in the last seconds
    this.counts = []; // what is shown
    this.ranks = [];
    this.chosen = null; // [layer, expert]
    this.span = "total";
    this.picked = false; // before a person picks a span, it is the one in which something moves
    this.waiting = false; // for the first counts
    for (const input of document.querySelectorAll("input[name=span]")) {
      // Not "change": who clicks what is shown wants it to stay.
      input.addEventListener("click", () => {
        this.span = input.value;
        this.picked = true;
        this.show();
      });
    }
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.choose(null));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => this.choose(null));
    document.addEventListener("themechange", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(document.getElementById("map"));
  }

  /** What the server counted since it started, [layer][expert]; empty before it has counted anything. [layer][rank] has
   * that rank's experts, if they are on several. */
  update(total, ranks = []) {
    this.ranks = ranks;
    const now = performance.now();
    const last = this.history.at(-1)?.[1] ?? [];
    const grown = total.length === last.length && total[0]?.length === last[0]?.length && sum(total) >= sum(last);
    if (!grown) {
      // The first counts after none are all new. Otherwise another server stands there, or the page has just come.
      this.history = total.length && this.waiting ? [[now, total.map((row) => row.map(() => 0))]] : [];
      this.choose(null);
    }
    this.waiting = !total.length;
    if (total.length && (!this.history.length || sum(this.history.at(-1)[1]) !== sum(total))) this.history.push([now, total]);
    // One from before the window stays: the difference starts there.
    const newest = this.history.at(-1)?.[0];
    while (this.history.length > 2 && this.history[1][0] < newest - 1000 * RECENT) this.history.shift();
    this.show();
  }

  show() {
    const [at, total] = this.history.at(-1) ?? [0, []];
    const idle = Math.round((performance.now() - at) / 1000);
    this.counts = total;
    if (!this.picked) {
      this.span = this.history.length > 1 && idle < RECENT ? "recent" : "total";
      document.querySelector(`input[name=span][value=${this.span}]`).checked = true;
    }
    if (this.span === "recent") {
      const before = this.history.length > 1 ? this.history[0][1] : total;
      this.counts = total.map((row, l) => row.map((n, e) => n - before[l][e]));
    }
    const there = total.length > 0;
    for (const id of ["map", "legend", "map-keys", "strip"]) document.getElementById(id).hidden = !there;
    this.note.textContent = there ? this.summary(idle) : "No token has met an expert yet.";
    this.draw();
    if (this.chosen) this.describe();
  }

  summary(idle) {
    const [L, E] = [this.counts.length, this.counts[0].length];
    const rows = this.counts.map(balance);
    const size = `${L} layer${L > 1 ? "s" : ""} × ${E} experts`;
    if (rows.every((row) => row.sum === 0)) return `${size} · nothing routed since this page is open`;
    const unused = this.counts.flat().filter((n) => n === 0).length;
    const worst = rows.reduce((best, row, l) => (row.peak > rows[best].peak ? l : best), 0);
    const expert = this.counts[worst].indexOf(Math.max(...this.counts[worst]));
    const even = rows.reduce((a, row) => a + row.even, 0) / L;
    const parts = [size, `${percent(even)} even`, `busiest: layer ${worst}, expert ${expert}, ${times(rows[worst].peak)}`];
    if (unused) parts.push(`${unused.toLocaleString("en")} unused`);
    if (this.span === "recent" && idle > 2) parts.push(`idle for ${idle} s`);
    return parts.join(" · ");
  }

  // -- drawing --------------------------------------------------------------------------------------------------------

  draw() {
    const L = this.counts.length;
    const width = this.canvas.parentElement.clientWidth;
    if (!L || !width) return;
    const rowHeight = L <= 12 ? 24 : L <= 32 ? 17 : 13;
    const cells = Math.min(width - LEFT - RIGHT, WIDEST * this.counts[0].length);
    this.box = { left: LEFT, top: HEAD, width: cells, rowHeight, height: HEAD + L * rowHeight };
    this.range = range(this.counts);
    const pen = this.sized(this.canvas, width, this.box.height);
    this.drawCells(pen, this.box);
    this.drawWords(pen);
    if (this.chosen) this.drawChosen(pen);
    this.drawScale();
    this.drawStrip();
    this.canvas.ariaLabel = `Expert load. ${this.note.textContent}`;
  }

  /** A pen for a canvas of this size, which draws in css pixels. */
  sized(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return pen;
  }

  /** In device pixels. With more experts than pixels a column shows the most loaded of its experts: peaks must not get lost. */
  drawCells(pen, box) {
    const ratio = window.devicePixelRatio || 1;
    const E = this.counts[0].length;
    const [left, width] = [Math.round(box.left * ratio), Math.floor(box.width * ratio)];
    const row = (l) => Math.round((box.top + l * box.rowHeight) * ratio);
    const columns = Math.min(E, width);
    const line = box.rowHeight >= 5 ? Math.max(1, Math.round(ratio)) : 0;
    const gap = width / columns >= 5 * ratio ? line : 0;
    pen.save();
    pen.resetTransform();
    pen.fillStyle = GROUND;
    pen.fillRect(left, row(0), width, row(this.counts.length) - row(0));
    this.counts.forEach((counts, l) => {
      const mean = counts.reduce((a, b) => a + b, 0) / E;
      if (!mean) return;
      for (let c = 0; c < columns; c++) {
        let most = 0;
        for (let e = Math.floor((c * E) / columns); e < Math.ceil(((c + 1) * E) / columns); e++) most = Math.max(most, counts[e]);
        const from = left + Math.round((c * width) / columns);
        const to = left + Math.round(((c + 1) * width) / columns) - gap;
        pen.fillStyle = colour(most / mean, this.range);
        pen.fillRect(from, row(l), to - from, row(l + 1) - line - row(l));
      }
    });
    pen.restore();
  }

  /** The same cells above the chat, where the style sheet shows them: without words, a few pixels a layer. */
  drawStrip() {
    const canvas = document.querySelector("#strip canvas");
    const width = canvas.clientWidth;
    if (!width) return;
    const rowHeight = Math.min(9, STRIP / this.counts.length);
    const height = rowHeight * this.counts.length;
    this.drawCells(this.sized(canvas, width, height), { left: 0, top: 0, width, rowHeight });
    const when = this.span === "recent" ? `last ${RECENT} s` : "since start";
    document.getElementById("strip-note").textContent = `Experts, ${when}`;
  }

  drawWords(pen) {
    const style = getComputedStyle(this.canvas);
    const { rowHeight } = this.box;
    const E = this.counts[0].length;
    const right = LEFT + this.box.width;
    const width = right + RIGHT;
    pen.fillStyle = style.color;
    pen.textBaseline = "middle";
    pen.font = `11px ${style.fontFamily}`;
    pen.textAlign = "left";
    pen.fillText("expert 0", LEFT, HEAD / 2 - 1);
    pen.textAlign = "right";
    pen.fillText(String(E - 1), right, HEAD / 2 - 1);
    pen.fillText("max", right + 42, HEAD / 2 - 1);
    pen.fillText("even", width, HEAD / 2 - 1);
    pen.font = `${rowHeight > 14 ? 11 : 10}px ${style.fontFamily}`;
    this.counts.forEach((row, l) => {
      const middle = HEAD + (l + 0.5) * rowHeight;
      const { sum, peak, even } = balance(row);
      pen.textAlign = "right";
      pen.fillText(String(l), LEFT - 6, middle);
      if (!sum) return;
      pen.fillText(times(peak), right + 42, middle);
      pen.fillText(percent(even), width, middle);
    });
  }

  drawChosen(pen) {
    const { left, top, width } = this.place(...this.chosen);
    pen.strokeStyle = getComputedStyle(this.canvas).outlineColor;
    pen.lineWidth = 2;
    pen.strokeRect(left - 1, top - 1, Math.max(width, 2) + 1, this.box.rowHeight + 1);
  }

  drawScale() {
    const { low, high, cut } = this.range;
    document.getElementById("least").textContent = low ? times(low) : "unused";
    document.getElementById("most").textContent = cut ? `${TOP}× and over` : times(high);
    const scale = document.getElementById("scale");
    const [width, height] = [scale.clientWidth, scale.clientHeight];
    const pen = this.sized(scale, width, height);
    const span = doublings(high) - doublings(low);
    for (let x = 0; x < width; x++) {
      pen.fillStyle = colour(2 ** (doublings(low) + (x / width) * span) - 1, this.range);
      pen.fillRect(x, 0, 1, 12);
    }
    const style = getComputedStyle(scale);
    pen.fillStyle = style.color;
    pen.font = `11px ${style.fontFamily}`;
    pen.textAlign = "center";
    for (const value of [1, 2, 4]) {
      const at = (width * (doublings(value) - doublings(low))) / span;
      if (at > width - 12) continue; // the end has a label of its own
      pen.fillRect(at, 12, 1, 3);
      pen.fillText(value === 1 ? "even" : `${value}×`, at, 25);
    }
  }

  // -- one cell -------------------------------------------------------------------------------------------------------

  place(l, e) {
    const width = this.box.width / this.counts[0].length;
    return { left: LEFT + e * width, top: HEAD + l * this.box.rowHeight, width };
  }

  point(event) {
    if (!this.box) return;
    const l = Math.floor((event.offsetY - HEAD) / this.box.rowHeight);
    const e = Math.floor(((event.offsetX - LEFT) / this.box.width) * this.counts[0].length);
    const inside = l >= 0 && l < this.counts.length && e >= 0 && e < this.counts[0].length;
    this.choose(inside ? [l, e] : null);
  }

  move(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Escape") this.choose(null);
    if (!(event.key in steps) || !this.counts.length) return;
    event.preventDefault();
    const [l, e] = this.chosen ?? [0, 0];
    const step = this.chosen ? steps[event.key] : [0, 0];
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.choose([within(l + step[0], this.counts.length), within(e + step[1], this.counts[0].length)]);
  }

  choose(cell) {
    if (String(cell) === String(this.chosen)) return;
    this.chosen = cell;
    this.draw();
    this.label.hidden = cell === null;
    if (cell) this.describe();
  }

  describe() {
    const [l, e] = this.chosen;
    const row = this.counts[l];
    const all = row.reduce((a, b) => a + b, 0);
    const share = all ? row[e] / all : 0;
    const load = share ? `${percent(share)}, ${times(share * row.length)} even` : "unused";
    const on = (this.ranks[l] ?? []).flatMap((experts, rank) => (experts.includes(e) ? [rank] : []));
    const where = on.length ? ` · rank ${on.join(", ")}` : "";
    this.label.textContent = `Layer ${l} · expert ${e} · ${load}${where}`;
    const { left, top, width } = this.place(l, e);
    const room = this.canvas.clientWidth - this.label.offsetWidth;
    const below = top + this.box.rowHeight + 8;
    const fits = below + this.label.offsetHeight <= this.canvas.clientHeight || l === 0;
    this.label.style.left = `${Math.max(0, Math.min(room, left + width / 2 - this.label.offsetWidth / 2))}px`;
    this.label.style.top = `${fits ? below : top - this.label.offsetHeight - 8}px`;
  }
}

const sum = (counts) => counts.reduce((a, row) => a + row.reduce((b, n) => b + n, 0), 0);
const times = (value) => `${value.toFixed(value < 9.95 ? 1 : 0)}×`;
const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : share < 0.0995 ? 2 : 1)}%`;

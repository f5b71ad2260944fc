// The expert heat map: one row a MoE layer, one column an expert, and next to each row how even its load is.
//
// Counts are of all tokens since the start; what is shown are shares of a layer. L layers, E experts.

const RECENT = 10; // seconds
const TOP = 8; // times an even share: the strongest colour
const LEFT = 26; // css pixels for the layer's number
const RIGHT = 94; // and for its balance
const HEAD = 18;
// From little to much; lightness goes one way only, so that it reads without colour vision.
const RAMPS = {
  light: ["#eef1ee", "#cfe3dd", "#93c9c0", "#4aa3a3", "#1f7391", "#274a80", "#2b2560"],
  dark: ["#1a2122", "#1d3a40", "#1f5c63", "#2f8a80", "#6fb787", "#c3d883", "#fdf5b4"],
};

const SHADES = 256;
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// A map has up to 30,000 cells, drawn once a second: colours are mixed once.
const TABLES = Object.fromEntries(
  Object.entries(RAMPS).map(([theme, ramp]) => [theme, Array.from({ length: SHADES }, (_, i) => mix(ramp, i))]),
);

function mix(ramp, shade) {
  const place = (shade / (SHADES - 1)) * (ramp.length - 1);
  const low = Math.min(Math.floor(place), ramp.length - 2);
  const [from, to] = [rgb(ramp[low]), rgb(ramp[low + 1])];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * (place - low))).join(", ")})`;
}

/** Of a load that is so many times an even share. */
export function colour(times, theme) {
  const place = Math.min(1, Math.log2(1 + times) / Math.log2(1 + TOP));
  return TABLES[theme][Math.round(place * (SHADES - 1))];
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
    this.chosen = null; // [layer, expert]
    this.span = "total";
    this.waiting = false; // for the first counts
    for (const input of document.querySelectorAll("input[name=span]")) {
      input.addEventListener("change", () => {
        this.span = input.value;
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

  /** What the server counted since it started, [layer][expert]; empty before it has counted anything. */
  update(total) {
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
    if (this.span === "recent") {
      const before = this.history.length > 1 ? this.history[0][1] : total;
      this.counts = total.map((row, l) => row.map((n, e) => n - before[l][e]));
    }
    const there = total.length > 0;
    for (const id of ["map", "legend", "map-keys"]) document.getElementById(id).hidden = !there;
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
    const ratio = window.devicePixelRatio || 1;
    const rowHeight = L <= 12 ? 24 : L <= 32 ? 17 : 13;
    this.box = { width: width - LEFT - RIGHT, rowHeight, height: HEAD + L * rowHeight };
    this.canvas.style.height = `${this.box.height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.box.height * ratio);
    const pen = this.canvas.getContext("2d");
    const theme = isDark() ? "dark" : "light";
    this.drawCells(pen, ratio, theme);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawWords(pen, width);
    if (this.chosen) this.drawChosen(pen);
    this.drawScale(theme);
    this.canvas.ariaLabel = `Expert load. ${this.note.textContent}`;
  }

  /** In device pixels. With more experts than pixels a column shows the most loaded of its experts: peaks must not get lost. */
  drawCells(pen, ratio, theme) {
    const E = this.counts[0].length;
    const left = Math.round(LEFT * ratio);
    const width = Math.floor(this.box.width * ratio);
    const columns = Math.min(E, width);
    const gap = width / columns >= 5 * ratio ? Math.round(ratio) : 0;
    this.counts.forEach((row, l) => {
      const mean = row.reduce((a, b) => a + b, 0) / E;
      const top = Math.round((HEAD + l * this.box.rowHeight) * ratio);
      const bottom = Math.round((HEAD + (l + 1) * this.box.rowHeight) * ratio) - Math.max(1, Math.round(ratio));
      for (let c = 0; c < columns; c++) {
        let most = 0;
        for (let e = Math.floor((c * E) / columns); e < Math.ceil(((c + 1) * E) / columns); e++) most = Math.max(most, row[e]);
        const from = left + Math.round((c * width) / columns);
        const to = left + Math.round(((c + 1) * width) / columns) - gap;
        pen.fillStyle = colour(mean ? most / mean : 0, theme);
        pen.fillRect(from, top, to - from, bottom - top);
      }
    });
  }

  drawWords(pen, width) {
    const style = getComputedStyle(this.canvas);
    const { rowHeight } = this.box;
    const E = this.counts[0].length;
    const right = width - RIGHT;
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

  drawScale(theme) {
    const scale = document.getElementById("scale");
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [scale.clientWidth, scale.clientHeight];
    scale.width = width * ratio;
    scale.height = height * ratio;
    const pen = scale.getContext("2d");
    pen.scale(ratio, ratio);
    const at = (value) => (width * Math.log2(1 + value)) / Math.log2(1 + TOP);
    for (let x = 0; x < width; x++) {
      pen.fillStyle = colour(2 ** ((x / width) * Math.log2(1 + TOP)) - 1, theme);
      pen.fillRect(x, 0, 1, 10);
    }
    const style = getComputedStyle(scale);
    pen.fillStyle = style.color;
    pen.font = `11px ${style.fontFamily}`;
    pen.textAlign = "center";
    for (const value of [1, 2, 4]) {
      pen.fillRect(at(value), 10, 1, 3);
      pen.fillText(`${value}×`, at(value), 23);
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
    this.label.textContent = `Layer ${l} · expert ${e} · ${load}`;
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

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

// Four small charts of the last minutes, drawn as SVG so that the style sheet colours them.

const SPAN = 120; // seconds
const LEAST = 30; // before there are as many, the chart is stretched
const W = 200;
const H = 56;
const SVG = "http://www.w3.org/2000/svg";

const count = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(1)));
export const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : value ? `${Math.round(1000 * value)} ms` : "–"); // 0: none yet
const percent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)}%`;

const CHARTS = [
  {
    title: "Tokens/s",
    show: count,
    least: 10,
    scaled: 1, // by the first line: a prompt is read a hundred times as fast and would flatten it
    lines: [["generation_tokens_per_second", "written"], ["prompt_tokens_per_second", "read"]],
  },
  { title: "First token", show: seconds, least: 0.1, lines: [["ttft_p50", "median"], ["ttft_p99", "p99"]] },
  { title: "Requests", show: count, least: 4, lines: [["running", "running"], ["waiting", "waiting"]] },
  { title: "KV cache", show: percent, least: 0.05, most: 1, lines: [["kv_usage", "in use"]] },
];

function made(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

export class Charts {
  constructor(parent) {
    this.samples = [];
    this.charts = CHARTS.map((about) => new Chart(about, parent));
  }

  /** When the newest known sample was taken, by the server's clock. */
  get newest() {
    return this.samples.at(-1)?.time ?? 0;
  }

  add(samples) {
    this.samples.push(...samples);
    this.samples = this.samples.filter((sample) => sample.time > this.newest - SPAN);
    for (const chart of this.charts) chart.draw(this.samples);
  }
}

class Chart {
  constructor(about, parent) {
    this.about = about;
    this.samples = [];
    this.element = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = about.title;
    this.values = document.createElement("div");
    this.values.className = "values";
    this.element.append(caption, this.values);
    this.svg = made("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img" }, this.element);
    made("line", { x1: 0, x2: W, y1: H - 0.5, y2: H - 0.5, class: "base" }, this.svg);
    this.area = made("path", { class: "area" }, this.svg);
    this.paths = about.lines.map((_, i) => made("path", { class: `line line-${i}` }, this.svg));
    this.svg.append(this.paths[0]); // the first lies on top
    this.cursor = made("line", { y1: 0, y2: H, class: "cursor", visibility: "hidden" }, this.svg);
    this.top = document.createElement("span");
    this.top.className = "top";
    this.element.append(this.top);
    this.at = null; // where the pointer is, as a share of the width
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.point((event.clientX - box.left) / box.width);
    });
    this.svg.addEventListener("pointerleave", () => this.point(null));
    parent.append(this.element);
  }

  point(at) {
    this.at = at;
    this.draw(this.samples);
  }

  draw(samples) {
    this.samples = samples;
    const { lines, show, least, most, title, scaled = lines.length } = this.about;
    const end = samples.at(-1)?.time ?? 0;
    const highest = Math.max(least, ...samples.flatMap((sample) => lines.slice(0, scaled).map(([key]) => sample[key])));
    const top = Math.min(most ?? Infinity, round(highest));
    const span = Math.max(LEAST, end - (samples[0]?.time ?? end));
    const x = (sample) => W * (1 - (end - sample.time) / span);
    const y = (value) => H - 1 - (H - 5) * Math.min(1, value / top);
    lines.forEach(([key], i) => {
      const points = samples.map((sample) => `${x(sample).toFixed(1)},${y(sample[key]).toFixed(1)}`);
      this.paths[i].setAttribute("d", points.length ? `M${points.join("L")}` : "");
      if (i === 0) {
        const closed = points.length ? `M${x(samples[0]).toFixed(1)},${H}L${points.join("L")}L${W},${H}Z` : "";
        this.area.setAttribute("d", closed);
      }
    });
    const shown = this.nearest(samples, x) ?? samples.at(-1);
    this.cursor.setAttribute("visibility", this.at === null || !shown ? "hidden" : "visible");
    if (shown) {
      this.cursor.setAttribute("x1", x(shown));
      this.cursor.setAttribute("x2", x(shown));
    }
    this.top.textContent = show(top);
    this.values.replaceChildren(
      ...lines.map(([key, label], i) => {
        const value = document.createElement("span");
        value.className = `value value-${i}`;
        const number = document.createElement("b");
        number.textContent = shown ? show(shown[key]) : "–";
        value.append(number, ` ${label}`);
        return value;
      }),
    );
    const words = [...this.values.children].map((value) => value.textContent);
    this.svg.setAttribute("aria-label", `${title}: ${words.join(", ")}`);
  }

  nearest(samples, x) {
    if (this.at === null || !samples.length) return null;
    const distance = (sample) => Math.abs(x(sample) - W * this.at);
    return samples.reduce((best, sample) => (distance(sample) < distance(best) ? sample : best));
  }
}

/** Up to 1, 2 or 5 times a power of ten, so that the top of a chart seldom moves. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}

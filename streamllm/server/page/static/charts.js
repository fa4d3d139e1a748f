// Small line charts over the last minutes. A second line is dashed, so that colour is not needed.

import { byId, colour, element, prepareCanvas } from "./dom.js";

const WINDOW = 300;
const SHORTEST_WINDOW = 60;
const HEIGHT = 72;
const COLOURS = ["accent", "second"];
const DASHES = [[], [4, 3]];

/** A round number that is not less. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((round) => round >= value * 0.999);
}

function short(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** One chart: up to two lines with names, in one unit. */
export class Chart {
  #points = [];

  constructor(title, unit, names, { most = null } = {}) {
    Object.assign(this, { title, unit, names, most });
    this.canvas = element("canvas", { role: "img" });
    this.values = names.map((_, index) => element("b", { className: `line-${index}` }, "–"));
    const labels = names.flatMap((name, index) => [element("span", {}, `${name} `, this.values[index], ` ${unit}`)]);
    byId("charts").append(
      element("figure", {}, element("figcaption", {}, element("strong", {}, title), ...labels), this.canvas),
    );
  }

  /** Adds values at a time in seconds; null where there was nothing to measure. */
  add(time, values) {
    this.#points.push({ time, values });
    while (this.#points[0].time < time - WINDOW) this.#points.shift();
    values.forEach((value, index) => {
      if (value !== null) this.values[index].textContent = short(value);
    });
    this.draw();
  }

  clear() {
    this.#points = [];
    this.values.forEach((value) => (value.textContent = "–"));
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.#points.length) return;
    const context = prepareCanvas(this.canvas, width, HEIGHT);
    const end = this.#points.at(-1).time;
    const shown = Math.max(end - this.#points[0].time, SHORTEST_WINDOW);
    const largest = Math.max(...this.#points.flatMap((point) => point.values.map(Number)));
    const top = this.most ?? roundUp(Math.max(largest, 1));
    const x = (time) => width - ((end - time) / shown) * width;
    const y = (value) => HEIGHT - 2 - (Math.min(value / top, 1) * (HEIGHT - 14));
    context.strokeStyle = colour("line");
    context.strokeRect(0.5, 0.5, width - 1, HEIGHT - 1);
    context.fillStyle = colour("muted");
    context.font = "11px system-ui, sans-serif";
    context.fillText(`${short(top)} ${this.unit}`, 4, 12);
    this.names.forEach((_, index) => this.#line(context, index, x, y));
    const now = this.names.map((name, index) => `${name} ${this.values[index].textContent} ${this.unit}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${now.join(", ")}`);
  }

  #line(context, index, x, y) {
    context.strokeStyle = colour(COLOURS[index]);
    context.lineWidth = 1.5;
    context.setLineDash(DASHES[index]);
    context.beginPath();
    let drawing = false;
    for (const { time, values } of this.#points) {
      if (values[index] === null) continue;
      if (drawing) context.lineTo(x(time), y(values[index]));
      else context.moveTo(x(time), y(values[index]));
      drawing = true;
    }
    context.stroke();
    context.setLineDash([]);
  }
}

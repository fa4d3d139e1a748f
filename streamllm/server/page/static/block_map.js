// The block map: one cell a KV block, told apart by brightness, colour and shape.

import { byId, colour, element, prepareCanvas } from "./dom.js";
import { KNOWN, NAMES, kind } from "./block_store.js";

const COLOURS = ["block-free", "block-cached", "block-one", "block-shared"];
const LARGEST_CELL = 18;
const SMALLEST_CELL = 2;
const COMFORTABLE_HEIGHT = 360;
const FLASH_MS = 700;
const MOST_NAMED = 3;

/** Draws one cell: free hollow, cached a small square, one owner filled, shared filled with a hole. */
function drawCell(context, x, y, size, state, palette) {
  const which = kind(state);
  const inner = size >= 5 ? size - 1 : size;
  context.fillStyle = palette.ground;
  context.fillRect(x, y, size, size);
  context.fillStyle = palette.cells[which];
  if (which === 0) {
    if (size >= 5) {
      context.strokeStyle = palette.cells[0];
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    }
    return;
  }
  if (which === 1 && size >= 3) {
    const part = Math.max(Math.round(inner / 2), 2);
    const offset = Math.floor((inner - part) / 2);
    context.fillRect(x + offset, y + offset, part, part);
    return;
  }
  context.fillRect(x, y, inner, inner);
  if (which === 3 && size >= 5) {
    const hole = Math.max(Math.floor(inner / 3), 1);
    const offset = Math.floor((inner - hole) / 2);
    context.fillStyle = palette.ground;
    context.fillRect(x + offset, y + offset, hole, hole);
  }
}

function currentPalette() {
  return { ground: colour("panel"), mark: colour("mark"), cells: COLOURS.map(colour) };
}

function groupByRequest(holders) {
  const groups = new Map();
  for (const holder of holders) groups.set(holder.request, [...(groups.get(holder.request) ?? []), holder]);
  return groups;
}

export class BlockMap {
  #palette = null;
  #context = null;
  #cell = LARGEST_CELL;
  #columns = 1;
  #pointed = null;
  #marked = new Set();
  #flashing = new Map();

  constructor(store) {
    this.store = store;
    this.canvas = byId("block-map");
    this.details = byId("block-details");
    this.canvas.onmousemove = (event) => this.#point(this.#at(event));
    this.canvas.onmouseleave = () => {
      if (document.activeElement !== this.canvas) this.#point(null);
    };
    this.canvas.onfocus = () => this.#point(this.#pointed ?? 0);
    this.canvas.onblur = () => this.#point(null);
    this.canvas.onkeydown = (event) => this.#move(event);
    new ResizeObserver(() => this.redraw()).observe(this.canvas.parentElement);
  }

  /** Lays out and draws everything. */
  redraw() {
    const width = this.canvas.clientWidth;
    const count = this.store.states.length;
    if (!width || !count) return;
    this.#palette = currentPalette();
    const fitting = Math.floor(Math.sqrt((width * COMFORTABLE_HEIGHT) / count));
    this.#cell = Math.min(Math.max(fitting, SMALLEST_CELL), LARGEST_CELL);
    this.#columns = Math.floor(width / this.#cell);
    const height = Math.ceil(count / this.#columns) * this.#cell + 1;
    this.#context = prepareCanvas(this.canvas, width, height);
    this.#context.fillStyle = this.#palette.ground;
    this.#context.fillRect(0, 0, width, height);
    for (let block = 0; block < count; block += 1) this.#drawBlock(block);
    this.#drawLegend();
  }

  /** Draws what has changed; copies on write flash. */
  update(changed, copies) {
    if (this.#context === null) return;
    const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches;
    for (const [, to] of quiet ? [] : copies) {
      clearTimeout(this.#flashing.get(to));
      this.#flashing.set(to, setTimeout(() => this.#endFlash(to), FLASH_MS));
      changed.add(to);
    }
    changed.forEach((block) => this.#drawBlock(block));
    if (this.#pointed !== null) this.#point(this.#pointed, true);
    this.#updateLegend();
  }

  #endFlash(block) {
    this.#flashing.delete(block);
    this.#drawBlock(block);
  }

  #drawBlock(block) {
    const size = this.#cell;
    const x = (block % this.#columns) * size;
    const y = Math.floor(block / this.#columns) * size;
    drawCell(this.#context, x, y, size, this.store.states[block] ?? 0, this.#palette);
    if (this.#marked.has(block) || this.#flashing.has(block) || block === this.#pointed) {
      const strong = block === this.#pointed && size >= 5;
      this.#context.strokeStyle = this.#palette.mark;
      this.#context.lineWidth = strong ? 2 : 1;
      const inset = strong ? 1 : 0.5;
      this.#context.strokeRect(x + inset, y + inset, Math.max(size - 1 - inset, 1), Math.max(size - 1 - inset, 1));
    }
  }

  // -- pointing at a block --------------------------------------------------------------------------------

  #at(event) {
    const column = Math.floor(event.offsetX / this.#cell);
    const block = Math.floor(event.offsetY / this.#cell) * this.#columns + column;
    return column < this.#columns && block < this.store.states.length ? block : null;
  }

  #move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns }[event.key];
    const last = this.store.states.length - 1;
    const now = this.#pointed ?? 0;
    let next = { Home: 0, End: last }[event.key];
    if (step !== undefined) next = Math.min(Math.max(now + step, 0), last);
    if (next === undefined) return;
    event.preventDefault();
    this.#point(next);
  }

  #point(block, again = false) {
    if (this.#context === null || (block === this.#pointed && !again)) return;
    const before = new Set(this.#marked);
    if (this.#pointed !== null) before.add(this.#pointed);
    this.#pointed = block;
    this.#marked = block === null ? new Set() : this.store.relatives(block);
    before.forEach((each) => this.#drawBlock(each));
    this.#marked.forEach((each) => this.#drawBlock(each));
    if (block === null) return;
    this.#drawBlock(block);
    const text = this.#describe(block);
    if (this.details.textContent !== text) this.details.textContent = text;
  }

  #describe(block) {
    const { store } = this;
    const state = store.states[block];
    const parts = [`Block ${block}: ${NAMES[kind(state)]}`];
    if (state & 3) parts.push(state & KNOWN ? "content known to the prefix cache" : "content not known to the prefix cache");
    const requests = groupByRequest(store.holders(block));
    for (const [request, holders] of [...requests].slice(0, MOST_NAMED)) {
      const first = holders[0].place * store.blockSize;
      const choices = holders.map(({ choice }) => choice + 1).join(", ");
      parts.push(`${request}, choice ${choices}, tokens ${first} to ${first + store.blockSize - 1}`);
    }
    if (requests.size > MOST_NAMED) parts.push(`and ${requests.size - MOST_NAMED} more requests`);
    return parts.join("; ");
  }

  // -- the legend -----------------------------------------------------------------------------------------

  #drawLegend() {
    const states = [0, KNOWN, 1, 2];
    const items = states.map((state, index) => {
      const sample = element("canvas", { className: "sample", "aria-hidden": "true" });
      drawCell(prepareCanvas(sample, 15, 15), 0, 0, 15, state, this.#palette);
      return element("li", {}, sample, ` ${NAMES[index]} `, element("b", {}));
    });
    byId("legend").replaceChildren(...items);
    this.#updateLegend();
  }

  #updateLegend() {
    byId("legend").querySelectorAll("b").forEach((made, index) => {
      const text = this.store.counts[index].toLocaleString("en");
      if (made.textContent !== text) made.textContent = text;
    });
  }
}

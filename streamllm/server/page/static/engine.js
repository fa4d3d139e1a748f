// The engine's view: follows the stream of events while it is seen.

import { ApiError, call, events } from "./api.js";
import { BlockMap } from "./block_map.js";
import { BlockStore } from "./block_store.js";
import { Chart } from "./charts.js";
import { byId, element } from "./dom.js";

const RETRY_MS = 2000;
const MAX_HAPPENINGS = 12;
const MAX_COPIES = 4;

export class EngineView {
  #controller = null;
  #last = null;
  #preemptions = new Map();

  constructor() {
    this.store = new BlockStore();
    this.map = new BlockMap(this.store);
    this.charts = {
      speed: new Chart("Throughput", "tokens/s", ["generated", "prompts"]),
      queues: new Chart("Sequences", "", ["running", "waiting"]),
      ttft: new Chart("Time to first token", "ms", ["mean"]),
      itl: new Chart("Time between tokens", "ms", ["mean"]),
      blocks: new Chart("KV blocks", "%", ["in use", "known to the prefix cache"], { most: 100 }),
      memory: new Chart("Memory in use", "%", ["slots wasted", "saved by sharing"], { most: 100 }),
    };
    new ResizeObserver(() => this.#drawCharts()).observe(byId("charts"));
  }

  /** Watches the engine until `stop`; harmless when it does already. */
  async start() {
    if (this.#controller) return;
    const controller = (this.#controller = new AbortController());
    while (!controller.signal.aborted) {
      try {
        await this.#follow(controller.signal);
        if (!controller.signal.aborted) this.#status("The server ended the stream; trying again.");
      } catch (error) {
        if (controller.signal.aborted) return;
        this.#status(error instanceof ApiError ? error.message : `The server does not answer (${error.message}).`);
        if (error.status === 401) {
          this.#controller = null;
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  stop() {
    this.#controller?.abort();
    this.#controller = null;
  }

  /** After a change of colours or of size. */
  redraw() {
    this.map.redraw();
    this.#drawCharts();
  }

  async #follow(signal) {
    const response = await call("engine/events", { signal });
    for await (const { name, data } of events(response)) {
      if (name === "snapshot") this.#begin(data);
      else if (name === "blocks") this.#news(data);
      else if (name === "overview") this.#overview(data);
    }
  }

  #begin(snapshot) {
    this.#last = null;
    this.store.reset(snapshot.num_blocks, snapshot.block_size);
    this.store.take(snapshot);
    this.map.redraw();
    this.#status(`Live: ${snapshot.num_blocks.toLocaleString("en")} blocks of ${snapshot.block_size} tokens.`);
  }

  #news(news) {
    const changed = this.store.take(news);
    for (const [from, to] of news.copies.slice(-MAX_COPIES)) {
      const [holder] = this.store.holders(to);
      const whose = holder ? `, for choice ${holder.choice + 1} of ${holder.request}` : "";
      this.#happened(`Copy on write: block ${from} to ${to}${whose}`);
    }
    this.map.update(changed, news.copies);
  }

  #overview(now) {
    const { stats } = now;
    const last = this.#last;
    this.#last = now;
    const since = last && now.time > last.time ? now.time - last.time : null;
    const rate = (name) => (since ? Math.max(stats[name] - last.stats[name], 0) / since : null);
    const milliseconds = (seconds) => (seconds === null ? null : 1000 * seconds);
    const { memory } = stats;
    const { charts } = this;
    charts.speed.add(now.time, [rate("generation_tokens"), rate("prompt_tokens")]);
    charts.queues.add(now.time, [stats.num_running, stats.num_waiting]);
    charts.ttft.add(now.time, [milliseconds(now.ttft)]);
    charts.itl.add(now.time, [milliseconds(now.itl)]);
    charts.blocks.add(now.time, [
      (100 * memory.used_blocks) / memory.num_blocks,
      (100 * memory.cached_blocks) / memory.num_blocks,
    ]);
    charts.memory.add(now.time, [100 * now.waste, 100 * now.sharing]);
    this.#requests(now);
  }

  #requests({ requests, num_requests: count, stats }) {
    const looked = stats.prefix_cache_queries;
    const hits = looked ? `, ${((100 * stats.prefix_cache_hits) / looked).toFixed(0)} % of prompt tokens cached` : "";
    byId("num-requests").textContent = `${count} now; ${stats.num_preemptions} preemptions so far${hits}`;
    const rows = requests.map((each) => {
      const cells = [
        state(each),
        each.num_cached_tokens ? `${each.num_prompt_tokens} (${each.num_cached_tokens} cached)` : each.num_prompt_tokens,
        each.num_output_tokens,
        each.num_blocks,
        each.num_sequences,
        `${each.age.toFixed(1)} s`,
      ];
      const name = each.adapter ? `${each.request_id} (${each.adapter})` : each.request_id;
      this.#notePreemption(each);
      const names = ["State", "Prompt", "Output", "Blocks", "Sequences", "Age"];
      return element(
        "tr",
        {},
        element("th", { scope: "row", title: each.request_id }, name),
        ...cells.map((cell, index) => element("td", { "data-name": names[index] }, String(cell))),
      );
    });
    const none = element("tr", {}, element("td", { colSpan: 7, className: "muted" }, "None."));
    byId("requests").replaceChildren(...(rows.length ? rows : [none]));
    const live = new Set(requests.map((each) => each.request_id));
    for (const id of this.#preemptions.keys()) if (!live.has(id)) this.#preemptions.delete(id);
  }

  #notePreemption({ request_id: id, num_preemptions: count }) {
    if (count > (this.#preemptions.get(id) ?? 0)) this.#happened(`Preempted: ${id}, to be recomputed later`);
    this.#preemptions.set(id, count);
  }

  #happened(text) {
    const list = byId("happenings");
    const time = new Date().toLocaleTimeString("en-GB");
    list.prepend(element("li", {}, `${time} ${text}`));
    while (list.children.length > MAX_HAPPENINGS) list.lastChild.remove();
  }

  #drawCharts() {
    Object.values(this.charts).forEach((chart) => chart.draw());
  }

  #status(text) {
    byId("engine-status").textContent = text;
  }
}

function state({ state: name, num_computed_tokens: computed, num_prompt_tokens: prompt }) {
  return name === "prefill" ? `prefill ${computed}/${prompt}` : name;
}

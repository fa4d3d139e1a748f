// One answer of the model: what has come so far, how fast, and how it is shown.

import { button, element } from "./dom.js";
import { markdown } from "./markdown.js";

const LEVELS = [
  [0.9, "p4"],
  [0.6, "p3"],
  [0.3, "p2"],
  [0.1, "p1"],
  [0, "p0"],
];

/** A request's choices as their chunks arrive. */
export class Answer {
  constructor(request) {
    this.request = request;
    this.role = "assistant";
    this.choices = Array.from({ length: request.n ?? 1 }, () => ({ text: "", reasoning: "", tokens: [], finish: null }));
    this.chosen = 0;
    this.error = null;
    this.stopped = false;
    this.showsTokens = false;
    this.usage = null;
    this.began = performance.now();
    this.firstAt = null;
    this.lastAt = null;
  }

  get text() {
    return this.choices[this.chosen].text;
  }

  /** Takes in a chunk of the stream. */
  add(chunk) {
    if (chunk.error) {
      this.error = chunk.error.message;
      return;
    }
    if (chunk.usage) this.usage = chunk.usage;
    for (const { index, delta, logprobs, finish_reason: finish } of chunk.choices ?? []) {
      const choice = this.choices[index];
      const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
      choice.text += delta.content ?? "";
      choice.reasoning += reasoning;
      choice.tokens.push(...(logprobs?.content ?? []));
      choice.finish = finish ?? choice.finish;
      if (delta.content || reasoning) {
        this.lastAt = performance.now();
        this.firstAt ??= this.lastAt;
      }
    }
  }

  /** How fast it came, in words. */
  describe() {
    const parts = [];
    if (this.firstAt !== null) parts.push(`first token after ${Math.round(this.firstAt - this.began)} ms`);
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: count, prompt_tokens_details: details } = this.usage;
      const seconds = (this.lastAt - this.firstAt) / 1000;
      const more = count - this.choices.length;
      if (seconds > 0 && more > 0) parts.push(`${(more / seconds).toFixed(1)} tokens/s`);
      parts.push(`${count} tokens`);
      parts.push(`prompt ${prompt}` + (details?.cached_tokens ? `, ${details.cached_tokens} of them cached` : ""));
    }
    if (this.choices.some((choice) => choice.finish === "length")) parts.push("cut at the limit");
    if (this.stopped) parts.push("stopped");
    return parts.join(" · ");
  }
}

/** Shows an answer in an element; `redraw` after more of it has come. */
export class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.body = element("div", { className: "choices" });
    this.stats = element("p", { className: "muted stats" });
    this.error = element("p", { className: "error", role: "alert", hidden: true });
    this.group = `choice-${Math.random().toString(36).slice(2)}`;
    this.parts = answer.choices.map((_, index) => this.#makeChoice(index));
    this.body.append(...this.parts.map((part) => part.root));
    this.redraw();
  }

  redraw() {
    const { answer } = this;
    answer.choices.forEach((choice, index) => {
      const part = this.parts[index];
      part.reasoning.hidden = choice.reasoning === "";
      if (part.reasoningText.textContent !== choice.reasoning) part.reasoningText.textContent = choice.reasoning;
      if (answer.showsTokens && choice.tokens.length) tokens(part, choice.tokens);
      else part.content.replaceChildren(markdown(choice.text));
      part.alternatives.hidden = !answer.showsTokens;
    });
    this.stats.textContent = answer.describe();
    this.error.hidden = answer.error === null;
    this.error.textContent = answer.error ?? "";
  }

  #makeChoice(index) {
    const part = {
      root: element("div", { className: "choice" }),
      reasoningText: element("div", { className: "reasoning" }),
      content: element("div", { className: "content" }),
      alternatives: element("output", { className: "alternatives muted", hidden: true }, "Point at a token, or move with the arrow keys, to see what else was likely."),
    };
    part.reasoning = element("details", { hidden: true }, element("summary", {}, "Reasoning"), part.reasoningText);
    if (this.answer.choices.length > 1) {
      const radio = element("input", { type: "radio", name: this.group, checked: index === 0 });
      radio.onchange = () => (this.answer.chosen = index);
      part.root.append(element("label", { className: "pick" }, radio, ` Choice ${index + 1}: go on with this one`));
    }
    part.root.append(part.reasoning, part.content, part.alternatives);
    return part;
  }
}

// -- tokens and their probabilities -----------------------------------------------------------------------

/** Tokens coloured and underlined by their probability; one stop of the Tab key, arrows move inside. */
function tokens(part, list) {
  const shown = list.map((token, index) => {
    const probability = Math.exp(token.logprob);
    const level = LEVELS.find(([least]) => probability >= least)[1];
    const made = element("span", { className: `token ${level}`, tabIndex: index ? -1 : 0 }, token.token);
    const tell = () => (part.alternatives.textContent = alternatives(token));
    made.onmouseenter = tell;
    made.onfocus = tell;
    return made;
  });
  const text = element("p", { className: "tokens", role: "group", "aria-label": "Tokens by probability" }, ...shown);
  text.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const now = shown.indexOf(document.activeElement);
    const next = shown[now + step];
    if (step === undefined || now < 0 || next === undefined) return;
    event.preventDefault();
    shown[now].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  part.content.replaceChildren(text);
}

function alternatives(token) {
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const others = token.top_logprobs
    .filter((other) => other.token !== token.token)
    .map((other) => `${JSON.stringify(other.token)} ${percent(other.logprob)}`);
  return `${JSON.stringify(token.token)} ${percent(token.logprob)}; else: ${others.join(", ") || "nothing"}`;
}

/** The button that switches an answer between its text and its tokens. */
export function tokensButton(view) {
  const { answer } = view;
  const made = button("Probabilities", () => {
    answer.showsTokens = !answer.showsTokens;
    made.setAttribute("aria-pressed", String(answer.showsTokens));
    view.redraw();
  });
  made.setAttribute("aria-pressed", String(answer.showsTokens));
  return made;
}

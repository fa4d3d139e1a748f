// The chat: a conversation, its settings, and the request that is under way.

import { Answer, AnswerView, tokensButton } from "./answer.js";
import { ApiError, call, events, post } from "./api.js";
import { button, byId, element } from "./dom.js";
import { asCurl, asPython } from "./snippets.js";

/** {role: "user", text} and Answers, in turn. */
const turns = [];
let underWay = null;

/** Makes the chat's controls work and reads the list of models. */
export function startChat() {
  const prompt = byId("prompt");
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  prompt.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  byId("stop").onclick = () => underWay?.abort();
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") underWay?.abort();
  });
  byId("new-chat").onclick = () => {
    underWay?.abort();
    turns.length = 0;
    draw();
    prompt.focus();
  };
  byId("code-close").onclick = () => byId("code-dialog").close();
  byId("settings").open = matchMedia("(min-width: 60rem)").matches;
  readModels();
}

async function readModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    byId("model").replaceChildren(
      ...data.map((model) =>
        element("option", { value: model.id }, model.parent ? `${model.id} (adapter of ${model.parent})` : model.id),
      ),
    );
  } catch (error) {
    byId("chat-status").className = "error";
    byId("chat-status").textContent = `The models cannot be listed: ${error.message}`;
  }
}

// -- requests ---------------------------------------------------------------------------------------------

function number(id) {
  const { value } = byId(id);
  return value === "" ? undefined : Number(value);
}

/** The conversation so far as a request; what is left empty is left out. */
function makeRequest() {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) messages.push({ role: turn.role, content: turn.text });
  const choices = number("choices") ?? 1;
  const request = {
    model: byId("model").value || undefined,
    messages,
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    n: choices > 1 ? choices : undefined,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (byId("logprobs").checked) Object.assign(request, { logprobs: true, top_logprobs: 5 });
  return JSON.parse(JSON.stringify(request));
}

function send() {
  const text = byId("prompt").value.trim();
  if (!text || underWay) return;
  turns.push({ role: "user", text });
  byId("prompt").value = "";
  answer();
}

function regenerate() {
  if (underWay) return;
  turns.pop();
  answer();
}

/** Puts the last question back where it can be changed. */
function edit() {
  if (underWay) return;
  while (turns.at(-1).role !== "user") turns.pop();
  byId("prompt").value = turns.pop().text;
  draw();
  byId("prompt").focus();
}

async function answer() {
  const controller = (underWay = new AbortController());
  const made = new Answer(makeRequest());
  turns.push(made);
  const view = draw();
  say("The answer is coming.");
  try {
    const response = await post("v1/chat/completions", made.request, { signal: controller.signal });
    for await (const { data } of events(response)) {
      made.add(data);
      view.soon();
    }
  } catch (error) {
    if (controller.signal.aborted) made.stopped = true;
    else made.error = error instanceof ApiError ? error.message : `The server does not answer (${error.message}).`;
  }
  // A new chat may have begun another one meanwhile.
  if (underWay === controller) underWay = null;
  if (!turns.includes(made)) return;
  draw();
  say(made.error ? "The answer failed." : made.stopped ? "Stopped." : "The answer is complete.");
}

function say(text) {
  byId("chat-status").className = "quiet";
  byId("chat-status").textContent = text;
}

// -- what is shown ----------------------------------------------------------------------------------------

/** Draws the conversation anew; returns the view of the last answer, to be redrawn as it grows. */
function draw() {
  let last = null;
  const items = turns.map((turn, index) => {
    if (turn.role === "user") return userTurn(turn, index === lastQuestion());
    last = new GrowingView(turn);
    return answerTurn(turn, last.view, index === turns.length - 1);
  });
  byId("turns").replaceChildren(...items);
  byId("empty").hidden = turns.length > 0;
  byId("send").hidden = underWay !== null;
  byId("stop").hidden = underWay === null;
  stayAtEnd(true);
  return last;
}

function lastQuestion() {
  return turns.findLastIndex((turn) => turn.role === "user");
}

function userTurn(turn, isLast) {
  const item = element("li", { className: "user" }, element("p", { className: "question" }, turn.text));
  if (isLast && !underWay) item.append(element("div", { className: "buttons" }, button("Edit", edit)));
  return item;
}

function answerTurn(turn, view, isLast) {
  const item = element("li", { className: "assistant" }, view.body, view.error, view.stats);
  if (isLast && underWay) return item;
  const actions = element("div", { className: "buttons" });
  if (isLast) actions.append(button("Regenerate", regenerate));
  if (turn.choices.some((choice) => choice.tokens.length)) actions.append(tokensButton(view));
  actions.append(button("curl", () => showCode(asCurl(turn.request)), { ariaLabel: "Copy as curl" }));
  actions.append(button("Python", () => showCode(asPython(turn.request)), { ariaLabel: "Copy as Python" }));
  item.append(actions);
  return item;
}

/** An answer's view that is redrawn at most once a frame. */
class GrowingView {
  #due = false;

  constructor(turn) {
    this.view = new AnswerView(turn);
  }

  soon() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      const atEnd = isAtEnd();
      this.view.redraw();
      stayAtEnd(atEnd);
    });
  }
}

function isAtEnd() {
  const page = document.documentElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < 80;
}

function stayAtEnd(wasAtEnd) {
  if (wasAtEnd && !byId("chat").hidden) window.scrollTo(0, document.documentElement.scrollHeight);
}

function showCode(text) {
  const copy = byId("code-copy");
  byId("code").textContent = text;
  copy.textContent = "Copy";
  copy.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      // Without TLS a browser lends no clipboard: the text is selected for the keyboard.
      getSelection().selectAllChildren(byId("code"));
      copy.textContent = "Selected: copy it with the keyboard";
    }
  };
  byId("code-dialog").showModal();
}

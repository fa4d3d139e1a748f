// Requests to the server that serves this page, with its API key if it asks for one.

import { byId } from "./dom.js";

const KEY = "streamllm-key";

/** What the server said was wrong. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The address of a route, seen from wherever the page lies. */
export function address(path) {
  return new URL(path, document.baseURI);
}

/** A request that has been answered well; asks for a key where one is missing. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(address(path), { ...options, headers });
    if (response.ok) return response;
    if (response.status === 401 && (await askForKey(Boolean(key)))) continue;
    throw new ApiError(await messageOf(response), response.status);
  }
}

/** A POST of JSON. */
export function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", body: JSON.stringify(body), headers, ...options });
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `HTTP status ${response.status}`;
  }
}

/** Server-sent events of a response: {name, data}, the data parsed unless it is [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (waiting + value).split(/\r?\n\r?\n/);
      waiting = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  const text = data.join("\n");
  if (text === "" || text === "[DONE]") return null;
  return { name, data: JSON.parse(text) };
}

// -- the key ----------------------------------------------------------------------------------------------

let asking = null;

/** Asks once, whoever needs it; tells whether there is another key now. */
export function askForKey(wasRefused) {
  asking ??= show(wasRefused).finally(() => (asking = null));
  return asking;
}

function show(wasRefused) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent =
    (wasRefused ? "The server does not take this key. " : "This server asks for an API key. ") +
    "It is kept until this tab is closed.";
  byId("key-button").hidden = false;
  return new Promise((resolve) => {
    let given = false;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      if (!key) return;
      sessionStorage.setItem(KEY, key);
      given = true;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      byId("key").value = "";
      resolve(given);
    };
    dialog.showModal();
  });
}

// The README's screenshots, of a server with the default model that is given something to do:
//   streamllm serve --num-kv-blocks 700 --port 8000
//   npm install && SERVER_URL=http://localhost:8000 CHROMIUM=/usr/bin/chromium PICTURES=folder node pictures.mjs

import { join } from "node:path";
import { chromium } from "playwright-core";

const { SERVER_URL, CHROMIUM, PICTURES } = process.env;
const QUESTION = "Write a short list of three things that a paged KV cache is good for.";
const COMMON = "You are a patient assistant who explains memory management to newcomers. ".repeat(12);

/** Requests of several kinds, until they are aborted. */
async function load(signal) {
  const post = (body) =>
    fetch(`${SERVER_URL}/v1/completions`, {
      method: "POST", signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ max_tokens: 900, temperature: 1, ignore_eos: true, ...body }),
    }).then((answer) => answer.text()).catch(() => {});
  const kinds = [
    { prompt: `${COMMON} What is a page?`, n: 4 },
    { prompt: `${COMMON} What is a block table?` },
    { prompt: "Once upon a time", n: 2 },
    { prompt: "The history of computing began with " },
    { prompt: `${COMMON} Why share prefixes?`, n: 3 },
  ];
  const forever = async (kind, index) => {
    while (!signal.aborted) await post({ ...kind, max_tokens: 80 + 70 * index });
  };
  await Promise.all(kinds.map(forever));
}

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"] });

async function open(options, hash) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  await page.goto(`${SERVER_URL}/${hash}`);
  return page;
}

const controller = new AbortController();
load(controller.signal);
for (const [name, options] of [
  ["light", { colorScheme: "light", viewport: { width: 1000, height: 940 } }],
  ["narrow", { colorScheme: "light", viewport: { width: 360, height: 760 } }],
]) {
  const page = await open(options, "#engine");
  await page.waitForTimeout(name === "light" ? 40000 : 9000);
  // A shared block is pointed at, so that all of its owners' blocks are marked.
  await page.focus("#block-map");
  await page.keyboard.press("Home");
  for (let step = 0; step < 400; step += 1) {
    if (/: shared/.test(await page.textContent("#block-details"))) break;
    await page.keyboard.press("ArrowRight");
  }
  await page.evaluate(() => window.scrollTo(0, 0));
  await page.screenshot({ path: join(PICTURES, `${name}.png`) });
}
controller.abort();

const page = await open({ colorScheme: "dark", viewport: { width: 1000, height: 860 } }, "#chat");
await page.fill("#max-tokens", "120");
await page.fill("#temperature", "0.3");
await page.check("#logprobs");
await page.click("#settings summary");
for (const question of [QUESTION, "And in one sentence?"]) {
  await page.fill("#prompt", question);
  await page.press("#prompt", "Enter");
  await page.waitForFunction(() => document.querySelector("#send").hidden);
  await page.locator("#send").waitFor({ timeout: 60000 });
}
await page.getByRole("button", { name: "Probabilities" }).last().click();
await page.locator(".token.p1, .token.p2, .token.p3").last().hover();
await page.screenshot({ path: join(PICTURES, "dark.png") });
await browser.close();

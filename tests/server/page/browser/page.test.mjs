// The page in a real browser, against the server at SERVER_URL; the one at GUARDED_URL asks for the key KEY.

import assert from "node:assert/strict";
import { after, before, beforeEach, afterEach, test } from "node:test";
import { chromium } from "playwright-core";

const { SERVER_URL, GUARDED_URL, KEY, CHROMIUM } = process.env;
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

let browser, context, page, complaints;

before(async () => {
  browser = await chromium.launch({ executablePath: CHROMIUM, args: FLAGS });
});
after(() => browser?.close());

async function open(options = {}, url = SERVER_URL) {
  await context?.close();
  context = await browser.newContext({ viewport: { width: 1100, height: 900 }, ...options });
  page = await context.newPage();
  page.setDefaultTimeout(15000);
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    const { origin, protocol } = new URL(request.url());
    if (protocol !== "data:" && origin !== new URL(url).origin) complaints.push(`a request to ${request.url()}`);
  });
  await page.goto(url);
}

beforeEach(async () => {
  complaints = [];
  await open();
});
afterEach(() => assert.deepEqual(complaints, []));

const lastAnswer = () => page.locator("#turns > li.assistant").last();

async function ask(text, settings = {}) {
  for (const [id, value] of Object.entries(settings)) await page.fill(`#${id}`, String(value));
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}

const done = () => page.locator("#send").waitFor();

/** Waits until a function of the page's own state is true. */
const until = (condition, argument) => page.waitForFunction(condition, argument);

/** How many blocks the legend counts as free, cached, of one owner, shared. */
const counts = () =>
  page.$$eval("#legend b", (found) => found.map((each) => Number(each.textContent.replaceAll(",", ""))));

// -- chat ---------------------------------------------------------------------------------------------------

test("a chat streams, and says how fast it was", async () => {
  await ask("Hello", { "max-tokens": 150, temperature: 0 });
  await until(() => document.querySelector(".content")?.textContent.length > 5);
  const early = (await lastAnswer().locator(".content").textContent()).length;
  await done();
  assert.ok((await lastAnswer().locator(".content").textContent()).length > early);
  const stats = await lastAnswer().locator(".stats").textContent();
  assert.match(stats, /first token after \d+ ms · [\d.]+ tokens\/s · 150 tokens · prompt \d+/);
  assert.match(stats, /cut at the limit/);
  assert.equal(await page.textContent("#chat-status"), "The answer is complete.");
});

test("stop ends the answer, on the server too, and keeps what came", async () => {
  await ask("Hello", { "max-tokens": 4000 });
  await until(() => document.querySelector(".content")?.textContent.length > 20);
  await page.click("#stop");
  await done();
  const text = await lastAnswer().locator(".content").textContent();
  assert.ok(text.length > 20);
  assert.match(await lastAnswer().locator(".stats").textContent(), /stopped/);
  const load = await (await fetch(`${SERVER_URL}/load`)).json();
  assert.deepEqual([load.num_running, load.num_waiting], [0, 0]);
  await page.waitForTimeout(200);
  assert.equal(await lastAnswer().locator(".content").textContent(), text);
});

test("Escape stops too; regenerate and edit ask again", async () => {
  await ask("First question", { "max-tokens": 20 });
  await done();
  const requests = [];
  page.on("request", (request) => request.method() === "POST" && requests.push(request.postDataJSON()));
  await page.getByRole("button", { name: "Regenerate" }).click();
  await done();
  assert.deepEqual(requests[0].messages, [{ role: "user", content: "First question" }]);
  assert.equal(await page.locator("#turns > li").count(), 2);
  await page.getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.inputValue("#prompt"), "First question");
  assert.equal(await page.locator("#turns > li").count(), 0);
  await ask("Second question", { "max-tokens": 4000, system: "Be brief.", seed: 7, "top-p": 0.9, temperature: 0.5 });
  await until(() => document.querySelector(".content")?.textContent.length > 5);
  await page.keyboard.press("Escape");
  await done();
  const { messages, seed, top_p: topP, temperature, max_tokens: limit, n } = requests[1];
  assert.deepEqual(messages, [{ role: "system", content: "Be brief." }, { role: "user", content: "Second question" }]);
  assert.deepEqual([seed, topP, temperature, limit, n], [7, 0.9, 0.5, 4000, undefined]);
});

test("probabilities of tokens, by colour, underline and words", async () => {
  await page.check("#logprobs");
  await ask("Hello", { "max-tokens": 12 });
  await done();
  const toggle = page.getByRole("button", { name: "Probabilities" });
  await toggle.click();
  assert.equal(await toggle.getAttribute("aria-pressed"), "true");
  const tokens = page.locator(".token");
  assert.equal(await tokens.count(), 12);
  // The scripted model gives each token a logprob of -0.5: 61 %.
  assert.match(await tokens.first().getAttribute("class"), /p3/);
  assert.equal(await tokens.first().evaluate((each) => getComputedStyle(each).textDecorationStyle), "dotted");
  await tokens.first().focus();
  await page.keyboard.press("ArrowRight");
  assert.equal(await tokens.nth(1).evaluate((each) => each === document.activeElement), true);
  assert.match(await page.textContent(".alternatives"), /60\.7 %; else: /);
});

test("a refusal is shown in its place", async () => {
  await ask("Hello", { temperature: 3 });
  await done();
  assert.match(await lastAnswer().locator(".error").textContent(), /temperature/);
  complaints = complaints.filter((each) => !each.includes("status of 400"));
});

test("markdown becomes elements, and HTML stays text", async () => {
  const text = [
    "# Title",
    "Some **bold**, *italic* and `code <b>`.",
    "- one",
    "- two",
    "  1. inner",
    "",
    "```js",
    "let x = 1 < 2;",
    "```",
    "<img src=x onerror=alert(1)> <script>alert(2)</script>",
    "> quoted",
    "2 * 3 * 4 and snake_case_name",
  ].join("\n");
  const made = await page.evaluate(async (source) => {
    const { markdown } = await import("/page/markdown.js");
    const holder = document.createElement("div");
    holder.append(markdown(source));
    return holder.innerHTML;
  }, text);
  assert.ok(made.includes("<h3>Title</h3>"));
  assert.ok(made.includes("Some <strong>bold</strong>, <em>italic</em> and <code>code &lt;b&gt;</code>."));
  assert.ok(made.includes('<ul><li>one</li><li>two<ol start="1"><li>inner</li></ol></li></ul>'));
  assert.ok(made.includes("<code>let x = 1 &lt; 2;</code>"));
  assert.ok(made.includes("&lt;img src=x onerror=alert(1)&gt; &lt;script&gt;"));
  assert.ok(made.includes("<blockquote><p>quoted</p></blockquote>"));
  assert.ok(made.includes("2 * 3 * 4 and snake_case_name"));
});

test("the same request as curl and as Python", async () => {
  await ask("It's \"quoted\"", { "max-tokens": 5, choices: 2 });
  await done();
  await page.getByRole("button", { name: "Copy as curl" }).click();
  const curl = await page.textContent("#code");
  assert.ok(curl.startsWith(`curl ${SERVER_URL}/v1/chat/completions`) && curl.includes("It'\\''s"));
  await page.click("#code-close");
  await page.getByRole("button", { name: "Copy as Python" }).click();
  const python = await page.textContent("#code");
  assert.ok(python.includes("stream=True,") && python.includes("n=2,"));
  await page.keyboard.press("Escape");
});

test("several choices, one of which goes on", async () => {
  await ask("Hello", { "max-tokens": 10, choices: 3 });
  await done();
  assert.equal(await page.locator(".choice").count(), 3);
  await page.locator(".pick input").nth(2).check();
  const text = await page.evaluate(() => document.querySelectorAll(".choice .content")[2].textContent);
  const request = page.waitForRequest((each) => each.method() === "POST");
  await ask("And then?");
  const { messages } = (await request).postDataJSON();
  assert.equal(messages[1].content.trim(), text.trim());
  await done();
});

// -- the key ------------------------------------------------------------------------------------------------

test("the key is asked for, refused, taken, and kept for the tab", async () => {
  await open({}, GUARDED_URL);
  await page.locator("#key-dialog[open]").waitFor();
  await page.fill("#key", "wrong");
  await page.keyboard.press("Enter");
  await page.getByText("does not take this key").waitFor();
  await page.fill("#key", KEY);
  await page.keyboard.press("Enter");
  await until(() => document.querySelector("#model").options.length > 0);
  await ask("Hello", { "max-tokens": 5 });
  await done();
  assert.equal(await page.evaluate((key) => Object.values(localStorage).includes(key), KEY), false);
  await page.reload();
  await until(() => document.querySelector("#model").options.length > 0);
  await page.click("#engine-tab");
  await page.getByText("Live:").waitFor();
  complaints = complaints.filter((each) => !each.includes("status of 401"));
});

// -- the engine ---------------------------------------------------------------------------------------------

test("the block map shows sharing while four choices run, and that all is free afterwards", async () => {
  await page.click("#engine-tab");
  await page.getByText("Live:").waitFor();
  const controller = new AbortController();
  const body = { prompt: "p".repeat(170), max_tokens: 3000, n: 4, stream: true };
  const answer = await fetch(`${SERVER_URL}/v1/completions`, {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal: controller.signal,
  });
  await until(() => Number(document.querySelectorAll("#legend b")[3].textContent) >= 10);
  await until(() => /decoding/.test(document.querySelector("#requests").textContent));
  const row = await page.locator("#requests tr").first().locator("td").allTextContents();
  assert.equal(row[4], "4");
  // Whoever points at a shared block learns who has it.
  await page.focus("#block-map");
  await page.keyboard.press("Home");
  let details = "";
  for (let block = 0; block < 600 && !details.includes("shared"); block += 1) {
    details = await page.textContent("#block-details");
    await page.keyboard.press("ArrowRight");
  }
  assert.match(details, /Block \d+: shared; content known to the prefix cache; .*, choice 1, 2, 3, 4, tokens \d+ to \d+$/);
  await page.getByText("Copy on write: block").first().waitFor();
  await until(() => /\d/.test(document.querySelector("#charts b").textContent));
  assert.match(await page.locator("#charts canvas").nth(1).getAttribute("aria-label"), /running 4/);
  controller.abort();
  await answer.body?.cancel().catch(() => {});
  await until(() => [2, 3].every((index) => document.querySelectorAll("#legend b")[index].textContent === "0"));
  assert.ok((await counts())[1] >= 10); // the prompt's blocks stay cached
  await page.getByText("None.").waitFor();
});

test("the engine is watched only while it is seen", async () => {
  const requests = [];
  page.on("request", (request) => requests.push(new URL(request.url()).pathname));
  await page.waitForTimeout(300);
  assert.ok(!requests.includes("/engine/events"));
  await page.click("#engine-tab");
  await page.getByText("Live:").waitFor();
  const closed = page.waitForEvent("requestfailed", (request) => request.url().endsWith("/engine/events"));
  await page.click("#chat-tab");
  await closed;
});

test("a map of a hundred thousand blocks is drawn and pointed at", async () => {
  await page.click("#engine-tab");
  await page.getByText("Live:").waitFor();
  const drawn = await page.evaluate(async () => {
    const { BlockMap } = await import("/page/block_map.js");
    const { BlockStore } = await import("/page/block_store.js");
    const store = new BlockStore();
    store.reset(100_000, 16);
    store.take({ runs: [[0, 50_000, 1], [50_000, 100, 6]], sequences: [], tables: [], gone: [] });
    const map = new BlockMap(store);
    map.redraw();
    const canvas = document.querySelector("#block-map");
    const columns = Math.floor(canvas.clientWidth / 2);
    return { enough: columns * Math.floor(canvas.clientHeight / 2) >= 100_000, counts: store.counts };
  });
  assert.deepEqual(drawn, { enough: true, counts: [49_900, 0, 50_000, 100] });
});

// -- for everybody ------------------------------------------------------------------------------------------

/** The least contrast between a text and its ground, over all visible texts. */
const worstContrast = () =>
  page.evaluate(() => {
    const parse = (text) => text.match(/[\d.]+/g).map(Number);
    const luminance = (rgb) => {
      const [r, g, b] = rgb.slice(0, 3).map((part) => {
        const value = part / 255;
        return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
      for (let each = element; each; each = each.parentElement) {
        const colour = parse(getComputedStyle(each).backgroundColor);
        if (colour.length < 4 || colour[3] > 0) return colour;
      }
      return [255, 255, 255];
    };
    let worst = { ratio: 21, text: "" };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const { parentElement: element, textContent: text } = walker.currentNode;
      if (!text.trim() || !element.checkVisibility()) continue;
      const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < worst.ratio) worst = { ratio, text };
    }
    return worst;
  });

for (const colorScheme of ["light", "dark"]) {
  test(`texts can be read and the states of blocks told apart in the ${colorScheme} theme`, async () => {
    await open({ colorScheme });
    await page.check("#logprobs");
    await ask("Hello", { "max-tokens": 12 });
    await done();
    await page.getByRole("button", { name: "Probabilities" }).click();
    let { ratio, text } = await worstContrast();
    assert.ok(ratio >= 4.5, `${ratio}: ${text}`);
    await page.click("#engine-tab");
    await page.getByText("Live:").waitFor();
    ({ ratio, text } = await worstContrast());
    assert.ok(ratio >= 4.5, `${ratio}: ${text}`);
    // Each state differs in brightness from the next: they can be told without colour.
    const steps = await page.evaluate(async () => {
      const { colour } = await import("/page/dom.js");
      const bright = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
        .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0.05);
      const values = ["free", "cached", "one", "shared"].map((name) => bright(colour(`block-${name}`)));
      return values.slice(1).map((value, index) => value / values[index]);
    });
    const rising = steps.every((step) => step > 1.2);
    const falling = steps.every((step) => step < 1 / 1.2);
    assert.ok(rising || falling, steps.join(" "));
  });
}

test("everything that can be used has a name, and is reached by the keyboard", async () => {
  for (const tab of ["#chat-tab", "#engine-tab"]) {
    await page.click(tab);
    const nameless = await page.$$eval("button, input, select, textarea, canvas, summary", (found) =>
      found
        .filter((each) => each.checkVisibility() && each.getAttribute("aria-hidden") !== "true")
        .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()))
        .map((each) => each.outerHTML.slice(0, 80)),
    );
    if (tab === "#engine-tab") await page.getByText("Live:").waitFor();
    assert.deepEqual(nameless.filter((each) => !each.includes('role="img"')), []);
  }
  await page.click("#chat-tab");
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.getAttribute("#engine-tab", "aria-selected"), "true");
  await page.keyboard.press("ArrowLeft");
  const reached = new Set();
  for (let press = 0; press < 25; press += 1) {
    await page.keyboard.press("Tab");
    const found = await page.evaluate(() => {
      const { activeElement: active } = document;
      return { id: active.id, ring: getComputedStyle(active).outlineStyle !== "none" };
    });
    if (found.id) {
      assert.ok(found.ring, `${found.id} shows no focus`);
      reached.add(found.id);
    }
  }
  for (const id of ["theme-button", "model", "temperature", "system", "prompt", "send", "new-chat"]) {
    assert.ok(reached.has(id), id);
  }
  const ids = await page.$$eval("[id]", (found) => found.map((each) => each.id));
  assert.equal(new Set(ids).size, ids.length);
});

test("a theme of one's own is kept", async () => {
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.click("#theme-button");
  assert.equal(await ground(), light);
  await page.click("#theme-button");
  const dark = await ground();
  assert.notEqual(dark, light);
  await page.reload();
  await until(() => document.querySelector("#theme-button").textContent === "Theme: dark");
  assert.equal(await ground(), dark);
});

test("a narrow screen needs no sideways scrolling", async () => {
  await open({ viewport: { width: 360, height: 740 } });
  await page.click("#settings summary");
  await ask(`${"averylongword".repeat(10)}`, { "max-tokens": 60, choices: 2 });
  await done();
  const tooWide = () =>
    page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.equal(await tooWide(), 0);
  await page.click("#engine-tab");
  await page.getByText("Live:").waitFor();
  assert.equal(await tooWide(), 0);
});

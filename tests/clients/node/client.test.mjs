// The unchanged `openai` npm client against a running server. Run by test_node_client.py, which says where the
// server is (SERVER_URL) and which fields there are (FIELDS, a file).

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SERVER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const { model, fields } = JSON.parse(readFileSync(process.env.FIELDS, "utf8"));
const chat = {
  model,
  messages: [{ role: "user", content: "Say something about the sea." }],
  temperature: 0,
  max_tokens: 12,
};
const completion = { model, prompt: "The sea is", temperature: 0, max_tokens: 12 };
const routes = { chat: client.chat.completions, completions: client.completions };

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(chat);
  assert.equal(whole.choices[0].message.role, "assistant");
  assert.equal(whole.usage.completion_tokens, 12);
  const chunks = await collected(
    await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
  );
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
});

test("a completion, whole and streamed", async () => {
  const whole = await client.completions.create(completion);
  const chunks = await collected(await client.completions.create({ ...completion, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("the client's own accumulator", async () => {
  const forced = { structured_outputs: { choice: ["It is wide, and blue, and deep."] }, max_tokens: 40 };
  const final = await client.chat.completions.stream({ ...chat, ...forced }).finalChatCompletion();
  assert.equal(final.choices[0].message.content, "It is wide, and blue, and deep.");
  assert.equal(final.choices[0].finish_reason, "stop");
});

test("several choices", async () => {
  const request = { ...chat, n: 3, temperature: 1.5, seed: 1 };
  const whole = await client.chat.completions.create(request);
  const texts = ["", "", ""];
  for (const chunk of await collected(await client.chat.completions.create({ ...request, stream: true }))) {
    for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.message.content));
});

test("structured output", async () => {
  const schema = {
    type: "object",
    properties: { colour: { enum: ["red", "blue"] }, crew: { type: "integer", minimum: 1, maximum: 9 } },
    required: ["colour", "crew"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    ...chat,
    max_tokens: 80,
    response_format: { type: "json_schema", json_schema: { name: "boat", strict: true, schema } },
  });
  const boat = JSON.parse(answer.choices[0].message.content);
  assert.ok(["red", "blue"].includes(boat.colour) && boat.crew >= 1 && boat.crew <= 9);
});

test("leaving a stream", async () => {
  const stream = await client.chat.completions.create({
    ...chat,
    max_tokens: 4000,
    ignore_eos: true,
    stream: true,
  });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("models and response headers", async () => {
  assert.deepEqual((await collected(client.models.list())).map((card) => card.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
  const { response, request_id } = await client.chat.completions
    .create(chat, { headers: { "X-Request-Id": "mine" } })
    .withResponse();
  assert.equal(response.status, 200);
  assert.equal(request_id, "mine");
});

test("embeddings, which the client asks for in base64", async () => {
  const input = ["The sea is blue.", "漢字 😀"];
  const decoded = await client.embeddings.create({ model, input });
  const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.deepEqual(decoded.data, floats.data);
  assert.equal(decoded.data[0].embedding.length, 576);
});

test("routes besides OpenAI's", async () => {
  const { tokens } = await client.post(`${process.env.SERVER_URL}/tokenize`, { body: { prompt: "The sea is" } });
  const { prompt } = await client.post(`${process.env.SERVER_URL}/detokenize`, { body: { tokens } });
  assert.equal(prompt, "The sea is");
  const rendered = await client.post("/chat/completions/render", { body: chat });
  assert.ok(rendered.prompt_token_ids.length > 0);
});

test("errors", async () => {
  const long = [{ role: "user", content: "word ".repeat(20000) }];
  const cases = [
    [{ model: "nope" }, OpenAI.NotFoundError, "model", "model_not_found"],
    [{ temperature: 9 }, OpenAI.BadRequestError, "temperature", null],
    [{ messages: [] }, OpenAI.BadRequestError, "messages", null],
    [{ messages: long }, OpenAI.BadRequestError, "messages", "context_length_exceeded"],
  ];
  for (const [wrong, kind, param, code] of cases) {
    for (const stream of [false, true]) {
      await assert.rejects(client.chat.completions.create({ ...chat, ...wrong, stream }), (error) => {
        assert.ok(error instanceof kind, `${error}`);
        assert.deepEqual([error.param, error.code], [param, code]);
        return true;
      });
    }
  }
  await assert.rejects(client.models.retrieve("nope"), OpenAI.NotFoundError);
});

test("every field of the table", async () => {
  for (const { route, name, request, refused } of fields) {
    const sent = routes[route].create(request);
    if (refused === null) {
      const answer = await sent;
      if (request.stream) await collected(answer);
      else assert.ok(answer.usage.prompt_tokens > 0, `${route} ${name}`);
    } else {
      await assert.rejects(sent, (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError, `${route} ${name}: ${error}`);
        assert.ok(error.param.startsWith(refused), `${route} ${name}: ${error.param}`);
        return true;
      });
    }
  }
});

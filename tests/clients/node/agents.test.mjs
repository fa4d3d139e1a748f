// Tools and responses through the unchanged `openai` npm client. Run by test_node_client.py as client.test.mjs is.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SERVER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const cities = ["Paris", "Oslo"];
const sides = [6, 20];

function schema(name, values) {
  return {
    type: "object",
    properties: { [name]: { enum: values } },
    required: [name],
    additionalProperties: false,
  };
}

function tool(name, parameters) {
  return { type: "function", function: { name, description: `Do ${name}.`, strict: true, parameters } };
}

const tools = [tool("weather", schema("city", cities)), tool("throw_die", schema("sides", sides))];
const chat = {
  model,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  temperature: 0,
  max_tokens: 60,
  parallel_tool_calls: false,
};
const ask = { model, input: "What is the weather in Paris?", temperature: 0, max_output_tokens: 60 };
const sea = { structured_outputs: { choice: ["It is wide, and blue."] } };

function shown({ finish_reason, message }) {
  const calls = (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return { finish_reason, content: message.content, calls };
}

function check(calls) {
  for (const [name, given] of calls) {
    assert.ok(name === "weather" ? cities.includes(given.city) : sides.includes(given.sides), `${name} ${given}`);
  }
}

test("tool choices, whole and accumulated from a stream", async () => {
  const named = { type: "function", function: { name: "throw_die" } };
  const expected = { auto: null, none: "stop", required: "tool_calls", named: "stop" };
  for (const [name, reason] of Object.entries(expected)) {
    const request = { ...chat, tools, tool_choice: name === "named" ? named : name };
    const whole = shown((await client.chat.completions.create(request)).choices[0]);
    const final = await client.chat.completions.stream(request).finalChatCompletion();
    assert.deepEqual(shown(final.choices[0]), whole, name);
    if (reason) assert.equal(whole.finish_reason, reason);
    if (name === "none") assert.equal(whole.calls.length, 0);
    if (name === "required" || name === "named") {
      assert.equal(whole.calls.length, 1);
      assert.equal(whole.content, null);
    }
    if (name === "named") assert.equal(whole.calls[0][0], "throw_die");
    check(whole.calls);
  }
});

test("the client runs the tools", async () => {
  const called = [];
  const runnable = tools.map((each) => ({
    ...each,
    function: {
      ...each.function,
      parse: JSON.parse,
      function: (given) => {
        called.push([each.function.name, given]);
        return "it is done";
      },
    },
  }));
  const request = { ...chat, tools: runnable, tool_choice: "required" };
  for (const stream of [false, true]) {
    called.length = 0;
    const runner = client.chat.completions.runTools({ ...request, stream }, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(called.length, 2);
    check(called);
    assert.equal(runner.messages.filter((message) => message.role === "tool").length, 2);
    called.length = 0;
    const tool_choice = { type: "function", function: { name: "throw_die" } };
    const single = client.chat.completions.runTools({ ...request, stream, tool_choice });
    assert.deepEqual(await single.finalFunctionToolCallResult(), "it is done");
    assert.equal(called.length, 1);
    check(called);
  }
});

test("responses, whole and accumulated from a stream", async () => {
  const whole = await client.responses.create({ ...ask, ...sea });
  assert.equal(whole.output_text, "It is wide, and blue.");
  const kinds = [];
  const stream = client.responses.stream({ ...ask, ...sea });
  for await (const event of stream) kinds.push(event.type);
  const final = await stream.finalResponse();
  assert.equal(final.output_text, whole.output_text);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.equal((await client.responses.retrieve(final.id)).output_text, whole.output_text);
});

test("a call in one turn, its output in the next", async () => {
  const flat = tools.map(({ type, function: each }) => ({ type, ...each }));
  const forced = { tools: flat, tool_choice: "required", parallel_tool_calls: false };
  const stream = client.responses.stream({ ...ask, ...forced });
  let pieces = "";
  stream.on("response.function_call_arguments.delta", (event) => (pieces += event.delta));
  const first = await stream.finalResponse();
  const [call] = first.output;
  assert.equal(pieces, call.arguments);
  check([[call.name, JSON.parse(call.arguments)]]);
  const output = { type: "function_call_output", call_id: call.call_id, output: "rain" };
  const next = { ...ask, ...sea, input: [output], previous_response_id: first.id };
  const second = await client.responses.create(next);
  assert.equal(second.previous_response_id, first.id);
  assert.ok(second.usage.input_tokens > first.usage.output_tokens);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.create(next), OpenAI.NotFoundError);
});

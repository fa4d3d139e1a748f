// A request as a command, or as a program, that somebody can take elsewhere. The key stays here.

import { address } from "./api.js";

/** A POST of a chat request with curl. */
export function asCurl(request) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${address("v1/chat/completions")} \\`,
    "  -H 'Content-Type: application/json' \\",
    '  -H "Authorization: Bearer $STREAMLLM_API_KEY" \\',
    `  -d '${body}'`,
  ].join("\n");
}

/** The same with the openai package. */
export function asPython(request) {
  const { stream_options: _, ...fields } = request;
  const values = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  return [
    "import os",
    "",
    "import openai",
    "",
    "client = openai.OpenAI(",
    `    base_url="${address("v1")}",`,
    '    api_key=os.environ.get("STREAMLLM_API_KEY", "none"),',
    ")",
    "stream = client.chat.completions.create(",
    ...values,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
  ].join("\n");
}

/** A JSON value in Python's notation. */
function literal(value, depth) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((each) => `${inner}${literal(each, depth + 1)},\n`).join("")}${end}]`;
  }
  const pairs = Object.entries(value).map(([name, each]) => `"${name}": ${literal(each, depth + 1)}`);
  return `{${pairs.join(", ")}}`;
}

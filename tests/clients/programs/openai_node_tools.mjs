// Usage: node openai_node_tools.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const CITIES = ["Verona", "Mantua"];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
const named = { name: "weather", description: "The weather of a city.", parameters, strict: true };
const person = {
  type: "object",
  properties: { name: { enum: ["Romeo", "Juliet"] }, isDead: { type: "boolean" } },
  required: ["name", "isDead"],
  additionalProperties: false,
};
const asked = { role: "user", content: "What light is that?" };
const shared = { model, temperature: 0, parallel_tool_calls: false };

function outputOf(args) {
  assert.ok(CITIES.includes((typeof args === "string" ? JSON.parse(args) : args).city));
  return "The sun is up.";
}

// Chats: the answer goes back as it came, whole and streamed; then the package runs the loop itself.
const tools = [{ type: "function", function: named }];
const forced = { ...shared, messages: [asked], tools, tool_choice: "required", max_completion_tokens: 120 };
const whole = await client.chat.completions.create(forced);
assert.equal(whole.choices[0].finish_reason, "tool_calls");
const streamed = await client.chat.completions.stream(forced).finalChatCompletion();
for (const { message } of [whole.choices[0], streamed.choices[0]]) {
  const messages = [asked, message];
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: outputOf(call.function.arguments) });
  }
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, stop: ["\n\n"] });
  assert.ok(answer.choices[0].message.content);
}
let numCalls = 0;
const run = (args) => (numCalls++, outputOf(args));
const runner = client.chat.completions.runTools({
  ...forced,
  tool_choice: { type: "function", function: { name: "weather" } },
  tools: [{ type: "function", function: { ...named, function: run, parse: JSON.parse } }],
});
await runner.done();
assert.equal(numCalls, 1);

// Responses: items go back as they came, whole, streamed and parsed.
const fields = { ...shared, max_output_tokens: 120 };
const items = { ...fields, input: [asked], tools: [{ type: "function", ...named }], tool_choice: "required" };
const stream = client.responses.stream(items);
const kinds = [];
for await (const event of stream) kinds.push(event.type);
assert.equal(kinds.at(-1), "response.completed");
assert.ok(kinds.includes("response.function_call_arguments.delta"));
for (const response of [await client.responses.create(items), await stream.finalResponse()]) {
  const input = [asked, ...response.output];
  for (const item of response.output) {
    input.push({ type: "function_call_output", call_id: item.call_id, output: outputOf(item.arguments) });
  }
  const answer = await client.responses.create({ ...fields, input, stop: ["\n\n"] });
  assert.equal(answer.status, "completed");
  assert.ok(answer.output_text);
}
const format = { type: "json_schema", name: "person", schema: person, strict: true };
const parsed = await client.responses.parse({ ...fields, input: "Who?", text: { format } });
assert.deepEqual(Object.keys(JSON.parse(parsed.output_text)), ["name", "isDead"]);
let text = "";
for await (const event of await client.responses.create({ ...fields, input: "Who?", text: { format }, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, parsed.output_text);
await assert.rejects(client.responses.create({ model, input: "x", previous_response_id: "resp_1" }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "previous_response_id";
});
console.log("functions called and answered, objects of a schema, streams equal to the whole");

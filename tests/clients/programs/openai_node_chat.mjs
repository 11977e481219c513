// Usage: node openai_node_chat.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "A garden." },
  { role: "user", content: [{ type: "text", text: "What light is that?" }] },
];
const fields = { model, messages, max_completion_tokens: 16, temperature: 0 };

const whole = await client.chat.completions.create(fields);
const said = whole.choices[0].message;
assert.equal(said.role, "assistant");
let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...fields, ...options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.ok(text);
assert.equal(text, said.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);  // what was cached differs

const final = await client.chat.completions.stream(fields).finalChatCompletion();
assert.deepEqual(final.choices[0].message.content, text);
assert.equal(final.choices[0].finish_reason, "length");

const more = [...messages, said, { role: "user", content: "Who speaks?" }];
const several = await client.chat.completions.create({ ...fields, messages: more, n: 2, stop: [",", "."] });
assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
assert.ok(several.choices.every((choice) => !/[,.]/.test(choice.message.content)));

const scored = await client.chat.completions.create({ ...fields, logprobs: true, top_logprobs: 2 });
const tokens = scored.choices[0].logprobs.content;
assert.equal(tokens.map((each) => each.token).join(""), text);
assert.ok(tokens.every((each) => each.top_logprobs[0].logprob === each.logprob));

const image = { role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AA==" } }] };
await assert.rejects(client.chat.completions.create({ ...fields, messages: [image] }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  return error.status === 400 && error.param === "messages[0].content[0].type";
});
console.log("as it should be, streams equal to the whole");

// Usage: node openai_node.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const fields = { model, prompt: "ROMEO:", max_tokens: 16, temperature: 0 };

const whole = await client.completions.create(fields);
let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.completions.create({ ...fields, ...options })) {
  text += chunk.choices[0]?.text ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].text);
assert.equal(usage.total_tokens, whole.usage.total_tokens);  // what was cached differs

const several = await client.completions.create({ ...fields, prompt: ["ROMEO:", "JULIET:"], n: 2, stop: [",", "O"] });
assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1, 2, 3]);
assert.ok(several.choices.every((choice) => !/[,O]/.test(choice.text)));

const { logprobs } = (await client.completions.create({ ...fields, logprobs: 3 })).choices[0];
assert.equal(logprobs.tokens.join(""), text);
assert.ok(logprobs.token_logprobs.every((value, place) => value === Math.max(...Object.values(logprobs.top_logprobs[place]))));

await assert.rejects(client.completions.create({ ...fields, suffix: "x" }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  return error.status === 400 && error.param === "suffix";
});
assert.equal((await client.models.retrieve(model)).id, (await client.models.list()).data[0].id);
console.log("as it should be, the stream equal to the whole");

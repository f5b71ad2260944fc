// The package @anthropic-ai/sdk of npm.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { LONG, MANY_TOKENS, SCHEMA, SERVER, TOOL, checkAbort, checkCall, checkPerson, run } from "./harness.mjs";

const client = new Anthropic({ baseURL: SERVER.url, apiKey: "none", maxRetries: 0 });
const user = [{ role: "user", content: SERVER.prompt }];
const some = { model: SERVER.model, temperature: 0, max_tokens: SERVER.num_tokens, messages: user };

const messages = {
  async chat() {
    const message = await client.messages.create(some);
    assert.deepEqual(message.content, [{ type: "text", text: SERVER.expected }]);
    assert.equal(message.stop_reason, "max_tokens");
    const models = await client.models.list();
    assert.equal(models.data[0].id, SERVER.model);
  },
  async stream() {
    const stream = client.messages.stream(some);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const message = await stream.finalMessage();
    assert.equal(text, SERVER.expected);
    assert.equal(message.content[0].text, SERVER.expected);
  },
  async tools() {
    const { parameters, ...about } = TOOL;
    const tools = [{ ...about, input_schema: parameters, cache_control: { type: "ephemeral" } }];
    const tool_choice = { type: "any", disable_parallel_tool_use: true };
    const message = await client.messages.stream({ ...some, max_tokens: 100, tools, tool_choice }).finalMessage();
    const [call] = message.content;
    checkCall(call.name, call.input);
    assert.equal(message.stop_reason, "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "rain" }] };
    const asked = [...user, { role: "assistant", content: message.content }, { role: "user", content: [result] }];
    const answer = await client.messages.create({ ...some, max_tokens: 8, tools, messages: asked });
    assert(answer.content[0].text);
  },
  async structured() {
    const output_config = { format: { type: "json_schema", schema: SCHEMA } };
    const message = await client.messages.create({ ...some, max_tokens: 60, output_config });
    checkPerson(JSON.parse(message.content[0].text));
  },
  async errors() {
    await assert.rejects(client.messages.create({ ...some, model: "no-such-model" }), Anthropic.NotFoundError);
    const long = { ...some, messages: [{ role: "user", content: LONG }] };
    for (const stream of [false, true])
      await assert.rejects(client.messages.create({ ...long, stream }), (error) => {
        assert(error instanceof Anthropic.BadRequestError);
        assert.match(error.message, /prompt is too long/);
        return true;
      });
  },
  async abort() {
    await checkAbort(async () => {
      const endless = client.withOptions({ baseURL: SERVER.endless });
      const stream = endless.messages.stream({ ...some, max_tokens: MANY_TOKENS });
      stream.on("text", () => stream.abort());
      await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
    });
  },
  async usage() {
    const { usage } = await client.messages.create(some);
    assert.equal(usage.input_tokens + usage.cache_read_input_tokens, SERVER.num_prompt_tokens);
    assert.equal(usage.output_tokens, SERVER.num_tokens);
    const asked = { model: SERVER.model, messages: user };
    assert.equal((await client.messages.countTokens(asked)).input_tokens, SERVER.num_prompt_tokens);
  },
};

await run("@anthropic-ai/sdk", { "@anthropic-ai/sdk (npm)": messages });

// The openai package of npm: chats and responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { LONG, SERVER, TOOL, checkAbort, checkCall, run } from "./harness.mjs";

const client = new OpenAI({ baseURL: `${SERVER.url}/v1`, apiKey: "none", maxRetries: 0 });
const endless = client.withOptions({ baseURL: `${SERVER.endless}/v1` });
const Person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(99) });
const user = [{ role: "user", content: SERVER.prompt }];
const some = { model: SERVER.model, temperature: 0 };

const isRefused = async (ask) => {
  await assert.rejects(ask({ model: "no-such-model" }), OpenAI.NotFoundError);
  await assert.rejects(ask({ content: LONG }), (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    return true;
  });
};

const chats = {
  async chat() {
    const { choices } = await client.chat.completions.create({ ...some, messages: user, max_tokens: SERVER.num_tokens });
    assert.equal(choices[0].message.content, SERVER.expected);
    assert.equal(choices[0].finish_reason, "length");
    const models = await client.models.list();
    assert.equal(models.data[0].id, SERVER.model);
  },
  async stream() {
    const body = { ...some, messages: user, max_tokens: SERVER.num_tokens, stream_options: { include_usage: true } };
    const stream = client.chat.completions.stream(body);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const whole = await stream.finalChatCompletion();
    assert.equal(text, SERVER.expected);
    assert.equal(whole.usage.completion_tokens, SERVER.num_tokens);
  },
  async tools() {
    const asked = [...user];
    const body = { ...some, tools: [{ type: "function", function: TOOL }], max_tokens: 100 };
    const must = { tool_choice: "required", parallel_tool_calls: false };
    const { choices } = await client.chat.completions.create({ ...body, ...must, messages: asked });
    const [call] = choices[0].message.tool_calls;
    checkCall(call.function.name, JSON.parse(call.function.arguments));
    assert.equal(choices[0].finish_reason, "tool_calls");
    const streamed = await client.chat.completions.stream({ ...body, ...must, messages: asked }).finalChatCompletion();
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    asked.push(streamed.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" });
    const answer = await client.chat.completions.create({ ...body, messages: asked, max_tokens: 8 });
    assert(answer.choices[0].message.content);
  },
  async structured() {
    const format = zodResponseFormat(Person, "person");
    const body = { ...some, messages: user, max_tokens: 60, response_format: format };
    const { choices } = await client.chat.completions.parse(body);
    Person.parse(choices[0].message.parsed);
  },
  async errors() {
    await isRefused(async ({ content = SERVER.prompt, ...more }) => {
      await client.chat.completions.create({ ...some, messages: [{ role: "user", content }], ...more });
    });
    await isRefused(async ({ content = SERVER.prompt, ...more }) => {
      await client.chat.completions.create({ ...some, stream: true, messages: [{ role: "user", content }], ...more });
    });
  },
  async abort() {
    await checkAbort(async () => {
      const stream = await endless.chat.completions.create({ ...some, messages: user, stream: true });
      for await (const _ of stream) break;
    });
  },
  async usage() {
    const { usage } = await client.chat.completions.create({ ...some, messages: user, max_tokens: SERVER.num_tokens });
    assert.deepEqual([usage.prompt_tokens, usage.completion_tokens], [SERVER.num_prompt_tokens, SERVER.num_tokens]);
  },
};

const responses = {
  async chat() {
    const body = { ...some, input: SERVER.prompt, max_output_tokens: SERVER.num_tokens };
    const response = await client.responses.create(body);
    assert.equal(response.output_text, SERVER.expected);
    assert.equal(response.status, "incomplete");
    const next = await client.responses.create({ ...body, input: "And then?", previous_response_id: response.id });
    assert(next.usage.input_tokens > response.usage.total_tokens);
  },
  async stream() {
    const body = { ...some, input: user, max_output_tokens: SERVER.num_tokens };
    const stream = client.responses.stream(body);
    let text = "";
    stream.on("response.output_text.delta", ({ delta }) => (text += delta));
    const whole = await stream.finalResponse();
    assert.equal(text, SERVER.expected);
    assert.equal(whole.output_text, SERVER.expected);
  },
  async tools() {
    const body = { ...some, tools: [{ type: "function", ...TOOL, strict: true }], max_output_tokens: 100 };
    const must = { tool_choice: "required", parallel_tool_calls: false };
    const response = await client.responses.create({ ...body, ...must, input: user });
    const [call] = response.output;
    checkCall(call.name, JSON.parse(call.arguments));
    const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
    body.max_output_tokens = 8;
    const answer = await client.responses.create({ ...body, input: [...user, ...response.output, result] });
    assert(answer.output_text);
    const again = await client.responses.create({ ...body, input: [result], previous_response_id: response.id });
    assert.equal(again.output_text, answer.output_text);
  },
  async structured() {
    const text = { format: zodTextFormat(Person, "person") };
    const response = await client.responses.parse({ ...some, input: user, max_output_tokens: 60, text });
    Person.parse(response.output_parsed);
  },
  async errors() {
    await isRefused(async ({ content = SERVER.prompt, ...more }) => {
      await client.responses.create({ ...some, input: content, ...more });
    });
  },
  async abort() {
    await checkAbort(async () => {
      const leaving = new AbortController();
      const stream = await endless.responses.create({ ...some, input: user, stream: true }, { signal: leaving.signal });
      try {
        for await (const event of stream) if (event.type === "response.output_text.delta") leaving.abort();
      } catch (error) {
        assert(error instanceof OpenAI.APIUserAbortError);
      }
    });
  },
  async usage() {
    const { usage } = await client.responses.create({ ...some, input: user, max_output_tokens: SERVER.num_tokens });
    assert.deepEqual([usage.input_tokens, usage.output_tokens], [SERVER.num_prompt_tokens, SERVER.num_tokens]);
  },
};

await run("openai", { "openai (npm), chat": chats, "openai (npm), responses": responses });

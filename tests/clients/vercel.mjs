// Vercel's AI SDK, with its provider for OpenAI (chats and responses) and the one for servers like OpenAI's.
import assert from "node:assert/strict";
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { LONG, SCHEMA, SERVER, TOOL, checkAbort, checkCall, checkPerson, run } from "./harness.mjs";

const openai = (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const options = { name: "anabranch", supportsStructuredOutputs: true, includeUsage: true };
const compatible = (url) => createOpenAICompatible({ ...options, baseURL: `${url}/v1` });

// `provider`: what makes models, of a server's address.
function cases(provider) {
  const model = provider(SERVER.url);
  const some = { model: model(SERVER.model), temperature: 0, maxRetries: 0 };
  const short = { ...some, prompt: SERVER.prompt, maxOutputTokens: SERVER.num_tokens };
  return {
    async chat() {
      const answer = await generateText(short);
      assert.equal(answer.text, SERVER.expected);
      assert.equal(answer.finishReason, "length");
    },
    async stream() {
      const answer = streamText(short);
      let text = "";
      for await (const delta of answer.textStream) text += delta;
      assert.equal(text, SERVER.expected);
      const usage = await answer.usage;
      assert.deepEqual([usage.inputTokens, usage.outputTokens], [SERVER.num_prompt_tokens, SERVER.num_tokens]);
    },
    async tools() {
      const calls = [];
      const execute = async (given) => {
        calls.push(given);
        return { weather: "rain" };
      };
      const about = { description: TOOL.description, inputSchema: jsonSchema(TOOL.parameters), execute };
      const tools = { [TOOL.name]: tool(about) };
      const providerOptions = { openai: { parallelToolCalls: false }, anabranch: { parallel_tool_calls: false } };
      const asked = { ...some, prompt: SERVER.prompt, tools, toolChoice: "required", providerOptions };
      const { steps, response } = await generateText({ ...asked, maxOutputTokens: 100 });
      checkCall(steps[0].toolCalls[0].toolName, calls[0]);
      const messages = [{ role: "user", content: SERVER.prompt }, ...(response.messages ?? [])];
      const answer = streamText({ ...some, messages, tools, maxOutputTokens: 8 });
      assert(await answer.text);
    },
    async structured() {
      const output = Output.object({ schema: jsonSchema(SCHEMA), name: "person" });
      const answer = await generateText({ ...some, prompt: SERVER.prompt, maxOutputTokens: 60, output });
      checkPerson(answer.output);
    },
    async errors() {
      await assert.rejects(generateText({ ...short, model: model("no-such-model") }), (error) => {
        assert(APICallError.isInstance(error));
        assert.equal(error.statusCode, 404);
        return true;
      });
      await assert.rejects(generateText({ ...short, prompt: LONG }), (error) => {
        assert(APICallError.isInstance(error) && !error.isRetryable);
        assert.match(error.message, /maximum context length/);
        return true;
      });
    },
    async abort() {
      await checkAbort(async () => {
        const leaving = new AbortController();
        const endless = provider(SERVER.endless)(SERVER.model);
        const answer = streamText({ ...some, model: endless, prompt: SERVER.prompt, abortSignal: leaving.signal });
        for await (const _ of answer.textStream) leaving.abort();
      });
    },
    async usage() {
      const { usage } = await generateText(short);
      assert.deepEqual([usage.inputTokens, usage.outputTokens], [SERVER.num_prompt_tokens, SERVER.num_tokens]);
    },
  };
}

await run("ai", {
  "ai (npm) with @ai-sdk/openai, chat": cases((url) => openai(url).chat),
  "ai (npm) with @ai-sdk/openai, responses": cases((url) => openai(url).responses),
  "ai (npm) with @ai-sdk/openai-compatible": cases(compatible),
});

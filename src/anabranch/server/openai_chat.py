"""POST /v1/chat/completions: the answer to a chat in OpenAI's dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.request import Completion, TokenLogprobs
from anabranch.sampling_params import SamplingParams
from anabranch.server.chat import Chat, prepare, read_chat, tool_call
from anabranch.server.errors import bad_request
from anabranch.server.openai_answer import Choice, OpenAIAnswer, TokenTexts, finite, prompt_logprobs
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import ChatCompletion
from anabranch.server.sampling import grammar, sampling_params
from anabranch.text.output import Delta

MAX_TOP_LOGPROBS = 20


class ChatAnswer(OpenAIAnswer[ChatCompletion]):
    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    async def prepare(self) -> None:
        body, service, model = self.body, self.service, self.service.model
        if body.top_logprobs is not None:
            if not body.logprobs:
                raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
            if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
                raise bad_request(f"top_logprobs must lie in [0, {MAX_TOP_LOGPROBS}]", "top_logprobs")

        def work() -> tuple[Chat, str, list[int], SamplingParams]:
            params = sampling_params(
                body,
                model.sampling_defaults,
                max_tokens=service.max_model_len,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                grammar=grammar(body),
            )
            chat = read_chat(body)
            return chat, *prepare(service, chat, params)

        chat, prompt, self.prompt_ids, params = await service.prepare(work, "messages", self.num_bytes)
        self.add(self.id, self.prompt_ids, params, model.chat_tokenizer)
        self.readers = [
            model.parsers.start(chat.offered, chat.tool_choice, True, prompt, chat.parallel_tool_calls)
            for _ in self.answers[0].requests
        ]
        self.log["prompt_tokens"] = len(self.prompt_ids)

    def parts(self, delta: Delta) -> list[Part]:
        """The parts in a delta's text; to be called once for each delta, in order."""
        return self.readers[delta.index].feed(delta.text, delta.completion.finish_reason is not None)

    def extras(self, whole: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {"prompt_token_ids": self.prompt_ids} if self.body.return_token_ids else {}
        if whole and (found := self.answers[0].output.prompt_logprobs) is not None:
            extras["prompt_logprobs"] = prompt_logprobs(found, self.texts)
        return extras

    def choice(self, number: int, completion: Completion) -> Choice:
        message = self.message(self.readers[completion.index].feed(completion.text, final=True))
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = message.pop("content", None if "tool_calls" in message else "")
        message = {"role": "assistant", "content": content, "refusal": None, **message}
        choice = {"index": completion.index, "message": message, "logprobs": None}
        if self.body.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(completion.logprobs or [], self.texts)}
        return choice | self.ending(completion, completion.token_ids, self.finish_reason(completion))

    def chunk_choice(self, number: int, delta: Delta, first: bool) -> Choice | None:
        """None while text is held back, for part of a character or of a tag."""
        message, completion = self.message(self.parts(delta)), delta.completion
        if first:  # the role comes with the first token, whether it has text already or not
            message = {"role": "assistant", "content": message.pop("content", ""), **message}
        choice: Choice = {"delta": message, "logprobs": None}
        choice |= self.ending(completion, delta.token_ids, self.finish_reason(completion))
        if self.body.logprobs and delta.token_ids:
            new = (completion.logprobs or [])[-len(delta.token_ids) :]
            choice["logprobs"] = {"content": chat_logprobs(new, self.texts)}
        useful = message or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
        return choice if useful else None

    def message(self, parts: list[Part]) -> dict[str, Any]:
        """Parts as one delta: text of the same type joined, pieces of a call's arguments too."""
        message: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text) if text:
                    message["content"] = message.get("content", "") + text
                case Reasoning(text) if text and self.body.include_reasoning:
                    message["reasoning_content"] = message["reasoning"] = message.get("reasoning", "") + text
                case ToolCallBegin(index, id, name):
                    calls[index] = {"index": index, **tool_call(id, name, "")}
                case ToolCallArguments(index, text) if text:
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            message["tool_calls"] = list(calls.values())
        return message

    def finish_reason(self, completion: Completion) -> str | None:
        called = completion.finish_reason == "stop" and self.readers[completion.index].num_calls
        return "tool_calls" if called else completion.finish_reason


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = list(texts.bytes(token_id))
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": spelling}

    return [
        one(item.token_id, item.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in item.top]}
        for item in logprobs
    ]

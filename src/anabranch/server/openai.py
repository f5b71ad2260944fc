"""OpenAI's dialect: its routes and vLLM's /tokenize and /detokenize; answers whole or in chunks, of chats and of
completions as lm-eval asks for them.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from anabranch import __version__
from anabranch.request import TokenLogprobs
from anabranch.sampling_params import SamplingParams
from anabranch.server import prompts, protocol, stream
from anabranch.server.body import read_json
from anabranch.server.chat import Chat, prepare, render, tool_call
from anabranch.server.errors import bad_request
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import ChatCompletion, sampling_params
from anabranch.server.service import Service
from anabranch.server.stream import event, json_response
from anabranch.text.output import Answer, Delta
from anabranch.text.render_chat import Rendered
from anabranch.text.tokenizer import Tokenizer

router = APIRouter()
SamplingBody = TypeVar("SamplingBody", bound=protocol.Sampling)
Choice = dict[str, Any]

MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it
LOWEST = -9999.0  # JSON has no -Infinity
MAX_DETOKENIZED = 65_536  # tokens, where the context is shorter

BODIES: dict[str, type[protocol.Body]] = {
    "/v1/chat/completions": protocol.ChatCompletion,
    "/v1/completions": protocol.Completion,
    "/tokenize": protocol.Tokenize,
    "/detokenize": protocol.Detokenize,
}


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request) -> Response:
    return await _answer(request, protocol.ChatCompletion, ChatAnswer)


@router.post("/v1/completions", summary="Continue prompts")
async def completions(request: Request) -> Response:
    return await _answer(request, protocol.Completion, CompletionAnswer)


async def _answer(request: Request, schema: type[protocol.Sampling], answer_type: type[OpenAIAnswer[Any]]) -> Response:
    _, body = await read_json(request, schema, ready=True)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    request.state.log["stream"] = body.stream
    answer = answer_type(request, body)
    if body.stream:
        return stream.EventStream(answer.chunks(), answer.accepted, answer.service.settings.ping_timeout)
    return await stream.whole(request, answer.whole())


@router.get("/v1/models", summary="The models served here")
async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    if request.state.dialect == "anthropic":
        found = [_anthropic_model(service, name) for name in service.names]
        ends = {"first_id": service.names[0], "last_id": service.names[-1]}
        return json_response({"data": found, "has_more": False, **ends})
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{id:path}", summary="One model")
async def model(request: Request, id: str) -> Response:
    service: Service = request.app.state.service
    service.check_model(id)
    return json_response((_anthropic_model if request.state.dialect == "anthropic" else _model)(service, id))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "anabranch",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
        "quantization": service.quantization,
    }


def _anthropic_model(service: Service, name: str) -> dict[str, Any]:
    began, length = datetime.fromtimestamp(int(service.started), UTC).isoformat(), service.max_model_len
    limits = {"max_input_tokens": length, "max_tokens": length}
    return {"type": "model", "id": name, "display_name": name, "created_at": began, "lifecycle": "active", **limits}


@router.post("/tokenize", summary="The tokens of a text or a conversation")
async def tokenize(request: Request) -> Response:
    service, body = await read_json(request, protocol.Tokenize)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    where = "prompt" if body.messages is None else "messages"

    def work() -> dict[str, Any]:
        if body.messages is not None:
            rendered, special = render(service.model, Chat(body)), bool(body.add_special_tokens)
        else:
            rendered, special = Rendered(body.prompt or ""), body.add_special_tokens is not False
        tokens = service.encode(rendered, special, where, counting=True)
        tokenizer = service.model.tokenizer
        texts = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": texts}

    return json_response(await service.prepare(work, where, request.state.num_bytes))


@router.post("/detokenize", summary="The text of tokens")
async def detokenize(request: Request) -> Response:
    service, body = await read_json(request, protocol.Detokenize)
    model, vocabulary = service.model, service.model.config.vocab_size
    if len(body.tokens) > (limit := max(service.max_model_len, MAX_DETOKENIZED)):
        raise bad_request(f"tokens: {len(body.tokens)} tokens; at most {limit} go into one request", "tokens")
    if body.tokens and (largest := max(body.tokens)) >= vocabulary:
        raise bad_request(f"tokens: {largest} is not in the vocabulary [0, {vocabulary})", "tokens")
    work = partial(model.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return json_response({"prompt": await service.prepare(work, "tokens", request.state.num_bytes)})


class OpenAIAnswer(ABC, Generic[SamplingBody]):
    """The answer to one request. Choice p × n + i is the i-th of prompt p."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    prompt_field: ClassVar[str]
    """The body's field that errors about the prompt name."""
    num_prompts = 1

    def __init__(self, request: Request, body: SamplingBody) -> None:
        self.service: Service = request.app.state.service
        self.body, self.log, self.num_bytes = body, request.state.log, request.state.num_bytes
        self.id = f"{self.id_prefix}-{uuid4().hex}"  # not the request's: a client may send the same one twice
        self.created = int(time.time())
        self.n = body.n or 1
        self.logprobs = LogprobWriter(self.service.model.tokenizer)
        self.answers: list[Answer] = []
        self.accepted: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Done when nothing but the engine may still refuse the request, with the seconds that this can take."""

    @abstractmethod
    async def prepare(self) -> None:
        """Add the answers to be generated."""

    @abstractmethod
    def choice(self, number: int, delta: Delta, first: bool, whole: bool = False) -> Choice:
        """What a delta adds to a choice, or begins it with; `whole`: the delta is all of it."""

    def extras(self, whole: bool) -> dict[str, Any]:
        """Fields next to the choices, of a whole answer or of the first chunk."""
        return {}

    def add(self, id: str, prompt_ids: list[int], params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.service.check_tokens(prompt_ids, self.prompt_field)
        priority, salt, now = self.body.priority, self.body.cache_salt or "", time.monotonic()
        answer = Answer(id, prompt_ids, params, tokenizer, arrival=now, priority=priority, cache_salt=salt)
        self.answers.append(answer)
        if not self.accepted.done():
            settings = self.service.settings
            self.accepted.set_result(settings.begin_timeout if params.grammar is None else settings.grammar_timeout)

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
        """What is generated, with the numbers of the prompts, once there is room for it; at the end, logs how much."""
        with self.service.admitted(self.num_prompts * max(1, self.n)):
            await self.prepare()
            async with aclosing(self.service.generate(self.answers)) as generated:
                yield generated
        found = usage(self.answers)
        completions = [completion for answer in self.answers for completion in answer.output.completions]
        self.log |= {name: found[name] for name in ("prompt_tokens", "completion_tokens")}
        self.log["finish"] = ",".join(sorted({str(completion.finish_reason) for completion in completions}))

    async def whole(self) -> dict[str, Any]:
        async with self.deltas() as deltas:
            async for _ in deltas:
                pass
        choices = []
        for number, answer in enumerate(self.answers):
            for one in answer.output.completions:
                delta = Delta(one.index, one.text, one.token_ids, one)
                choice = self.choice(number, delta, first=True, whole=True)
                choices.append({"index": number * self.n + one.index, **choice})
        about = {"choices": choices, "usage": usage(self.answers)}
        return self.head(self.object_name) | about | self.extras(whole=True)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or protocol.StreamOptions()
        counted = options.include_usage
        begun: set[int] = set()
        head = self.head(self.chunk_object_name)
        async with self.deltas() as deltas:
            async for number, delta in deltas:
                index = number * self.n + delta.index
                first = index not in begun
                choice = self.choice(number, delta, first)
                if not first and not any(choice.values()):  # text is held back, for part of a character or of a tag
                    continue
                chunk = head | {"choices": [{"index": index, **choice}]}
                if counted:
                    chunk["usage"] = usage(self.answers) if options.continuous_usage_stats else None
                yield event(chunk if begun else chunk | self.extras(whole=False))
                begun.add(index)
        if counted:
            yield event(head | {"choices": [], "usage": usage(self.answers)})
        yield b"data: [DONE]\n\n"

    def head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": f"anabranch-{__version__}",
        }

    def ending(self, delta: Delta, finish_reason: str | None) -> Choice:
        """A choice's new tokens if the request wants them, and how the choice ended if it has."""
        choice: Choice = {"logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = delta.completion.stop_reason
            if delta.completion.routed_experts is not None:
                choice["routed_experts"] = npy_base64(delta.completion.routed_experts)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


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
            logprobs, limit = (body.top_logprobs or 0) if body.logprobs else None, service.max_model_len
            params = sampling_params(body, model.sampling_defaults, max_tokens=limit, logprobs=logprobs)
            chat = Chat(body)
            return chat, *prepare(service, chat, params)

        chat, prompt, self.prompt_ids, params = await service.prepare(work, "messages", self.num_bytes)
        self.add(self.id, self.prompt_ids, params, model.chat_tokenizer)
        tools, parallel = (chat.offered, chat.tool_choice), chat.parallel_tool_calls
        self.readers = [
            model.parsers.start(*tools, True, prompt, parallel, continued=chat.begun) for _ in self.answers[0].requests
        ]
        self.log["prompt_tokens"] = len(self.prompt_ids)

    def extras(self, whole: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {"prompt_token_ids": self.prompt_ids} if self.body.return_token_ids else {}
        if whole and (found := self.answers[0].output.prompt_logprobs) is not None:
            extras["prompt_logprobs"] = self.logprobs.prompt(found)
        return extras

    def parts(self, delta: Delta) -> list[Part]:
        """The parts in a delta's text; to be called once for each delta, in order."""
        return self.readers[delta.index].feed(delta.text, delta.completion.finish_reason is not None)

    def choice(self, number: int, delta: Delta, first: bool, whole: bool = False) -> Choice:
        message = self.message(self.parts(delta))
        finish_reason: str | None = delta.completion.finish_reason
        if whole:
            for call in message.get("tool_calls", ()):
                del call["index"]
            content = message.pop("content", None if "tool_calls" in message else "")
            message = {"role": "assistant", "content": content, "refusal": None, **message}
        elif first:  # the role comes with the first token, whether it has text already or not
            message = {"role": "assistant", "content": message.pop("content", ""), **message}
        if finish_reason == "stop" and self.readers[delta.index].num_calls:
            finish_reason = "tool_calls"
        choice: Choice = {"message" if whole else "delta": message, **self.ending(delta, finish_reason)}
        if self.body.logprobs and (whole or delta.token_ids):
            choice["logprobs"] = {"content": self.logprobs.chat(new_logprobs(delta))}
        return choice

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


class CompletionAnswer(OpenAIAnswer[protocol.Completion]):
    """Prompts are texts or lists of token ids."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, request: Request, body: protocol.Completion) -> None:
        super().__init__(request, body)
        self.offsets: dict[int, int] = {}
        """By choice: characters of its tokens that have been sent."""
        self.prompts = prompts.split(body.prompt, "prompt")
        self.num_prompts = len(self.prompts)

    async def prepare(self) -> None:
        body, service = self.body, self.service

        def work() -> tuple[SamplingParams, list[list[int]]]:
            fixed: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, "logprobs": body.logprobs}
            if body.echo and body.prompt_logprobs is None:
                fixed["prompt_logprobs"] = body.logprobs
            params = sampling_params(body, service.model.sampling_defaults, **fixed)
            return params, prompts.encode(service, self.prompts, body.add_special_tokens, "prompt")

        params, encoded = await service.prepare(work, "prompt", self.num_bytes)
        for number, ids in enumerate(encoded):
            self.add(f"{self.id}-{number}", ids, params, service.model.tokenizer)

    def choice(self, number: int, delta: Delta, first: bool, whole: bool = False) -> Choice:
        output, body, text = self.answers[number].output, self.body, delta.text
        if first and body.echo:
            prompt = self.prompts[number]
            if not isinstance(prompt, str):
                prompt = self.service.model.tokenizer.decode(prompt, skip_special_tokens=False)
            text = prompt + text
        choice: Choice = {"text": text, **self.ending(delta, delta.completion.finish_reason)}
        if body.logprobs is not None and (whole or delta.token_ids):
            index, token_ids, found = number * self.n + delta.index, delta.token_ids, new_logprobs(delta)
            if index not in self.offsets and body.echo:
                token_ids = output.prompt_ids + token_ids
                found = [*(output.prompt_logprobs or [None] * len(output.prompt_ids)), *found]
            offset = self.offsets.get(index, 0)
            choice["logprobs"] = lists = self.logprobs.completion(token_ids, found, offset)
            self.offsets[index] = offset + sum(map(len, lists["tokens"]))
        if whole and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs.prompt(output.prompt_logprobs or [])
        if body.return_token_ids and first:
            choice["prompt_token_ids"] = output.prompt_ids
        return choice


def usage(answers: list[Answer]) -> dict[str, Any]:
    outputs = [answer.output for answer in answers]
    prompt = sum(len(output.prompt_ids) for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached for output in outputs)},
    }


def new_logprobs(delta: Delta) -> list[Any]:
    return (delta.completion.logprobs or [])[-len(delta.token_ids) :]


def finite(logprob: float) -> float:
    """All others stay unchanged: lm-eval recognizes greedy tokens by equal floats."""
    return max(logprob, LOWEST)


class LogprobWriter:
    """Log probabilities as each route has them, with tokens as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.spellings = tokenizer.spellings[False]

    def text(self, token_id: int) -> str:
        """Part of a character has no text: its bytes are written out, so that different tokens look different."""
        spelling = self.spellings[token_id] or b""
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            spelling = list(self.spellings[token_id] or b"")
            return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": spelling}

        return [
            one(item.token_id, item.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in item.top]}
            for item in logprobs
        ]

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int = 0
    ) -> dict[str, list[Any]]:
        """Four lists, of tokens that begin at this offset in the text of all tokens."""
        tokens = [self.text(token_id) for token_id in token_ids]
        return {
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in logprobs],
            "tokens": tokens,
            "top_logprobs": [None if item is None else self._top(item) for item in logprobs],
        }

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """Best first; of two tokens with the same text the better one. The token itself is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(self.text(token_id), finite(logprob))
        return top

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """In vLLM's form: by token id, with rank and text."""

        def one(item: TokenLogprobs) -> dict[str, Any]:
            ranked = [(item.token_id, item.logprob, item.rank)]
            ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)]
            return {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token)}
                for token, logprob, rank in ranked
            }

        return [None if item is None else one(item) for item in logprobs]


def npy_base64(routed: Sequence[Sequence[Sequence[int]]]) -> str:
    """Routed experts as vLLM sends them: the ids of every token but the last, a .npy of shape [token, layer, k]."""
    num_layers = len(routed[0]) if routed else 0
    top_k = len(routed[0][0]) if num_layers else 0
    shape = (len(routed), num_layers, top_k)
    values = [expert for token in routed for layer in token for expert in layer]
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}"
    # Magic, version, length and header together end at a multiple of 64.
    padded = header + " " * (-(len(header) + 11) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("latin-1")
    return base64.b64encode(head + struct.pack(f"<{len(values)}h", *values)).decode()

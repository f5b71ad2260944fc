"""The routes of OpenAI's dialect, and vLLM's /tokenize and /detokenize."""

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from anabranch.server import protocol, stream
from anabranch.server.body import read_json
from anabranch.server.chat import Chat, render
from anabranch.server.errors import bad_request
from anabranch.server.openai_answer import ChatAnswer, CompletionAnswer, OpenAIAnswer
from anabranch.server.service import Service
from anabranch.server.stream import json_response
from anabranch.text.special_text import Rendered

router = APIRouter()

MAX_DETOKENIZED = 65_536  # tokens, where the context is shorter

BODIES: dict[str, type[msgspec.Struct]] = {
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
        return stream.EventStream(answer.chunks())
    return await stream.whole(request, answer.whole())


@router.get("/v1/models", summary="The models served here")
async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{id:path}", summary="One model")
async def model(request: Request, id: str) -> Response:
    service: Service = request.app.state.service
    service.check_model(id)
    return json_response(_model(service, id))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "anabranch",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
    }


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

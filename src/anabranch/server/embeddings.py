"""OpenAI's /v1/embeddings. The engine schedules an input like a prompt from which nothing is generated."""

from __future__ import annotations

import base64
import time
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from anabranch import embedding
from anabranch.server import prompts, protocol, stream
from anabranch.server.body import read_json
from anabranch.server.errors import bad_request
from anabranch.server.service import Service
from anabranch.text.output import Answer

router = APIRouter()
BODIES: dict[str, type[protocol.Body]] = {"/v1/embeddings": protocol.Embedding}


@router.post("/v1/embeddings", summary="Vectors of texts")
async def embeddings(request: Request) -> Response:
    service, body = await read_json(request, protocol.Embedding, ready=True)
    return await stream.whole(request, embed(service, body, request.state.num_bytes, request.state.log))


async def embed(service: Service, body: protocol.Embedding, num_bytes: int, log: dict[str, Any]) -> dict[str, Any]:
    given, pooling = prompts.split(body.input, "input"), body.pooling or service.settings.pooling
    try:
        embedding.check(pooling, body.dimensions, service.model.config.hidden_size)
    except ValueError as error:  # its message begins with the field's name
        raise bad_request(str(error), str(error).split()[0]) from None
    with service.admitted(len(given), "input"):
        many = await service.prepare(
            lambda: prompts.encode(service, given, body.add_special_tokens, "input", generates=False),
            "input",
            num_bytes,
        )
        id, now, answers = f"embd-{uuid4().hex}", time.monotonic(), []
        for number, ids in enumerate(many):
            service.check_tokens(ids, "input")
            options: dict[str, Any] = {"arrival": now, "priority": body.priority, "pooling": pooling}
            answers.append(Answer(f"{id}-{number}", ids, embedding.PARAMS, None, **options))
        async with aclosing(service.generate(answers)) as generated:
            async for _ in generated:
                pass
    data = [
        {"object": "embedding", "index": number, "embedding": written(answer.output.embedding or b"", body)}
        for number, answer in enumerate(answers)
    ]
    log["prompt_tokens"] = num_tokens = sum(map(len, many))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": service.names[0], "usage": usage}


def written(vector: bytes, body: protocol.Embedding) -> str | list[float]:
    numbers = embedding.shorten(vector, body.dimensions)
    return base64.b64encode(numbers).decode() if body.encoding_format == "base64" else numbers.tolist()

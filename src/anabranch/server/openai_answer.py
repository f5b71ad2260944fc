"""An answer in OpenAI's dialect, whole or in chunks: what chats and completions share."""

from __future__ import annotations

import base64
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from anabranch import __version__
from anabranch.request import Completion, TokenLogprobs
from anabranch.sampling_params import SamplingParams
from anabranch.server.protocol import Sampling
from anabranch.server.service import Service
from anabranch.server.stream import event
from anabranch.text.output import Answer, Delta
from anabranch.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=Sampling)
Choice = dict[str, Any]
LOWEST = -9999.0  # JSON has no -Infinity


class OpenAIAnswer(ABC, Generic[Body]):
    """The answer to one request. Choice p × n + i is the i-th of prompt p."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    prompt_field: ClassVar[str]
    """The body's field that errors about the prompt name."""
    num_prompts = 1

    def __init__(self, service: Service, body: Body, log: dict[str, Any], num_bytes: int = 0) -> None:
        """`num_bytes` is the size of the request's body."""
        self.service, self.body, self.log, self.num_bytes = service, body, log, num_bytes
        self.id = f"{self.id_prefix}-{uuid4().hex}"  # not the request's: a client may send the same one twice
        self.created = int(time.time())
        self.n = body.n or 1
        self.texts = TokenTexts(service.model.tokenizer)
        self.answers: list[Answer] = []

    @abstractmethod
    async def prepare(self) -> None:
        """Add the answers to be generated."""

    @abstractmethod
    def choice(self, number: int, completion: Completion) -> Choice:
        """A finished choice."""

    @abstractmethod
    def chunk_choice(self, number: int, delta: Delta, first: bool) -> Choice | None:
        """What a delta adds to a choice, or begins it with; None if that is nothing."""

    def extras(self, whole: bool) -> dict[str, Any]:
        """Fields next to the choices, of a whole answer or of the first chunk."""
        return {}

    def add(self, id: str, prompt_ids: list[int], params: SamplingParams, tokenizer: Tokenizer) -> None:
        options = {"priority": self.body.priority, "cache_salt": self.body.cache_salt or ""}
        self.answers.append(self.service.answer(id, prompt_ids, params, tokenizer, self.prompt_field, **options))

    async def whole(self) -> dict[str, Any]:
        with self.service.admitted(self.num_prompts * max(1, self.n)):
            await self.prepare()
            async with aclosing(self.service.generate(self.answers)) as generated:
                async for _ in generated:
                    pass
        choices = [
            self.choice(number, completion)
            for number, answer in enumerate(self.answers)
            for completion in answer.output.completions
        ]
        return self.head(self.object_name) | {"choices": choices, "usage": self.log_usage()} | self.extras(whole=True)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        counted = options is not None and options.include_usage
        always = counted and options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        with self.service.admitted(self.num_prompts * max(1, self.n)):
            await self.prepare()
            head = self.head(self.chunk_object_name)
            async with aclosing(self.service.generate(self.answers)) as generated:
                async for number, delta in generated:
                    index = number * self.n + delta.index
                    choice = self.chunk_choice(number, delta, first=index not in begun)
                    if choice is None:
                        continue
                    chunk = head | {"choices": [{"index": index, **choice}]}
                    if counted:
                        chunk["usage"] = usage(self.answers) if always else None
                    yield event(chunk if begun else chunk | self.extras(whole=False))
                    begun.add(index)
        found = self.log_usage()
        if counted:
            yield event(head | {"choices": [], "usage": found})

    def head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": f"anabranch-{__version__}",
        }

    def ending(self, completion: Completion, token_ids: list[int], finish_reason: str | None) -> Choice:
        """A choice's new tokens if the request wants them, and how the choice ended if it has."""
        choice: Choice = {"finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
            if completion.routed_experts is not None:
                choice["routed_experts"] = npy_base64(completion.routed_experts)
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def log_usage(self) -> dict[str, Any]:
        """The usage of all answers, which have ended."""
        found = usage(self.answers)
        completions = [completion for answer in self.answers for completion in answer.output.completions]
        self.log |= {name: found[name] for name in ("prompt_tokens", "completion_tokens")}
        self.log["finish"] = ",".join(sorted({str(completion.finish_reason) for completion in completions}))
        return found


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


class TokenTexts:
    """Tokens as text and as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.spellings = tokenizer.spellings[False]

    def bytes(self, token_id: int) -> bytes:
        return self.spellings[token_id] or b""

    def text(self, token_id: int) -> str:
        """Part of a character has no text: its bytes are written out, so that different tokens look different."""
        spelling = self.bytes(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def finite(logprob: float) -> float:
    """All others stay unchanged: lm-eval recognizes greedy tokens by equal floats."""
    return max(logprob, LOWEST)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """In vLLM's form: by token id, with rank and text."""

    def one(item: TokenLogprobs) -> dict[str, Any]:
        ranked = [(item.token_id, item.logprob, item.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)]
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
            for token, logprob, rank in ranked
        }

    return [None if item is None else one(item) for item in logprobs]


def npy_base64(routed: Sequence[Sequence[Sequence[int]]]) -> str:
    """Routed experts as vLLM sends them: the ids of every token but the last, a .npy of shape [token, layer, k]."""
    num_layers = len(routed[0]) if routed else 0
    top_k = len(routed[0][0]) if num_layers else 0
    shape = (len(routed), num_layers, top_k)
    values = array("h", (expert for token in routed for layer in token for expert in layer))
    if sys.byteorder == "big":
        values.byteswap()
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}"
    # Magic, version, length and header together end at a multiple of 64.
    padded = header + " " * (-(len(header) + 11) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("latin-1")
    return base64.b64encode(head + values.tobytes()).decode()

"""POST /v1/completions: text or token ids in, one prompt or many, its log probabilities if wanted, as lm-eval asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.request import Completion as Finished
from anabranch.request import TokenLogprobs
from anabranch.sampling_params import SamplingParams
from anabranch.server.errors import bad_request
from anabranch.server.openai_answer import Choice, OpenAIAnswer, TokenTexts, finite, prompt_logprobs
from anabranch.server.protocol import MAX_PROMPTS, Completion
from anabranch.server.sampling import grammar, sampling_params
from anabranch.server.service import Service
from anabranch.text.output import Delta

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it


def list_prompts(prompt: str | list[Any]) -> list[Any]:
    """A text, token ids, or a list of either → a list. Long lists are refused before their items are checked."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if not prompt or isinstance(prompt[0], int | float) else prompt
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} go into one request", "prompt")
    return prompts


class CompletionAnswer(OpenAIAnswer[Completion]):
    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, service: Service, body: Completion, log: dict[str, Any], num_bytes: int = 0) -> None:
        super().__init__(service, body, log, num_bytes)
        self.prompts = list_prompts(body.prompt)
        self.num_prompts = len(self.prompts)
        self.logprobs: dict[int, CompletionLogprobs] = {}

    async def prepare(self) -> None:
        body, service = self.body, self.service

        def work() -> tuple[SamplingParams, list[list[int]]]:
            params = sampling_params(
                body,
                service.model.sampling_defaults,
                max_tokens=DEFAULT_MAX_TOKENS,
                logprobs=body.logprobs,
                grammar=grammar(body),
                **({"prompt_logprobs": body.logprobs} if body.echo and body.prompt_logprobs is None else {}),
            )
            self.check_prompts()
            return params, [
                service.encode(one, body.add_special_tokens, "prompt") if isinstance(one, str) else one
                for one in self.prompts
            ]

        params, prompts = await service.prepare(work, "prompt", self.num_bytes)
        for number, ids in enumerate(prompts):
            self.add(f"{self.id}-{number}", ids, params, service.model.tokenizer)

    def check_prompts(self) -> None:
        """400 for what is neither text nor token ids; takes time in proportion to the number of tokens."""
        for number, one in enumerate(self.prompts):
            if isinstance(one, str) and one:
                continue
            if not isinstance(one, list) or not one:
                empty = "is empty: give at least one token" if one in ("", []) else "must be text or token ids"
                raise bad_request(f"prompt[{number}] {empty}", "prompt")
            self.service.check_length(len(one), "prompt")
            if not all(type(token) is int and 0 <= token < 2**31 for token in one):
                raise bad_request(f"prompt[{number}]: token ids must be integers from 0 on", "prompt")

    def text(self, number: int, new: str) -> str:
        """With echo, the prompt's text stands first: as it came, or of token ids, special tokens included."""
        prompt = self.prompts[number] if self.body.echo else ""
        if not isinstance(prompt, str):
            prompt = self.service.model.tokenizer.decode(prompt, skip_special_tokens=False)
        return prompt + new

    def choice(self, number: int, completion: Finished) -> Choice:
        output, body = self.answers[number].output, self.body
        text = self.text(number, completion.text)
        choice: Choice = {"index": number * self.n + completion.index, "text": text, "logprobs": None}
        choice |= self.ending(completion, completion.token_ids, completion.finish_reason)
        if body.logprobs is not None:
            found = completion.logprobs or []
            choice["logprobs"] = self._logprobs(number, completion.index, completion.token_ids, found)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [], self.texts)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_ids
        return choice

    def chunk_choice(self, number: int, delta: Delta, first: bool) -> Choice | None:
        completion = delta.completion
        text = self.text(number, delta.text) if first else delta.text
        choice: Choice = {"text": text, "logprobs": None}
        choice |= self.ending(completion, delta.token_ids, completion.finish_reason)
        if self.body.logprobs is not None and delta.token_ids:
            new = (completion.logprobs or [])[-len(delta.token_ids) :]
            choice["logprobs"] = self._logprobs(number, delta.index, delta.token_ids, new)
        if self.body.return_token_ids and first:
            choice["prompt_token_ids"] = self.answers[number].output.prompt_ids
        useful = first or text or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
        return choice if useful else None

    def _logprobs(self, number: int, index: int, token_ids: list[int], found: list[Any]) -> dict[str, Any]:
        """Of the next tokens of a choice; with echo, the prompt's come first."""
        place = number * self.n + index
        if place not in self.logprobs:
            self.logprobs[place] = CompletionLogprobs(self.texts)
            output = self.answers[number].output
            if self.body.echo:
                token_ids = output.prompt_ids + token_ids
                found = [*(output.prompt_logprobs or [None] * len(output.prompt_ids)), *found]
        return self.logprobs[place].chunk(token_ids, found)


class CompletionLogprobs:
    """The four lists of a choice's log probabilities, as tokens come."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.offset = 0

    def chunk(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, item in zip(token_ids, logprobs, strict=True):
            text = self.texts.text(token_id)
            found["text_offset"].append(self.offset)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if item is None else finite(item.logprob))
            found["top_logprobs"].append(None if item is None else self._top(item))
            self.offset += len(text)
        return found

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """Best first; of two tokens with the same text the better one. The token itself is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(self.texts.text(token_id), finite(logprob))
        return top

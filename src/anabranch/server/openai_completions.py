"""POST /v1/completions: text or token ids in, one prompt or many, its log probabilities if wanted, as lm-eval asks."""

from __future__ import annotations

from typing import Any

from anabranch.request import Completion as Finished
from anabranch.sampling_params import SamplingParams
from anabranch.server import logprobs
from anabranch.server.errors import bad_request
from anabranch.server.openai_answer import Choice, OpenAIAnswer, routed_experts
from anabranch.server.protocol import MAX_PROMPTS, Completion
from anabranch.server.sampling import grammar, sampling_params
from anabranch.server.service import Service
from anabranch.text.output import Delta

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it


def list_prompts(prompt: str | list[Any]) -> list[Any]:
    """A text, token ids, or a list of either → a list. Long lists are refused before they are looked through."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if not prompt or isinstance(prompt[0], int | float) else prompt
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} go into one request", "prompt")
    return prompts


def check_prompts(prompts: list[Any], service: Service) -> None:
    """400 for what is neither text nor token ids; takes as long as there are tokens."""
    for number, one in enumerate(prompts):
        if isinstance(one, str) and one:
            continue
        if not isinstance(one, list) or not one:
            empty = "is empty: give at least one token" if one in ("", []) else "must be text or token ids"
            raise bad_request(f"prompt[{number}] {empty}", "prompt")
        service.check_length(len(one), "prompt")
        if not all(type(token) is int and 0 <= token < 2**31 for token in one):
            raise bad_request(f"prompt[{number}]: token ids must be integers from 0 on", "prompt")


class CompletionAnswer(OpenAIAnswer[Completion]):
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, service: Service, body: Completion, log: dict[str, Any], num_bytes: int = 0) -> None:
        super().__init__(service, body, log, num_bytes)
        self.prompts = list_prompts(body.prompt)
        self.num_prompts = len(self.prompts)
        self.formats: dict[int, logprobs.CompletionLogprobs] = {}

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
            check_prompts(self.prompts, service)
            return params, [
                service.encode(one, body.add_special_tokens, "prompt") if isinstance(one, str) else one
                for one in self.prompts
            ]

        params, prompts = await service.prepare(work, "prompt", self.num_bytes)
        for number, ids in enumerate(prompts):
            self.add(f"{self.id}-{number}", ids, params, service.model.tokenizer)

    def prompt_text(self, number: int) -> str:
        """As it came; token ids as they read, special tokens too."""
        prompt = self.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return self.service.model.tokenizer.decode(prompt, skip_special_tokens=False)

    def choice(self, number: int, finished: Finished) -> Choice:
        output = self.answers[number].output
        text = self.prompt_text(number) + finished.text if self.body.echo else finished.text
        choice: Choice = {"index": number * self.n + finished.index, "text": text, "logprobs": None}
        choice |= end(finished)
        if self.body.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, finished.index, finished.token_ids, finished.logprobs or [])
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt(output.prompt_logprobs or [], self.texts)
        if self.body.return_token_ids:
            choice |= {"token_ids": finished.token_ids, "prompt_token_ids": output.prompt_ids}
        return choice

    def _logprobs(self, number: int, index: int, token_ids: list[int], found: list[Any]) -> dict[str, Any]:
        """Of the next tokens of a choice; with echo, the first ones have the prompt's before them."""
        place = number * self.n + index
        if place not in self.formats:
            self.formats[place] = logprobs.CompletionLogprobs(self.texts)
            output = self.answers[number].output
            if self.body.echo:
                token_ids = output.prompt_ids + token_ids
                found = [*(output.prompt_logprobs or [None] * len(output.prompt_ids)), *found]
        return self.formats[place].chunk(token_ids, found)

    def chunk_choice(self, number: int, delta: Delta, first: bool) -> Choice | None:
        text = self.prompt_text(number) + delta.text if first and self.body.echo else delta.text
        finished = delta.completion
        choice: Choice = {"text": text, "logprobs": None, "finish_reason": None}
        if finished.finish_reason is not None:
            choice |= end(finished)
        if self.body.logprobs is not None and delta.token_ids:
            new = (finished.logprobs or [])[-len(delta.token_ids) :]
            choice["logprobs"] = self._logprobs(number, delta.index, delta.token_ids, new)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.answers[number].output.prompt_ids
        told = first or text or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")
        return choice if told else None


def end(finished: Finished) -> Choice:
    return {
        "finish_reason": finished.finish_reason,
        "stop_reason": finished.stop_reason,
        **routed_experts(finished),
    }

"""Whether requests get the same bits whatever they are computed with: tokens and log probabilities of an engine with
`deterministic`, alone and in other company. The model is the user's, the prompts are random tokens."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anabranch.conformance import Result
from anabranch.engine.plan import held_pages
from anabranch.llm import LLM, RequestOutput, SamplingParams

LENGTHS = (1, 201, 7, 90, 33, 64)
"""Tokens of the prompts; a model with short contexts gets shorter ones. The first three fill the few pages, so
that their answers do not fit beside them."""
ANSWER = 24


def check_determinism(model: str | None, **options: Any) -> Iterator[Result]:
    """A result for each way to compute the requests; `options` are those of an LLM."""
    options = {"deterministic": True, "max_num_seqs": len(LENGTHS), "show_progress": False, **options}
    prompts: list[list[int]] = []
    expected: list[RequestOutput] = []
    params: list[SamplingParams] = []

    def compared(what: str, found: list[RequestOutput], occurred: int, of: str) -> Result:
        faults = [fault for pair in zip(expected, found, strict=True) for fault in differences(*pair)]
        if not occurred:
            faults = [f"not tested: {of}"]
        return Result("determinism", what, f"{occurred} {of}", tuple(faults))

    with LLM(model, prefix_cache=False, **options) as llm:
        config = llm.engine.runner.model.config  # type: ignore[attr-defined]
        prompts += make_prompts(config.vocab_size, llm.engine.config.max_model_len - ANSWER)
        greedy = SamplingParams(temperature=0, logprobs=5, prompt_logprobs=0, max_tokens=ANSWER, ignore_eos=True)
        few = (1, 2, 3)  # tokens to choose from, so that answers repeat themselves and there are drafts
        params += [
            replace(greedy, detokenize=False, temperature=i % 2, seed=i, allowed_token_ids=few)
            for i in range(len(prompts))
        ]
        expected += [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        yield compared(
            "again", [llm.generate([p], one)[0] for p, one in zip(prompts, params)], len(prompts), "requests"
        )
        yield compared("in one batch", llm.generate(prompts, params), len(prompts), "requests at a time")
    for tokens in (len(LENGTHS), 50):
        with LLM(model, prefix_cache=False, **{**options, "max_num_batched_tokens": tokens}) as llm:
            yield compared("prompts in chunks", llm.generate(prompts, params), tokens, "tokens a step")
    params = [replace(one, prompt_logprobs=None) for one in params]  # these would keep prefixes from being reused
    with LLM(model, **options) as llm:
        llm.generate([prompt[: len(prompt) * 2 // 3] or prompt for prompt in prompts], params)
        found = llm.generate(prompts, params)
        yield compared("prefixes from the cache", found, sum(one.num_cached for one in found), "tokens from the cache")
        found = llm.generate(prompts, params)
        yield compared("whole prompts from the cache", found, sum(one.num_cached for one in found), "tokens from it")
    longest = -(-(max(map(len, prompts)) + ANSWER) // 4) * 4
    # A group with a window holds less than the prompt that a step computes, so there must be more of its pages.
    num_pages = (max(held_pages(config, longest, 4)) + 1) * sum(g.policy.per_token for g in config.cache_groups)
    few_pages = {"page_size": 4, "num_pages": num_pages, "max_model_len": longest}
    with LLM(model, **{**options, **few_pages}) as llm:
        found = llm.generate(prompts, params)
        yield compared("few pages", found, llm.engine.scheduler.num_preemptions, "preemptions")
    with LLM(model, **{**options, "speculative": "ngram"}) as llm:
        found = llm.generate(prompts, params)
        yield compared("drafts", found, llm.engine.metrics.draft_tokens, "drafts verified")


def make_prompts(vocabulary: int, longest: int) -> list[list[int]]:
    rng = random.Random(0)
    made = []
    for length in LENGTHS:
        length = max(1, length * min(longest, max(LENGTHS)) // max(LENGTHS))
        made.append([rng.randrange(vocabulary) for _ in range(length)])
    return made


def differences(expected: RequestOutput, found: RequestOutput) -> Iterator[str]:
    """The first, if there is any."""
    for what, ours, theirs in (
        ("prompt", expected.prompt_logprobs, found.prompt_logprobs),
        ("answer", expected.completions[0].logprobs, found.completions[0].logprobs),
    ):
        for i, (one, other) in enumerate(zip(ours or (), theirs or ())):
            if one != other and one is not None and other is not None:
                tokens = f"{one.token_id} and {other.token_id}, {one.logprob:.9g} and {other.logprob:.9g}"
                yield f"a prompt of {len(expected.prompt_ids)} tokens, {what} token {i}: {tokens}"
                return
    if expected.token_ids != found.token_ids:
        yield f"a prompt of {len(expected.prompt_ids)} tokens: {found.token_ids}, not {expected.token_ids}"

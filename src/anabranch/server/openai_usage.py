"""How many tokens an answer took, as OpenAI's dialect tells it."""

from __future__ import annotations

from typing import Any

from anabranch import __version__
from anabranch.engine.output import Answer
from anabranch.server.protocol import StreamOptions

FINGERPRINT = f"anabranch-{__version__}"


def usage(answers: list[Answer], log: dict[str, Any] | None = None) -> dict[str, Any]:
    outputs = [answer.output for answer in answers]
    prompt = sum(len(output.prompt_ids) for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.completions)
    if log is not None:
        log |= {"prompt_tokens": prompt, "completion_tokens": completion}
        log["finish"] = ",".join(sorted({str(one.finish_reason) for output in outputs for one in output.completions}))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached for output in outputs)},
    }


class StreamUsage:
    """When a stream tells its usage: at the end, with every chunk, or not at all."""

    def __init__(self, options: StreamOptions | None, answers: list[Answer]) -> None:
        self.wanted = options is not None and options.include_usage
        self.continuous = self.wanted and options is not None and options.continuous_usage_stats
        self.answers = answers

    def beside(self) -> dict[str, Any]:
        """What a chunk with text carries of it."""
        if self.continuous:
            return {"usage": usage(self.answers)}
        return {"usage": None} if self.wanted else {}

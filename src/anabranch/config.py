"""How the engine runs: one small frozen dataclass. `resolve` turns every "auto" into a value, once, and logs it.

The model's own shape is models.config.ModelConfig; this is what the user decides.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.models.config import ModelConfig
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)

AUTO = 0  # of a number: to be resolved
SERVED_TOKENS = 8192
"""Of a step in a server: others wait while it runs."""
LARGE_MEMORY, LARGE_STEP = 64 << 30, 16384
"""With so many bytes, steps of batches have so many tokens: on an H200 the experts of Qwen3-30B-A3B are 5 % faster than
with half as many, and a step needs 0.7 GB more."""
CHOICES = {
    "graph_mode": ("auto", "full", "none"),
    "prefill_graph": ("auto", "full", "breakable", "piecewise", "none"),
    "compiler": ("inductor", "none"),
    "moe_combine": ("fastest", "fused", "ordered", "unfused"),
    "shared_expert": ("auto", "stream", "inline"),
    "tune": ("off", "fast", "full"),
}
"""Fields of EngineConfig that have one of a few values."""
GENERATION_CONFIGS = ("auto", "none")
GENERATION_CONFIG_HELP = (
    "auto: the model's generation_config.json gives temperature, top_k and the like where a request does not; "
    "none: it does not"
)
FLAG_HELP = {
    "graph_mode": "whether decode steps are captured as graphs",
    "prefill_graph": "whether other steps are captured: one prompt's whole (full), between attentions, or compiled",
    "compiler": "who compiles the pieces of --prefill-graph piecewise",
    "moe_combine": "how experts' rows are summed; ordered: the same bits every time",
    "shared_expert": "where a shared expert runs",
    "tune": "measure the experts' tiles at start if no table fits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str
    dtype: str = "auto"
    load_format: str = "safetensors"
    max_model_len: int = AUTO
    """Tokens a request may have, prompt and answer together. Auto: the model's limit, as far as the KV pool allows."""
    max_num_seqs: int = 512
    """Requests that run at the same time."""
    max_num_batched_tokens: int = AUTO
    """Tokens computed in one step. Auto: the platform's choice for batches that nobody watches (a server asks for
    fewer: others wait while a step runs)."""
    page_size: int = AUTO
    num_pages: int = AUTO
    """KV pages of the pool (of the largest group). Auto: what memory_fraction leaves after weights and workspace."""
    memory_fraction: float = 0.0
    prefix_cache: bool = True
    async_scheduling: bool = True
    """Launch the next step before the last one's tokens are read."""
    graph_mode: str = "auto"
    """full: decode steps are captured and replayed; none: every kernel is launched by itself."""
    prefill_graph: str = "auto"
    """breakable: other steps are captured in pieces, between attentions; full: so, but those of one request as a whole;
    piecewise: they are traced, split at attention, compiled and captured; none: they are not."""
    compiler: str = "inductor"
    """Of piecewise steps. inductor: simple ops are fused; none: the pieces run our kernels as they stand."""
    moe_combine: str = "fastest"
    """How experts' rows come back to their token. fused: added where they are computed, in any order; ordered: the same
    bits every time for the same batch; unfused: written, then summed; auto: whichever is fastest."""
    shared_expert: str = "auto"
    """stream: beside the routed experts, on a second stream; inline: after them; packed: as experts that every token
    visits, where its width is a multiple of theirs; auto: stream up to 256 tokens, else inline."""
    tune: str = "fast"
    """Where no table of measured tiles fits model and GPU, measure at start: for 15 seconds, or in full; off: never."""
    expert_load_interval: int = 16
    """Steps between two copies of the expert histogram, which counts every token, to the host; 0: no histogram."""
    generation_config: str = "auto"
    """auto: temperature, top_k, top_p, min_p and repetition_penalty of the model's generation_config.json hold for
    requests that leave them out; none: they do not. The file's end-of-text tokens hold in both cases."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 0),
            ("page_size", 0),
            ("num_pages", 0),
            ("expert_load_interval", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, not {value!r}")
        for name, known in [*CHOICES.items(), ("generation_config", GENERATION_CONFIGS)]:
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits, not {self.seed!r}")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must lie in (0, 1], not {self.memory_fraction!r}")


def _stream(word: str) -> str:
    words = {"auto": "auto", "on": "stream", "off": "inline"}
    if word not in words:
        raise argparse.ArgumentTypeError(f"auto, on or off, not {word!r}")
    return words[word]


STREAM_FLAG = "--shared-expert-stream"
STREAM_HELP = "--shared-expert in two words: on is stream, off is inline"
STREAM_OPTIONS: dict[str, Any] = {
    "dest": "shared_expert",
    "type": _stream,
    "default": argparse.SUPPRESS,
    "metavar": "{auto,on,off}",
}


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """--moe-combine and the like, for commands that run an engine; without names, all of CHOICES."""
    for name in names or CHOICES:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            choices=CHOICES[name],
            default=EngineConfig.__dataclass_fields__[name].default,
            help=f"{FLAG_HELP[name]} (default %(default)s)",
        )
        if name == "shared_expert":
            parser.add_argument(STREAM_FLAG, help=STREAM_HELP, **STREAM_OPTIONS)


def flags(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_flags` was given on the command line, as fields of EngineConfig."""
    return {name: getattr(options, name) for name in (*CHOICES, "generation_config") if hasattr(options, name)}


def batch_tokens(total: int) -> int:
    """Tokens of a step on a GPU with so many bytes, where throughput is all that counts."""
    return LARGE_STEP if total >= LARGE_MEMORY else SERVED_TOKENS


def resolve(config: EngineConfig, model: ModelConfig, platform: Platform) -> EngineConfig:
    """Every auto that needs only model and platform; the pool's size needs memory and is filled in by the runner."""
    chosen: dict[str, object] = {}
    if config.page_size == AUTO:
        chosen["page_size"] = platform.page_size
    if config.max_num_batched_tokens == AUTO:
        chosen["max_num_batched_tokens"] = platform.batch_tokens
    if config.memory_fraction == 0.0:
        chosen["memory_fraction"] = platform.memory_fraction
    if config.graph_mode == "auto":
        chosen["graph_mode"] = "full" if platform.graph_mode == "full" else "none"
    if config.prefill_graph == "auto":
        suits = {"full": "full", "pieces": "breakable", "none": "none"}[platform.graph_mode]
        chosen["prefill_graph"] = "none" if config.graph_mode == "none" else suits
    for name in ("graph_mode", "prefill_graph"):
        if getattr(config, name) not in ("auto", "none") and not platform.has("graphs"):
            raise ValueError(
                f"{name} {getattr(config, name)}: platform {platform.name!r} captures no graphs; use auto or none"
            )
        if getattr(config, name) == "full" and platform.graph_mode == "pieces":
            raise ValueError(f"{name} full: platform {platform.name!r} captures between attentions only; use auto")
    if config.max_model_len == AUTO:
        chosen["max_model_len"] = model.max_position
    elif config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {config.max_model_len} is more than the model's own limit of {model.max_position} tokens"
        )
    for name, value in chosen.items():
        log.info("%s: auto → %s", name, value)
    return replace(config, **chosen)  # type: ignore[arg-type]

"""How the engine runs: one small frozen dataclass. `loader.resolve` replaces every "auto" by a value, once.

The model's own shape is models.config.ModelConfig; this is what the user decides. Two fields depend on the memory that
the weights leave: `Engine.__init__` fills in `num_pages` and lowers `max_model_len` to what the pages hold. Nothing
else changes a resolved config.
"""

from dataclasses import dataclass
from typing import Any

AUTO = 0  # of a number: to be resolved
AUTO_NUMBERS = ("max_model_len", "max_num_batched_tokens", "page_size", "num_pages")
AT_LEAST = dict.fromkeys(("max_num_seqs", "speculative_tokens", "state_interval", "tensor_parallel_size"), 1) | {
    "data_parallel_size": 1,
    "expert_load_interval": 0,
    "expert_copies": 0,
    "nodes": 1,
    "rebalance_interval": 0,
}
"""Other numbers, and what they must be at least."""
SERVED_TOKENS = 8192
"""Tokens of a step in a server, whose other clients wait while it runs."""
LARGE_MEMORY, LARGE_STEP = 64 << 30, 16384
"""Bytes of memory from which offline batches are run in steps of this many tokens: on an H200 the experts of
Qwen3-30B-A3B are 5 % faster than with half as many, and a step needs 0.7 GB more."""
MAX_DRAFTING = 256
"""Token rows that sample, up to which there is room for all drafts of all requests, whatever max_num_seqs is."""
DTYPES = ("float32", "float16", "bfloat16")
CHOICES = {
    "graphs": ("auto", "full", "pieces", "compiled", "traced", "decode", "none"),
    "moe_combine": ("auto", "fastest", "fused", "ordered", "unfused"),
    "shared_expert": ("auto", "stream", "inline"),
    "tune": ("off", "fast", "full"),
    "quantization": ("none", "fp8", "int4"),
    "kv_cache_dtype": ("auto", "model", "fp8_e4m3"),
    "state_dtype": ("float32", "model"),
    "generation_config": ("auto", "model", "none"),
    "speculative": ("none", "ngram", "mtp"),
}
"""Fields of EngineConfig that have one of a few values."""


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
    """Tokens computed in one step. Auto: 8192 in a server, else what the platform prefers for offline batches."""
    serving: bool = False
    """Clients wait for single tokens, as in a server, so steps are kept short."""
    page_size: int = AUTO
    num_pages: int = AUTO
    """KV pages of the pool (of the largest group). Auto: what memory_fraction leaves after weights and workspace."""
    memory_fraction: float = 0.0
    prefix_cache: bool = True
    state_interval: int = 8192
    """Tokens of a long prompt between two copies of its states for the prefix cache, in models that have states. In the
    35B-A3B of Qwen3.6 a copy takes as much memory as keys and values of 3,000 tokens."""
    async_scheduling: bool = True
    """Launch the next step before the last one's tokens are read."""
    graphs: str = "auto"
    """How steps are captured as graphs and replayed. Mixers are what mixes tokens: attention.

    | value    | decode steps (one token a request) | one prompt's step | other steps            |
    |----------|------------------------------------|-------------------|------------------------|
    | full     | one graph                          | a few graphs      | pieces between mixers  |
    | pieces   | pieces between mixers              | pieces            | pieces                 |
    | compiled | one graph                          | traced, split at the mixers, compiled by   |
    |          |                                    | Inductor, captured in pieces               |
    | traced   | one graph                          | as compiled, but without Inductor          |
    | decode   | one graph                          | not captured      | not captured           |
    | none     | not captured                       | not captured      | not captured           |

    Auto: full, or pieces where the platform cannot capture mixers, or none where it captures nothing."""
    moe_combine: str = "auto"
    """How experts' rows are summed for each token. fused: added where they are computed, in any order; ordered: the
    same bits every time for the same batch; unfused: written, then summed; fastest: one of them, by the number of
    tokens. Auto: fastest."""
    shared_expert: str = "auto"
    """stream: at the same time as the routed experts, on a second stream, in steps of up to 256 tokens; inline: after
    them. Auto: stream where the platform has streams."""
    deterministic: bool = False
    """What a request gets does not depend, to the bit, on what is computed with it: other requests, chunks of prompts,
    cached prefixes, drafts. On one CPU or NVIDIA GPU; see kernels.bind."""
    tune: str = "fast"
    """Where no table of measured tiles fits model and GPU, measure at start: for 15 seconds, or in full; off: never."""
    quantization: str = "none"
    """Quantise the matrices of the layers while a plain checkpoint is loaded. fp8: E4M3 in blocks of 128 × 128; int4:
    in groups of 128 inputs. Embedding, head and routers stay as they are, as does a checkpoint that is quantised
    already."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in. model: the dtype that is computed in; fp8_e4m3: a byte each, with the scales
    that the checkpoint has for them, or 1. Auto: model."""
    state_dtype: str = "float32"
    """What recurrent states are kept in, in models that have them. model: the dtype that is computed in; with bfloat16
    half the memory and half the time to read and write them, but every token rounds the state."""
    speculative: str = "none"
    """Where drafts of next tokens come from, several of which one step verifies. ngram: what followed the last tokens
    where they occurred before. mtp: what the draft layer of the checkpoint predicts. Answers stay the same; steps are
    not launched ahead (see async_scheduling)."""
    speculative_tokens: int = 4
    """The most drafts of one request in a step."""
    expert_load_interval: int = 16
    """Steps between two copies of the expert histogram, which counts every token, to the host; 0: no histogram."""
    generation_config: str = "auto"
    """model: temperature, top_k, top_p, min_p and repetition_penalty of the model's generation_config.json hold for
    requests that leave them out; none: they do not. The file's end-of-text tokens hold in both cases. Auto: model."""
    tensor_parallel_size: int = 1
    """Ranks among which the model is divided, each with a device (on CPUs: a process)."""
    expert_parallel: bool = False
    """Ranks have whole experts, not a part of each."""
    nodes: int = 1
    """Machines that have the ranks, as many each; every one runs the same program, as torchrun starts it."""
    data_parallel_size: int = 1
    """Engines with requests of their own, each with all of the model but the experts, which are divided among all
    ranks; with expert_parallel. Each has tensor_parallel_size ranks."""
    expert_copies: int = 0
    """Experts for which each rank has room beyond its share: copies of those with most tokens."""
    rebalance_interval: int = 0
    """Steps after which experts are divided anew among ranks, by the tokens that each had since; 0: never."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (AT_LEAST | dict.fromkeys(AUTO_NUMBERS, 0)).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, not {value!r}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits, not {self.seed!r}")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must lie in (0, 1], not {self.memory_fraction!r}")
        if self.data_parallel_size > 1 and not self.expert_parallel:
            raise ValueError("data_parallel_size divides experts among ranks: it needs expert_parallel")
        if self.num_ranks % self.nodes:
            raise ValueError(f"{self.num_ranks} ranks cannot be divided among {self.nodes} nodes")

    @property
    def model_options(self) -> dict[str, Any]:
        """Those that say what the model keeps and has: for `read_config` and `load_model`."""
        return {name: getattr(self, name) for name in ("kv_cache_dtype", "state_dtype", "speculative")}

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    def expert_slots(self, num_experts: int) -> int:
        """Room for whole experts of a layer on each rank."""
        return min(num_experts, -(-num_experts // self.num_ranks) + self.expert_copies)

    def expert_share(self, num_experts: int) -> float:
        """Of a layer's experts, the most that a rank has."""
        whole = self.expert_parallel and num_experts
        return self.expert_slots(num_experts) / num_experts if whole else 1 / self.num_ranks

    @property
    def max_samples(self) -> int:
        """Token rows of a step that sample: one for each request, and drafts. Where many requests run, rows are worth
        more to them than to drafts."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + self.max_drafts), MAX_DRAFTING))

    @property
    def max_drafts(self) -> int:
        """The most drafts of one request in a step."""
        return self.speculative_tokens if self.speculative != "none" else 0

    @property
    def num_ahead(self) -> int:
        """Positions after the last token of a step that drafts of this step are computed at."""
        return self.speculative_tokens - 1 if self.speculative == "mtp" else 0


def batch_tokens(total: int) -> int:
    """Tokens of a step of an offline batch on a GPU with `total` bytes."""
    return LARGE_STEP if total >= LARGE_MEMORY else SERVED_TOKENS

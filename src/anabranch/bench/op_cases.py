"""The calls that `anabranch bench ops` times: a function for each op, yielding calls and their bytes and arithmetic.

T tokens, R requests, D hidden width or head dim, H query heads, G key-value heads, V vocabulary, P pages, S slots,
K experts per token, E experts, I expert width.

Shapes are those of the bundled configs, which have figures in targets.json, and of a tiny model.
An op is called as the engine calls it, `ops.NAME(...)`, so that the bound kernel is timed. To add an op, write a
function with `@cases("NAME")`, or with another name and `op="NAME"` for a part of its cases.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from anabranch import ops
from anabranch.bench.records import CONFIGS, TARGETS
from anabranch.layers.config import AttentionConfig, RopeConfig
from anabranch.models.config import LayerConfig, ModelConfig, read_config
from anabranch.moe.config import MoEConfig
from anabranch.ops.weight import Weight
from anabranch.platforms import Platform

COLD_BYTES = 256 << 20
"""The least size of all sets of weights that calls alternate between: larger than any cache."""
ROUTE_TARGETS = {
    torch.bfloat16: {1: 2.0, 64: 2.2, 2048: 3.0, 16384: 5.0, 250_000: 50.0},
    torch.float32: {1: 2.5, 250_000: 90.0},
}
TINY = "tiny"
"""The default without an accelerator: shows that everything runs, and what a call costs there."""
JUDGED_TOKENS = 512
"""Tokens of a batch of experts that are compared with an exact result: the first ones."""


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    config: ModelConfig
    moe: MoEConfig
    experts_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """µs of the op `experts` by number of tokens, on an H200 in bf16: "target", and of vLLM 0.25.1's Triton path."""

    @property
    def heads(self) -> tuple[AttentionConfig, ...]:
        """Each kind of attention layer once."""
        mixers = (layer.mixer for layer in self.config.layers)
        return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, AttentionConfig)))


@cache
def shape(name: str) -> ModelShape:
    config = tiny() if name == TINY else read_config(CONFIGS / name)
    moe = next(layer.moe for layer in config.layers if layer.moe is not None)
    return ModelShape(name, config, moe, TARGETS.get(name, {}).get("experts_us", {}))


def tiny() -> ModelConfig:
    rope = RopeConfig(head_dim=16, rotary_dim=16)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=rope)
    moe = MoEConfig(num_experts=8, top_k=2, width=32, renormalize=True)
    return ModelConfig(
        model_type="qwen3_moe",
        vocab_size=1000,
        hidden_size=64,
        layers=(LayerConfig(mixer=attention, moe=moe),),
        activation="silu",
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=4096,
    )


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The user's choices."""

    platform: Platform
    models: tuple[ModelShape, ...]
    dtype: torch.dtype
    tokens: tuple[int, ...] = ()
    """Empty: each op's own list."""
    zipf: bool = False
    combines: tuple[str, ...] = ("fastest",)

    @property
    def small(self) -> bool:
        """Without an accelerator, few and small sizes are timed."""
        return self.platform.device.type == "cpu"

    def sizes(self, *usual: int) -> tuple[int, ...]:
        return self.tokens or (tuple(size for size in usual if size <= 64) if self.small else usual)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.float32 if self.small else dtype or self.dtype
        return torch.empty(shape, dtype=drawn, device=self.platform.device).normal_().to(dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    size: int
    """The number of tokens or requests."""
    label: str
    """What distinguishes it from other rows of the same model and size."""
    given: Sequence[tuple[Any, ...]]
    """The arguments of each call; calls alternate between them."""
    num_bytes: float
    """The least that a call must read and write."""
    flops: float = 0.0
    expected: Callable[..., Any] | None = None
    """Computes the right result of the first call; None: the op's reference does."""
    judged: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    """Further columns: target_us, vllm_us."""

    def calls(self, function: Callable[..., Any]) -> list[Callable[[], Any]]:
        return [partial(function, *one) for one in self.given]


Make = Callable[[Setting, ModelShape], Iterator[Case]]
CASES: dict[str, Make] = {}
OP_OF: dict[str, str] = {}


def cases(name: str, op: str = "") -> Callable[[Make], Make]:
    def register(function: Make) -> Make:
        OP_OF[name] = op or name
        assert OP_OF[name] in ops.OPS and name not in CASES, name
        CASES[name] = function
        return function

    return register


def num_sets(num_bytes: int) -> int:
    """How many sets of weights of this size are larger than any cache."""
    return max(2, min(16, -(-COLD_BYTES // num_bytes)))


# -- dense ops ---------------------------------------------------------------------------------------------------------


@cases("add_rms_norm")
def add_rms_norm(setting: Setting, model: ModelShape) -> Iterator[Case]:
    width = model.config.hidden_size
    weight_D = setting.normal(width)
    for tokens in setting.sizes(1, 16, 64, 256, 1024, 8192):
        given = [(setting.normal(tokens, width), setting.normal(tokens, width), weight_D, 1e-6) for _ in range(4)]
        yield Case(tokens, f"D {width}", given, 4 * tokens * width * setting.dtype.itemsize)


@cases("sum_add_rms_norm")
def sum_add_rms_norm(setting: Setting, model: ModelShape) -> Iterator[Case]:
    width, k = model.config.hidden_size, model.moe.top_k
    weight_D = setting.normal(width)
    for tokens in setting.sizes(16, 64, 128, 256, 512, 1024, 8192):
        expert_TK = torch.zeros(tokens, k, dtype=torch.int32, device=setting.platform.device)
        given = [
            (setting.normal(tokens, k, width), expert_TK, setting.normal(tokens, width), weight_D, 1e-6)
            for _ in range(4)
        ]
        yield Case(tokens, f"D {width} k {k}", given, tokens * ((k + 3) * width * setting.dtype.itemsize + 4 * k))


@cases("linear")
def linear(setting: Setting, model: ModelShape) -> Iterator[Case]:
    for name, inputs, outputs, out_dtype in projections(model):
        bytes_of_one = inputs * outputs * setting.dtype.itemsize
        weights = [Weight.of(setting.normal(outputs, inputs) / inputs**0.5) for _ in range(num_sets(bytes_of_one))]
        for tokens in setting.sizes(1, 2, 4, 8, 16, 64, 256):
            x_TD = setting.normal(tokens, inputs)
            size = (out_dtype or setting.dtype).itemsize
            yield Case(
                tokens,
                f"{name} {inputs}→{outputs}",
                [(x_TD, weight, None, out_dtype) for weight in weights],
                num_bytes=bytes_of_one + tokens * (inputs * setting.dtype.itemsize + outputs * size),
                flops=2.0 * tokens * inputs * outputs,
            )


def projections(model: ModelShape) -> Iterator[tuple[str, int, int, torch.dtype | None]]:
    """(name, inputs, outputs, dtype of the result) of a model's dense products."""
    width = model.config.hidden_size
    for heads in model.heads:
        q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        yield "qkv", width, q + 2 * kv, None
        yield "o", q, width, None
    yield "router", width, model.moe.num_experts, torch.float32
    yield "lm_head", width, model.config.vocab_size, None


@cases("gated_activation")
def gated_activation(setting: Setting, model: ModelShape) -> Iterator[Case]:
    inner = model.moe.width
    for tokens in setting.sizes(1, 64, 1024, 8192):
        given = [(setting.normal(tokens, 2 * inner), model.config.activation) for _ in range(4)]
        yield Case(tokens, f"I {inner}", given, 3 * tokens * inner * setting.dtype.itemsize)


@cases("add_gated")
def add_gated(setting: Setting, model: ModelShape) -> Iterator[Case]:
    width = model.config.hidden_size
    for tokens in setting.sizes(1, 16, 64, 256, 1024, 8192):
        given = [tuple(setting.normal(tokens, d) for d in (width, width, 1)) for _ in range(4)]
        yield Case(tokens, f"D {width}", given, (3 * width + 1) * tokens * setting.dtype.itemsize)


@cases("sample")
def sample(setting: Setting, model: ModelShape) -> Iterator[Case]:
    device, vocabulary = setting.platform.device, model.config.vocab_size
    for rows in setting.sizes(1, 16, 64, 256):
        logits = [3 * setting.normal(rows, vocabulary, dtype=torch.float32) for _ in range(2)]
        seed_R, position_R = torch.arange(rows, device=device), torch.full((rows,), 7, device=device)
        for label, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("plain", 1.0, 0, 1.0),
            ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
        ):
            rest = (
                torch.full((rows,), temperature, device=device),
                seed_R,
                position_R,
                torch.full((rows,), top_k, dtype=torch.int32, device=device),
                torch.full((rows,), top_p, device=device),
                torch.zeros(rows, device=device),
            )
            given = [(ops.SampleCall(logits_RV, *rest),) for logits_RV in logits]
            yield Case(rows, label, given, 4.0 * rows * vocabulary, judged=temperature == 0)


# -- attention ---------------------------------------------------------------------------------------------------------


@cases("attention")
def attention(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """Decode: every request has one query; prefill: one request with all of its tokens new."""
    decode = (
        ((1, 40), (4, 100)) if setting.small else tuple((r, c) for r in (1, 16, 64, 256) for c in (128, 1024, 8192))
    )
    for heads in model.heads:
        for requests, context in decode:
            if not setting.tokens or requests in setting.tokens:
                yield attention_case(setting, heads, requests, 1, context)
        for tokens in setting.sizes(64, 128, 1024, 4096, 8192):
            yield attention_case(setting, heads, 1, tokens, tokens)


def attention_case(
    setting: Setting, heads: AttentionConfig, requests: int, queries: int, context: int, page_size: int = 16
) -> Case:
    device, item = setting.platform.device, setting.dtype.itemsize
    pages_each = -(-context // page_size)
    seen = min(context, heads.window) if heads.window else context
    per_layer = 2 * requests * pages_each * page_size * heads.num_kv_heads * heads.head_dim * item
    table_RM = torch.randperm(requests * pages_each, device=device).int().view(requests, pages_each)
    start_R = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
    length_R = torch.full((requests,), context, dtype=torch.int32, device=device)
    rest = (table_RM, start_R, length_R, heads.head_dim**-0.5, heads.window, queries)
    given = []
    for _ in range(min(4, num_sets(per_layer))):
        kv = setting.normal(2, requests * pages_each, page_size, heads.num_kv_heads, heads.head_dim)
        q_THD = setting.normal(requests * queries, heads.num_heads, heads.head_dim)
        given.append((ops.AttentionCall(q_THD, kv[0], kv[1], *rest),))
    # A causal mask leaves half of the square; a window leaves each token at most the window.
    pairs = requests * (context * (context + 1) / 2 - (context - seen) * (context - seen + 1) / 2)
    if queries == 1:
        pairs = requests * seen
    window = f", window {heads.window}" if heads.window else ""
    kind = f"decode, context {context}" if queries == 1 else "prefill"
    keys = requests * (seen if queries == 1 else context)
    return Case(
        requests * queries,
        f"{kind}, H {heads.num_heads} G {heads.num_kv_heads} D {heads.head_dim}{window}",
        given,
        num_bytes=item * heads.head_dim * (2 * keys * heads.num_kv_heads + 2 * requests * queries * heads.num_heads),
        flops=4.0 * pairs * heads.num_heads * heads.head_dim,
        judged=queries * context <= 1 << 21,  # the reference holds all scores in fp32
    )


@cases("rope_store")
def rope_store(setting: Setting, model: ModelShape) -> Iterator[Case]:
    device = setting.platform.device
    for heads in model.heads:
        H, G, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
        norm_D = setting.normal(D)
        for tokens in setting.sizes(1, 16, 64, 256, 1024, 8192):
            angle_TF = torch.rand(tokens, D // 2, device=device)
            num_pages = -(-tokens // 16)
            pages = setting.normal(2, num_pages, 16, G, D)
            slot_T = torch.randperm(num_pages * 16, device=device)[:tokens]
            packed = [setting.normal(tokens, H + 2 * G, D) for _ in range(4)]
            rest = (angle_TF.cos(), angle_TF.sin(), norm_D, norm_D, False, 1e-6, pages[0], pages[1], slot_T)
            given = [(ops.RopeStoreCall(qkv[:, :H], qkv[:, H : H + G], qkv[:, H + G :], *rest),) for qkv in packed]
            num_bytes = 2.0 * tokens * (H + 2 * G) * D * setting.dtype.itemsize + 4 * tokens * D
            yield Case(tokens, f"H {H} G {G} D {D}", given, num_bytes)


@cases("latent_attention")
def latent_attention(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """As `attention`. The shape is that of DeepSeek-V2-Lite (or a tiny one) for whatever model, so that it is timed
    once."""
    if model is not setting.models[0]:
        return
    decode = ((4, 100),) if setting.small else tuple((r, c) for r in (1, 16, 64, 256) for c in (1024, 8192, 32768))
    for requests, context in decode:
        if not setting.tokens or requests in setting.tokens:
            yield latent_attention_case(setting, requests, 1, context)
    for tokens in setting.sizes(64, 1024, 4096, 8192):
        yield latent_attention_case(setting, 1, tokens, tokens)


def latent_attention_case(setting: Setting, requests: int, queries: int, context: int, page_size: int = 16) -> Case:
    H, L, F = (2, 16, 8) if setting.small else (16, 512, 64)
    device, item, tokens = setting.platform.device, setting.dtype.itemsize, requests * queries
    pages_each = -(-context // page_size)
    table_RM = torch.randperm(requests * pages_each, device=device).int().view(requests, pages_each)
    start_R = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
    length_R = torch.full((requests,), context, dtype=torch.int32, device=device)
    given = []
    for _ in range(min(4, num_sets(requests * context * (L + F) * item))):
        q_THL, q_turned_THF = setting.normal(tokens, H, L), setting.normal(tokens, H, F)
        rows_PSC = setting.normal(requests * pages_each, page_size, L + F)
        rest = table_RM, start_R, length_R, 192**-0.5, queries
        given.append((ops.LatentAttentionCall(q_THL, q_turned_THF, rows_PSC, *rest),))
    pairs = requests * (context if queries == 1 else context * (context + 1) / 2)
    kind = f"decode, context {context}" if queries == 1 else "prefill"
    return Case(
        tokens,
        f"{kind}, H {H} L {L} F {F}",
        given,
        num_bytes=item * (requests * context * (L + F) + tokens * H * (2 * L + F)),
        flops=2.0 * pairs * H * (2 * L + F),
        judged=tokens * context <= 1 << 21,  # the reference holds all scores in fp32
    )


@cases("expanded_attention", op="attention")
def expanded_attention(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """The prefill of `latent_attention` with keys and values of heads, as layers/latent makes them."""
    if model is not setting.models[0]:
        return
    H, D, E = (2, 12, 8) if setting.small else (16, 192, 128)
    for tokens in setting.sizes(64, 1024, 4096, 8192):
        pages = -(-tokens // 16)
        table, start, length = (
            torch.tensor(x, dtype=torch.int32, device=setting.platform.device)
            for x in ([list(range(pages))], [0, tokens], [tokens])
        )
        given = []
        for _ in range(2):
            k, v = setting.normal(pages, 16, H, D + E).split([D, E], -1)
            q = setting.normal(tokens, H, D)
            given.append((ops.AttentionCall(q, k, v, table, start, length, D**-0.5, max_query=tokens),))
        num_bytes = 2 * setting.dtype.itemsize * tokens * H * (D + E)
        pairs = tokens * (tokens + 1) / 2
        judged = tokens * tokens <= 1 << 21
        yield Case(tokens, f"prefill, H {H} D {D} E {E}", given, num_bytes, 2.0 * pairs * H * (D + E), judged=judged)


# -- the gated delta net -----------------------------------------------------------------------------------------------


@cases("gdn_decode", op="gated_delta")
def gdn_decode(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """Every request has one token. The shape is that of Qwen3.6-35B-A3B (or a tiny one) for whatever model, so that it
    is timed once."""
    for requests in setting.sizes(1, 4, 16, 64, 256) if model is setting.models[0] else ():
        yield gated_delta_case(setting, requests, 1)


@cases("gdn_prefill", op="gated_delta")
def gdn_prefill(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """One request, all of whose tokens are new."""
    for tokens in setting.sizes(64, 512, 2048, 8192) if model is setting.models[0] else ():
        yield gated_delta_case(setting, 1, tokens)


def gated_delta_case(setting: Setting, requests: int, tokens: int, kept: int = 3) -> Case:
    G, H, K, V = (1, 2, 16, 16) if setting.small else (16, 32, 128, 128)
    device, item, channels = setting.platform.device, setting.dtype.itemsize, 2 * G * K + H * V
    start_R = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens
    length_R = torch.full((requests,), 100 if tokens == 1 else tokens, dtype=torch.int32, device=device)
    page_R = torch.randperm(requests, device=device).int()
    calls = []
    for _ in range(num_sets(4 * requests * H * K * V)):
        calls.append(
            ops.GatedDeltaCall(
                setting.normal(requests * tokens, channels + H * V + 2 * H),
                setting.normal(requests, kept, channels),
                setting.normal(requests, H, K, V, dtype=torch.float32) * 0.1,
                page_R,
                start_R,
                length_R,
                setting.normal(channels, kept + 1) * 0.5,
                setting.normal(H, dtype=torch.float32) - 3,
                setting.normal(H, dtype=torch.float32),
                setting.normal(V),
                1e-6,
                G,
                tokens,
            )
        )
    first = calls[0]._replace(conv_PLC=calls[0].conv_PLC.clone(), state_PHKV=calls[0].state_PHKV.clone())
    state = (2 if tokens == 1 else 1) * requests * (4 * H * K * V + kept * channels * item)
    # Of a chunk of 64 and a head: q kᵀ, k kᵀ, an inverse times k and v, q kᵀ times updates; three with the state.
    chunk = 2.0 * 64 * (64 * (3 * K + 2 * V) + 3 * K * V)
    return Case(
        requests * tokens,
        f"G {G} H {H} K {K} V {V}",
        [(call,) for call in calls],
        num_bytes=state + requests * tokens * (channels + 2 * H * V) * item,
        flops=0.0 if tokens == 1 else H * chunk * requests * tokens / 64,
        expected=lambda call: ops.gated_delta.reference(first),  # the state before the timed calls
        judged=tokens <= 512,
    )


# -- experts -----------------------------------------------------------------------------------------------------------


def draw_logits(setting: Setting, num_experts: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uniform routing; or by Zipf's law: the r-th most popular expert is drawn in proportion to 1 / r."""
    device = setting.platform.device
    if not setting.zipf:
        return (2 * torch.randn(tokens, num_experts, device=device)).to(dtype)
    rank = torch.randperm(num_experts, device=device) + 1
    gumbel = -torch.log(-torch.log(torch.rand(tokens, num_experts, device=device)))
    return (gumbel - torch.log(rank.float())).to(dtype)


@cases("route")
def route(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """With a learned scale for each expert, as Gemma 4's router has; in every dtype that logits may have."""
    dtypes = (torch.float32,) if setting.small else (torch.bfloat16, torch.float16, torch.float32)
    E, k = model.moe.num_experts, model.moe.top_k
    scale_E = torch.rand(E, device=setting.platform.device) + 0.5
    options: dict[str, Any] = {"top_k": k, "renormalize": model.moe.renormalize, "expert_scale_E": scale_E}
    for dtype in dtypes:
        for tokens in setting.sizes(1, 2, 16, 64, 256, 1024, 2048, 4096, 16384, 250_000):
            yield Case(
                tokens,
                f"E {E} k {k} {str(dtype).removeprefix('torch.')}",
                [(ops.RouteCall(draw_logits(setting, E, tokens, dtype), **options),) for _ in range(4)],
                num_bytes=tokens * (E * dtype.itemsize + 8 * k),
                more={"target_us": ROUTE_TARGETS.get(dtype, {}).get(tokens) if E == 128 else None},
            )


@cases("experts")
def experts(setting: Setting, model: ModelShape) -> Iterator[Case]:
    """Plan, gate/up, activation, down and combine; routing is given. `error`: against fp64."""
    E, D, inner, item = model.moe.num_experts, model.config.hidden_size, model.moe.width, setting.dtype.itemsize
    elements = 3 * D * inner
    weights = [
        (Weight.of(setting.normal(E, 2 * inner, D) * D**-0.5), Weight.of(setting.normal(E, D, inner) * inner**-0.5))
        for _ in range(min(4, num_sets(E * elements * item)) if setting.small else 4)
    ]
    for tokens in setting.sizes(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        torch.manual_seed(tokens)
        calls = []
        for i in range(4 * len(weights) if tokens <= 64 else len(weights)):
            weight_TK, expert_TK = draw_logits(setting, E, tokens).softmax(-1).topk(model.moe.top_k)
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
            gate_up_EFD, down_EDI = weights[i % len(weights)]
            given = setting.normal(tokens, D), weight_TK, expert_TK.int(), gate_up_EFD, down_EDI
            calls.append(ops.ExpertsCall(*given, model.config.activation))
        hit = sum(call.expert_TK.unique().numel() for call in calls) / len(calls)
        known = {f"{who}_us": us.get(str(tokens)) for who, us in model.experts_us.items()}
        for combine in setting.combines:
            yield Case(
                tokens,
                ("zipf, " if setting.zipf else "") + combine,
                [(call._replace(combine=combine),) for call in calls],
                num_bytes=(hit * elements + 2 * tokens * D) * item,
                flops=2.0 * tokens * model.moe.top_k * elements,
                expected=exact,
                more=known,
            )


def exact(call: ops.ExpertsCall) -> torch.Tensor:
    """In fp64, expert by expert, for the first tokens."""
    x_TD, weight_TK, expert_TK = (x[:JUDGED_TOKENS] for x in call[:3])
    y_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for e in range(call.down_EDI.shape[0]):
        token, slot = (expert_TK == e).nonzero(as_tuple=True)
        if token.numel():
            h = x_TD[token].double() @ call.gate_up_EFD.data[e].double().T
            h = ops.gated_activation.reference(h, call.activation)
            y_TD.index_add_(0, token, h @ call.down_EDI.data[e].double().T * weight_TK[token, slot, None].double())
    return y_TD

"""The demo model as it is trained: qwen2_moe, written so that one GPU trains it fast, saved as Hugging Face names it.

B batch, T tokens, D hidden width, H heads, E experts, K experts a token visits, I expert width.

At this size every expert is computed for every token: all of them together are one gated feed-forward of width E · I,
whose inner channels are multiplied by their expert's routing weight (zero for those not chosen). That is the same
function as dispatching, and two large matrix products instead of many small ones. With `num_experts = 0` the
feed-forward is dense and as wide as what a token of the MoE visits: the model to compare with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

THETA, EPS = 10000.0, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 16
    top_k: int = 2
    expert_width: int = 112
    shared_width: int = 256
    max_position: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def dense(self) -> Shape:
        """Without experts, and with a feed-forward as wide as what a token visits here."""
        return replace(self, num_experts=0, top_k=0, shared_width=self.shared_width + self.top_k * self.expert_width)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        self.qkv = nn.Linear(shape.hidden_size, sum(self.sizes))
        self.out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for part in self.split(self.qkv(x_BTD))]
        q, k = (rotate(part, cos_TD, sin_TD) for part in heads[:2])
        k, v = (part.repeat_interleave(self.shape.num_heads // self.shape.num_kv_heads, 1) for part in (k, heads[2]))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def split(self, qkv: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, ...]:
        return torch.split(qkv, self.sizes, dim)


def rotate(x_BHTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    low, high = x_BHTD.chunk(2, -1)
    return (x_BHTD * cos_TD + torch.cat((-high, low), -1) * sin_TD).to(x_BHTD.dtype)


class FeedForward(nn.Module):
    """The shared expert behind its gate, and the routed ones beside it; or one dense feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, experts, inner = shape.hidden_size, shape.num_experts, shape.expert_width
        self.gate_up = nn.Linear(width, 2 * shape.shared_width, bias=False)
        self.down = nn.Linear(shape.shared_width, width, bias=False)
        if experts:
            self.shared_gate = nn.Linear(width, 1, bias=False)
            self.router = nn.Linear(width, experts, bias=False)
            self.gate_EID = nn.Parameter(torch.empty(experts, inner, width))
            self.up_EID = nn.Parameter(torch.empty(experts, inner, width))
            self.down_EDI = nn.Parameter(torch.empty(experts, width, inner))
        self.wrong_experts = False
        """Send every token to the neighbours of its experts: what the routing is worth."""

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, losses: balance and z, share of the tokens at each expert)."""
        gate, up = self.gate_up(x_BTD).chunk(2, -1)
        shared_BTD = self.down(F.silu(gate) * up)
        if not self.shape.num_experts:
            return shared_BTD, x_BTD.new_zeros(2, dtype=torch.float32), x_BTD.new_zeros(0)
        weight_BTE, losses, load_E = self.route(x_BTD)
        inner = F.silu(F.linear(x_BTD, self.gate_EID.flatten(0, 1))) * F.linear(x_BTD, self.up_EID.flatten(0, 1))
        inner = inner.unflatten(-1, (self.shape.num_experts, -1)) * weight_BTE.unsqueeze(-1).to(inner.dtype)
        routed_BTD = F.linear(inner.flatten(-2), self.down_EDI.transpose(0, 1).flatten(1))
        return torch.sigmoid(self.shared_gate(x_BTD)) * shared_BTD + routed_BTD, losses, load_E

    def route(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_BTE = F.linear(x_BTD.float(), self.router.weight)
        prob_BTE = logits_BTE.softmax(-1)
        best_BTK, expert_BTK = prob_BTE.topk(self.shape.top_k, -1)
        chosen_BTE = torch.zeros_like(prob_BTE).scatter(-1, expert_BTK, 1.0)
        load_E = chosen_BTE.mean((0, 1)) / self.shape.top_k
        balance = self.shape.num_experts * (load_E * prob_BTE.mean((0, 1))).sum()
        z = logits_BTE.logsumexp(-1).square().mean()
        weight_BTK = best_BTK / best_BTK.sum(-1, keepdim=True)
        if self.wrong_experts:
            expert_BTK = (expert_BTK + self.shape.num_experts // 2) % self.shape.num_experts
        weight_BTE = torch.zeros_like(prob_BTE).scatter(-1, expert_BTK, weight_BTK)
        return weight_BTE, torch.stack((balance, z)), load_E


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(shape.hidden_size, EPS)
        self.attention = Attention(shape)
        self.before_feed_forward = nn.RMSNorm(shape.hidden_size, EPS)
        self.feed_forward = FeedForward(shape)


class Model(nn.Module):
    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, EPS)
        frequency = THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle_TD = torch.outer(torch.arange(shape.max_position), frequency).repeat(1, 2)
        self.register_buffer("cos", angle_TD.cos(), persistent=False)
        self.register_buffer("sin", angle_TD.sin(), persistent=False)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            into_residual = ".out." in name or ".down" in name
            scale = 0.02 * ((2 * self.shape.num_layers) ** -0.5 if into_residual else 1.0)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def forward(self, token_BT: torch.Tensor, target_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(cross-entropy, losses of the routers summed over layers, load_LE)."""
        x_BTD = self.embed(token_BT)
        cos, sin = self.cos[: token_BT.shape[1]], self.sin[: token_BT.shape[1]]
        losses, loads = [], []
        for layer in self.layers:
            x_BTD = x_BTD + layer.attention(layer.before_attention(x_BTD), cos, sin)
            y_BTD, loss, load_E = layer.feed_forward(layer.before_feed_forward(x_BTD))
            x_BTD = x_BTD + y_BTD
            losses.append(loss)
            loads.append(load_E)
        logits = F.linear(self.norm(x_BTD), self.embed.weight).float()
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), target_BT.flatten())
        return cross_entropy, torch.stack(losses).sum(0), torch.stack(loads)


def count(model: Model) -> dict[str, int]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts, total = model.shape.num_experts, sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if name.endswith(("_EID", "_EDI")))
    idle = routed * (experts - model.shape.top_k) // experts if experts else 0
    return {"total": total, "active": total - idle, "embedding": sizes["embed.weight"]}


def tensors(model: Model) -> dict[str, torch.Tensor]:
    """Under Hugging Face's names."""
    found = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for layer_id, layer in enumerate(model.layers):
        here = f"model.layers.{layer_id}"
        attention, ffn = layer.attention, layer.feed_forward
        found[f"{here}.input_layernorm.weight"] = layer.before_attention.weight
        found[f"{here}.post_attention_layernorm.weight"] = layer.before_feed_forward.weight
        found[f"{here}.self_attn.o_proj.weight"] = attention.out.weight
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", attention.split(getattr(attention.qkv, kind), 0)):
                found[f"{here}.self_attn.{name}_proj.{kind}"] = part
        found[f"{here}.mlp.gate.weight"] = ffn.router.weight
        found[f"{here}.mlp.shared_expert_gate.weight"] = ffn.shared_gate.weight
        for name, weight in zip(("gate", "up"), ffn.gate_up.weight.chunk(2)):
            found[f"{here}.mlp.shared_expert.{name}_proj.weight"] = weight
        found[f"{here}.mlp.shared_expert.down_proj.weight"] = ffn.down.weight
        for name, stack in (("gate", ffn.gate_EID), ("up", ffn.up_EID), ("down", ffn.down_EDI)):
            for expert_id, weight in enumerate(stack):
                found[f"{here}.mlp.experts.{expert_id}.{name}_proj.weight"] = weight
    return found


def config(shape: Shape) -> dict[str, Any]:
    """config.json. The weights are stored in bfloat16 to be small; float32 is what they are to be computed in: at this
    width it is the faster of the two on a CPU, and the same tokens come out on every machine."""
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
        "intermediate_size": shape.shared_width,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def save(model: Model, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model.shape), indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0, "do_sample": True}
    generation |= {"temperature": 0.7, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in tensors(model).items()}
    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )

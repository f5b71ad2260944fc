"""Look-ups in the JSON files of a model folder, with the errors built in: one line naming the file and the key.

Knows JSON, types and upper bounds; does not know families. Pure Python without torch.
"""

import json
from pathlib import Path
from typing import Any

LIMITS = {
    "num_hidden_layers": 1024,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 256,
    "moe_num_experts": 4096,
    "moe_num_shared_experts": 256,
    "moe_k": 256,
    "num_experts_per_tok": 256,
    "top_k_experts": 256,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_global_key_value_heads": 4096,
    "head_dim": 4096,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "global_head_dim": 4096,
    "q_lora_rank": 1 << 18,
    "kv_lora_rank": 1 << 18,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 21,
    "moe_intermediate_size": 1 << 21,
    "shared_expert_intermediate_size": 1 << 21,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
}
"""The most a config may ask for, several times what any published model has: a damaged or hostile file is refused
before anything is built from it."""


class ConfigError(ValueError):
    """A config this engine cannot serve; the message is one line with the file, the key and the reason."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError if there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; is {path.parent} a model folder?") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as JSON: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}; truncated? download it again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return raw


def shown(value: object) -> str:
    """A value for a message: its beginning, on one line."""
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 80 else f"{text[:80]}…"


class Keys:
    """A raw config; every look-up names the file and the key when it fails. A null counts as absent."""

    def __init__(self, raw: dict[str, Any], path: Path, name: str = "") -> None:
        """`name`: the key that holds this object; none: it is the file's own."""
        self.raw = raw
        self.path = path
        self.name = name

    def fail(self, reason: str) -> ConfigError:
        where = f"{self.path}: {self.name!r}" if self.name else self.path
        return ConfigError(f"{where}: {reason}")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of several synonyms that is present and not null."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return default

    def _required(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names, default=default)
        if value is None:
            raise self.fail(f"key {' or '.join(map(repr, names))} is missing")
        return value

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        value: int = self._required(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"{names[0]!r} must be an integer of at least {minimum}, not {shown(value)}")
        if value > LIMITS.get(names[0], value):
            raise self.fail(f"{names[0]!r} = {shown(value)} is more than the {LIMITS[names[0]]} supported")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._required(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.fail(f"{names[0]!r} must be a positive number, not {shown(value)}")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self.fail(f"{name!r} must be an object, not {shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.fail(f"{name!r} must be true or false, not {shown(value)}")
        return value

    def refuse_unless(self, name: str, allowed: tuple[object, ...], reason: str) -> None:
        if self.raw.get(name) not in (None, *allowed):
            raise self.fail(f"{name!r} = {shown(self.raw[name])}: {reason}")

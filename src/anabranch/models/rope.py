"""How positions turn queries and keys: the rope keys of config.json → one RopeConfig.

Which key wins and what an absent one means is as in transformers; what transformers cannot run is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anabranch.layers.config import RopeConfig
from anabranch.models.keys import Keys, shown

KINDS = ("default", "linear", "llama3", "proportional", "yarn", "longrope")


def read_rope(keys: Keys, head_dim: int, default_theta: float, default_rotary: float | None = None) -> RopeConfig:
    """`rope_scaling` where there is one, else `rope_parameters`: one replaces the other whole, as in transformers.
    Both fall back on top-level keys. `default_rotary`: of a family that turns a part of each head, the share of it."""
    scaling, parameters = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    name = "rope_scaling" if scaling else "rope_parameters"
    chosen = Keys({**(scaling or parameters)}, keys.path, name)
    if any(isinstance(value, dict) for value in chosen.raw.values()):
        raise chosen.fail("rope parameters for each type of layer are not supported in this family")
    if chosen.get("rope_theta") is None:
        chosen.raw["rope_theta"] = keys.get("rope_theta", default=default_theta)
    theta = chosen.number("rope_theta")
    lost = parameters.get("rope_theta")
    if scaling and lost is not None and lost != theta:
        raise keys.fail(
            f"'rope_scaling' replaces 'rope_parameters', and its 'rope_theta' = {shown(lost)} would be lost: "
            "write 'rope_theta' into 'rope_scaling', or everything into one of the two"
        )
    # The order of transformers: here the top-level key comes first.
    original = keys.get("original_max_position_embeddings", default=chosen.get("original_max_position_embeddings"))
    chosen.raw["original_max_position_embeddings"] = original or keys.get("max_position_embeddings")
    return _read(keys, chosen, head_dim, default_rotary)


def read_rope_of_layer_type(keys: Keys, layer_type: str, head_dim: int, default: Mapping[str, Any]) -> RopeConfig:
    """Where `rope_scaling` or `rope_parameters` hold an object for each type of layer, with nothing left out.
    `default`: where there is neither."""
    name = "rope_scaling" if keys.get("rope_scaling") is not None else "rope_parameters"
    found = keys.mapping(name) if keys.get(name) is not None else default
    parameters = found.get(layer_type)
    if not isinstance(parameters, dict):
        raise keys.fail(f"{name!r} must hold an object for {layer_type!r}, not {shown(parameters)}")
    return _read(keys, Keys({**parameters}, keys.path, name), head_dim)


def _read(keys: Keys, found: Keys, head_dim: int, default_rotary: float | None = None) -> RopeConfig:
    kind = found.get("rope_type", "type", default="default")
    if kind == "dynamic":
        raise found.fail(
            "rope type 'dynamic' is not supported: past 'max_position_embeddings' tokens it turns all keys anew with "
            "every token, which a cache of keys cannot follow; up to there it equals 'default', which may be written"
        )
    if kind not in KINDS:
        raise found.fail(f"rope type {shown(kind)} is not supported (supported: {', '.join(KINDS)})")
    share, partial = 1.0, default_rotary is not None
    if kind != "default" or partial:
        found.raw["partial_rotary_factor"] = found.get(
            "partial_rotary_factor", default=keys.get("partial_rotary_factor", default=default_rotary or 1.0)
        )
        share = found.number("partial_rotary_factor")
        if partial and int(head_dim * share) % 2 | (int(head_dim * share) == 0):
            raise found.fail(f"'partial_rotary_factor' = {share} of 'head_dim' = {head_dim} must be an even number")
        if share > 1 or (share < 1 and partial == (kind == "proportional")):
            raise found.fail(f"'partial_rotary_factor' = {share} is not supported with rope type {kind!r}")
    rope = RopeConfig(
        kind=kind,
        theta=found.number("rope_theta"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * share) // 2 * 2,
    )
    if kind == "default":
        return rope
    if kind == "longrope":
        return _longrope(keys, found, rope)
    rope = replace(rope, factor=found.number("factor", default=1.0 if kind == "proportional" else None))
    if kind == "yarn":
        return _yarn(found, rope)
    if kind != "llama3":
        return rope
    low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
    if high <= low:
        raise found.fail(f"'high_freq_factor' = {high} must be more than 'low_freq_factor' = {low}")
    original = found.integer("original_max_position_embeddings")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position=original)


def _yarn(found: Keys, rope: RopeConfig) -> RopeConfig:
    if rope.theta <= 1:
        raise found.fail(f"'rope_theta' = {rope.theta} must be more than 1 with rope type 'yarn'")

    def magnitude(name: str | None = None) -> float:
        return 1 + 0.1 * (found.number(name) if name else 1.0) * math.log(max(rope.factor, 1.0))

    if found.get("attention_factor") is not None:
        attention_factor = found.number("attention_factor")
    elif found.get("mscale") and found.get("mscale_all_dim"):
        attention_factor = magnitude("mscale") / magnitude("mscale_all_dim")
    else:
        attention_factor = magnitude()
    return replace(
        rope,
        original_max_position=found.integer("original_max_position_embeddings"),
        beta_fast=found.number("beta_fast", default=32.0),
        beta_slow=found.number("beta_slow", default=1.0),
        truncate="truncate" not in found.raw or found.flag("truncate", False),
        attention_factor=attention_factor,
    )


def _longrope(keys: Keys, found: Keys, rope: RopeConfig) -> RopeConfig:
    """Where no sequence is so long that its keys would have to be turned anew, with the other factors."""
    longest = keys.integer("max_position_embeddings")
    original = found.integer("original_max_position_embeddings", minimum=2)
    known = found.get("factor") is not None or found.get("attention_factor") is not None
    if longest > original:
        raise found.fail(
            "rope type 'longrope' is supported up to 'original_max_position_embeddings' tokens: a longer sequence "
            "turns all its keys by other factors, which a cache of keys cannot follow; set 'max_position_embeddings' = "
            f"{original}" + ("" if known else f", and 'factor' = {longest / original:g}, which follows from it")
        )
    factors = found.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rope.rotary_dim // 2:
        raise found.fail(f"'short_factor' must be a list of {rope.rotary_dim // 2} numbers, not {shown(factors)}")
    if found.get("attention_factor") is not None:
        attention_factor = found.number("attention_factor")
    else:
        factor = found.number("factor", default=1.0)
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    numbers = tuple(Keys({"short_factor": one}, keys.path, found.name).number("short_factor") for one in factors)
    return replace(rope, factors=numbers, attention_factor=attention_factor)

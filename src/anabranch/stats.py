"""The numbers of several engines as those of one."""

from collections.abc import Sequence
from typing import Any

NOW = ("running", "waiting", "kv_usage")
"""What an engine that has ended has no more of."""
MEANS = ("kv_usage",)
LEAST = ("max_model_len",)


def combined(parts: Sequence[dict[str, Any]], ended: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The sum of stats of engines. Of those that have ended, what they have counted is in it: totals never fall."""
    rest = [{name: value for name, value in part.items() if name not in (*NOW, *LEAST)} for part in ended]
    found = {name: [part[name] for part in (*parts, *rest) if name in part] for name in parts[0]}
    total = {name: _sum(values) for name, values in found.items()}
    total |= {name: total[name] / len(found[name]) for name in MEANS if name in total}
    total |= {name: min(found[name]) for name in LEAST if name in total}
    if "spec_decode_acceptance" in total:
        total["spec_decode_acceptance"] = total["spec_decode_accepted_tokens"] / max(
            1, total["spec_decode_draft_tokens"]
        )
    return total


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers; of lists, element by element; of dictionaries, key by key. Bounds of histograms and what is no number
    are the first's."""
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        found = {key: [value[key] for value in values if key in value] for key in keys}
        return {key: some[0] if key == "bounds" else _sum(some) for key, some in found.items()}
    if isinstance(first, list):
        return [_sum(column) for column in zip(*filter(None, values))]
    return sum(values) if isinstance(first, int | float) else first

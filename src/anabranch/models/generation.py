"""generation_config.json: how the model's authors want its tokens chosen where a request does not say.

Pure Python without torch. Which tokens end a text is read from the same file by `config`.
"""

from pathlib import Path
from typing import Any

from anabranch.models.keys import Keys, read_json
from anabranch.sampling_params import SamplingParams

FILE = "generation_config.json"
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""What has no meaning with `do_sample: false`."""
NAMES = (*SAMPLED, "repetition_penalty")


def read_sampling_defaults(folder: str | Path, generation_config: str = "auto") -> dict[str, Any]:
    """Fields of SamplingParams for requests that leave them out; none with `generation_config` none or without a file.

    An explicit `do_sample: false` is greedy, as in transformers: temperature 0, and no other choice among tokens.
    Without the key the file's numbers hold. ConfigError if one of them is out of range."""
    path = Path(folder) / FILE
    if generation_config == "none" or not path.exists():
        return {}
    keys = Keys(read_json(path), path)
    found = {name: keys.get(name) for name in NAMES if keys.get(name) is not None}
    for name, value in found.items():
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise keys.fail(f"{str(error)[:200]}; correct it, or ignore the file (--generation-config none)") from None
    if keys.flag("do_sample", True):
        return found
    return {name: value for name, value in found.items() if name not in SAMPLED} | {"temperature": 0.0}

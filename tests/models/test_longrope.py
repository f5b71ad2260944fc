"""Both sides of longrope's original context: up to it ours computes what transformers computes; past it transformers
turns all keys of a sequence by other factors, and ours refuses the config and says what to write instead."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.models.keys import ConfigError
from tests.models import tiny

ORIGINAL, LONGEST = 48, 192


def test_the_cure_that_is_named_gives_the_same_model(tmp_path: Path) -> None:
    base = next(case for case in tiny.CASES if case.name == "mixtral_longrope")
    rope = {key: value for key, value in tiny.LONGROPE.items() if key != "factor"}  # it follows from the lengths
    rope |= {"original_max_position_embeddings": ORIGINAL}
    settings = base.settings | {"max_position_embeddings": LONGEST, "rope_parameters": rope}
    folder = tiny.save(replace(base, settings=settings), tmp_path / "model")
    tokens = tiny.prompt(base)
    judge = tiny.Judge(folder, base.model_type)
    up_to_there, past_it = judge.logits(tokens[:ORIGINAL]), judge.logits(tokens[: ORIGINAL + 1])
    assert (past_it[:-1] - up_to_there).abs().max() > 0.1  # all keys were turned anew

    with pytest.raises(ConfigError) as refused:
        load_model(folder, dtype="float32")
    longest, factor = re.findall(r"set 'max_position_embeddings' = (\d+), and 'factor' = (\d+)", str(refused.value))[0]
    assert (int(longest), int(factor)) == (ORIGINAL, LONGEST // ORIGINAL)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = int(longest)
    config["rope_scaling"]["factor"] = int(factor)
    (folder / "config.json").write_text(json.dumps(config))
    ours = SingleSequence(load_model(folder, dtype="float32"), 64)
    found = torch.cat([ours.forward(tokens[:40]), ours.forward(tokens[40:ORIGINAL])])
    torch.testing.assert_close(found, up_to_there, rtol=0, atol=1e-4)

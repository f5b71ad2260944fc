"""Time a prefill with latent attention: queries in the latent space against keys and values expanded to heads.

    python benchmarks/latent_prefill.py [--tokens 2048] [--context 0] [--repeats 3] [--dtype float32]

One layer with the attention of DeepSeek-V2-Lite (16 heads, 576 numbers kept of a token) and few experts, with random
weights, on the default device. On a CPU, times are of the processor: OMP_NUM_THREADS=1 makes them those of a clock.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from anabranch import platforms
from anabranch.bench.records import CONFIGS
from anabranch.engine.single import SingleSequence
from anabranch.layers.config import LatentConfig
from anabranch.loader.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=0, help="tokens before these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    config = json.loads((CONFIGS / "deepseek-v2-lite" / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"vocab_size": 1024}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = load_model(Path(folder), dtype=options.dtype, load_format="dummy")
    platform = platforms.current()
    clock = time.process_time if platform.device.type == "cpu" else time.perf_counter
    tokens = torch.randint(0, 1024, (options.context + options.tokens,)).tolist()
    for _ in range(options.repeats):
        for name, most in (("absorbed", sys.maxsize), ("expanded", 0)):
            sequence = SingleSequence(model, len(tokens))
            if options.context:
                sequence.forward(tokens[: options.context], all_logits=False)
            with mock.patch.object(LatentConfig, "most_absorbed", most):
                platform.synchronize()
                begin = clock()
                sequence.forward(tokens[options.context :], all_logits=False)
                platform.synchronize()
            print(f"{name}: {1e3 * (clock() - begin):.1f} ms", flush=True)


if __name__ == "__main__":
    main()

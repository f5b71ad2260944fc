"""What states of gated delta nets in the model's dtype cost in precision, against states in fp32.

    python benchmarks/state_error.py qwen3.6-35b-a3b --json FILE
    python benchmarks/state_error.py FOLDER --tokens 64 --every 16             without a GPU

A model is a config that comes with `bench offline`, or a folder; without weights in it they are drawn as
benchmarks/make_checkpoint.py does, on the device: what layers add to a row is then about half as long as its token's
embedding, and states remember from one token to a thousand. (With dummy weights layers add next to nothing, and logits
are equal to the bit.) Logits have a variance of 1; where a model's are larger, so is its divergence.

Several sequences of the same tokens (random, or ids in a JSON file), one token a step, so that a state is rounded after
each, as in decoding; steps are captured where the platform captures graphs. Of the tokens up to each mark: the relative
error of their logits, the mean KL divergence in nats and the share of equal best tokens; and the relative error of the
states at the mark, of the layer where it is largest. For comparison, the same of fp32 states with the tokens between
two marks in one step, as in a prompt: what the order of sums changes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anabranch import platforms
from anabranch.bench.records import bundled, commit
from anabranch.compile.capture import Captured
from anabranch.engine import kv_tensors
from anabranch.engine.batch import StepMaker
from anabranch.engine.scheduler import Sequence, Share
from anabranch.layers.step import Step
from anabranch.loader.load import load_model
from anabranch.models.config import ModelConfig, read_config
from anabranch.models.decoder import Decoder
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

PAGE_SIZE = 16


class Follower:
    """The sequences, with states as `config` says. All share the model: only what they keep differs."""

    def __init__(self, model: Decoder, config: ModelConfig, tokens: list[list[int]]) -> None:
        self.model, weight, groups = model, model.embed_tokens.weight, config.cache_groups
        self.sequences = []
        for i, ids in enumerate(tokens):
            sequence = Sequence(Request(id=str(i), prompt_ids=tuple(ids), params=SamplingParams()), i)
            sequence.slot = i
            self.sequences.append(sequence)
        length = len(tokens[0])
        count = -(-length // PAGE_SIZE)
        states = [index for index, group in enumerate(groups) if not group.policy.per_token]
        self.layers = [layer for index in states for layer in groups[index].layers]
        num_pages = [len(tokens) * (1 if index in states else count) for index in range(len(groups))]
        self.pages = {
            str(i): [
                [i] * count if index in states else list(range(i * count, (i + 1) * count))
                for index in range(len(groups))
            ]
            for i in range(len(tokens))
        }
        self.kv = kv_tensors.allocate(config, num_pages, PAGE_SIZE, weight.dtype, weight.device)
        self.steps = StepMaker(len(groups), len(tokens), length, PAGE_SIZE, weight.device, states=states)

    def compute(self, step: Step) -> torch.Tensor:
        return self.model.logits(self.model(step, self.kv))

    def shares(self, begin: int, end: int) -> list[Share]:
        return [Share(sequence, begin, end, end - begin) for sequence in self.sequences]

    def prompt(self, begin: int, end: int) -> torch.Tensor:
        """Logits of these tokens, [tokens, sequences, V], in one step."""
        step = self.steps.make([share._replace(num_samples=1) for share in self.shares(begin, end)], self.pages.get)
        return self.compute(step).unflatten(0, (len(self.sequences), -1)).transpose(0, 1)

    def decoder(self, platform: platforms.Platform) -> Callable[[int, int], torch.Tensor]:
        """Like `prompt`, one token a step."""
        steps, count = self.steps, len(self.sequences)
        captured = None
        if platform.has("graphs"):
            captured = Captured(
                platform,
                platform.make_graph_pool(),
                steps.padding(count),
                lambda packed_3R: self.compute(steps.unpack(packed_3R, steps.width, padded=True)),
            )

        def step(place: int) -> torch.Tensor:
            rows = steps.host_step(self.shares(place, place + 1), self.pages.get)
            if captured is None:
                return self.compute(steps.unpack_rows(rows))
            return captured.replay(steps.pack(rows, count)).clone()

        return lambda begin, end: torch.stack([step(place) for place in range(begin, end)])

    def state(self, layer: int) -> torch.Tensor:
        return self.kv[layer][1].double()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def compare(logits_TSV: torch.Tensor, exact_TSV: torch.Tensor) -> dict[str, float]:
    """A token of all sequences at a time, for the memory that it takes."""
    sums = torch.zeros(4, dtype=torch.float64, device=logits_TSV.device)
    for logits, exact in zip(logits_TSV, exact_TSV, strict=True):
        logits, exact = logits.double(), exact.double()
        log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
        kl, same = (log_p.exp() * (log_p - log_q)).sum(), (logits.argmax(-1) == exact.argmax(-1)).sum()
        sums += torch.stack([(logits - exact).square().sum(), exact.square().sum(), kl, same.double()])
    difference, norm, kl, same = sums.tolist()
    rows = logits_TSV.shape[0] * logits_TSV.shape[1]
    return {"logits": (difference / max(norm, 1e-60)) ** 0.5, "kl": kl / rows, "same_best": same / rows}


def fill(model: Decoder) -> None:
    from make_checkpoint import draw, embedding_std  # type: ignore[import-not-found]

    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        std = embedding_std(model.config) if name.startswith("embed_tokens.") else None
        parameter.copy_(draw(name.removesuffix(".data"), tuple(parameter.shape), std, device, generator))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each sequence (default 512)")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="at a time (default 8)")
    parser.add_argument("--every", type=int, default=64, metavar="N", help="tokens between two marks (default 64)")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of token ids (default: random)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    folder = options.model if Path(options.model).is_dir() else bundled(options.model, "dummy")
    has_weights = any(Path(folder).glob("*.safetensors"))

    model = load_model(folder, dtype=options.dtype, load_format="safetensors" if has_weights else "dummy")
    if not has_weights:
        fill(model)
    count, length, rng = options.sequences, options.tokens, random.Random(0)
    ids = [rng.randrange(model.config.vocab_size) for _ in range(count * length)]
    if options.ids is not None:
        ids = json.loads(options.ids.read_text())
        length = min(length, len(ids) // count)
    tokens = [ids[i * length : (i + 1) * length] for i in range(count)]
    exact = Follower(model, model.config, tokens)
    if not exact.layers:
        parser.error(f"{options.model} has no layers with states")
    rounded = Follower(model, read_config(folder, state_dtype="model"), tokens)
    others = Follower(model, model.config, tokens)
    platform = platforms.current()
    compute_exact = exact.decoder(platform)
    compared = {"model": (rounded, rounded.decoder(platform)), "other sums": (others, others.prompt)}
    rows: list[dict[str, Any]] = []
    print(f"{'tokens':>7} {'states':>12} {'logits':>9} {'KL':>10} {'same best':>10} {'state':>9}")
    for begin in range(0, length, options.every):
        end = min(length, begin + options.every)
        exact_TSV = compute_exact(begin, end)
        for name, (follower, compute) in compared.items():
            found: dict[str, Any] = compare(compute(begin, end), exact_TSV)
            found["state"] = max(error(follower.state(i), exact.state(i)) for i in exact.layers)
            rows.append({"tokens": end, "states": name} | found)
            cells = f"{found['logits']:9.2e} {found['kl']:10.2e} {found['same_best']:10.2%} {found['state']:9.2e}"
            print(f"{end:7} {name:>12} {cells}", flush=True)
    if options.json is not None:
        about = {"model": options.model, "commit": commit(), "dtype": options.dtype, "sequences": count}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Step 2: train the demo model, or the dense model it is compared with, on one GPU (or, slowly, on a CPU).

    python -m tools.train_demo.train DATA OUT --minutes 3
    python -m tools.train_demo.train DATA OUT2 --model dense --steps N    # as many as the first run took

Writes OUT/training.json (loss by step, held-out loss, a bigram's, expert load per layer) and, for the MoE, the model as
a Hugging Face folder. The folder is written every few minutes on the way, so that a run cut short leaves a model.
`--minutes` is turned into a number of steps before training begins, by timing a few, and holds even where steps take
longer then: the learning rate falls with the clock. `--steps` with the number of steps taken repeats the run. Seeds are
fixed; GPU sums are not, so a repetition differs in the last digits.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.train_demo import model as models
from tools.train_demo.optimizer import Optimizer

BALANCE, Z = 0.01, 0.001
WARM_UP, DECAY = 0.02, 0.4
"""Shares of the steps in which the learning rate rises, and falls to zero."""
SAVE_SECONDS = 100
"""Between two models written on the way."""
DISCOUNT = 0.75
END_ID = 0


class Windows:
    """Stretches of `length` tokens and their successors, each beginning at the beginning of a document.

    So position 0 holds what it holds when the model is used: the token that ends the text before. Every epoch cuts
    elsewhere and shuffles anew.
    """

    def __init__(self, tokens: np.ndarray, length: int, device: torch.device) -> None:
        self.length = length
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        starts = np.flatnonzero(tokens == END_ID)
        self.starts = starts[starts <= len(tokens) - length - 1]
        if not len(self.starts):
            raise ValueError(f"{len(tokens)} tokens hold no stretch of {length}; write more text or give --length less")
        self.offsets = torch.arange(length + 1, device=device)

    def epoch(self, number: int) -> np.ndarray:
        rng = np.random.default_rng(number)
        regular = np.arange(rng.integers(self.length), self.starts[-1] + 1, self.length)
        found = np.unique(np.searchsorted(self.starts, regular))
        return rng.permutation(self.starts[found]) if len(found) else self.starts[:1]

    def gather(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(starts).to(self.tokens.device)
        window = self.tokens[rows[:, None] + self.offsets].long()
        return window[:, :-1], window[:, 1:]

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        left, number = np.empty(0, dtype=np.int64), 0
        while True:
            while len(left) < size:
                left, number = np.concatenate((left, self.epoch(number))), number + 1
            yield self.gather(left[:size])
            left = left[size:]


def bigram_loss(train: np.ndarray, heldout: np.ndarray, vocab_size: int) -> float:
    """Held-out cross-entropy of pair counts with absolute discounting, backed off to single tokens."""
    pairs = np.bincount(train[:-1].astype(np.int64) * vocab_size + train[1:], minlength=vocab_size**2)
    pairs = pairs.reshape(vocab_size, vocab_size).astype(np.float32)
    single = (np.bincount(train, minlength=vocab_size) + 1.0) / (len(train) + vocab_size)
    total, kinds = pairs.sum(1), (pairs > 0).sum(1)
    first, second = heldout[:-1], heldout[1:]
    seen = np.maximum(total[first], 1)
    back_off = np.where(total[first] > 0, DISCOUNT * kinds[first] / seen, 1.0)
    probability = np.maximum(pairs[first, second] - DISCOUNT, 0) / seen + back_off * single[second]
    return float(-np.log(probability).mean())


class Trainer:
    def __init__(self, model: models.Model, data: Windows, heldout: Windows, batch: int, lr: float) -> None:
        self.model, self.data, self.heldout, self.batch, self.lr = model, data, heldout, batch, lr
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.forward = torch.compile(model) if on_gpu else model
        self.optimizer = Optimizer(model, lr)

    def loss(self, token_BT: torch.Tensor, target_BT: torch.Tensor, forward: Any = None) -> tuple[torch.Tensor, ...]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return (forward or self.forward)(token_BT, target_BT)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], share: float) -> torch.Tensor:
        cross_entropy, router, _ = self.loss(*batch)
        (cross_entropy + BALANCE * router[0] + Z * router[1]).backward()
        self.optimizer.step(share)
        return cross_entropy.detach()

    def steps_in(self, seconds: float, seed: int) -> int:
        """How many steps fit, measured with a few that are then forgotten. Compiling is not counted."""
        batches = self.data.batches(self.batch)
        for _ in range(3):
            self.step(next(batches), 0.0).item()
        started, num_steps = time.perf_counter(), 0
        while num_steps < 3 or time.perf_counter() - started < min(4.0, seconds / 10):
            self.step(next(batches), 0.0).item()
            num_steps += 1
        per_step = (time.perf_counter() - started) / num_steps
        self.model.reset(seed)
        self.optimizer = Optimizer(self.model, self.lr)
        return max(10, int(seconds / per_step))

    def train(self, num_steps: int, seconds: float, save: Callable[[], None]) -> list[dict[str, float]]:
        """The curve: training and held-out loss about twenty times on the way, and `save` a few times.

        Ends after `num_steps` or `seconds`, whichever is first; the learning rate is zero then.
        """
        curve, every, started = [], max(1, num_steps // 20), time.perf_counter()
        saved = started
        recent: list[torch.Tensor] = []
        for number, batch in zip(range(1, num_steps + 1), self.data.batches(self.batch)):
            done = max(number / num_steps, (time.perf_counter() - started) / seconds)
            recent.append(self.step(batch, learning_rate(done, num_steps)))
            if number % every and done < 1:
                continue
            if time.perf_counter() - saved > SAVE_SECONDS:
                save()
                saved = time.perf_counter()
            point = {"step": number, "train": float(torch.stack(recent).mean()), "heldout": self.evaluate(16)["loss"]}
            recent.clear()
            passed = time.perf_counter() - started
            speed = number * self.batch * self.data.length / passed
            curve.append({name: round(value, 4) for name, value in point.items()} | {"seconds": round(passed, 1)})
            print(f"{curve[-1]}  {speed:,.0f} tokens/s", flush=True)
            if done >= 1:
                break
        return curve

    @torch.no_grad()
    def evaluate(self, max_batches: int) -> dict[str, Any]:
        """Loss on the first held-out stretches, and the share of tokens each expert of each layer gets."""
        starts = np.sort(self.heldout.epoch(0))
        size = min(self.batch, len(starts))
        losses, loads = [], []
        for first in range(0, len(starts) - size + 1, size)[:max_batches]:
            loss, _, load_LE = self.loss(*self.heldout.gather(starts[first : first + size]), forward=self.model)
            losses.append(loss)
            loads.append(load_LE)
        return {"loss": float(torch.stack(losses).mean()), "load": torch.stack(loads).mean(0).tolist()}

    def final(self) -> dict[str, Any]:
        """Held-out loss with the weights as they are saved; and with every token sent to the wrong experts."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        right = self.evaluate(10**6)
        found = {"heldout_loss": right["loss"], "heldout_perplexity": math.exp(right["loss"])}
        if self.model.shape.num_experts:
            for layer in self.model.layers:
                layer.feed_forward.wrong_experts = True
            found |= {"expert_load": right["load"], "heldout_loss_wrong_experts": self.evaluate(10**6)["loss"]}
        return found


def learning_rate(done: float, num_steps: int) -> float:
    """At a share of the training; of the full rate."""
    return max(0.0, min(1.0, done / max(10 / num_steps, WARM_UP), (1 - done) / DECAY))


def show_load(load_LE: list[list[float]]) -> str:
    lines = ["expert load, % of a layer's tokens, and the fullest against the mean:"]
    for layer_id, load_E in enumerate(load_LE):
        shares = " ".join(f"{100 * share:5.1f}" for share in load_E)
        lines.append(f"  layer {layer_id} {shares}   {max(load_E) * len(load_E):.2f}")
    return "\n".join(lines)


def run(data: Path, out: Path, options: argparse.Namespace, shape: models.Shape | None = None) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    tokens = {name: np.load(data / f"{name}.npz")["tokens"] for name in ("train", "heldout")}
    vocab_size = json.loads((data / "data.json").read_text())["vocab_size"]
    shape = shape or models.Shape(vocab_size=vocab_size)
    if options.model == "dense":
        shape = shape.dense()
    model = models.Model(shape, options.seed).to(device)
    windows = {name: Windows(found, options.length, device) for name, found in tokens.items()}
    trainer = Trainer(model, windows["train"], windows["heldout"], options.batch, options.lr)
    tokens_per_step = options.batch * options.length
    num_steps = options.steps or trainer.steps_in(60 * options.minutes, options.seed)
    if not options.steps and options.max_epochs:
        num_steps = min(num_steps, max(10, int(options.max_epochs * len(tokens["train"]) / tokens_per_step)))
    parameters = models.count(model)
    print(f"{options.model}: {parameters}, {num_steps} steps of {tokens_per_step} tokens on {device}", flush=True)
    started = time.perf_counter()

    def save() -> None:
        if shape.num_experts:
            models.save(model, out)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "data.json"):
                shutil.copyfile(data / name, out / name)

    save()
    curve = trainer.train(num_steps, math.inf if options.steps else 60 * options.minutes, save)
    num_steps = int(curve[-1]["step"])
    seconds = time.perf_counter() - started
    result = {
        "model": options.model,
        "shape": asdict(shape),
        "parameters": parameters,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "steps": num_steps,
        "batch": options.batch,
        "length": options.length,
        "lr": options.lr,
        "seed": options.seed,
        "train_tokens": num_steps * tokens_per_step,
        "epochs": num_steps * tokens_per_step / len(tokens["train"]),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(num_steps * tokens_per_step / seconds),
        **trainer.final(),
        "bigram_loss": bigram_loss(tokens["train"], tokens["heldout"], shape.vocab_size),
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    save()
    if shape.num_experts:
        print(show_load(result["expert_load"]))
    shown = ("heldout_loss", "heldout_perplexity", "heldout_loss_wrong_experts", "bigram_loss", "epochs", "seconds")
    print(json.dumps({name: round(result[name], 4) for name in shown if name in result}), flush=True)
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="as write_conversations leaves it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=("moe", "dense"), default="moe")
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=float, default=3.0, help="of training, without compiling (%(default)s)")
    how_long.add_argument("--steps", type=int, default=0, metavar="N", help="exactly so many")
    parser.add_argument("--max-epochs", type=float, default=6.0, metavar="N", help="with --minutes; 0: any number")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="stretches in a step (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens in a stretch (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's; Muon follows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    run(options.data, options.out, options)


if __name__ == "__main__":
    main()

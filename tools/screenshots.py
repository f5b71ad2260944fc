"""Take the pictures of the page that README shows, in Chromium, of a real server that answers real requests.

    python -m tools.screenshots FOLDER [--only experts]

experts.png is the heat map, dark, of a narrow model with the layers and experts of Qwen3-30B-A3B and random weights:
each layer's router prefers some experts, and the prompts are few. page.png is the whole page, light:
the bundled model tells a story. Both need what development needs (`make setup`), and Chromium.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.server.browser import Browser, Tab, chromium
from tests.server.serving import TEMPLATE, Running, running
from tools import tiny_model

NARROW = {
    **tiny_model.CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "head_dim": 16,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
TEXTS = ("The river divides.", "def f(x): return x + 1", "1, 2, 3, 5, 8, 13", "Flüsse teilen sich.")
QUESTION = "Tell me a story about a little fox who finds a red ball."


def write_narrow(folder: Path) -> None:
    tiny_model.write(folder, config=NARROW)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith("mlp.gate.weight"):  # rows of different lengths: long ones win, or lose, more often
            weight *= torch.rand(len(weight), 1, generator=generator).square() + 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shoot(tab: Tab, file: Path, selector: str = "body", margin: int = 0) -> None:
    """The part of the page that this element covers."""
    box = tab.box(selector)
    clip = {name: box[name] - margin for name in ("x", "y")} | {"scale": 1}
    clip |= {name: box[name] + 2 * margin for name in ("width", "height")}
    clip["y"] += tab.js("scrollY")
    found = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    file.write_bytes(base64.b64decode(found["data"]))


def experts(browser: Browser, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_narrow(Path(folder) / "narrow")
        with running(Path(folder) / "narrow", "--expert-load-interval", "1") as server:
            with browser.tab(1340, 900, dark=True) as tab:
                tab.open(server.url)
                tab.until("document.querySelector('#status').textContent === 'ready'")
                asked = [threading.Thread(target=complete, args=(server, text)) for text in TEXTS]
                for one in asked:
                    one.start()
                for one in asked:
                    one.join()
                tab.until("/busiest/.test(document.querySelector('#experts-note').textContent)")
                tab.click("#experts .switch label:first-child")
                tab.js("document.activeElement.blur()")
                tab.point("mouseMoved", 1, 1)
                shoot(tab, file, "#experts", 8)


def complete(server: Running, text: str) -> None:
    server.complete(text * 4, max_tokens=64, temperature=1, seed=len(text))


def page(browser: Browser, file: Path) -> None:
    with running(None, "--expert-load-interval", "1") as server, browser.tab(1280, 800) as tab:
        tab.open(server.url)
        tab.until("document.querySelector('#status').textContent === 'ready'")
        tab.js("document.querySelector('#seed').value = '2'; document.querySelector('#prompt').focus()")
        tab.type(QUESTION)
        tab.press("Enter")
        tab.until("document.querySelector('#log .actions button:nth-child(2)') !== null")
        tab.until("/busiest/.test(document.querySelector('#experts-note').textContent)")
        tab.until("document.querySelectorAll('#charts .value b')[2].textContent !== '–'")
        shoot(tab, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["experts", "page"])
    options = parser.parse_args()
    with chromium() as browser:
        for take in (experts, page):
            if options.only in (None, take.__name__):
                take(browser, options.folder / f"{take.__name__}.png")


if __name__ == "__main__":
    main()

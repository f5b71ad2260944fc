"""Take pictures of the page in Chromium, of real servers that answer real requests.

    python -m tools.screenshots docs [--only experts]      # experts.png and page.png, as README shows them
    python -m tools.screenshots FOLDER --all               # to be looked at: desktop and phone, light and dark

experts.png is the heat map, dark, of a narrow model with the layers and experts of Qwen3-30B-A3B and random weights:
each layer's router prefers some experts, and the prompts are few. page.png is the whole page, light:
the bundled model tells a story. With --all there are four of each, such as page_phone_dark.png; on a phone these are
what its screen shows. They need what development needs (`make setup`), and Chromium.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

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
READY = "document.querySelector('#status').textContent === 'ready'"
COUNTED = "/busiest/.test(document.querySelector('#experts-note').textContent)"


class Form(NamedTuple):
    phone: bool
    dark: bool

    def __str__(self) -> str:
        return f"{'phone' if self.phone else 'desktop'}_{'dark' if self.dark else 'light'}"

    def tab(self, browser: Browser, width: int, height: int) -> AbstractContextManager[Tab]:
        return browser.tab(*((390, 844) if self.phone else (width, height)), phone=self.phone, dark=self.dark)


FORMS = [Form(phone, dark) for phone in (False, True) for dark in (False, True)]
README = {"experts": Form(phone=False, dark=True), "page": Form(phone=False, dark=False)}


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


@contextmanager
def narrow_server() -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as folder:
        write_narrow(Path(folder) / "narrow")
        with running(Path(folder) / "narrow", "--expert-load-interval", "1") as server:
            yield server


def experts(browser: Browser, forms: dict[Form, Path]) -> None:
    with narrow_server() as server:
        for form, file in forms.items():
            with form.tab(browser, 1340, 900) as tab:
                tab.open(server.url)
                tab.until(READY)
                asked = [threading.Thread(target=complete, args=(server, text)) for text in TEXTS]
                for one in asked:
                    one.start()
                for one in asked:
                    one.join()
                tab.until(COUNTED)
                tab.click("#experts .switch label:first-child")
                tab.js("document.activeElement.blur()")
                tab.point("mouseMoved", 1, 1)
                if form.phone:
                    tab.js("document.querySelector('#experts').scrollIntoView()")
                    tab.screenshot(file)
                else:
                    shoot(tab, file, "#experts", 8)


def complete(server: Running, text: str) -> None:
    server.complete(text * 4, max_tokens=64, temperature=1, seed=len(text))


def page(browser: Browser, forms: dict[Form, Path]) -> None:
    with running(None, "--expert-load-interval", "1") as server:
        for form, file in forms.items():
            with form.tab(browser, 1280, 800) as tab:
                tab.open(server.url)
                tab.until(READY)
                tab.js("document.querySelector('#seed').value = '2'; document.querySelector('#prompt').focus()")
                tab.type(QUESTION)
                tab.press("Enter")
                tab.until("document.querySelector('#log .actions button:nth-child(2)') !== null")
                tab.until(COUNTED)
                value = "document.querySelectorAll('#charts .value b')[{}].textContent"
                tab.until(f"{value.format(2)} !== '–' && {value.format(4)} === '0'")  # first token; running
                if form.phone:
                    tab.screenshot(file)
                else:
                    shoot(tab, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["experts", "page"])
    parser.add_argument("--all", action="store_true", help="desktop and phone, light and dark")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for take in (experts, page):
            name = take.__name__
            if options.only in (None, name):
                every = {form: options.folder / f"{name}_{form}.png" for form in FORMS}
                take(browser, every if options.all else {README[name]: options.folder / f"{name}.png"})


if __name__ == "__main__":
    main()

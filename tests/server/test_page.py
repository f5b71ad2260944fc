"""The page in a real browser against a real server: a chat that streams and stops, charts, the heat map; by keyboard,
on a phone, with a key. Whatever a test does, the page complains of nothing and asks nobody else.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing_tool
from tests.server.browser import Browser, Tab, chromium
from tests.server.serving import NAME, QUICK, Running, running, write_model

pytestmark = pytest.mark.chromium
drawing = pytest.mark.slow  # half of the time of this file, for what changes with page/*.js alone

AXE = Path(__file__).parents[2] / ".cache" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
PROMPT = "xyzzy: how do rivers divide?"
BUSY = "!document.querySelector('#stop').hidden"
IDLE = "document.querySelector('#stop').hidden"
ANSWER = "document.querySelector('#log article.assistant:last-of-type .text').textContent"
PHONE = ("#strip", "#chat")
DRAWN = "document.querySelector('#cells').toDataURL()"
COPY = """
    const {colour, range, ExpertMap} = await import("/page/experts.js");
    const copy = () => { // the page's own canvas is not made for being read
        const canvas = document.querySelector("#cells"), {width, height} = canvas;
        const pen = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
        pen.drawImage(canvas, 0, 0);
        return {pen, width, height};
    };
"""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same noise, but it ends only where it is told to."""
    folder = write_model(tmp_path_factory.mktemp("model") / NAME)
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    return folder


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Running]:
    with running(endless, "--expert-load-interval", "1", "--num-pages", "4200") as server:
        server.complete(max_tokens=4)  # so that there is a map from the beginning
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def page(browser: Browser, server: Running, **options: Any) -> Iterator[Tab]:
    with browser.tab(**options) as tab:
        tab.open(server.url)
        tab.until("document.querySelector('#status').textContent === 'ready'")
        yield tab
        if tab.js(BUSY):
            tab.press("Escape")
            tab.until(IDLE)
        assert not tab.complaints
        strangers = [url for url in tab.urls if not url.startswith((f"{server.url}/", "data:"))]
        assert not strangers
        assert not [url for url in tab.urls if "xyzzy" in url]
    server.until_idle()


def ask(tab: Tab, text: str, max_tokens: int) -> None:
    settings = {"max_tokens": max_tokens, "temperature": 0}
    for name, value in settings.items():
        tab.js(f"document.querySelector('#{name}').value = '{value}'")
    tab.js("document.querySelector('#prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def settle(server: Running) -> None:
    """Idle, and the server's own look at the experts, once a second, has seen all there was."""
    server.until_idle()
    now = time.time()
    server.until(lambda: any(one["time"] > now for one in server.stats()["samples"]), "no sample")


def test_text_grows_until_it_is_stopped(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        for stop in ("key", "button"):
            ask(tab, PROMPT, 50_000)
            tab.until(f"{BUSY} && {ANSWER}.length > 3")
            before = tab.js(f"{ANSWER}.length")
            tab.until(f"{ANSWER}.length > {before}")
            assert tab.js(BUSY) and server.stats()["running"] == 1
            assert tab.js("document.querySelector('#log').ariaBusy") == "true"
            if stop == "key":
                tab.press("Escape")
            else:
                tab.click("#stop")
            tab.until(IDLE)
            assert "stopped" in tab.text("#log article.assistant:last-of-type .figures")
            after = tab.js(ANSWER)
            server.until_idle()
            assert tab.js(ANSWER) == after and len(after) > before
            assert tab.js("document.activeElement.id") == "prompt"
        tab.click("#clear")
        assert tab.js("document.querySelectorAll('#log article').length") == 0


def test_what_the_page_asks_for_is_what_is_set(browser: Browser, server: Running) -> None:
    """The second request holds the first answer, and that is what any client gets."""
    bodies = []
    with page(browser, server) as tab:
        on_event = tab.on_event

        def listen(method: str, params: dict[str, Any]) -> None:
            on_event(method, params)
            if method == "Network.requestWillBeSent" and params["request"]["method"] == "POST":
                bodies.append(json.loads(params["request"]["postData"]))

        tab.on_event = listen  # type: ignore[method-assign]
        settings = {"top_p": "0.9", "top_k": "40", "min_p": "0.05", "repetition_penalty": "1.1", "seed": "7"}
        for name, value in ({"system": "Be brief."} | settings).items():
            tab.js(f"document.querySelector('#{name}').value = '{value}'")
        ask(tab, PROMPT, 24)
        tab.until(IDLE)
        figures = r"24 tokens · .* tokens/s · first after (\d+ ms|\d\.\d\d s) · cut at"
        assert re.match(figures, tab.text("#log .figures"))
        ask(tab, "And then?", 8)
        tab.until(IDLE)
    first, second = bodies
    assert first == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 24,
        "seed": 7,
    }
    whole = {name: value for name, value in first.items() if not name.startswith("stream")}
    answer = server.post("/v1/chat/completions", whole).json()["choices"][0]["message"]["content"]
    asked = {"role": "user", "content": "And then?"}
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": answer}, asked]


def test_a_refusal_is_shown_and_the_question_kept(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        ask(tab, PROMPT, 0)
        assert not tab.js("document.querySelectorAll('#log article').length"), "the browser itself refuses 0"
        assert tab.js("document.querySelector('#sampling').open")
        tab.js("document.querySelector('#max_tokens').value = ''; document.querySelector('#seed').value = '1e30'")
        tab.js("document.querySelector('#prompt').focus()")
        tab.press("Enter")
        tab.until("document.querySelector('#log .error') !== null")
        assert "seed" in tab.text("#log .error")
        assert tab.js("document.querySelector('#prompt').value") == PROMPT
        assert any("400" in complaint for complaint in tab.complaints)
        tab.complaints.clear()


@drawing
def test_charts_and_heat_map_are_the_servers_numbers(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        ask(tab, PROMPT, 40)
        tab.until(IDLE)
        before = tab.until(f"!document.querySelector('#map').hidden && {DRAWN}")
        chart = "document.querySelector('#charts .line').getAttribute('d')"
        line = tab.js(chart)
        ask(tab, PROMPT * 20, 300)
        tab.until(f"{DRAWN} !== {json.dumps(before)}")
        tab.until(f"{chart} !== {json.dumps(line)}")
        tab.until(IDLE)
        settle(server)
        tab.click("#experts .switch label:first-child")
        check_cells(tab, server)
        label = "document.querySelectorAll('#charts svg')[{}].ariaLabel"
        first = tab.js(label.format(1))
        assert re.fullmatch(r"First token: [\d.]+ m?s median, [\d.]+ m?s p99", first), first
        words = {0: "Tokens/s: 0 written, 0 read", 2: "Requests: 0 running, 0 waiting", 3: "KV cache: 0% in use"}
        for number, said in words.items():  # a second or two after the last token
            tab.until(f"{label.format(number)} === {json.dumps(said)}")
        balances = server.get("/debug/experts").json()["balance_total"]
        worst = min(range(len(balances)), key=balances.__getitem__)
        assert f"layer {worst}, " in tab.text("#experts-note") and f"{1 / balances[worst]:.1f}×" in tab.text(
            "#experts-note"
        )


def test_before_the_first_token_there_is_no_time_to_it(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        said = tab.js("""import("/page/charts.js").then(({Charts}) => {
            const box = document.createElement("div");
            const sample = {time: 1, generation_tokens_per_second: 0, prompt_tokens_per_second: 0, ttft_p50: 0,
                ttft_p99: 0, running: 0, waiting: 0, kv_usage: 0};
            new Charts(box).add([sample]);
            return [...box.querySelectorAll("svg")].map((one) => one.ariaLabel) })""")
    assert said[:2] == ["Tokens/s: 0 written, 0 read", "First token: – median, – p99"]


def check_cells(tab: Tab, server: Running) -> None:
    """Each cell has the colour of its load, and pointing at it says so."""
    total = server.get("/debug/experts").json()["total"]
    look = f"""(async () => {{ {COPY}
        const canvas = copy(), total = {json.dumps(total)}, wrong = [];
        const width = Math.min(40, (canvas.width - 26 - 94) / total[0].length);
        const height = (canvas.height - 18) / total.length;
        total.forEach((row, l) => row.forEach((n, e) => {{
            const mean = row.reduce((a, b) => a + b) / row.length;
            const x = 26 + (e + 0.5) * width, y = 18 + (l + 0.5) * height;
            const seen = [...canvas.pen.getImageData(x, y, 1, 1).data].slice(0, 3);
            if (colour(n / mean, range(total)) !== `rgb(${{seen.join(", ")}})`) wrong.push([l, e, n / mean, seen]);
        }}));
        return wrong.length ? JSON.stringify(wrong) : "right";
    }})()"""
    tab.until(f"{look}.then((found) => found === 'right')")
    box = tab.box("#cells")
    width = min(40, (box["width"] - 26 - 94) / len(total[0]))
    tab.point("mouseMoved", box["x"] + 26 + 5.5 * width, box["y"] + 18 + 2.5 * (box["height"] - 18) / len(total))
    share = total[2][5] / sum(total[2])
    load = f"{100 * share:.{2 if share < 0.0995 else 1}f}%, {share * len(total[2]):.1f}× even" if share else "unused"
    assert tab.text("#cell") == f"Layer 2 · expert 5 · {load}"


@pytest.mark.slow
def test_the_map_says_which_rank_has_an_expert(browser: Browser, endless: Path) -> None:
    flags = ("--tensor-parallel-size", "2", "--expert-parallel", "--expert-copies", "1", "--num-pages", "4200")
    with running(endless, "--expert-load-interval", "1", *flags) as server:
        server.complete(max_tokens=4)
        server.until(lambda: server.get("/debug/experts").json()["ranks"], "no ranks")
        first, second = server.get("/debug/experts").json()["ranks"][0]
        alone, copied = min({*second} - {*first}), min({*first} & {*second})
        with page(browser, server) as tab:
            tab.until("!document.querySelector('#map').hidden")
            tab.js("document.querySelector('#cells').focus()")
            for expert, ranks in ((copied, "0, 1"), (alone, "1")):
                tab.press("Escape")
                for _ in range(1 + expert):  # the first key chooses the first cell
                    tab.press("ArrowRight")
                said = tab.text("#cell")
                assert said.startswith(f"Layer 0 · expert {expert} · ") and said.endswith(f" · rank {ranks}"), said


@drawing
def test_colours_go_one_way_and_the_legend_tells_them(browser: Browser, server: Running) -> None:
    loads = [step / 8 for step in range(0, 80)]
    for dark in (False, True):
        with page(browser, server, dark=dark) as tab:
            found = tab.js(
                f"""import("/page/experts.js").then(({{colour}}) => {json.dumps(loads)}.map((load) =>
                colour(load, {{low: 0, high: 8}}).match(/\\d+/g).map(Number)))"""
            )
            light = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in found]
            assert light == sorted(light) and len(set(light)) > 60
            # Nothing, twice an even share (half-way on a scale of doublings of 1 + load up to 9), eight times.
            for load, mark in zip((0, 2, 8), ("#14222c", "#1f9680", "#fff8b0"), strict=True):
                expected = [int(mark[at : at + 2], 16) for at in (1, 3, 5)]
                assert found[loads.index(load)] == pytest.approx(expected, abs=2)
            tab.until("!document.querySelector('#legend').hidden")
            scale = tab.js(
                """(() => { const scale = document.querySelector("#scale"), {width, height} = scale;
                const pen = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
                pen.drawImage(scale, 0, 0);
                const at = (share) => [...pen.getImageData(share * width, 4, 1, 1).data].slice(0, 3);
                return [0.004, 0.5, 0.996].map(at) })()"""
            )
            # Whatever is shown, its least load has the first colour and its greatest the last.
            assert scale == [pytest.approx(found[loads.index(load)], abs=4) for load in (0, 2, 8)]


@pytest.mark.parametrize(
    ("row", "ends"),
    [
        ([100, 100, 100, 100], (0.9, 1.1, False)),
        ([50, 150, 100, 100], (0.5, 1.5, False)),
        ([0] * 15 + [9], (0, 8, True)),
    ],
)
def test_colours_are_scaled_to_what_is_shown(
    browser: Browser, server: Running, row: list[int], ends: tuple[float, float, bool]
) -> None:
    with page(browser, server) as tab:
        empty = [0] * len(row)  # a layer without tokens does not count
        found = tab.js(f"import('/page/experts.js').then(({{range}}) => range({[row, empty]}))")
        assert (found["low"], found["high"], found["cut"]) == pytest.approx(ends)


@drawing
def test_the_map_opens_on_what_moves(browser: Browser, server: Running) -> None:
    shown = "document.querySelector('input[name=span]:checked').value"
    settle(server)
    with page(browser, server) as tab:
        tab.until("!document.querySelector('#map').hidden")
        assert tab.js(shown) == "total", "nothing runs"
        ask(tab, PROMPT, 200)
        tab.until(f"{shown} === 'recent'")
        tab.until(IDLE)
        tab.until(f"{shown} === 'total'")  # ten seconds later
        tab.click("#experts .switch label:first-child")
        ask(tab, PROMPT, 200)
        tab.until(IDLE)
        settle(server)
        time.sleep(1.5)
        assert tab.js(shown) == "total", "a choice is kept"


@drawing
def test_last_seconds_show_only_what_is_new(browser: Browser, server: Running) -> None:
    settle(server)
    with page(browser, server) as tab:
        tab.until("!document.querySelector('#map').hidden")
        total = tab.js(DRAWN)
        tab.click("#experts .switch label:last-child")
        assert "nothing routed since" in tab.text("#experts-note") and tab.js(DRAWN) != total
        ask(tab, PROMPT, 100)
        tab.until("/busiest/.test(document.querySelector('#experts-note').textContent)")
        tab.until(IDLE)
        tab.until("/idle for/.test(document.querySelector('#experts-note').textContent)")


@drawing
def test_it_rests_while_nobody_looks(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        # Tabs of a browser without a window are all visible.
        tab.js("window.now = false; Object.defineProperty(document, 'hidden', {get: () => window.now})")
        tab.js("window.now = true; document.dispatchEvent(new Event('visibilitychange'))")
        for _ in range(10):  # a look may be under way
            before = len(tab.urls)
            time.sleep(2.5)
            tab.js("0")
            if len(tab.urls) == before:
                break
        assert len(tab.urls) == before
        tab.js("window.now = false; document.dispatchEvent(new Event('visibilitychange'))")
        end = time.monotonic() + 60
        while len(tab.urls) == before:
            assert time.monotonic() < end
            tab.js("0")


def test_by_keyboard_alone(browser: Browser, server: Running) -> None:
    focused = "document.activeElement.id || document.activeElement.tagName + (document.activeElement.value ?? '')"
    outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
    with page(browser, server) as tab:
        assert tab.js(focused) == "prompt"
        tab.type("one")
        tab.press("Enter", modifiers=8)
        tab.type("two")
        assert tab.js("document.querySelector('#prompt').value") == "one\ntwo"
        tab.press("Tab", modifiers=8)
        assert tab.js(focused) == "SUMMARY" and tab.js(outlined)
        tab.press("Enter")
        order = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "schema"]
        for name in ["system", *order]:
            tab.press("Tab")
            value = {"temperature": "0", "seed": "3"}.get(name)
            assert tab.js(focused) == name and tab.js(outlined)
            if value:
                tab.type(value)
        tab.js("document.querySelector('#max_tokens').value = 50000")
        tab.press("Tab")
        tab.press("Enter")
        tab.until(f"{BUSY} && {ANSWER}.length > 3")
        tab.press("Escape")
        tab.until(IDLE)
        assert tab.text("#log article.user .text") == "one\ntwo" and tab.js(focused) == "prompt"
        tab.until("!document.querySelector('#map').hidden")
        order = []
        while order[-1:] != ["cells"]:
            tab.press("Tab")
            order.append(tab.js(focused))
            assert len(order) < 6, order
        assert order in (["send", "INPUTtotal", "cells"], ["send", "INPUTrecent", "cells"])
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
            tab.press(key)
        assert tab.text("#cell").startswith("Layer 1 · expert 1 · "), tab.text("#cell")
        tab.press("Escape")
        assert tab.js("document.querySelector('#cell').hidden")


@drawing
def test_on_a_phone_nothing_sticks_out(browser: Browser, server: Running) -> None:
    wide = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - innerWidth"
    with page(browser, server, width=390, height=844, phone=True) as tab:
        ask(tab, "x" * 400, 200)
        tab.until(IDLE)
        tab.until("!document.querySelector('#map').hidden")
        tab.js("for (const one of document.querySelectorAll('#history, #sampling')) one.open = true")
        tab.until("document.querySelectorAll('#past button').length")
        assert tab.js(wide) <= 0
        out = """[...document.querySelectorAll("body *")].filter((e) => {
            const b = e.getBoundingClientRect(); return b.width && (b.right > innerWidth + 0.5 || b.left < -0.5) })
            .filter((e) => !e.closest("pre")).map((e) => e.outerHTML.slice(0, 80))"""
        assert tab.js(out) == []
        fits = "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('#model'))"
        tab.js("document.querySelector('#model').textContent = 'anabranch-demo'")
        assert tab.js(fits), "the model's name is cut"
        tab.press("Escape")
        strip, chat = (tab.js(f"document.querySelector('{at}').getBoundingClientRect().toJSON()") for at in PHONE)
        assert strip["width"] > 350 and strip["bottom"] <= chat["top"] and 20 < strip["height"] <= 100
        assert chat["bottom"] < 844, "the field for a message is on the first screen"
        tab.click("#strip")
        tab.until("scrollY > 100 && document.querySelector('#cells').getBoundingClientRect().bottom <= innerHeight")
        box = tab.js("document.querySelector('#cells').getBoundingClientRect().toJSON()")
        tab.tap(box["x"] + 30, box["y"] + 22)
        tab.until("!document.querySelector('#cell').hidden")
        assert tab.text("#cell").startswith("Layer 0 · expert 0 · ")
        assert tab.js(wide) <= 0


@drawing
@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (4, 8), (48, 128), (60, 512)])
def test_maps_of_any_size(browser: Browser, server: Running, layers: int, experts: int) -> None:
    """Peaks stay visible where experts are more than pixels. The counts are the test's: such models are large."""
    hot = [experts // 2 - 1 + layer % 3 for layer in range(layers)]
    for options in ({"width": 1280}, {"width": 390}, {"width": 390, "height": 844, "phone": True}):
        with page(browser, server, **options) as tab:
            found = tab.js(f"""(async () => {{ {COPY}
                const one = (l, e) => e === {hot}[l] ? 1000 * {experts} : 1000 + l + e;
                new ExpertMap().update(Array.from({{length: {layers}}},
                    (_, l) => Array.from({{length: {experts}}}, (_, e) => one(l, e))));
                const {{pen, width, height}} = copy(), ratio = devicePixelRatio, hottest = [];
                const strong = colour(99, {{low: 0, high: 8}});
                for (let l = 0; l < {layers}; l++) {{
                    const row = (height / ratio - 18) / {layers};
                    const data = pen.getImageData(0, Math.floor((18 + (l + 0.4) * row) * ratio), width, 1).data;
                    const at = [];
                    for (let x = 0; x < width; x++)
                        if (`rgb(${{data.slice(4 * x, 4 * x + 3).join(", ")}})` === strong) at.push(x);
                    hottest.push(at.length ? at.reduce((a, b) => a + b) / at.length : -1);
                }}
                const cells = Math.min(width - (26 + 94) * ratio, 40 * {experts} * ratio);
                return {{cells: cells / ratio, height: height / ratio, note:
                    document.querySelector("#experts-note").textContent,
                    hottest: hottest.map((x) => (x + 0.5 - 26 * ratio) / cells),
                    wide: document.documentElement.scrollWidth - innerWidth}};
            }})()""")
            assert found["note"].startswith(f"{layers} layer{'s' if layers > 1 else ''} × {experts} experts")
            busiest = re.search(r"layer (\d+), expert (\d+), ", found["note"])
            assert busiest and int(busiest[2]) == hot[int(busiest[1])]
            assert found["wide"] <= 0
            assert found["cells"] / experts <= 40 and found["height"] <= 18 + 24 * layers
            if experts > 8:  # of fewer, none can have eight times an even share
                assert found["hottest"] == pytest.approx([(expert + 0.5) / experts for expert in hot], abs=0.01)


@drawing
def test_light_dark_and_as_the_system(browser: Browser, server: Running) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with page(browser, server, dark=True) as tab:
        dark = tab.js(paper)
        tab.click("#theme")
        light = tab.js(paper)
        assert tab.text("#theme") == "Light" and sum(map(int, re.findall(r"\d+", light))) > 600
        tab.open(server.url)
        assert tab.js(paper) == light, "a choice is kept"
        tab.click("#theme")
        assert tab.text("#theme") == "Dark" and tab.js(paper) == dark
        tab.click("#theme")
        assert tab.text("#theme") == "Auto" and tab.js(paper) == dark


def test_text_never_becomes_part_of_the_page(browser: Browser, server: Running) -> None:
    wrote = (
        '<img src="x" onerror="alert(1)"> **bold** `code` *it*\n\n# Head\n- a\n- b\n\n```html\n<script>1</script>\n```'
    )
    with page(browser, server) as tab:
        shape = tab.js(f"""(async () => {{
            const {{render}} = await import("/page/text.js");
            const box = document.createElement("div");
            box.append(render({json.dumps(wrote)}));
            document.body.append(box);
            return [...box.querySelectorAll("*")].map((e) => e.localName).join(" ") + "|" + box.textContent;
        }})()""")
    names, _, text = shape.partition("|")
    assert names == "p strong code em h3 ul li li pre code"
    assert text == '<img src="x" onerror="alert(1)"> bold code itHeadab<script>1</script>'


def test_tables_links_quotes_and_lists_in_lists(browser: Browser, server: Running) -> None:
    shapes = {
        "| a | b |\n|---|:-:|\n| 1 | **2** |\n| x \\| y | <b> |\nafter": (
            "div table thead tr th th tbody tr td td strong tr td td p",
            "ab12x | y<b>after",
        ),
        "> one\n> - two\n>\n> > three\nafter": ("blockquote p ul li blockquote p p", "onetwothreeafter"),
        "1. a\n   - b\n     - c\n   - d\n\n2. e\n- f": ("ol li ul li ul li li li ul li", "abcdef"),
        "[x](https://a.example/b_(c)) http://d.example/e?f=1.": ("p a a", "x http://d.example/e?f=1."),
        "[x](javascript:alert(1)) [y](data:text/html,z) [z](//a.example)": (
            "p",
            "[x](javascript:alert(1)) [y](data:text/html,z) [z](//a.example)",
        ),
        "> " * 5000 + "deep": (" ".join(["blockquote"] * 8 + ["p"]), "> " * 4992 + "deep"),
        "a | b\n---\nc": ("p hr p", "a | bc"),
    }
    with page(browser, server) as tab:
        for wrote, expected in shapes.items():
            found = tab.js(f"""(async () => {{
                const {{render}} = await import("/page/text.js");
                const box = document.createElement("div");
                box.append(render({json.dumps(wrote)}));
                return [[...box.querySelectorAll("*")].map((e) => e.localName).join(" "), box.textContent];
            }})()""")
            assert (found[0], found[1]) == expected
        link = tab.js("""import("/page/text.js").then(({render}) => {
            const a = render("[x](https://a.example/b_(c))").querySelector("a"); return [a.href, a.rel, a.target] })""")
        assert link == ["https://a.example/b_(c)", "noopener noreferrer", "_blank"]


def rows(tab: Tab) -> list[str]:
    found: list[str] = tab.js("[...document.querySelectorAll('#log article .text')].map((one) => one.textContent)")
    return found


def test_an_answer_is_copied_and_written_again_and_a_message_edited(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        browser.call("Browser.grantPermissions", permissions=allowed, browserContextId=tab.context)
        for text in ("first", "second"):
            ask(tab, text, 6)
            tab.until(IDLE)
        before = rows(tab)
        assert [before[0], before[2], len(before)] == ["first", "second", 4]
        button = "#log article:nth-of-type({}) .actions button:nth-child({})"
        tab.click(button.format(2, 1))
        tab.until("document.querySelector('#log article:nth-of-type(2) button').textContent === 'Copied'")
        raw = tab.js("JSON.parse(localStorage['anabranch-chats'])[0].messages[1].content")
        assert tab.js("navigator.clipboard.readText()") == raw
        tab.js("document.querySelector('#max_tokens').value = 3")
        tab.click(button.format(4, 2))
        tab.until(
            f"{IDLE} && /^3 tokens/.test(document.querySelector('#log article:last-of-type .figures').textContent)"
        )
        assert rows(tab)[:3] == before[:3] and len(rows(tab)) == 4
        tab.click(button.format(3, 1))
        assert tab.js("document.querySelector('#prompt').value") == "second"
        tab.press("Escape")
        assert tab.js("document.querySelector('#prompt').value + document.querySelector('#editing').hidden") == "true"
        tab.click(button.format(1, 1))
        ask(tab, " of all", 6)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .actions').length === 2")
        assert rows(tab)[0] == "first of all" and len(rows(tab)) == 2


def test_what_was_there_stays_where_no_answer_comes(browser: Browser, server: Running) -> None:
    """Written again, or edited, and refused: the conversation is what it was, here and in what the browser keeps."""
    kept = "JSON.parse(localStorage['anabranch-chats'])[0].messages.map((one) => one.content)"
    button = "#log article:nth-of-type({}) .actions button:last-child"
    seed, prompt = "document.querySelector('#seed').value = '{}'", "document.querySelector('#prompt').value"
    editing = "!document.querySelector('#editing').hidden"
    with page(browser, server) as tab:
        for text in ("first", "second"):
            ask(tab, text, 6)
            tab.until(IDLE)
        before, messages = rows(tab), tab.js(kept)
        tab.js(seed.format("1e30"))
        tab.click(button.format(2))
        tab.until(f"{IDLE} && document.querySelectorAll('#log .error').length === 1")
        assert rows(tab) == [*before, ""] and tab.js(kept) == messages
        assert tab.js(prompt) == "" and not tab.js(editing), "the question is still in the conversation"
        tab.click(button.format(1))
        ask(tab, " of all", 6)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .error').length === 2")
        assert rows(tab) == [*before, "", "first of all", ""] and tab.js(kept) == messages
        assert tab.js(prompt) == "first of all" and tab.js(editing), "sending it again still replaces the first"
        tab.press("Escape")
        tab.js(seed.format(""))
        ask(tab, "third", 6)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .actions').length === 6")
        assert tab.js(kept)[:5] == [*messages, "third"]
        tab.js(seed.format("1e30"))
        tab.click(button.format(1))
        ask(tab, " of all", 6)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .error').length === 3")
        tab.js(seed.format(""))
        tab.js("document.querySelector('#prompt').focus()")
        tab.press("Enter")
        tab.until(f"{IDLE} && document.querySelectorAll('#log .actions').length === 2")
        assert rows(tab)[0] == tab.js(kept)[0] == "first of all" and len(rows(tab)) == len(tab.js(kept)) == 2
        assert all("400" in complaint for complaint in tab.complaints)
        tab.complaints.clear()


@pytest.mark.slow
def test_thoughts_alone_are_no_answer(browser: Browser, endless: Path, tmp_path: Path) -> None:
    template = (endless / "chat_template.jinja").read_text().rstrip() + "<think>"
    (tmp_path / "thinks.jinja").write_text(template)
    flags = ("--num-pages", "300", "--reasoning-parser", "think", "--chat-template", str(tmp_path / "thinks.jinja"))
    with running(endless, *flags) as server, page(browser, server) as tab:
        ask(tab, PROMPT, 6)
        tab.until(IDLE)
        assert len(tab.text("#log .thoughts div")) > 3 and rows(tab) == [PROMPT, ""]
        assert "Only thoughts came" in tab.text("#log article:last-of-type")
        assert tab.js("document.querySelector('#prompt').value") == PROMPT
        assert tab.js("localStorage['anabranch-chats'] ?? null") is None


def test_conversations_are_kept_until_they_are_cleared(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        assert tab.js("document.querySelector('#history').hidden")
        ask(tab, "one", 6)
        tab.until(IDLE)
        one = rows(tab)
        tab.click("#clear")
        assert rows(tab) == [] and not tab.js("document.querySelector('#intro').hidden")
        ask(tab, "two", 6)
        tab.until(IDLE)
        two = rows(tab)
        tab.open(server.url)
        tab.until("document.querySelectorAll('#log article').length")
        assert rows(tab) == two, "the newest is opened again"
        tab.click("#history summary")
        tab.until("document.querySelectorAll('#past button').length === 2")
        tab.click("#past button:last-child")
        assert rows(tab) == one and not tab.js("document.querySelector('#history').open")
        ask(tab, "more", 6)
        tab.until(IDLE)
        assert rows(tab)[:2] == one and len(rows(tab)) == 4
        tab.click("#history summary")
        tab.until("document.querySelector('#past button').textContent === 'one'")
        tab.click("#forget")
        assert rows(tab) == [] and tab.js("localStorage['anabranch-chats'] ?? null") is None
        tab.js("localStorage['anabranch-chats'] = '[{\"messages\": 3}, null]'")
        tab.open(server.url)
        tab.until("document.querySelector('#status').textContent === 'ready'")
        assert rows(tab) == [], "what is not a conversation is left out"


def test_a_conversation_is_exported(browser: Browser, server: Running, tmp_path: Path) -> None:
    with page(browser, server) as tab:
        ask(tab, PROMPT, 6)
        tab.until(IDLE)
        answer = tab.js("JSON.parse(localStorage['anabranch-chats'])[0].messages[1].content")
        browser.call(
            "Browser.setDownloadBehavior", behavior="allow", browserContextId=tab.context, downloadPath=str(tmp_path)
        )
        for kind in ("json", "md"):
            tab.click("#export summary")
            tab.click(f"#export-{kind}")
            file = tmp_path / f"chat.{kind}"
            server.until(lambda file=file: file.exists() and file.stat().st_size, "no file")
        wrote = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": answer}]
        assert json.loads((tmp_path / "chat.json").read_text()) == {"messages": wrote}
        assert (tmp_path / "chat.md").read_text() == f"## user\n\n{PROMPT}\n\n## assistant\n\n{answer}\n"


def test_a_schema_that_is_not_json_is_not_sent(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        tab.js("document.querySelector('#sampling').open = true; document.querySelector('#schema').focus()")
        tab.type('{"enum": ["north", ')
        ask(tab, PROMPT, 30)
        assert rows(tab) == [] and "not JSON" in tab.js("document.querySelector('#schema').validationMessage")


@drawing
def test_text_has_contrast_and_fields_have_names(browser: Browser, server: Running) -> None:
    """WCAG 2 AA: 4.5:1 between text and what is behind it, in both themes, menus and fields included."""
    faint = """(() => {
        const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = (colour) => parts(colour).slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = (e) => { while (e) { const c = getComputedStyle(e).backgroundColor;
            if ((parts(c)[3] ?? 1) === 1) return c; e = e.parentElement; } };
        const words = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        return [...document.querySelectorAll("body *")]
            .filter((e) => e.checkVisibility({visibilityProperty: true}) && words(e)).map((e) => {
                const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
                return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
            }).filter(([ratio]) => ratio < 4.5) })()"""
    unnamed = """[...document.querySelectorAll("button, input, textarea, a, summary")].filter((e) =>
        e.checkVisibility() && !(e.textContent.trim() || e.ariaLabel || e.labels?.[0]?.textContent.trim()))
        .map((e) => e.outerHTML)"""
    for dark in (False, True):
        with page(browser, server, dark=dark) as tab:
            ask(tab, "x", 4)
            tab.until(IDLE)
            tab.js("for (const one of document.querySelectorAll('details')) one.open = true")
            tab.until("document.querySelectorAll('#past button').length")
            assert tab.js(faint) == [] and tab.js(unnamed) == []


def read_axe(file: Path = AXE) -> str:
    """The source of axe-core, which examines a page for what excludes people."""
    if not file.exists():
        missing_tool("needs axe-core, and npm to install it: make .cache/axe/node_modules/axe-core/axe.min.js")
    return file.read_text()


@pytest.fixture(scope="module")
def axe() -> str:
    return read_axe()


def test_without_npm_axe_is_a_missing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.conftest.TEST_ALL", True)
    with pytest.raises(pytest.fail.Exception, match="needs axe-core, and npm"):
        read_axe(tmp_path / "axe.min.js")


def violations(tab: Tab, axe: str) -> list[str]:
    """What axe-core calls serious or critical in what is shown now."""
    tab.js(f"globalThis.axe ?? (() => {{ {axe} }})(), 0")
    found: list[str] = tab.js("""axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
        .filter(({impact}) => impact === "serious" || impact === "critical")
        .flatMap(({id, nodes}) => nodes.map(({html}) => `${id}: ${html.slice(0, 100)}`)))""")
    return found


@drawing
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, server: Running, axe: str, dark: bool, phone: bool) -> None:
    size = {"width": 390, "height": 844, "phone": True} if phone else {}
    wide = "very " * 60
    wrote = f"# Head\n\n| a | b |\n|---|---|\n| {wide} | [c](https://d.example) |\n\n"
    wrote += f"```\n{wide}\n```\n\n> `e`\n\n- f\n  1. g"
    with page(browser, server, dark=dark, **size) as tab:
        assert violations(tab, axe) == []
        ask(tab, PROMPT, 12)
        tab.until(f"{IDLE} && !document.querySelector('#map').hidden")
        tab.js(f"""import("/page/text.js").then(({{render}}) =>
            document.querySelector("#log .assistant .text").append(render({json.dumps(wrote)})))""")
        tab.js("document.querySelector('#cells').focus()")
        tab.press("ArrowDown")
        assert not tab.js("document.querySelector('#cell').hidden") and violations(tab, axe) == []
        tab.js("for (const one of document.querySelectorAll('details')) one.open = true")
        tab.until("document.querySelectorAll('#past button').length")
        assert violations(tab, axe) == []
        tab.js("document.querySelector('#seed').value = '1e30'")
        ask(tab, PROMPT, 4)
        tab.until(f"{IDLE} && document.querySelector('#log .error') !== null")
        assert violations(tab, axe) == []
        tab.js("document.querySelector('#ask-key').showModal()")
        assert violations(tab, axe) == []
        tab.complaints.clear()  # of the refusal


def test_the_policy_lets_nothing_else_in(browser: Browser, server: Running) -> None:
    answer = server.get("/")
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and "default-src 'none'" in policy
    assert "http" not in policy and "unsafe" not in policy and "*" not in policy
    with page(browser, server) as tab:
        tab.js("""(() => { const s = document.createElement("script"); s.textContent = "window.broken = 1";
                  document.body.append(s) })()""")
        assert tab.js("window.broken ?? 0") == 0
        assert any("Content Security Policy" in complaint for complaint in tab.complaints)
        tab.complaints.clear()


@pytest.mark.slow
def test_it_asks_for_the_key_it_needs(browser: Browser, endless: Path) -> None:
    with running(endless, "--num-pages", "300", key="sesame") as server, browser.tab() as tab:
        tab.open(server.url)
        tab.until("document.querySelector('#ask-key').open")
        assert tab.js("document.activeElement.id") == "key"
        tab.type("wrong")
        tab.press("Enter")
        tab.until("/refused/.test(document.querySelector('#key-note').textContent)")
        tab.until("document.querySelector('#ask-key').open")
        tab.press("Escape")
        assert tab.js("document.querySelector('#ask-key').open"), "nothing works without it"
        tab.type("sesame")
        tab.press("Enter")
        tab.until("!document.querySelector('#ask-key').open")
        tab.until("document.querySelector('#status').textContent === 'ready'")
        ask(tab, PROMPT, 5)
        tab.until(f"{IDLE} && {ANSWER}.length")
        assert not [url for url in tab.urls if "sesame" in url]


def test_it_says_when_the_server_is_gone(browser: Browser, endless: Path) -> None:
    with running(endless, "--num-pages", "4200") as server, browser.tab() as tab:
        tab.open(server.url)
        tab.until("document.querySelector('#status').textContent === 'ready'")
        ask(tab, PROMPT, 50_000)
        tab.until(f"{BUSY} && {ANSWER}.length > 3")
        names = ("#chat-title", "#export")
        left, right = (f"document.querySelector('{name}').getBoundingClientRect()" for name in names)
        assert tab.js(f"{right}.left - {left}.right") > 100, "the first answer grows: no history yet"
        faded = "getComputedStyle(document.querySelector('.side')).opacity"
        assert tab.js(faded) == "1"
        server.engine.kill()
        tab.until("document.querySelector('#log .error') !== null")
        assert "engine" in tab.text("#log .error")
        server.process.wait(QUICK)
        tab.until("document.querySelector('#status').textContent === 'server unreachable'")
        assert tab.js(faded) == "0.5", "its figures are of before"
        ask(tab, PROMPT, 4)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .error').length === 2")
        assert tab.text("#log article:last-of-type .error").startswith("The server is unreachable.")


@pytest.mark.slow
def test_the_bundled_model_introduces_itself(browser: Browser) -> None:
    with running(None) as server, page(browser, server) as tab:
        tab.until("!document.querySelector('#starters').hidden")
        assert "parameters" in tab.text("#about") and "English" in tab.text("#about")
        starters = tab.js("[...document.querySelectorAll('#starters button')].map((one) => one.textContent)")
        assert len(starters) == 3 and starters[0].startswith("Tell me a story")
        tab.click("#starters button")
        tab.until(f"{IDLE} && document.querySelector('#log article.assistant') && {ANSWER}.length > 20")
        assert tab.text("#log article.user .text") == starters[0]
        assert tab.js("document.querySelector('#intro').hidden")
        tab.js("document.querySelector('#sampling').open = true; document.querySelector('#schema').focus()")
        tab.type('{"enum": ["north", "south"]}')
        ask(tab, PROMPT, 30)
        tab.until(f"{IDLE} && document.querySelectorAll('#log .actions').length === 4")
        assert rows(tab)[3] in ('"north"', '"south"')
        assert "card" not in server.get("/debug/stats?since=1").json(), "once is enough"


def test_other_models_have_starters_too(browser: Browser, server: Running) -> None:
    with page(browser, server) as tab:
        assert tab.js("document.querySelectorAll('#starters button').length") == 3
        assert tab.text("#about").startswith("Ask something")


@pytest.mark.slow
def test_loading_shows_its_stage(browser: Browser, endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_SECONDS", "4")
    make_slowly, small = "tests.server.faulty_engine:make_slowly", {"max_num_seqs": 4, "num_pages": 300}
    with running(endless, make_engine=make_slowly, engine=small, ready=False) as server, browser.tab() as tab:
        server.url = f"http://127.0.0.1:{server.wait_for('listening on http://127.0.0.1:([0-9]+)')[1]}"
        tab.open(server.url)
        stage = tab.until("/is loading [(].+[)]/.exec(document.querySelector('#status').textContent)?.[0]")
        assert "is loading (" in tab.text("#stage") and stage
        assert tab.js("document.querySelector('#starters').hidden")
        tab.until("document.querySelector('#status').textContent === 'ready'")
        assert tab.js("document.querySelector('#stage').hidden && !document.querySelector('#starters').hidden")


def test_the_routes_send_little_when_there_is_little_new(server: Running) -> None:
    settle(server)
    server.until(lambda: len(server.stats()["samples"]) > 1, "no samples")
    samples = server.stats()["samples"]
    later = server.get(f"/debug/stats?since={samples[-1]['time']}").json()["samples"]
    assert len(later) < len(samples) and all(one["time"] > samples[-1]["time"] for one in later)
    refused = server.get("/debug/stats?since=soon")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "since"
    first = server.get("/debug/experts")
    again = server.get("/debug/experts", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    server.complete("other words", max_tokens=4)
    server.until(lambda: server.get("/debug/experts").headers["etag"] != first.headers["etag"], "the tag stays")

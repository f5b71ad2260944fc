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

from tests.server.browser import Browser, Tab, chromium
from tests.server.serving import NAME, QUICK, Running, running, write_model

pytestmark = pytest.mark.chromium
drawing = pytest.mark.slow  # half of the time of this file, for what changes with page/*.js alone

PROMPT = "xyzzy: how do rivers divide?"
BUSY = "!document.querySelector('#stop').hidden"
IDLE = "document.querySelector('#stop').hidden"
ANSWER = "document.querySelector('#log article.assistant:last-of-type .text').textContent"
DRAWN = "document.querySelector('#cells').toDataURL()"
COPY = """
    const {colour, ExpertMap} = await import("/page/experts.js");
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
        assert tab.text("#log") == ""


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
        for name, value in {"system": "Be brief.", "top_p": "0.9", "seed": "7"}.items():
            tab.js(f"document.querySelector('#{name}').value = '{value}'")
        ask(tab, PROMPT, 24)
        tab.until(IDLE)
        assert re.match(r"24 tokens · .* tokens/s · first after \d+ ms · cut at", tab.text("#log .figures"))
        ask(tab, "And then?", 8)
        tab.until(IDLE)
    first, second = bodies
    assert first == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.9,
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


def check_cells(tab: Tab, server: Running) -> None:
    """Each cell has the colour of its load, and pointing at it says so."""
    total = server.get("/debug/experts").json()["total"]
    look = f"""(async () => {{ {COPY}
        const canvas = copy(), total = {json.dumps(total)}, wrong = [];
        const width = (canvas.width - 26 - 94) / total[0].length, height = (canvas.height - 18) / total.length;
        total.forEach((row, l) => row.forEach((n, e) => {{
            const mean = row.reduce((a, b) => a + b) / row.length;
            const x = 26 + (e + 0.5) * width, y = 18 + (l + 0.5) * height;
            const seen = [...canvas.pen.getImageData(x, y, 1, 1).data].slice(0, 3);
            if (colour(n / mean, "light") !== `rgb(${{seen.join(", ")}})`) wrong.push([l, e, n / mean, seen]);
        }}));
        return wrong.length ? JSON.stringify(wrong) : "right";
    }})()"""
    tab.until(f"{look}.then((found) => found === 'right')")
    box = tab.box("#cells")
    width = (box["width"] - 26 - 94) / len(total[0])
    tab.point("mouseMoved", box["x"] + 26 + 5.5 * width, box["y"] + 18 + 2.5 * (box["height"] - 18) / len(total))
    share = total[2][5] / sum(total[2])
    load = f"{100 * share:.{2 if share < 0.0995 else 1}f}%, {share * len(total[2]):.1f}× even" if share else "unused"
    assert tab.text("#cell") == f"Layer 2 · expert 5 · {load}"


@drawing
def test_colours_go_one_way_and_the_legend_tells_them(browser: Browser, server: Running) -> None:
    loads = [step / 8 for step in range(0, 80)]
    ends = {"light": ("#eef1ee", "#4aa3a3", "#2b2560"), "dark": ("#1a2122", "#2f8a80", "#fdf5b4")}
    for theme, marks in ends.items():
        with page(browser, server, dark=theme == "dark") as tab:
            found = tab.js(
                f"""import("/page/experts.js").then(({{colour}}) =>
                {json.dumps(loads)}.map((load) => colour(load, "{theme}").match(/\\d+/g).map(Number)))"""
            )
            light = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in found]
            assert light == sorted(light, reverse=theme == "light") and len(set(light)) > 60
            # Nothing, twice an even share (half-way on a scale of doublings of 1 + load up to 9), eight times.
            for load, mark in zip((0, 2, 8), marks, strict=True):
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
            assert scale == [pytest.approx(found[loads.index(load)], abs=4) for load in (0, 2, 8)]


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
        for name, value in {"system": "", "temperature": "0", "top_p": "", "max_tokens": "", "seed": "3"}.items():
            tab.press("Tab")
            assert tab.js(focused) == name and tab.js(outlined)
            if value:
                tab.type(value)
        tab.js("document.querySelector('#max_tokens').value = 50000")
        tab.press("Tab")
        tab.press("Enter")
        tab.until(f"{BUSY} && {ANSWER}.length > 3")
        tab.press("Escape")
        tab.until(IDLE)
        assert tab.text("#log article.user") == "one\ntwo" and tab.js(focused) == "prompt"
        tab.until("!document.querySelector('#map').hidden")
        order = []
        while order[-1:] != ["cells"]:
            tab.press("Tab")
            order.append(tab.js(focused))
            assert len(order) < 6, order
        assert order == ["send", "INPUTtotal", "cells"]
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
        tab.js("document.querySelector('#sampling').open = true")
        assert tab.js(wide) <= 0
        out = """[...document.querySelectorAll("body *")].filter((e) => {
            const b = e.getBoundingClientRect(); return b.width && (b.right > innerWidth + 0.5 || b.left < -0.5) })
            .filter((e) => !e.closest("pre")).map((e) => e.outerHTML.slice(0, 80))"""
        assert tab.js(out) == []
        tab.js("document.querySelector('#experts').scrollIntoView()")
        box = tab.js("document.querySelector('#cells').getBoundingClientRect().toJSON()")
        tab.tap(box["x"] + 30, box["y"] + 22)
        tab.until("!document.querySelector('#cell').hidden")
        assert tab.text("#cell").startswith("Layer 0 · expert 0 · ")
        assert tab.js(wide) <= 0


@drawing
@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (60, 512)])
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
                const strong = colour(99, "light");
                for (let l = 0; l < {layers}; l++) {{
                    const row = (height / ratio - 18) / {layers};
                    const data = pen.getImageData(0, Math.floor((18 + (l + 0.4) * row) * ratio), width, 1).data;
                    const at = [];
                    for (let x = 0; x < width; x++)
                        if (`rgb(${{data.slice(4 * x, 4 * x + 3).join(", ")}})` === strong) at.push(x);
                    hottest.push(at.length ? at.reduce((a, b) => a + b) / at.length : -1);
                }}
                const cells = width - (26 + 94) * ratio;
                return {{hottest: hottest.map((x) => (x + 0.5 - 26 * ratio) / cells), note:
                    document.querySelector("#experts-note").textContent,
                    wide: document.documentElement.scrollWidth - innerWidth}};
            }})()""")
            assert found["note"].startswith(f"{layers} layer{'s' if layers > 1 else ''} × {experts} experts")
            busiest = re.search(r"layer (\d+), expert (\d+), ", found["note"])
            assert busiest and int(busiest[2]) == hot[int(busiest[1])]
            assert found["wide"] <= 0
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
        server.engine.kill()
        tab.until("document.querySelector('#log .error') !== null")
        assert "engine" in tab.text("#log .error")
        server.process.wait(QUICK)
        tab.until("document.querySelector('#status').textContent === 'no answer'")


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

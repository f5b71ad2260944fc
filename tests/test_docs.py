"""What README and docs/ say is what is there: files, links, commands, options, routes, metrics; and examples run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch import kernels, ops, platforms
from anabranch.cli.main import COMMANDS, main, make_parser

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugin"
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: str) -> dict[str, str]:
    """File name → the code block that follows it: a line with the name in bold, then the block."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"^\*\*(.+?)\*\*\n\n```\w+\n(.*?)^```$", text, re.M | re.S)
    return {name.replace("\\", ""): code for name, code in found}


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def test_the_example_platform_is_the_tested_one() -> None:
    shown = blocks("adding_a_platform.md")
    files = {str(path.relative_to(PLUGIN)) for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml")}
    assert set(shown) == files
    for name, code in shown.items():
        assert code == (PLUGIN / name).read_text(), name


def test_each_page_ends_with_the_command_that_proves_success() -> None:
    for page in ("platform", "kernel", "model", "format", "mixer"):
        text = (ROOT / "docs" / f"adding_a_{page}.md").read_text().rstrip()
        last = text.removesuffix("```").rpartition("```sh\n")[2].strip()
        assert text.endswith("```") and last.startswith(("anabranch conformance", "pytest ")), page


@BY_NAME
def test_files_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|tools|benchmarks|docs)/[a-z\d_./]+)`", page.read_text()):
        made_there = f"**{name}**" in page.read_text()
        assert made_there or (ROOT / name).exists(), name


def test_the_map_has_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "anabranch").glob("*/__init__.py")}
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("Inside `engine/`")[0]
    assert {name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)/`", row)} == rooms
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    assert set(re.findall(r"^  (\w+)/ ", tree, re.M)) == rooms
    (commands,) = re.findall(r"^  cli/ +(.+)$", tree, re.M)
    assert set(commands.split(", ")) == {name.split()[0] for name in COMMANDS}


def test_every_dialect_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """In the help, and where README's tree says what server/ is."""
    main(["--help"])
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    texts = [*capsys.readouterr().out.split("usage: anabranch serve"), *re.findall(r"^  server/ .+$", tree, re.M)]
    assert len(texts) == 3
    for name in ("OpenAI", "Anthropic", "Ollama"):
        assert all(name in text for text in texts), name


@BY_NAME
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


def test_the_site_has_every_page() -> None:
    """mkdocs.yml and the site's first page name every page of docs/, and no other."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(re.findall(r"\S+\.md", nav)) == sorted(pages)
    linked = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert sorted([*linked, "index.md"]) == sorted(pages)


def command_lines(page: Path) -> list[list[str]]:
    text = "\n".join(code(page, "sh")).replace("\\\n", " ")
    lines = [shlex.split(line.partition(" | ")[0], comments=True) for line in text.splitlines()]
    return [line[1:] for line in lines if line and Path(line[0]).name == "anabranch"]


@BY_NAME
def test_command_lines_are_understood(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.parent.name == "docs":
        monkeypatch.chdir(tmp_path)  # with the files for --config that the page shows
        for name, text in blocks(page.name).items():
            if name.endswith(".yaml"):
                Path(name).write_text(text)
    for line in command_lines(page):
        length = 2 if line[0] == "bench" else 1
        _, parser = make_parser(" ".join(line[:length]))
        try:
            parser.parse_intermixed_args(line[length:])
        except SystemExit as end:
            assert end.code == 0, capsys.readouterr().err  # --help ends with 0


def test_the_readme_shows_what_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    shown = (ROOT / "README.md").read_text().split("`plan` for Qwen3-30B-A3B:\n\n```text\n")[1].split("```")[0]
    folder = ROOT / "src/anabranch/bench/configs/qwen3-30b-a3b"
    assert main(["plan", str(folder), "--memory", "141GB"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_the_pages_show_every_command() -> None:
    shown = {" ".join(line[: 2 if line[0] == "bench" else 1]) for page in PAGES for line in command_lines(page)}
    assert shown == set(COMMANDS)


@BY_NAME
def test_options_a_page_names_exist(page: Path) -> None:
    known = {"--help"}
    for name in COMMANDS:
        known |= {option for action in make_parser(name)[1]._actions for option in action.option_strings}
    for option in re.findall(r"`(--[a-z-]+)", prose(page)):
        assert option in known, option


@BY_NAME
def test_environment_variables_a_page_names_are_read(page: Path) -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"\b(ANABRANCH_[A-Z_]+|OTEL_[A-Z_]+)\b", page.read_text()):
        assert f'"{name}"' in source, name


def test_fields_of_a_request_exist() -> None:
    protocol = pytest.importorskip("anabranch.server.protocol")
    paragraph = next(part for part in prose(ROOT / "docs" / "serving.md").split("\n\n") if "generation takes" in part)
    named = set(re.findall(r"`(\w+)`", paragraph))
    assert len(named) > 10 and named <= set(protocol.ChatCompletion.__struct_fields__)


# ---------------------------------------------------------------------------------------------------------------------
# Against a server
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[object]:
    for package in ("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "httpx", "psutil"):
        pytest.importorskip(package)
    from tests.server.serving import running

    with running(None, "--metrics-compat", "vllm") as server:
        yield server


def test_routes_the_pages_name_exist(server) -> None:
    paths = server.get("/openapi.json").json()["paths"] | {"/openapi.json": {"get": {}}}
    named = {
        (method, path)
        for page in PAGES
        for method, path in re.findall(r"`(?:(GET|POST|DELETE) )?(/[\w/.{}]*)`", prose(page))
    }
    assert len(named) > 15
    for method, path in named:
        assert path in paths and (not method or method.lower() in paths[path]), path
    shown = {path for _, path in named} | {"/v1/models/{id}"}
    assert set(paths) <= shown, "docs/serving.md lists every route"


def test_metrics_the_pages_name_exist_and_all_are_named(server) -> None:
    text = server.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    samples = set(re.findall(r"^([\w:]+)[{ ]", text, re.M))
    for page in PAGES:
        for name in re.findall(r"\b(?:anabranch_|vllm:)[a-z\d_]+", page.read_text()):
            assert name in families | samples, f"{page.name}: {name}"
    about = (ROOT / "docs" / "metrics.md").read_text()
    assert not [name for name in families if name.startswith("anabranch_") and f"`{name}`" not in about]


def test_the_command_that_serve_prints_gets_an_answer(server) -> None:
    found = server.wait_for(r"open (\S+) in a browser, or: curl (.+)")
    assert found[1] == server.url and "text/html" in server.get("/").headers["content-type"]
    url, h, header, d, body = shlex.split(found[2])
    assert (h, header, d) == ("-H", "content-type: application/json", "-d")
    answer = server.post(url.removeprefix(server.url), content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_the_readmes_examples_run(server, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    offline, client = code(ROOT / "README.md", "python")
    assert "LLM()" in offline and "http://127.0.0.1:8000" in client
    for example in (offline, client.replace("http://127.0.0.1:8000", server.url)):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", example]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.slow  # tests/test_llm.py runs the like
def test_the_example_for_users_of_vllm_runs(tmp_path: Path) -> None:
    (example,) = code(ROOT / "docs" / "from_vllm.md", "python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "length" in done.stdout, done.stderr


def test_what_determinism_costs_one_request_is_what_was_measured() -> None:
    plain, fixed = (
        re.findall(rf"^\| {name} \| \w+, G \| ([\d.]+) /", (ROOT / "LOG.md").read_text(), re.M)
        for name in ("Qwen3", "Qwen3, `--deterministic`")
    )
    assert f"{fixed[0]} ms a token instead of {plain[0]}" in (ROOT / "README.md").read_text()
    tuning = (ROOT / "docs" / "tuning.md").read_text()
    assert f"takes {fixed[0]} /" in tuning and "`--deterministic`" in tuning.partition("Same text whatever")[2][:200]


def test_pictures_that_are_kept_are_shown_and_small() -> None:
    text = "".join(page.read_text() for page in PAGES)
    kept = sorted((ROOT / "docs").glob("*.png"))
    assert kept and all(f"{file.name})" in text and file.stat().st_size < 150_000 for file in kept)


def test_ops_without_a_kernel_of_torchs_are_the_ones_that_the_changelog_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = platforms.make("cpu")
    if kernels.c_problem(cpu) or "c" not in cpu.providers:
        pytest.skip("no kernels in C")
    text = (ROOT / "CHANGELOG.md").read_text()
    (named,) = re.findall(r"ops without a kernel of torch's for CPUs \((.*?)\)", text)
    monkeypatch.setenv("ANABRANCH_KERNELS", "torch")
    try:
        kernels.bind(cpu)
        kept = {name for name, op in ops.OPS.items() if any(kernel.provider == "c" for kernel in op.bound)}
    finally:
        monkeypatch.undo()
        kernels.bind(platforms.current())
    assert set(re.findall(r"`(\w+)`", named)) == kept

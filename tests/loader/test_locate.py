"""Models by path and by hub id, against a stand-in for the hub on loopback.

huggingface_hub reads its environment when it is imported, so whatever talks to the hub runs in a fresh process.
"""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch.loader import locate as locate_module
from anabranch.loader.checkpoint import CheckpointError, read_checkpoint
from anabranch.loader.locate import locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
READ = {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
UNREAD = {"pytorch_model.bin", "modeling_tiny.py", "README.md", "original/model.safetensors"}
UNREAD |= {"consolidated.safetensors", "onnx/config.json", "model.gguf"}


@dataclass
class Hub:
    """What the stand-in serves, how it fails, and what it was asked for."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    failures: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # path prefix -> status (0: hang up), X-Error-Code
    cut_once: set[str] = field(default_factory=set)  # files whose first download stops half way
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def asked_files(self) -> set[str]:
        return {path.partition(f"/resolve/{COMMIT}/")[2] for path in self.requests if "/resolve/" in path}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(path)
            hub.tokens.add(self.headers.get("Authorization"))
            for prefix, (status, code) in hub.failures.items():
                if path.startswith(prefix) and status == 0:
                    self.close_connection = True
                    return None
                if path.startswith(prefix):
                    return self.reply(status, b'{"error": "refused"}', {"X-Error-Code": code} if code else {})
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                files = hub.repositories.get(match[1])
                if files is None:
                    return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                if match[3] not in ("main", COMMIT):
                    return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                if match[2] == "revision":
                    siblings = [{"rfilename": name} for name in files]
                    info: object = {"id": match[1], "modelId": match[1], "sha": COMMIT, "siblings": siblings}
                else:
                    info = [
                        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for name, content in files.items()
                    ]
                return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.reply_file(match[3], hub.repositories[match[1]][match[3]])
            return self.reply(404, b"{}", {})

        do_HEAD = do_GET

        def reply_file(self, name: str, content: bytes) -> None:
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                return self.reply(206, content[begin:end], headers)
            if self.command == "GET" and name in hub.cut_once:
                hub.cut_once.remove(name)
                self.close_connection = True
                return self.reply(200, content, headers, num_sent=len(content) // 2)
            return self.reply(200, content, headers)

        def reply(self, status: int, body: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:num_sent])

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def source(tmp_path: Path, hub: Hub) -> Path:
    """A small sharded checkpoint, among files that nobody should ask for, served as `someone/tiny`."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"a": torch.randn(64, 32), "b": torch.randn(7).bfloat16()}, folder / SHARDS[0])
    save_file({"c": torch.randn(100, 3)}, folder / SHARDS[1])
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    for name in READ | UNREAD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"file": "{name}"}}')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    hub.repositories["someone/tiny"] = {name: (folder / name).read_bytes() for name in names}
    return folder


class Client:
    """Runs `locate` in a fresh process whose only hub is the stand-in and whose cache is a temporary folder."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url

    def __call__(self, model: str, *, env: dict[str, str] | None = None, **arguments: object) -> Path | str:
        """The folder, or the message of the refusal."""
        code = (
            "import json, sys\n"
            "from anabranch.loader.checkpoint import CheckpointError\n"
            "from anabranch.loader.locate import locate\n"
            "model, arguments = json.loads(sys.argv[1])\n"
            "try:\n    print(json.dumps(['folder', str(locate(model, **arguments))]))\n"
            "except CheckpointError as error:\n    print(json.dumps(['refused', str(error)]))\n"
        )
        clean = {
            name: value for name, value in os.environ.items() if not re.match(r"(HF_|HUGGING|.*_proxy$)", name, re.I)
        }
        clean |= {"HF_HOME": str(self.home), "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}
        clean |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        clean |= {"PYTHONPATH": str(Path(locate_module.__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps([model, arguments])],
            env=clean | (env or {}),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        kind, text = json.loads(done.stdout.splitlines()[-1])
        assert "\n" not in text
        return Path(text) if kind == "folder" else str(text)


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Client:
    home = tmp_path / "home"
    home.mkdir()
    return Client(home, hub.url)


def assert_same_weights(folder: Path, source: Path) -> None:
    checkpoint = read_checkpoint(folder)
    assert sorted(checkpoint.tensors) == ["a", "b", "c"]
    for shard in SHARDS:
        expected = load_file(source / shard)
        actual = load_file(folder / shard)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


# From the hub


def test_download_then_offline(client: Client, hub: Hub, source: Path) -> None:
    folder = client("someone/tiny", env={"HF_TOKEN": "hf_secret"})
    assert isinstance(folder, Path), folder
    assert_same_weights(folder, source)
    assert folder.is_relative_to(client.home)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert hub.asked_files() == READ | set(SHARDS)  # and so no pickle, no code, no second copy
    assert hub.tokens == {"Bearer hf_secret"}

    hub.requests.clear()
    assert client("someone/tiny", env={"HF_HUB_OFFLINE": "1"}) == folder
    assert hub.requests == []


def test_interrupted_download_is_resumed(client: Client, hub: Hub, source: Path) -> None:
    hub.cut_once.add(SHARDS[0])
    folder = client("someone/tiny")
    assert isinstance(folder, Path), folder
    assert_same_weights(folder, source)
    assert hub.cut_once == set()


def test_without_weights_then_offline_with(client: Client, hub: Hub, source: Path) -> None:
    folder = client("someone/tiny", weights=False)
    assert isinstance(folder, Path), folder
    assert hub.asked_files() == READ
    with pytest.raises(CheckpointError, match=r"shard '.*' is missing \(2 of 2 shards are\)"):
        read_checkpoint(folder)

    assert client("someone/tiny", weights=False, env={"HF_HUB_OFFLINE": "1"}) == folder
    assert client("someone/tiny", env={"HF_HUB_OFFLINE": "1"}) == (
        f"someone/tiny: not (or not wholly) in the cache {client.home}/hub, and HF_HUB_OFFLINE forbids a download;"
        " unset HF_HUB_OFFLINE once, or give a local folder"
    )


def test_offline_and_not_in_the_cache(client: Client, hub: Hub, source: Path) -> None:
    assert client("someone/tiny", env={"HF_HUB_OFFLINE": "1"}) == (
        f"someone/tiny: not (or not wholly) in the cache {client.home}/hub, and HF_HUB_OFFLINE forbids a download;"
        " unset HF_HUB_OFFLINE once, or give a local folder"
    )
    assert hub.requests == []


def test_not_found(client: Client, hub: Hub) -> None:
    assert client("someone/nothing") == (
        f"someone/nothing: no such local folder, and not found on {hub.url};"
        " give an existing folder or a hub id owner/name"
    )
    (client.home / "someone" / "nothing2").mkdir(parents=True)
    assert client("someone/nothing") == (
        f"someone/nothing: no such local folder, and not found on {hub.url}; did you mean someone/nothing2?"
    )


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("place", ["/api/models/someone/tiny/revision", f"/someone/tiny/resolve/{COMMIT}/model-"])
def test_gated(client: Client, hub: Hub, source: Path, status: int, place: str) -> None:
    hub.failures[place] = (status, "GatedRepo")
    assert client("someone/tiny") == (
        f"someone/tiny: is gated; ask for access at {hub.url}/someone/tiny and set HF_TOKEN to a token of that account"
    )


@pytest.mark.parametrize(("status", "code"), [(401, "RepoNotFound"), (401, ""), (403, "")])
def test_private(client: Client, hub: Hub, source: Path, status: int, code: str) -> None:
    hub.failures["/api/models/someone/tiny"] = (status, code)
    message = client("someone/tiny", env={"HF_TOKEN": "hf_secret"})
    assert message == (
        f"someone/tiny: private or not on {hub.url} (HTTP {status});"
        " check the name, or set HF_TOKEN to a token that may read it"
    )


def test_hub_is_ill(client: Client, hub: Hub, source: Path) -> None:
    hub.failures["/api/"] = (500, "")
    assert client("someone/tiny") == f"someone/tiny: {hub.url} answered HTTP 500; try again later"


def test_network_failure(client: Client) -> None:
    with socket.socket() as probe:  # a port on which nobody listens
        probe.bind(("127.0.0.1", 0))
        client.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        message = client("someone/tiny")
    assert re.fullmatch(
        rf"someone/tiny: the download from {client.url} failed \(.*[Cc]onnection refused.*\);"
        " check the network, or give a local folder",
        str(message),
    )


def test_hub_hangs_up(client: Client, hub: Hub, source: Path) -> None:
    hub.failures["/api/"] = (0, "")
    message = client("someone/tiny")
    assert re.fullmatch(
        rf"someone/tiny: the download from {hub.url} failed \(Server disconnected.*\);"
        " check the network, or give a local folder",
        str(message),
    )


def test_transfer_fails_outside_http(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **arguments: object) -> None:
        raise RuntimeError("chunk 7:\n lost")  # as hf_xet does, which speaks to no stand-in

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refusal("someone/tiny")
    assert message.endswith("failed (chunk 7: lost); check the network, or give a local folder")


def test_cache_that_cannot_be_written(client: Client, source: Path) -> None:
    (client.home / "hub").write_text("a file where the cache folder should be")
    message = client("someone/tiny")
    assert re.fullmatch(
        rf"someone/tiny: cannot be stored in the cache {client.home}/hub \(.+\); free it or set HF_HOME", str(message)
    )


def test_repository_without_what_is_read(client: Client, hub: Hub) -> None:
    hub.repositories["someone/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"\x80\x02."}
    assert client("someone/pickles") == (
        "someone/pickles: the hub repository holds no *.safetensors, the only weights that are read;"
        " give a repository or a revision that has them"
    )
    hub.repositories["someone/gguf"] = {"model.gguf": b"GGUF", "params.json": b"{}"}
    assert client("someone/gguf") == (
        "someone/gguf: the hub repository holds no config.json; give a repository in transformers layout"
    )
    assert hub.asked_files() == {"config.json", "params.json"}


def test_not_a_hub_id(client: Client, hub: Hub) -> None:
    assert client("some one/tiny") == (
        "some one/tiny: neither an existing folder nor a hub id; give an existing folder or a hub id owner/name"
    )
    assert hub.requests == []


# On this machine


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(folder)) == folder
    assert locate("~/models/tiny") == folder
    assert locate("models/tiny") == Path("models/tiny")  # what is here wins over a hub id
    assert locate("./models/tiny", weights=False) == Path("models/tiny")


def refusal(model: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    return str(caught.value)


def test_local_folder_without_config(tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--tiny"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert refusal(str(cache)) == f"{cache}: holds no config.json; give the folder of a model, as the hub lays it out"
    (snapshot / "config.json").write_text("{}")
    assert refusal(str(cache)) == f"{cache}: holds no config.json; did you mean {snapshot}?"
    assert refusal(str(snapshot.parent)) == f"{snapshot.parent}: holds no config.json; did you mean {snapshot}?"


def test_file_instead_of_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert refusal(str(file)) == f"{file}: is a file; give the folder that holds it and its config.json"


def test_local_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny-moe").mkdir(parents=True)
    (tmp_path / "models" / "tiny-moz").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    absolute = f"{tmp_path}/models/tiny-mo"
    assert refusal(absolute) == f"{absolute}: no such folder; did you mean {tmp_path}/models/tiny-moe?"
    assert refusal("./models/tinymoe") == "./models/tinymoe: no such folder; did you mean models/tiny-moe?"
    assert refusal("./model/tiny-moe") == "./model/tiny-moe: no such folder; did you mean models?"
    assert refusal("~/modles") == f"~/modles: no such folder; did you mean {tmp_path}/models?"
    assert refusal("tiny") == "tiny: no such folder; give an existing folder or a hub id owner/name"
    assert refusal("a/b/c") == "a/b/c: no such folder; give an existing folder or a hub id owner/name"
    assert refusal("~nobody-of-this-name/x").startswith("~nobody-of-this-name/x: no such folder; ")


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
        ("gemma4-26b-a4b", "google/gemma-4-26B-A4B-it"),
    ],
)
def test_a_known_model_without_its_owner(
    name: str, hub_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-30b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refusal(name) == f"{name}: no such folder; did you mean {hub_id}?"
    assert hub_id not in refusal(f"./{name}")

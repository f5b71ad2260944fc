"""From what the user calls a model to a folder on this machine: a local folder, else a repository on the hub.

Downloads go through huggingface_hub, which keeps the cache and obeys HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE; only files that the engine reads are asked for, never pickles and never code. This file does not know
what is in the files: it promises a folder with a config.json, and `checkpoint` judges the weights.
"""

import contextlib
import difflib
import os
from pathlib import Path

from anabranch.loader.checkpoint import CheckpointError

_WEIGHTS = ["*.safetensors"]
_ALL_BUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer.model", "spiece.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Subfolders and consolidated files hold second copies of the weights in other layouts, as large as the first.
_SECOND_COPIES = ["*/*", "consolidated*"]
_HUB_IDS = """Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-Instruct-2507 Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-235B-A22B
Qwen/Qwen3-Coder-30B-A3B-Instruct Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.6-35B-A3B
Qwen/Qwen1.5-MoE-A2.7B openai/gpt-oss-20b openai/gpt-oss-120b deepseek-ai/DeepSeek-V2-Lite deepseek-ai/DeepSeek-V3
deepseek-ai/DeepSeek-R1 moonshotai/Kimi-K2-Instruct zai-org/GLM-4.5-Air zai-org/GLM-4.7-Flash MiniMaxAI/MiniMax-M2
google/gemma-4-26B-A4B-it mistralai/Mixtral-8x7B-Instruct-v0.1 allenai/OLMoE-1B-7B-0924 baidu/ERNIE-4.5-21B-A3B-PT"""


def locate(model: str, *, weights: bool = True) -> Path:
    """The folder of `model`, a local folder or a hub id `owner/name` to download (without weights: all the rest)."""
    return local(model) or _download(model, weights)


def local(model: str) -> Path | None:
    """The folder, if there is one; None for a hub id. A CheckpointError for what is neither."""
    if not model.strip():
        raise CheckpointError("the name of the model is empty; give an existing folder or a hub id owner/name")
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):  # os.path, for pathlib raises where a parent may not be entered
        return _check_local(path)
    if os.path.exists(path):
        raise CheckpointError(f"{model}: is a file; give the folder that holds it and its config.json")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        ids = {} if "/" in model else {hub_id.partition("/")[2].lower(): hub_id for hub_id in _HUB_IDS.split()}
        near = difflib.get_close_matches(model.lower(), ids, 1, 0.85)
        raise CheckpointError(f"{model}: no such folder; {f'did you mean {ids[near[0]]}?' if near else _nearest(path)}")
    return None


def _check_local(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
        cure = f"did you mean {inner[0].parent}?" if inner else "give the folder of a model, as the hub lays it out"
        raise CheckpointError(f"{folder}: holds no config.json; {cure}")
    return folder


def _nearest(path: Path) -> str:
    """The cure for a path that does not exist: the sibling closest to its first part that is not there."""
    while not os.path.exists(path.parent):
        path = path.parent
    folders: list[str] = []
    with contextlib.suppress(OSError):  # a parent that may not be listed has no suggestion to give
        folders = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    if near := difflib.get_close_matches(path.name, folders, n=1):
        return f"did you mean {path.parent / near[0]}?"
    return "give an existing folder or a hub id owner/name"


def _download(model: str, weights: bool) -> Path:
    # Imported here: it takes most of a second, and a local folder does not need it.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(
            snapshot_download(
                model,
                allow_patterns=_ALL_BUT_WEIGHTS + (_WEIGHTS if weights else []),
                ignore_patterns=_SECOND_COPIES,
            )
        )
    except HFValidationError:
        raise CheckpointError(f"{model}: neither an existing folder nor a hub id; {_nearest(Path(model))}") from None
    except (OSError, httpx.HTTPError, RuntimeError) as error:  # RuntimeError: what hf_xet raises on a failed transfer
        raise CheckpointError(f"{model}: {_explain(model, error)}") from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model}: the hub repository holds no config.json; give a repository in transformers layout"
        )
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{model}: the hub repository holds no *.safetensors, the only weights that are read;"
            " give a repository or a revision that has them"
        )
    return folder


def _explain(model: str, error: Exception) -> str:
    """Cause and cure of a failed download, in one line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    hub = constants.ENDPOINT
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # its message says "not in the cache either" whatever the cause
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"not (or not wholly) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids a download;"
            " unset HF_HUB_OFFLINE once, or give a local folder"
        )
    if isinstance(error, GatedRepoError):
        return f"is gated; ask for access at {hub}/{model} and set HF_TOKEN to a token of that account"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status == 404:
            return f"no such local folder, and not found on {hub}; {_nearest(Path(model))}"
        if status in (401, 403):
            return (
                f"private or not on {hub} (HTTP {status}); check the name, or set HF_TOKEN to a token that may read it"
            )
        return f"{hub} answered HTTP {status}; try again later"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be stored in the cache {constants.HF_HUB_CACHE} ({error.strerror}); free it or set HF_HOME"
    cause = " ".join(str(error).split()) or type(error).__name__
    return f"the download from {hub} failed ({cause}); check the network, or give a local folder"

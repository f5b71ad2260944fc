"""Options that users of vLLM and SGLang know: which of ours they are, why they have no effect, or why they are refused.

One table, for command lines, files of `--config` and `LLM`; docs/from_vllm.md shows it.
"""

import argparse
import difflib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "MODEL"


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    use: str = ""
    """Ours with the same meaning: MODEL, an option, or an option with a value."""
    why: str = ""
    """Why it has no effect, or is refused; of those that are refused also what to use instead."""
    refused: bool = False
    takes_value: bool = True
    """Of those that are none of ours."""
    unless: tuple[str, ...] = ()
    """Values for which it is not refused: they ask for what is done anyway."""


def _same(use: str, *names: str) -> Flag:
    return Flag(names, use)


def _no_effect(why: str, *names: str, takes_value: bool = True) -> Flag:
    return Flag(names, why=why, takes_value=takes_value)


def _refused(why: str, *names: str, takes_value: bool = True, unless: tuple[str, ...] = ()) -> Flag:
    return Flag(names, why=why, refused=True, takes_value=takes_value, unless=unless)


TABLE = (
    _same(MODEL, "--model", "--model-path"),
    _same("--max-model-len", "--context-length"),
    _same("--gpu-memory-utilization", "--mem-fraction-static", "--memory-fraction"),
    _same("--max-num-seqs", "--max-running-requests"),
    _same("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
    _same("--prefix-cache", "--enable-prefix-caching"),
    _same("--no-prefix-cache", "--no-enable-prefix-caching", "--disable-radix-cache"),
    _same("--page-size", "--block-size"),
    _same("--num-pages", "--num-gpu-blocks-override"),
    _same("--enforce-eager", "--disable-cuda-graph"),
    _same("--graphs compiled", "--enable-torch-compile"),
    _same("--no-async-scheduling", "--disable-overlap-schedule"),
    _same("--tensor-parallel-size", "--tp", "--tp-size", "-tp"),
    _same("--data-parallel-size", "--dp", "--dp-size", "-dp"),
    _same("--expert-parallel", "--enable-expert-parallel", "--enable-ep-moe"),
    _same("--nodes", "--nnodes"),
    _same("--quantization", "-q"),
    _same("--seed", "--random-seed"),
    _same("--speculative-tokens", "--num-speculative-tokens", "--speculative-num-draft-tokens"),
    _same("--max-queue", "--max-queued-requests"),
    _same("--step-timeout", "--watchdog-timeout"),
    _no_effect("no code from a model folder is ever run", "--trust-remote-code", takes_value=False),
    _no_effect("prompts are always computed in chunks", "--enable-chunked-prefill", takes_value=False),
    _no_effect(
        "calls and thoughts are parsed wherever the chat template has them",
        "--enable-auto-tool-choice",
        "--enable-reasoning",
        takes_value=False,
    ),
    _no_effect("a preempted request is computed again, and most of it is in the prefix cache", "--swap-space"),
    _no_effect("a preempted request is computed again", "--preemption-mode"),
    _no_effect("the format is found in the template", "--chat-template-content-format"),
    _no_effect(
        "prompts and answers are never logged, figures always are",
        "--disable-log-requests",
        "--enable-log-requests",
        "--no-enable-log-requests",
        "--disable-log-stats",
        "--log-requests",
        takes_value=False,
    ),
    _no_effect("the log has one level", "--log-level", "--log-level-http", "--uvicorn-log-level", "--max-log-len"),
    _no_effect("metrics are always exported", "--enable-metrics", takes_value=False),
    _no_effect(
        "each op takes the best kernel of the platform (`anabranch doctor` lists them)",
        "--attention-backend",
        "--moe-backend",
        "--moe-runner-backend",
        "--sampling-backend",
    ),
    _no_effect(
        "grammars are llguidance's",
        "--grammar-backend",
        "--guided-decoding-backend",
        "--structured-outputs-config",
    ),
    _no_effect("the engine is one process a rank", "--distributed-executor-backend", "--api-server-count"),
    _no_effect("sizes of graphs follow the steps that occur", "--max-seq-len-to-capture", "--cuda-graph-max-bs"),
    _no_effect("each step's tokens are sent at once", "--num-scheduler-steps", "--stream-interval"),
    _no_effect("every request may ask for 256", "--max-logprobs"),
    _no_effect(
        "there is nothing like it to turn off",
        "--disable-custom-all-reduce",
        "--disable-cascade-attn",
        "--skip-server-warmup",
        takes_value=False,
    ),
    _refused(
        "prompts are always computed in chunks, of --max-num-batched-tokens at most",
        "--no-enable-chunked-prefill",
        takes_value=False,
    ),
    _refused(
        "requests run by their field priority, then in the order of arrival",
        "--scheduling-policy",
        "--schedule-policy",
        unless=("fcfs", "priority"),
    ),
    _refused(
        "layers are not divided among devices: divide the model by --tensor-parallel-size, over machines by --nodes",
        "--pipeline-parallel-size",
        "--pp-size",
        "--pp",
        "-pp",
        unless=("1",),
    ),
    _refused(
        "experts are divided among the ranks of --tensor-parallel-size or --data-parallel-size: --expert-parallel",
        "--expert-parallel-size",
        "--ep-size",
        "--ep",
        unless=("1",),
    ),
    _refused(
        "experts move after --rebalance-interval steps, into the room that --expert-copies gives on each rank",
        "--enable-eplb",
        takes_value=False,
    ),
    _refused("room on each rank is --expert-copies", "--num-redundant-experts", "--ep-num-redundant-experts"),
    _refused(
        "torchrun or its environment variables name the nodes: see docs/many_devices.md",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--dist-init-addr",
        "--data-parallel-address",
    ),
    _refused(
        "adapters are not supported: merge the adapter into the weights (PEFT's merge_and_unload) and serve the result",
        "--enable-lora",
        takes_value=False,
    ),
    _refused(
        "adapters are not supported: merge the adapter into the weights",
        "--lora-modules",
        "--lora-paths",
        "--max-loras",
        "--max-lora-rank",
    ),
    _refused(
        "a hub id is its main revision: hf download ID --revision REV --local-dir FOLDER, then give FOLDER",
        "--revision",
        "--code-revision",
        unless=("main",),
    ),
    _refused(
        "the tokenizer is the model folder's tokenizer.json: put another one there",
        "--tokenizer",
        "--tokenizer-path",
        "--tokenizer-revision",
    ),
    _refused("tokenizer.json is the only form that is read", "--tokenizer-mode", unless=("auto", "hf")),
    _refused(
        "change config.json in a copy of the model's folder",
        "--hf-overrides",
        "--hf-config-path",
        "--json-model-override-args",
        "--rope-scaling",
        "--rope-theta",
    ),
    _refused(
        "change generation_config.json in a copy of the folder, or send the value with a request",
        "--override-generation-config",
    ),
    _refused("downloads go to the hub's cache: set HF_HOME", "--download-dir"),
    _refused("set HF_TOKEN", "--hf-token"),
    _refused("weights stay on the device: quantise them with --quantization int4", "--cpu-offload-gb", unless=("0",)),
    _refused(
        "it is --speculative ngram or mtp, with --speculative-tokens; other draft models are not supported",
        "--speculative-config",
        "--speculative-algorithm",
        "--speculative-model",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
    ),
    _refused("it is --graphs", "--compilation-config", "-O", "-cc"),
    _refused("set ANABRANCH_PLATFORM to a platform that `anabranch doctor` lists", "--device", unless=("auto",)),
    _refused(
        "a server generates and embeds: leave it out",
        "--task",
        "--runner",
        unless=("auto", "generate", "embed", "embedding", "pooling"),
    ),
    _refused(
        "put a proxy with TLS in front of the server",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
    ),
    _refused("set OTEL_EXPORTER_OTLP_ENDPOINT", "--otlp-traces-endpoint"),
    _refused(
        "prefill and decode are in one engine: see --max-num-batched-tokens",
        "--kv-transfer-config",
        "--disaggregation-mode",
        unless=("null",),
    ),
)
FLAGS = {name: flag for flag in TABLE for name in flag.names}
MODELS = tuple(name for name, flag in FLAGS.items() if flag.use == MODEL)

CHECKPOINTS = "a quantised checkpoint says so in its config.json: leave the option out; a plain one takes fp8 or int4"
VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": {"auto": "safetensors"},
    "generation_config": {"vllm": "none"},
}
"""Other names of values, by field."""
NO_VALUES: dict[str, dict[str, str]] = {
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "modelopt", "w8a8_fp8"), CHECKPOINTS
    ),
    "kv_cache_dtype": {"fp8_e5m2": "keys and values in a byte are fp8_e4m3"},
}
"""Values that others have, and why they are none here."""
FIELDS = {"gpu_memory_utilization": "memory_fraction"}
"""Options that are called otherwise in EngineConfig."""


def value(field: str, text: str) -> str:
    """What a value is called here; ValueError for one that others have and we do not."""
    if why := NO_VALUES.get(field, {}).get(text):
        raise ValueError(f"{text}: {why}")
    return VALUES.get(field, {}).get(text, text)


# ---------------------------------------------------------------------------------------------------------------------
# On the command line
# ---------------------------------------------------------------------------------------------------------------------


def add(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of a command that takes a model, as options that its help does not show."""
    own = dict(parser._option_string_actions)
    for action in parser._actions:
        if action.dest in (*VALUES, *NO_VALUES) and action.option_strings and action.choices is not None:
            action.type = _reader(action.dest)
    if not any(action.dest == "model" and not action.option_strings for action in parser._actions):
        return
    for flag in TABLE:
        names = [name for name in flag.names if name not in own]
        option, _, fixed = flag.use.partition(" ")
        target = own.get(option)
        if not names or (flag.use not in ("", MODEL) and target is None):
            continue
        how: dict[str, Any] = {"nargs": None if flag.takes_value else 0}
        if target is not None:
            how = {"nargs": 0} if fixed else {"nargs": target.nargs, "type": target.type, "choices": target.choices}
        parser.add_argument(
            *names, action=Known, flag=flag, target=target, dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
        )


def _reader(field: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        try:
            return value(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def nearest(parser: argparse.ArgumentParser, word: str) -> str:
    """The option that a mistyped one is most like; "" where none is, or where others have that very option."""
    visible = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    shown = [option for action in visible for option in action.option_strings]
    return next(iter([] if word in FLAGS else difflib.get_close_matches(word, shown, 1, 0.75)), "")


class Known(argparse.Action):
    def __init__(
        self, option_strings: list[str], dest: str, flag: Flag, target: argparse.Action | None, **how: Any
    ) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **how)
        self.flag, self.target = flag, target

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        flag = self.flag
        if self.target is not None:
            name, _, fixed = flag.use.partition(" ")
            self.target(parser, namespace, fixed or values, name)
        elif flag.refused and values not in flag.unless:
            parser.error(f"{option}: {flag.why}")
        elif not flag.refused:
            print(f"{parser.prog}: {option} has no effect: {flag.why}", file=sys.stderr)


def model_first(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """`--model NAME` as the first word, where a command takes a model."""
    if not isinstance(parser._option_string_actions.get(MODELS[0]), Known):
        return words
    found: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, given = word.partition("=")
        if word == "--":
            rest += [word, *left]
        elif name in MODELS and (equals or (given := next(left, ""))):
            found.append(given)
        else:
            rest.append(word)
    return found + rest


# ---------------------------------------------------------------------------------------------------------------------
# In Python
# ---------------------------------------------------------------------------------------------------------------------


def engine_options(options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an LLM as fields of EngineConfig; `known` are these with their defaults. Those that nobody
    knows stay as they are; ValueError for those that are refused."""
    found: dict[str, Any] = {}
    for name, given in options.items():
        flag = FLAGS.get(f"--{name.replace('_', '-')}")
        off = FLAGS.get(f"--no-{name.replace('_', '-')}") if given is False else None
        if off is not None and not off.use:
            flag, given = off, True
        if name in known or (flag is None and name != "enforce_eager" and name not in FIELDS):
            try:
                found[name] = value(name, given) if isinstance(given, str) else given
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif flag is not None and not flag.use:
            if given is None or given is False or str(given) in flag.unless:
                continue
            if flag.refused:
                raise ValueError(f"{name}: {flag.why}")
            warnings.warn(f"{name} has no effect: {flag.why}", stacklevel=3)
        else:
            option, _, fixed = (flag.use if flag else f"--{name.replace('_', '-')}").partition(" ")
            field = option.removeprefix("--").replace("-", "_")
            if field == "enforce_eager":
                field, fixed = "graphs", "none"
            field, turned_off = FIELDS.get(field, field.removeprefix("no_")), field.startswith("no_")
            if field not in known:
                where = "the first argument" if option == MODEL else f"an option of `anabranch serve`, {option}"
                raise ValueError(f"{name}: it is {where}")
            if fixed and not given:
                continue
            found[field] = fixed or (not given if turned_off else given)
    return found

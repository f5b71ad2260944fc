"""Options that users of vLLM and SGLang know: which of ours they are, why they have no effect, or why they are refused.

One table, for command lines, files of `--config` and `LLM`; docs/from_vllm.md shows it.
"""

import argparse
import difflib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
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


_SAME = {
    MODEL: "--model --model-path",
    "--max-model-len": "--context-length --ctx-size -c",
    "--gpu-memory-utilization": "--mem-fraction-static --memory-fraction",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--max-num-scheduled-tokens --chunked-prefill-size --max-prefill-tokens",
    "--prefix-cache": "--enable-prefix-caching",
    "--no-prefix-cache": "--no-enable-prefix-caching --disable-radix-cache",
    "--page-size": "--block-size",
    "--num-pages": "--num-gpu-blocks-override",
    "--state-dtype": "--mamba-ssm-cache-dtype --mamba-ssm-dtype",
    "--enforce-eager": "--disable-cuda-graph",
    "--graphs compiled": "--enable-torch-compile",
    "--deterministic": "--enable-deterministic-inference",
    "--no-async-scheduling": "--disable-overlap-schedule",
    "--tensor-parallel-size": "--tp --tp-size -tp",
    "--data-parallel-size": "--dp --dp-size -dp",
    "--expert-parallel": "--enable-expert-parallel --enable-ep-moe -ep",
    "--nodes": "--nnodes -n",
    "--quantization": "-q",
    "--seed": "--random-seed",
    "--speculative-tokens": "--num-speculative-tokens --spec-tokens --speculative-num-steps",
    "--max-queue": "--max-queued-requests",
    "--step-timeout": "--watchdog-timeout",
}
"""Ours, and the names it has elsewhere."""
_NO_EFFECT = {
    "a preempted request is computed again, and most of it is in the prefix cache": "--swap-space",
    "a preempted request is computed again": "--preemption-mode",
    "the format is found in the template": "--chat-template-content-format",
    "the log has one level": "--log-level --log-level-http --uvicorn-log-level --max-log-len",
    "models read text alone": "--limit-mm-per-prompt --limit-mm-data-per-request --mm-processor-cache-gb",
    "pages of --allowed-origins may send what the APIs need": "--allowed-methods --allowed-headers",
    "each op takes the best kernel of the platform (`anabranch doctor` lists them)": "--attention-backend "
    "--moe-backend --moe-runner-backend --sampling-backend --linear-backend --mamba-backend "
    "--prefill-attention-backend --decode-attention-backend",
    "grammars are llguidance's": "--grammar-backend --guided-decoding-backend --structured-outputs-config",
    "the engine is one process a rank": "--distributed-executor-backend --api-server-count -asc --tokenizer-worker-num",
    "sizes of graphs follow the steps that occur": "--max-seq-len-to-capture --cuda-graph-max-bs "
    "--max-cudagraph-capture-size",
    "each step's tokens are sent at once": "--num-scheduler-steps --stream-interval",
    "every request may ask for 256": "--max-logprobs",
}
"""Why options with a value have no effect."""
_NO_EFFECT_SWITCHES = {
    "no code from a model folder is ever run": "--trust-remote-code",
    "prompts are always computed in chunks": "--enable-chunked-prefill --enable-mixed-chunk",
    "calls and thoughts are parsed wherever the chat template has them": "--enable-auto-tool-choice --enable-reasoning",
    "requests always run by their field priority": "--enable-priority-scheduling",
    "prompts and answers are never logged, figures always are": "--disable-log-requests --enable-log-requests "
    "--no-enable-log-requests --disable-log-stats --log-requests",
    "a request is one line of the log": "--disable-uvicorn-access-log",
    "metrics are always exported": "--enable-metrics",
    "answers always have it": "--enable-prompt-tokens-details --enable-cache-report --enable-request-id-headers",
    "a server generates and embeds": "--is-embedding",
    "models read text alone": "--language-model-only --skip-mm-profiling",
    "there is nothing like it to turn off": "--disable-custom-all-reduce --disable-cascade-attn --skip-server-warmup "
    "--disable-hybrid-kv-cache-manager --disable-fastapi-docs --disable-shared-experts-fusion",
}
"""The same of those without a value."""
_REFUSED = {
    "room on each rank is --expert-copies": "--num-redundant-experts --ep-num-redundant-experts",
    "torchrun or its environment variables name the nodes: see docs/many_devices.md": "--node-rank -r --master-addr "
    "--master-port --dist-init-addr --nccl-init-addr --data-parallel-address -dpa",
    "the tokenizer is the model folder's tokenizer.json: put another one there": "--tokenizer --tokenizer-path "
    "--tokenizer-revision",
    "change config.json in a copy of the model's folder": "--hf-overrides --hf-config-path --json-model-override-args "
    "--rope-scaling --rope-theta",
    "change generation_config.json in a copy of the folder, or send the value with a request": ""
    "--override-generation-config --preferred-sampling-params",
    "send chat_template_kwargs with a request": "--default-chat-template-kwargs",
    "downloads go to the hub's cache: set HF_HOME": "--download-dir",
    "set HF_TOKEN": "--hf-token",
    "the cache is sized by --num-pages, of --page-size tokens, or --gpu-memory-utilization": "--kv-cache-memory-bytes "
    "--kv-cache-memory --max-total-tokens",
    "it is --speculative ngram or mtp, with --speculative-tokens; other draft models are not supported": ""
    "--speculative-config -sc --speculative-algorithm --spec-method --speculative-num-draft-tokens",
    "it is --graphs": "--compilation-config -O -cc --optimization-level",
    "set OTEL_EXPORTER_OTLP_ENDPOINT": "--otlp-traces-endpoint",
    "requests run by their field priority, then in the order of arrival": "--scheduling-policy "
    "--schedule-policy = fcfs priority",
    "layers are not divided among devices: divide the model by --tensor-parallel-size, over machines by --nodes": ""
    "--pipeline-parallel-size --pp-size --pp -pp = 1",
    "experts are divided among the ranks of --tensor-parallel-size or --data-parallel-size: --expert-parallel": ""
    "--expert-parallel-size --ep-size --ep = 1",
    "a hub id is its main revision: hf download ID --revision REV --local-dir FOLDER, then give FOLDER": "--revision "
    "--code-revision = main",
    "tokenizer.json is the only form that is read": "--tokenizer-mode = auto hf",
    "config.json is the only form that is read": "--config-format = auto hf",
    "models are those of `anabranch.models`": "--model-impl = auto",
    "weights stay on the device: quantise them with --quantization int4": "--cpu-offload-gb = 0 0.0",
    "the platform is found: leave it out, or set ANABRANCH_PLATFORM to one that `anabranch doctor` lists": ""
    "--device = auto",
    "a server generates and embeds: leave it out": "--task --runner --convert = auto none generate "
    "embed embedding pooling",
    "prefill and decode are in one engine: see --max-num-batched-tokens": "--kv-transfer-config "
    "--disaggregation-mode = null",
}
"""Why options with a value are refused; after = are values for which they are not."""
_REFUSED_SWITCHES = {
    "prompts are always computed in chunks, of --max-num-batched-tokens at most": "--no-enable-chunked-prefill",
    "experts move after --rebalance-interval steps, into the room that --expert-copies gives on each rank": ""
    "--enable-eplb",
    "adapters are not supported: merge the adapter into the weights (PEFT's merge_and_unload) and serve the result": ""
    "--enable-lora",
}
"""The same of those without a value."""
TABLE = (
    *(Flag(tuple(names.split()), use) for use, names in _SAME.items()),
    *(Flag(tuple(names.split()), why=why) for why, names in _NO_EFFECT.items()),
    *(Flag(tuple(names.split()), why=why, takes_value=False) for why, names in _NO_EFFECT_SWITCHES.items()),
    *(Flag(tuple(names.split()), why=why, refused=True, takes_value=False) for why, names in _REFUSED_SWITCHES.items()),
    *(
        Flag(tuple(names.split()), why=why, refused=True, unless=tuple(values.split()))
        for why, (names, _, values) in ((why, text.partition(" = ")) for why, text in _REFUSED.items())
    ),
)
FLAGS = {name: flag for flag in TABLE for name in flag.names}
MODELS = tuple(name for name, flag in FLAGS.items() if flag.use == MODEL)

FAMILIES = {
    "adapters are not supported: merge the adapter into the weights": "*lora*",
    "models read text alone: leave it out": "mm-* *-mm-* *media-* *image* video-* asr-* *encoder* enable-multimodal "
    "language-only enable-precise-embedding-interpolation",
    "it is --graphs; the sizes that are captured follow the steps that occur": "*cuda-graph* *cudagraph* "
    "enable-torch-compile-* torch-compile-* performance-mode",
    "the log and the metrics have one form: see docs/serving.md": "*-metric* bucket-* *-buckets trace-* *-trace* "
    "*-tracing *nvtx* profiler-config log-config-file log-error-stack log-requests-* enable-log-* *-logging* "
    "*access-log* jit-monitor-* debug-* *-dump-* show-* collect-* stat-loggers gc-* decode-log-interval "
    "enable-server-load-tracking",
    "it is --speculative ngram or mtp, with --speculative-tokens; other draft models are not supported": "spec-* "
    "speculative-* decoupled-spec-* *-draft-* *-eagle",
    "prompts and answers are computed by one engine, which shares its cache with no other: see --replicas": "ec-* "
    "disaggregation-* kv-events-config mooncake-* *pdmux* sm-group-num tokens-only num-reserved-decode-tokens "
    "prefill-round-robin-balance",
    "states of hybrid models are set by --state-dtype and --state-interval": "mamba-* *-mamba-* *replayssm*",
    "the cache is on the device: see --gpu-memory-utilization, --page-size, --prefix-cache and --kv-cache-dtype": ""
    "hicache-* *hierarchical-* *lmcache* *flexkv* kv-offloading-* *hisparse* radix-* *-radix-cache kv-canary* "
    "kv-sharing-* kv-cache-dtype-* prefix-caching-* prefix-cache-* prefix-match-* *-swa-* swa-* enable-page-major-* "
    "*-unified-memory c128-* watermark *chunked-prefix-cache *-kv-cache retraction-policy strip-thinking-cache",
    "experts move after --rebalance-interval steps, into the room that --expert-copies gives on each rank": "eplb-* "
    "ep-* *elastic-e* expert-placement-* *expert-distribution-* expert-balancedness-* *-expert-location max-ep-size "
    "fuseep-* *waterfill",
    "it is --data-parallel-size with --expert-parallel, over machines with --nodes": "enable-dp-* dp-* *-dp-* "
    "data-parallel-* load-balance-method moe-data-* moe-dp-* headless -dp?",
    "set CUDA_VISIBLE_DEVICES": "device-ids base-gpu-id gpu-id-step",
    "numactl binds a process to a node": "numa-*",
    "it is --ray-address, with --replicas or --nodes": "use-ray ray-workers-use-nsight",
    "ranks are set by --tensor-parallel-size, --data-parallel-size, --expert-parallel and --nodes alone": ""
    "*context-parallel* *-cp-* *-cp cp-* dcp-* -dcp -pcp *nccl* *deepep* *a2a-* all2all-* *allreduce-* *-all-reduce "
    "*symm-mem *mscclpp *batch-overlap tbo-* *dbo* ubatch-size pp-* *dist*-timeout* *attn-tp* *fault-tolerance* "
    "dwdp-size moe-dense-* *-ep-weight-filter *-all-to-all *-quant-communications max-parallel-loading-workers "
    "enable-p2p-check *-scattered-sconv",
    "--quantization fp8 or int4 quantises a plain checkpoint; a quantised one says so in its config.json": ""
    "quantization-* *-quant modelopt-* quantize-* allow-deprecated-* rl-quant-*",
    "weights are read once, from the folder's *.safetensors, and stay on the device": "*weight* *-ckpt-* kt-* "
    "offload-* cpu-offload-* safetensors-* model-loader-* model-checksum modelexpress-* *-memory-saver "
    "ignore-patterns pt-load-* enable-sleep-mode enable-cumem-allocator use-tqdm-on-load decrypted-*",
    "it is --pooling, or a field of the request": "pooler-config",
    "it is --generation-config": "sampling-defaults",
    "no code from elsewhere is loaded": "*-plugin *-cls logits-processors *custom-logit-processor middleware "
    "forward-hooks custom-* model-class-overrides model-config-parser sidecar*",
    "text is what a server reads and writes, and the tokenizer runs in its process": "skip-tokenizer-init "
    "*tokenizer-batch* *-batch-tokenizer* detokenizer-* renderer-* tokenizer-* enable-prompt-embeds",
    "each op takes the best kernel of the platform (`anabranch doctor` lists them): leave it out": "*-backend "
    "*flashinfer* *-gemm* triton-attention-* *-fusion *fused-* *mxfp4* *-fp4-* attention-config -ac kernel-config "
    "ir-op-priority *tf32* *fp32-lm-head use-fp64-gumbel dsa-* nsa-* *-dsa-* mlx-*",
    "put a proxy in front of the server, for TLS, HTTP/2 and paths": "*ssl-* uds *http2* *grpc* *root-path "
    "*http-sidecar-port",
    "larger requests are refused: see --max-header-bytes and --max-body-bytes": "h11-*",
    "pages and clients send the key in a header: see --allowed-origins and --api-key": "allow-credentials "
    "admin-api-key",
    "a request asks for it: send stream_options with include_usage": "*-include-usage",
    "the template is the model's own, or a file: --chat-template": "trust-request-chat-template *-template "
    "hf-chat-template-name response-role exclude-tools-when-* cohere-*",
    "docs/serving.md lists what requests may ask for, and the routes: there is no such thing": "*return-* "
    "logprobs-mode *-tokenizer-info-* constrained-json-* allow-auto-truncate enable-mis *-strict-thinking "
    "reasoning-config fingerprint-* *streaming-session *-streaming-output stream-output tool-server file-storage-path "
    "enable-offline-docs enable-flash-late-*",
    "the scheduler is set by --max-num-seqs and --max-num-batched-tokens, and the field priority of a request": ""
    "schedule* prefill-* *prefill-delayer long-prefill-* *-dynamic-chunking num-continuous-* *-priority-* priority-* "
    "min-free-* optimistic-* batch-notify-* sleep-on-idle load-snapshot-*",
    "diffusion language models are not supported": "dllm-* diffusion-config -dc",
    "there is nothing like it here: leave it out": "additional-config fail-on-environ-* rl-* warmups soft-watchdog-* "
    "engine-info-* crash-* msprobe-* disable-outlines-* *-sliding-window",
}
"""Further options of others, without the dashes, by what refuses them; * stands for any letters."""


CHECKPOINTS = "a quantised checkpoint says so in its config.json: leave the option out; a plain one takes fp8 or int4"
UNREAD = "not supported: a plain checkpoint takes fp8 or int4; FP8, AWQ, GPTQ, compressed-tensors and MXFP4 are read"
VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "state_dtype": {"auto": "float32"},
    "load_format": {"auto": "safetensors"},
    "generation_config": {"vllm": "none"},
}
"""Other names of values, by field."""
NO_VALUES: dict[str, dict[str, str]] = {
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "w8a8_fp8"), CHECKPOINTS
    )
    | dict.fromkeys(("bitsandbytes", "gguf", "torchao", "quark", "modelopt", "modelopt_fp4", "experts_int8"), UNREAD),
    "state_dtype": dict.fromkeys(("bfloat16", "float16"), "it is model: what is computed in"),
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


def reason(word: str) -> str:
    """Why an option that others have is none here; "" where that is not known."""
    name = word.replace("_", "-").partition(".")[0]  # vLLM has --a-config.field too
    name = name if name in FLAGS else name.replace("--no-", "--", 1)
    if name in FLAGS:
        return FLAGS[name].why * FLAGS[name].refused
    name = name.removeprefix("--")
    return next((why for why, some in FAMILIES.items() if any(fnmatch(name, one) for one in some.split())), "")


def nearest(parser: argparse.ArgumentParser, word: str) -> str:
    """The option that a mistyped one is most like, or is a part of; "" where none is, or where others have that very
    option."""
    visible = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    off = word.startswith("--n")  # else it is no mistyped --no-x, which means the opposite
    shown = [option for action in visible for option in action.option_strings if off or option[:5] != "--no-"]
    if word in FLAGS or reason(word):
        return ""
    parts = [option for option in shown if len(word) > 4 and (option.startswith(word) or option.endswith(word[1:]))]
    return next(iter(difflib.get_close_matches(word, shown, 1, 0.75) or parts * (len(parts) == 1)), "")


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


def turned_off(name: str) -> Flag | None:
    """The switch of others that `--no-x` turns off; None: there is none, or it is one of ours."""
    flag = FLAGS.get(name.replace("--no-", "--", 1)) if name.startswith("--no-") and name not in FLAGS else None
    return None if flag is None or flag.use or flag.takes_value else flag


def spelled(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """vLLM's other spellings: `--a_b` is --a-b, `--a-config.field` a value of --a-config, `--no-x` of a switch that is
    refused is what is done anyway, and of one without effect has none."""
    end = words.index("--") if "--" in words else len(words)
    found = []
    for word in words[:end]:
        name, equals, given = word.partition("=")
        plain = name.replace("_", "-")
        base = plain.partition(".")[0]
        if name.startswith("--") and name not in parser._option_string_actions:
            off = turned_off(base)
            if off is not None and off.refused:
                continue
            base = base if off is None else base.replace("--no-", "--", 1)
            if plain in parser._option_string_actions or (base in FLAGS and base in parser._option_string_actions):
                word = base + equals + given
        found.append(word)
    return found + words[end:]


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
        if given is None and (flag or name in known or name in FIELDS):
            continue  # the default, as elsewhere
        off = FLAGS.get(f"--no-{name.replace('_', '-')}") if given is False else None
        if off is not None and not off.use:
            flag, given = off, True
        if flag is None and name not in known and (why := reason(f"--{name}")):
            if given is None or given is False:
                continue
            raise ValueError(f"{name}: {why}")
        if name in known or (flag is None and name != "enforce_eager" and name not in FIELDS):
            try:
                found[name] = value(name, given) if isinstance(given, str) else given
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif flag is not None and not flag.use:
            if given is False or str(given) in flag.unless:
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

"""The options of vLLM's and SGLang's servers, by name: each has an answer, and none is taken for a typing error."""

import fnmatch
import random
from pathlib import Path

import pytest

from anabranch import LLM
from anabranch.cli.main import make_parser
from anabranch.known_flags import FAMILIES, FLAGS, engine_options, nearest, reason

VLLM = """
--additional-config --aggregate-engine-logging --all2all-backend --allow-credentials --allow-deprecated-quantization
--allowed-headers --allowed-local-media-path --allowed-media-domains --allowed-methods --allowed-origins --api-key
--api-server-count --async-scheduling --attention-backend --attention-config --block-size --chat-template
--chat-template-content-format --code-revision --cohere-format --cohere-is-reasoning-model --collect-detailed-traces
--compilation-config --config --config-format --convert --cp-kv-cache-interleave-size
--cpu-distributed-timeout-seconds --cpu-offload-gb --cpu-offload-params --cudagraph-capture-sizes --cudagraph-metrics
--data-parallel-address --data-parallel-backend --data-parallel-external-lb --data-parallel-hybrid-lb
--data-parallel-multi-port-external-lb --data-parallel-rank --data-parallel-rpc-port --data-parallel-size
--data-parallel-size-local --data-parallel-start-rank --data-parallel-supervisor-port --dbo-decode-token-threshold
--dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size --dcp-q-replicate
--decode-context-parallel-size --default-chat-template-kwargs --default-mm-loras --device-ids --diffusion-config
--disable-access-log-for-endpoints --disable-cascade-attn --disable-chunked-mm-input --disable-custom-all-reduce
--disable-fastapi-docs --disable-hybrid-kv-cache-manager --disable-log-stats --disable-nccl-for-dp-synchronization
--disable-sliding-window --disable-uvicorn-access-log --distributed-executor-backend --distributed-timeout-seconds
--download-dir --dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s
--dp-supervisor-probe-timeout-s --dtype --ec-manager-config --ec-transfer-config --enable-auto-tool-choice
--enable-bf16x3-router-gemm --enable-chunked-prefill --enable-cumem-allocator --enable-dbo --enable-elastic-ep
--enable-ep-weight-filter --enable-eplb --enable-expert-parallel --enable-fault-tolerance
--enable-flash-late-interaction --enable-flashinfer-autotune --enable-force-include-usage
--enable-layerwise-nvtx-tracing --enable-log-deltas --enable-log-outputs --enable-log-requests
--enable-logging-iteration-details --enable-lora --enable-mamba-cache-stochastic-rounding --enable-mfu-metrics
--enable-mixed-moe-lora-format --enable-mm-embeds --enable-moe-shared-loras --enable-offline-docs
--enable-per-request-metrics --enable-prefix-caching --enable-prompt-embeds --enable-prompt-tokens-details
--enable-request-id-headers --enable-return-routed-experts --enable-server-load-tracking --enable-sleep-mode
--enable-ssl-refresh --enable-tokenizer-info-endpoint --enable-tower-connector-lora --enable-trace-replay
--enforce-eager --eplb-config --exclude-tools-when-tool-choice-none --expert-placement-strategy
--fail-on-environ-validation --fault-tolerance-config --fingerprint-mode --fingerprint-value --fully-sharded-loras
--gdn-prefill-backend --generation-config --gpu-memory-utilization --grpc --h11-max-header-count
--h11-max-incomplete-event-size --headless --hf-config-path --hf-overrides --hf-token --host --ignore-patterns
--interleave-mm-strings --io-processor-plugin --ir-op-priority --jit-monitor-mode --jit-monitor-verbose
--kda-prefill-backend --kernel-config --kv-cache-dtype --kv-cache-dtype-skip-layers --kv-cache-memory-bytes
--kv-cache-metrics --kv-cache-metrics-sample --kv-events-config --kv-offloading-backend --kv-offloading-size
--kv-sharing-fast-prefill --kv-transfer-config --language-model-only --limit-mm-per-prompt --linear-backend
--load-format --log-config-file --log-error-stack --logits-processors --logprobs-mode --long-prefill-token-threshold
--lora-dtype --lora-modules --lora-target-modules --mamba-backend --mamba-block-size --mamba-cache-dtype
--mamba-cache-mode --mamba-cache-philox-rounds --mamba-ssm-cache-dtype --mamba-ssu-algorithm --master-addr
--master-port --max-cpu-loras --max-cudagraph-capture-size --max-log-len --max-logprobs --max-lora-rank --max-loras
--max-model-len --max-num-batched-tokens --max-num-scheduled-tokens --max-num-seqs --max-parallel-loading-workers
--media-io-kwargs --middleware --mm-device-do-normalize --mm-encoder-attn-backend --mm-encoder-attn-dtype
--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-only
--mm-encoder-tp-mode --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-processor-cache-gb --mm-processor-cache-type
--mm-processor-device --mm-processor-kwargs --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model
--model-class-overrides --model-impl --model-loader-extra-config --moe-backend --nnodes --node-rank
--num-gpu-blocks-override --numa-bind --numa-bind-cpus --numa-bind-nodes --offload-backend --offload-group-size
--offload-num-in-group --offload-params --offload-prefetch-step --optimization-level --otlp-traces-endpoint
--override-generation-config --per-request-spec-decode-metrics --performance-mode --pipeline-parallel-size
--pooler-config --port --prefill-context-parallel-size --prefill-schedule-interval --prefix-cache-retention-interval
--prefix-caching-hash-algo --prefix-match-unit --profiler-config --pt-load-map-location --quantization
--quantization-config --ray-workers-use-nsight --reasoning-config --reasoning-parser --reasoning-parser-plugin
--renderer-num-workers --replayssm-buffer-len --response-role --return-sampling-mask --return-tokens-as-token-ids
--revision --root-path --runner --safetensors-load-strategy --safetensors-prefetch-block-size
--safetensors-prefetch-num-threads --scheduler-cls --scheduler-reserve-full-isl --scheduling-policy --seed
--served-model-name --show-hidden-metrics-for-version --shutdown-timeout --skip-mm-profiling --skip-tokenizer-init
--spec-method --spec-model --spec-tokens --specialize-active-lora --speculative-config --ssl-ca-certs --ssl-cert-reqs
--ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval --structured-outputs-config --tensor-parallel-size
--tokenizer --tokenizer-mode --tokenizer-revision --tokens-only --tool-call-parser --tool-parser-plugin --tool-server
--trust-remote-code --trust-request-chat-template --ubatch-size --uds --use-fp64-gumbel --use-replayssm
--use-tqdm-on-load --uvicorn-log-level --video-pruning-method --video-pruning-rate --watermark
--weight-transfer-config --worker-cls --worker-extension-cls -ac -asc -cc -dc -dcp -dp -dpa -dpb -dpe -dph -dpl -dpm
-dpn -dpp -dpr -ep -n -pcp -pp -q -r -sc -tp
"""
SGLANG = """
--abort-on-priority-when-disabled --admin-api-key --allow-auto-truncate --allowed-media-domains --api-key
--asr-max-buffer-seconds --asr-max-concurrent-sessions --attention-backend --attention-context-parallel-size
--attn-cp-size --base-gpu-id --batch-notify-size --bf16-gemm-backend --bucket-e2e-request-latency
--bucket-inter-token-latency --bucket-time-to-first-token --c128-page-size --chat-template
--checkpoint-engine-wait-weights-before-ready --chunked-prefill-size --collect-tokens-histogram --completion-template
--config --constrained-json-disable-any-whitespace --constrained-json-whitespace-pattern --context-length
--cp-strategy --cpu-offload-gb --crash-dump-folder --cuda-graph-backend-decode --cuda-graph-backend-prefill
--cuda-graph-bs --cuda-graph-bs-decode --cuda-graph-bs-prefill --cuda-graph-config --cuda-graph-max-bs
--cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --cuda-graph-tc-compiler --custom-sigquit-handler
--custom-weight-loader --data-parallel-size --dcp-comm-backend --dcp-replicate-q-proj --dcp-size --debug-cuda-graph
--debug-tensor-dump-input-file --debug-tensor-dump-layers --debug-tensor-dump-output-folder --decode-attention-backend
--decode-context-parallel-size --decode-log-interval --decoupled-spec-bind-endpoint --decoupled-spec-connect-endpoints
--decoupled-spec-rank --decoupled-spec-role --decrypted-config-file --decrypted-draft-config-file --deepep-config
--deepep-dispatcher-output-dtype --deepep-mode --default-chat-template-kwargs --default-priority-value
--delete-ckpt-after-loading --detokenizer-worker-num --device --disable-attn-tp-gather --disable-chunked-prefix-cache
--disable-cuda-graph --disable-cuda-graph-padding --disable-custom-all-reduce --disable-decode-cuda-graph
--disable-fast-image-processor --disable-flashinfer-autotune --disable-flashinfer-cutlass-moe-fp4-allgather
--disable-hybrid-swa-memory --disable-outlines-disk-cache --disable-overlap-schedule --disable-piecewise-cuda-graph
--disable-prefill-cuda-graph --disable-priority-preemption --disable-radix-cache --disable-shared-experts-fusion
--disable-tokenizer-batch-decode --disaggregation-bootstrap-port --disaggregation-decode-enable-offload-kvcache
--disaggregation-decode-enable-radix-cache --disaggregation-decode-extra-slots
--disaggregation-decode-polling-interval --disaggregation-decode-retraction-backup --disaggregation-ib-device
--disaggregation-mode --disaggregation-transfer-backend --dist-init-addr --dist-timeout --dllm-algorithm
--dllm-algorithm-config --dllm-fdfo --download-dir --dp-size --dsa-decode-backend --dsa-paged-mqa-logits-backend
--dsa-prefill-backend --dsa-prefill-cp-mode --dsa-topk-backend --dsv4-prefill-backend --dtype --dwdp-size
--dynamic-batch-tokenizer-batch-size --dynamic-batch-tokenizer-batch-timeout --elastic-ep-backend
--elastic-ep-initial-size --elastic-ep-rejoin --elastic-ep-scale-timeout --enable-adaptive-dispatch-to-encoder
--enable-aiter-allreduce-fusion --enable-attn-tp-input-scattered --enable-breakable-cuda-graph
--enable-broadcast-mm-inputs-process --enable-cache-report --enable-cp-decode-attn-tp --enable-cudagraph-gc
--enable-custom-logit-processor --enable-deepseek-v4-fp4-indexer --enable-deterministic-inference
--enable-dp-attention --enable-dp-attention-local-control-broadcast --enable-dp-lm-head
--enable-draft-weights-cpu-backup --enable-dsa-cache-layer-split --enable-dsa-prefill-context-parallel
--enable-dynamic-batch-tokenizer --enable-dynamic-chunking --enable-elastic-expert-backup --enable-eplb
--enable-expert-distribution-metrics --enable-flashinfer-allreduce-fusion --enable-flexkv
--enable-forward-pass-metrics --enable-fp32-lm-head --enable-fused-moe-sum-all-reduce --enable-fused-qk-norm-rope
--enable-gdn-replayssm-spec --enable-hierarchical-cache --enable-hisparse --enable-http2
--enable-int8-mamba-checkpoint --enable-layerwise-nvtx-marker --enable-linear-replayssm --enable-linear-replayssm-spec
--enable-lmcache --enable-lora --enable-lora-overlap-loading --enable-mamba-cache-stochastic-rounding
--enable-memory-saver --enable-metrics --enable-metrics-for-all-schedulers --enable-mfu-metrics --enable-mis
--enable-mixed-chunk --enable-mm-global-cache --enable-mscclpp --enable-multi-layer-eagle --enable-multimodal
--enable-nccl-nvls --enable-nsa-prefill-context-parallel --enable-p2p-check --enable-page-major-kv-layout
--enable-pdmux --enable-precise-embedding-interpolation --enable-prefill-context-parallel --enable-prefill-cp
--enable-prefill-delayer --enable-prefix-mm-cache --enable-priority-scheduling --enable-profile-cuda-graph
--enable-quant-communications --enable-request-time-stats-logging --enable-return-hidden-states
--enable-return-indexer-topk --enable-return-routed-experts --enable-scattered-sconv --enable-session-radix-cache
--enable-single-batch-overlap --enable-ssl-refresh --enable-streaming-session --enable-strict-thinking
--enable-symm-mem --enable-tf32-matmul --enable-tokenizer-batch-encode --enable-torch-compile
--enable-torch-compile-debug-mode --enable-torch-symm-mem --enable-tp-lm-head-all-to-all --enable-trace
--enable-two-batch-overlap --enable-unified-memory --enable-w4a4-mxfp4-megamoe --enable-waterfill
--enable-weights-cpu-backup --encoder-bootstrap-port --encoder-only --encoder-register-urls --encoder-transfer-backend
--encoder-urls --enforce-disable-flashinfer-allreduce-fusion --enforce-piecewise-cuda-graph
--enforce-shared-experts-fusion --engine-info-bootstrap-port --ep --ep-dispatch-algorithm --ep-join-mode
--ep-join-rank-offset --ep-num-redundant-experts --ep-size --eplb-algorithm
--eplb-min-rebalancing-utilization-threshold --eplb-rebalance-layers-per-chunk --eplb-rebalance-num-iterations
--expert-balancedness-report-mode --expert-distribution-recorder-buffer-size --expert-distribution-recorder-mode
--expert-parallel-size --experts-shared-outer-loras --export-metrics-to-file --export-metrics-to-file-dir
--extra-metric-labels --fastapi-root-path --file-storage-path --flashinfer-allreduce-fusion-backend
--flashinfer-autotune-skip-ops --flashinfer-mla-disable-ragged --flashinfer-mxfp4-moe-precision --flexkv-config-file
--forward-hooks --forward-pass-metrics-ipc-name --forward-pass-metrics-worker-id --fp4-gemm-runner-backend
--fp8-gemm-runner-backend --fuseep-mode --gc-threshold --gc-warning-threshold-secs --generation-tokens-buckets
--gpu-id-step --grammar-backend --grpc-http-sidecar-port --grpc-mode --grpc-port --hf-chat-template-name
--hicache-host-memory-mode --hicache-io-backend --hicache-mem-layout --hicache-ratio --hicache-size
--hicache-storage-backend --hicache-storage-backend-extra-config --hicache-storage-prefetch-policy
--hicache-write-policy --hierarchical-sparse-attention-extra-config --hisparse-config --host
--http2-max-concurrent-streams --image-processor-backend --incremental-streaming-output --init-expert-location
--int8-mamba-ckpt-size --is-embedding --json-model-override-args --keep-mm-feature-on-device --kt-cpuinfer
--kt-max-deferred-experts-per-token --kt-method --kt-num-gpu-experts --kt-threadpool-count --kt-weight-path
--kv-cache-dtype --kv-canary --kv-canary-real-data --kv-canary-sweep-interval --kv-events-config --language-model-only
--language-only --limit-mm-data-per-request --linear-attn-backend --linear-attn-decode-backend
--linear-attn-prefill-backend --linear-attn-verify-backend --linear-replayssm-cache-len --lmcache-config-file
--load-balance-method --load-format --load-snapshot-publish-interval --log-level --log-level-http --log-requests
--log-requests-format --log-requests-level --log-requests-target --lora-backend --lora-drain-wait-threshold
--lora-eviction-policy --lora-paths --lora-strict-loading --lora-target-modules --lora-use-virtual-experts
--mamba-backend --mamba-cache-philox-rounds --mamba-full-memory-ratio --mamba-max-states-per-path
--mamba-radix-cache-strategy --mamba-scheduler-strategy --mamba-ssm-dtype --mamba-track-interval --max-ep-size
--max-loaded-loras --max-lora-chunk-size --max-lora-rank --max-loras-per-batch --max-mamba-cache-size
--max-prefill-tokens --max-queued-requests --max-running-requests --max-total-tokens --media-url-max-file-size-mb
--mem-fraction-static --min-free-slots-delay --mlx-enable-sampling --mm-attention-backend --mm-enable-dp-encoder
--mm-feature-transport --mm-global-cache-backend --mm-io-worker-num --mm-preprocess-cache-size-mb --mm-process-config
--mm-processor-worker-num --model --model-checksum --model-config-parser --model-impl --model-loader-extra-config
--model-path --modelexpress-config --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path
--modelopt-export-path --modelopt-quant --moe-a2a-backend --moe-data-parallel-size --moe-dense-tp-size --moe-dp-size
--moe-runner-backend --mooncake-ib-device --msprobe-dump-config --nccl-init-addr --nccl-port --nnodes --node-rank
--nsa-decode-backend --nsa-prefill-backend --nsa-prefill-cp-mode --num-continuous-decode-steps
--num-reserved-decode-tokens --numa-node --offload-group-size --offload-mode --offload-num-in-group
--offload-prefetch-step --optimistic-prefill-attempts --otlp-traces-endpoint --page-size --pdmux-config-path
--piecewise-cuda-graph-compiler --piecewise-cuda-graph-max-tokens --piecewise-cuda-graph-tokens
--pipeline-parallel-size --port --pp-async-batch-depth --pp-max-micro-batch-size --pp-size --pre-warm-nccl
--preferred-sampling-params --prefill-attention-backend --prefill-cp-mode --prefill-decode-interval
--prefill-delayer-forward-passes-buckets --prefill-delayer-max-delay-ms --prefill-delayer-max-delay-passes
--prefill-delayer-queue-min-ratio --prefill-delayer-token-usage-low-watermark --prefill-delayer-wait-seconds-buckets
--prefill-max-requests --prefill-only-disable-kv-cache --prefill-round-robin-balance
--priority-scheduling-preemption-threshold --prompt-tokens-buckets --quantization --quantization-param-path
--quantize-and-serve --radix-cache-backend --radix-eviction-policy --random-seed --reasoning-parser
--remote-instance-weight-loader-backend --remote-instance-weight-loader-seed-instance-ip
--remote-instance-weight-loader-seed-instance-service-port --remote-instance-weight-loader-send-weights-group-ports
--remote-instance-weight-loader-start-seed-via-transfer-engine --retraction-policy --return-hidden-states-mode
--revision --rl-on-policy-target --rl-quant-profile --sampling-backend --sampling-defaults --schedule-conservativeness
--schedule-low-priority-values-first --schedule-policy --scheduler-recv-interval --served-model-name --show-time-cost
--sidecar --sidecar-args --skip-server-warmup --skip-tokenizer-init --sleep-on-idle --sm-group-num --smg-grpc-mode
--smg-http-sidecar-port --soft-watchdog-timeout --spec-trace-dir --speculative-accept-threshold-acc
--speculative-accept-threshold-single --speculative-adaptive --speculative-adaptive-config --speculative-algorithm
--speculative-attention-mode --speculative-dflash-block-size --speculative-dflash-draft-window-size
--speculative-draft-attention-backend --speculative-draft-kv-cache-dtype --speculative-draft-load-format
--speculative-draft-model --speculative-draft-model-path --speculative-draft-model-quantization
--speculative-draft-model-revision --speculative-draft-window-size
--speculative-dspark-align-verify-tokens-to-graph-tier --speculative-dspark-block-size
--speculative-dspark-confidence-sts-path --speculative-dspark-sps-table-path --speculative-eagle-topk
--speculative-moe-a2a-backend --speculative-moe-runner-backend --speculative-ngram-capacity
--speculative-ngram-external-corpus-max-tokens --speculative-ngram-external-corpus-path
--speculative-ngram-external-sam-budget --speculative-ngram-match-type --speculative-ngram-max-bfs-breadth
--speculative-ngram-max-trie-depth --speculative-ngram-min-bfs-breadth --speculative-num-draft-tokens
--speculative-num-steps --speculative-skip-dp-mlp-sync --speculative-token-map --speculative-use-rejection-sampling
--ssl-ca-certs --ssl-certfile --ssl-keyfile --ssl-keyfile-password --startup-weight-load-mode --stat-loggers
--stream-interval --stream-output --stream-response-default-include-usage --strip-thinking-cache
--swa-full-tokens-ratio --tbo-token-distribution-threshold --tensor-parallel-size --tokenizer-backend
--tokenizer-metrics-allowed-custom-labels --tokenizer-metrics-custom-labels-header --tokenizer-mode --tokenizer-path
--tokenizer-worker-num --tool-call-parser --tool-server --torch-compile-max-bs --tp-size --trace-modules
--triton-attention-num-kv-splits --triton-attention-reduce-in-fp32 --triton-attention-split-tile-size
--trust-mm-content-hashes --trust-remote-code --use-ray --uvicorn-access-log-exclude-prefixes --warmups
--watchdog-timeout --weight-cache-mode --weight-cache-socket --weight-cache-timeout --weight-loader-disable-mmap
--weight-loader-drop-cache-after-load --weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads
--weight-version
"""
NAMES = sorted({*VLLM.split(), *SGLANG.split()})
"""As of August 2026."""


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        make_parser("serve")[1].parse_intermixed_args(list(words))
    assert end.value.code == 2
    return capsys.readouterr().err


def test_each_has_an_answer() -> None:
    _, parser = make_parser("serve")
    for name in NAMES:
        assert name in parser._option_string_actions or reason(name), name


def test_each_pattern_is_of_use() -> None:
    patterns = [pattern for patterns in FAMILIES.values() for pattern in patterns.split()]
    names = [name.removeprefix("--") for name in NAMES]
    assert not [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]


def test_typing_errors_are_not_taken_for_options_of_others() -> None:
    """A letter left out, or twice: the answer names the option that was meant."""
    _, parser = make_parser("serve")
    chance = random.Random(0)
    for option in [name for name in parser._option_string_actions if name.startswith("--") and name not in FLAGS]:
        place = chance.randrange(2, len(option))
        for word in (option[:place] + option[place + 1 :], option[: place + 1] + option[place:]):
            if word not in parser._option_string_actions:
                why = reason(word)
                found = why or nearest(parser, word)
                assert option in found or len(option) < 8, (word, option, found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eplb-config", '{"window_size": 100}'], "--eplb-config: experts move after --rebalance-interval steps"),
        (["--eplb-config.window_size", "100"], "experts move after --rebalance-interval steps"),
        (["--data-parallel-backend=ray"], "--data-parallel-backend: it is --data-parallel-size with --expert-parallel"),
        (["--enable-dp-attention"], "it is --data-parallel-size with --expert-parallel"),
        (["--config-format", "mistral"], "--config-format: config.json is the only form that is read"),
        (["--kv-cache-memory-bytes", "10"], "--num-pages"),
        (["--max-total-tokens", "10"], "--num-pages"),
        (["--default-chat-template-kwargs", "{}"], "send chat_template_kwargs with a request"),
        (["--enable_mm_embeds"], "models read text alone"),
        (["--mamba-ssm-cache-dtype", "bfloat16"], "it is model: what is computed in"),
        (["-ngl", "99"], "unrecognized arguments: -ngl"),
        (["-O3"], "it is --graphs"),
    ],
)
def test_answers(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(capsys, *words)
    assert said in found and "did you mean" not in found


def test_a_short_option_is_not_taken_for_a_longer_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser("serve")[1].parse_intermixed_args(["-c", "4096"]).max_model_len == 4096
    assert "--graphs" not in refusal(capsys, "-cx") and "2" not in refusal(capsys, "-t=2").partition("-t=2")[2]


def test_origins_as_a_list_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, parser = make_parser("serve")
    assert parser.parse_intermixed_args(["--allowed-origins", '["*"]']).allowed_origins == ("*",)
    assert parser.parse_intermixed_args(["--allowed-origins", '["a", "b"]']).allowed_origins == ("a", "b")
    assert parser.parse_intermixed_args(["--allowed-origins", "a, b"]).allowed_origins == ("a", "b")
    assert "--allowed-origins" in refusal(capsys, "--allowed-origins", '["a"')


def test_patterns_hold_in_python_and_in_files(tmp_path: Path) -> None:
    assert engine_options({"max_loras": None, "enable_mm_embeds": False}, {}) == {}
    with pytest.raises(ValueError, match="max_cpu_loras: adapters are not supported"):
        LLM("./nowhere", max_cpu_loras=4)
    (tmp_path / "a.yaml").write_text("enable-mm-embeds: false\n")
    make_parser("serve")[1].parse_intermixed_args(["--config", str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text("enable-mm-embeds: true\n")
    with pytest.raises(ValueError, match="enable-mm-embeds: models read text alone"):
        make_parser("serve")[1].parse_intermixed_args(["--config", str(tmp_path / "a.yaml")])


def test_spellings_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """_ for -, fields of tables, switches that are turned off; and tables in a file."""
    _, parser = make_parser("serve")
    words = ["--trust_remote_code", "--max_model_len=64", "--structured-outputs-config.backend", "xgrammar"]
    names = "trust-remote-code disable-log-stats enable-lora enable-eplb"
    off = [f"--no-{name}" for name in names.split()]
    assert parser.parse_intermixed_args([*words, *off, "--api-key", "a_b"]).max_model_len == 64
    said = capsys.readouterr().err
    assert "--trust-remote-code has no effect" in said and "--structured-outputs-config has no effect" in said
    assert "unrecognized arguments: --no-such_thing" in refusal(capsys, "--no-such_thing")
    assert "it is --graphs" in refusal(capsys, "--no-cuda-graph"), "it would turn off what is on here"
    assert "experts move after" in refusal(capsys, "--eplb_config.window_size=100")
    for text, why in (
        ("compilation_config:\n  level: 3\n", "compilation_config: it is --graphs"),
        ("speculative-config:\n  method: mtp\n", "speculative-config: it is --speculative"),
        ("chat-template:\n  a: b\n", "chat-template: a table is no value of an option"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises((ValueError, SystemExit)) as found:
            make_parser("serve")[1].parse_intermixed_args(["--config", str(tmp_path / "a.yaml")])
        assert why.partition(": ")[2] in f"{found.value} {capsys.readouterr().err}"
    (tmp_path / "a.yaml").write_text(
        "structured-outputs-config:\n  backend: xgrammar\nno-enable-lora: true\nno-trust-remote-code: true\n"
    )
    make_parser("serve")[1].parse_intermixed_args(["--config", str(tmp_path / "a.yaml")])
    assert "has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (["--cpu-offload-gb", "0.0"], True),
        (["--cpu-offload-gb", "4"], False),
        (["--convert", "none"], True),
        (["--speculative-num-steps", "3"], True),
        (["--speculative-num-draft-tokens", "4"], False),
    ],
)
def test_values_that_ask_for_what_is_done(words: list[str], accepted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if accepted:
        options = make_parser("serve")[1].parse_intermixed_args(words)
        assert options.speculative_tokens == (3 if "steps" in words[0] else 4)
    else:
        assert words[0] in refusal(capsys, *words)

"""What fits is decided before it is loaded. Ints alone: these tests need no MLX."""

from dataclasses import replace

import pytest

from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.layers.config import AttentionConfig, RopeConfig
from anabranch.mlx import memory
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.moe.config import MoEConfig
from anabranch.platforms import Memory
from anabranch.platforms.mlx import available_bytes

GB = 10**9
ATTENTION = AttentionConfig(
    num_heads=32, num_kv_heads=4, head_dim=128, scale=1.0, rope=RopeConfig(head_dim=128, rotary_dim=128)
)
MOE = MoEConfig(num_experts=128, top_k=8, width=768, renormalize=True)
# The shape of Qwen3-30B-A3B: 98 kB of keys and values a token in 16 bits.
MODEL = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    layers=(LayerConfig(mixer=ATTENTION, moe=MOE),) * 48,
    activation="silu",
    norm_eps=1e-6,
    tie_embeddings=False,
    max_position=40960,
    dtype="bfloat16",
)
CONFIG = EngineConfig(
    model="Qwen3-30B-A3B",
    memory_fraction=0.8,
    page_size=16,
    max_model_len=40960,
    max_num_seqs=8,
    max_num_batched_tokens=8192,
)
FOUR_BITS, SIXTEEN_BITS = 17 * GB, 61 * GB


def test_a_model_that_does_not_fit_is_refused_with_its_figures() -> None:
    mac = Memory(free=30 * GB, total=36 * GB)
    with pytest.raises(ValueError, match=r"61.00 GB of weights.* 28.80 GB may be used .*mlx_lm.convert -q"):
        memory.guard(CONFIG, MODEL, "bfloat16", SIXTEEN_BITS, mac)
    memory.guard(CONFIG, MODEL, "bfloat16", FOUR_BITS, mac)


def test_what_other_programs_hold_counts() -> None:
    with pytest.raises(ValueError, match=r"12.00 GB may be used .* 12.00 GB free now"):
        memory.guard(CONFIG, MODEL, "bfloat16", FOUR_BITS, Memory(free=12 * GB, total=36 * GB))


@pytest.mark.parametrize("total", [24, 36, 64, 128])
@pytest.mark.parametrize("window", [0, 4096])
def test_pages_and_the_working_copy_share_what_is_left(total: int, window: int) -> None:
    layers = [replace(MODEL.layers[0], mixer=replace(ATTENTION, window=window))] * 24 + [MODEL.layers[0]] * 24
    model = replace(MODEL, layers=tuple(layers))
    after = Memory(free=total * GB - FOUR_BITS, total=total * GB)
    pages = memory.num_pages(CONFIG, model, "bfloat16", FOUR_BITS, after)
    pool = plan.pages_bytes(model, pages, CONFIG.page_size, "bfloat16")
    longest = min(CONFIG.max_model_len, pages[-1] * 16)
    room = max(pool, memory.working_bytes(model, "bfloat16", [longest]))
    used = FOUR_BITS + memory.workspace_bytes(CONFIG, model, "bfloat16") + pool + room
    assert used <= 0.8 * total * GB
    needed = plan.held_pages(model, CONFIG.max_model_len, 16)
    enough = any(found == 2 * 8 * number for found, number in zip(pages, needed, strict=True))
    assert enough or used > 0.72 * total * GB, "memory lies idle"


def test_pages_as_configured() -> None:
    config = replace(CONFIG, num_pages=100)
    assert memory.num_pages(config, MODEL, "bfloat16", FOUR_BITS, Memory(free=0, total=0)) == [100]


def test_nothing_left_for_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing for KV pages"):
        memory.num_pages(CONFIG, MODEL, "bfloat16", FOUR_BITS, Memory(free=1 * GB // 10, total=22 * GB))


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    token = 2 * 4 * 128 * 48 * 2
    spare = memory.SPARE_TOKENS
    assert memory.working_bytes(MODEL, "bfloat16", [100]) == (100 + spare) * token
    assert memory.working_bytes(MODEL, "bfloat16", [100, 1000, 10]) == 3 * (1000 + spare) * token
    sliding = replace(MODEL, layers=(replace(MODEL.layers[0], mixer=replace(ATTENTION, window=64)),) * 48)
    assert memory.working_bytes(sliding, "bfloat16", [100, 1000]) == 2 * (64 + spare) * token


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            400000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        150000.
Pages purgeable:                            500.
"Translation faults":                 123456789.
"""


def test_free_memory_of_macos() -> None:
    assert available_bytes(VM_STAT) == 33500 * 16384
    with pytest.raises(ValueError, match="vm_stat: unexpected output"):
        available_bytes("page size: 4k")

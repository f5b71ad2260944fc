"""Every family, divided among ranks, computes what one rank computes; and each rank reads its share of the weights."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import platforms
from anabranch.engine.single import SingleSequence
from anabranch.kernels.c.library import MAX_ROWS
from anabranch.loader import names
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.load import load_model
from anabranch.loader.read import DTYPES, read_weights
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from anabranch.moe import dispatch
from anabranch.moe.layer import RoutedExperts
from anabranch.ops.weight import Weight
from anabranch.parallel.group import ALONE, Group, OneRank, split
from tests.models import tiny
from tests.parallel.ranks import run

FAMILIES = [
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
]
WITH_EXPERTS = [name for name in FAMILIES if name not in ("llama", "qwen3", "qwen3_5")]
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
COUNTS = dict.fromkeys(("gpt_oss", "minimax_m2", "mixtral"), "num_local_experts") | {"glm4_moe": "n_routed_experts"}
COUNTS["ernie4_5_moe"] = "moe_num_experts"
CASES = {case.model_type: case for case in reversed(tiny.CASES) if case.model_type in FAMILIES}
PROMPT = [(7 * i * i + 5 * i + 3) % tiny.VOCAB_SIZE for i in range(40)]


def settings(model_type: str) -> dict[str, Any]:
    """Sizes that 4 ranks divide: 8 experts; two key-value heads, so that pairs of ranks have the same."""
    if model_type in LATENT:
        return {"vocab_size": 132, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    found: dict[str, Any] = {"vocab_size": 132, "num_key_value_heads": 2}
    if "moe" in model_type or model_type in ("mixtral", "minimax_m2", "gemma4_text", "gpt_oss", "qwen3_next"):
        found[COUNTS.get(model_type, "num_experts")] = 8
    if model_type.startswith(("qwen3_5", "qwen3_next")):
        # The norm in a delta net may divide by numbers near 0, which multiplies roundings: see test_qwen3_5.
        found |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "rms_norm_eps": 0.3}
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for model_type, case in CASES.items():
        sized = replace(case, settings=case.settings | settings(model_type))
        made[model_type] = tiny.save(sized, tmp_path_factory.mktemp(model_type) / "model")
    return made


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """7 experts cannot be divided equally among 2 ranks, 6 not among 4; one tensor per expert, and all in one."""
    made = {}
    for model_type in ("qwen3_moe", "qwen3_5_moe"):
        for num_experts in (6, 7):
            case = CASES[model_type]
            sized = replace(case, settings=case.settings | settings(model_type) | {"num_experts": num_experts})
            folder = tmp_path_factory.mktemp(f"{model_type}_{num_experts}") / "model"
            made[f"{model_type} {num_experts}"] = tiny.save(sized, folder)
    return made


def logits(group: Group, folders: dict[str, Path]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A prompt in two chunks, then two steps of one token: with a part of each expert, and with whole experts."""
    return {name: (_logits(group, folder, False), _logits(group, folder, True)) for name, folder in folders.items()}


def uneven_logits(group: Group, folders: dict[str, Path]) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Whole experts, each on one rank, and with copies: the number of a prompt, and its logits. Ranks have the same
    prompt; then each its own, whose rows go to all ranks or only to those with their experts."""
    found = {}
    for name, folder in folders.items():
        found[name] = [(0, _logits(group, folder, True, slots)) for slots in (0, 5)]
        for slots, dispatch.ALL_TO_ALL_ROWS in ((0, 512), (0, 0), (5, 512), (5, 0)):
            found[name].append((group.rank, _own_logits(group, folder, slots)))
    return found


def own_logits(group: Group, folders: dict[str, Path], num_same: int) -> dict[str, tuple[int, list[torch.Tensor]]]:
    """Whole experts of all ranks, of which so many have the same prompt: its number, and its logits, with rows that go
    to all ranks and with rows that go only to those with their experts."""
    found, same = {}, split(group, num_same)
    for name, folder in folders.items():
        both = []
        for dispatch.ALL_TO_ALL_ROWS in (512, 0):
            both.append(_own_logits(group, folder, 0, same))
        found[name] = group.rank // num_same, both
    return found


def _own_logits(group: Group, folder: Path, slots: int, same: Group = ALONE) -> torch.Tensor:
    """Of a prompt in chunks of other sizes on each rank, the last one of one token on rank 0."""
    exchange = dispatch.Exchange(group, same)
    options = {"expert_parallel": True, "expert_slots": slots, "exchange": exchange, "group": same}
    sequence = SingleSequence(load_model(folder, dtype="float32", **options), 64)
    number = group.rank // same.size
    found, prompt = [], _prompt(number)
    bounds = [_bounds(other) for other in range(group.size // same.size)]
    for step, (begin, end) in enumerate(pairwise(bounds[number])):
        exchange.most = max(bound[step + 1] - bound[step] for bound in bounds)
        found.append(sequence.forward(prompt[begin:end]))
    return torch.cat(found)


def _bounds(number: int) -> list[int]:
    """Of the chunks of that prompt."""
    return [0, 25 - 8 * number, 30, 39 - number, 40]


def _prompt(rank: int) -> list[int]:
    return [(token + 11 * rank * place) % tiny.VOCAB_SIZE for place, token in enumerate(PROMPT)]


def _logits(
    group: Group, folder: Path, expert_parallel: bool, slots: int = 0, prompt: list[int] = PROMPT
) -> torch.Tensor:
    options = {"expert_parallel": expert_parallel, "expert_slots": slots}
    sequence = SingleSequence(load_model(folder, dtype="float32", group=group, **options), 64)
    # The second chunk is long enough for latent attention to expand its heads.
    return torch.cat([sequence.forward(chunk) for chunk in (prompt[:3], prompt[3:38], prompt[38:39], prompt[39:])])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_computes(folders: dict[str, Path], num_ranks: int) -> None:
    expected = {name: _logits(OneRank(), folder, False) for name, folder in folders.items()}
    first, *others = run(num_ranks, logits, folders)
    for name, both in first.items():
        for place, one in enumerate(both):
            assert (one - expected[name]).abs().max() < 1e-5, name
            assert all(torch.equal(other[name][place], one) for other in others), name  # to the bit


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_same"), [(2, 1), (4, 2)], ids=["2 engines", "2 engines of 2 ranks"])
def test_ranks_with_prompts_of_their_own(folders: dict[str, Path], num_ranks: int, num_same: int) -> None:
    chosen, expected = {name: folders[name] for name in WITH_EXPERTS}, {}
    for name, folder in chosen.items():
        for number in range(2):  # in the same chunks
            sequence = SingleSequence(load_model(folder, dtype="float32"), 64)
            chunks = [_prompt(number)[begin:end] for begin, end in pairwise(_bounds(number))]
            expected[name, number] = torch.cat([sequence.forward(chunk) for chunk in chunks])
    for found in run(num_ranks, own_logits, chosen, num_same):
        for name, (number, both) in found.items():
            for one in both:
                assert (one - expected[name, number]).abs().max() < 1e-5, name


def sums(group: Group, folder: Path) -> dict[str, list[tuple[int, bool]]]:
    """By combine, of each layer and number of tokens: the fewest rows that a rank's experts have, and whether the
    experts' sums are those of one rank, to the bit."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for combine in ("ordered", "fused"):
        options: dict[str, Any] = {"dtype": "float32", "moe_combine": combine}
        models = load_model(folder, **options), load_model(folder, **options, group=group, expert_parallel=True)
        layers = ([one for one in model.modules() if isinstance(one, RoutedExperts)] for model in models)
        for whole, part in zip(*layers, strict=True):
            for num_tokens in (3, 40, 80, 200):
                x_TD = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(0))
                routed: list[torch.Tensor] = []
                whole.on_route = routed.append
                ours, theirs = part(x_TD), whole(x_TD)
                assert (ours - theirs).abs().max() < 1e-5
                rows = routed[0].flatten().bincount(minlength=8).view(group.size, -1).sum(1)
                found.setdefault(combine, []).append((int(rows.min()), torch.equal(ours, theirs)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_terms_of_a_sum_have_one_order(num_ranks: int, tmp_path: Path) -> None:
    """Whole experts are summed by rank and then over ranks: with two a token, as one rank sums them. Not where a rank
    has few rows, for which a CPU has other kernels (of activations, and of experts: these add products without rounding
    them first)."""
    case = CASES["qwen3_moe"]
    # Rows of whole vectors: results do not depend on a row's place.
    sized = replace(case, settings=case.settings | settings("qwen3_moe") | {"moe_intermediate_size": 32})
    for found in run(num_ranks, sums, tiny.save(sized, tmp_path / "model")):
        many = [same for rows, same in found["ordered"] if rows > MAX_ROWS]
        assert len(many) >= 4 and all(many)


TWO = ("mixtral", "qwen3_5_moe", "qwen3_moe")
"""Families of two experts a token."""
FEW = 3
"""Rows of an expert from which on those of its products do not depend on their number: one alone has another kernel."""


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts whose rows are whole vectors: results do not depend on a row's place."""
    made = {}
    for name in TWO:
        width = {"intermediate_size" if name == "mixtral" else "moe_intermediate_size": 32}
        sized = replace(CASES[name], settings=CASES[name].settings | settings(name) | width)
        made[name] = tiny.save(sized, tmp_path_factory.mktemp(name) / "model")
    return made


def _long(number: int) -> list[int]:
    return [(7 * i * i + 5 * i + 3 + 11 * number * i) % tiny.VOCAB_SIZE for i in range(200 - 3 * number)]


def long_logits(group: Group, folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    """Of a prompt of its own, with rows that go to all ranks and with rows that go to some."""
    found: dict[str, list[torch.Tensor]] = {}
    for dispatch.ALL_TO_ALL_ROWS in (512, 0):
        for name, folder in folders.items():
            exchange = dispatch.Exchange(group)
            exchange.most = len(_long(0))
            options: dict[str, Any] = {"dtype": "float32", "moe_combine": "ordered"}
            model = load_model(folder, **options, expert_parallel=True, exchange=exchange)
            found.setdefault(name, []).append(SingleSequence(model, 256).forward(_long(group.rank)))
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_prompts_of_their_own_to_the_bit(vectors: dict[str, Path], num_ranks: int) -> None:
    """Whole models, two experts a token. An expert multiplies the rows of all ranks at once, so it is true only where
    kernels are not chosen by the number of rows: each expert must have some of every prompt."""
    x, weight = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(0))
    if any(not torch.equal(x[:some] @ weight[:64].T, (x @ weight[:64].T)[:some]) for some in range(FEW, 500)):
        pytest.skip("here a row of a product depends on the number of rows")
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for name, folder in vectors.items():
        model = load_model(folder, dtype="float32", moe_combine="ordered")
        routed: list[torch.Tensor] = []
        for layer in model.modules():
            if isinstance(layer, RoutedExperts):
                layer.on_route = routed.append
        for number in range(num_ranks):
            expected[name, number] = SingleSequence(model, 256).forward(_long(number))
        counts = [expert_TK.flatten().bincount() for expert_TK in routed]
        assert counts and all(count[count > 0].min() >= FEW for count in counts), name
    for rank, found in enumerate(run(num_ranks, long_logits, vectors)):
        for name, both in found.items():
            assert len(both) == 2 and all(torch.equal(one, expected[name, rank]) for one in both), name


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_are_divided_unequally(uneven: dict[str, Path], num_ranks: int) -> None:
    prompts = [_prompt(rank) for rank in range(num_ranks)]
    folders = {name: folder for name, folder in uneven.items() if name.endswith("7" if num_ranks == 2 else "6")}
    expected = {
        name: [_logits(OneRank(), folder, False, 0, prompt) for prompt in prompts] for name, folder in folders.items()
    }
    for found in run(num_ranks, uneven_logits, folders):
        for name, every in found.items():
            assert len(every) == 6
            for prompt, one in every:
                assert (one - expected[name][prompt]).abs().max() < 1e-5, name


class Rank(OneRank):
    """One of several, which are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_a_rank_has_its_share(folders: dict[str, Path], expert_parallel: bool) -> None:
    """Of every matrix, and reads no more bytes than that."""
    folder = folders["qwen3_moe"]
    whole = dict(load_model(folder).named_parameters())
    for rank in range(2):
        model = load_model(folder, group=Rank(rank, 2), expert_parallel=expert_parallel)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            divided = "norm" not in name and "router" not in name
            assert parameter.numel() == whole[name].numel() // (2 if divided else 1), name
        copies = names.match(model, read_checkpoint(folder))
        num_read = read_weights(parameters, copies, platforms.current())
        assert num_read == sum(parameter.nbytes for parameter in parameters.values())


def test_experts_that_are_converted_are_read_alone(folders: dict[str, Path]) -> None:
    """gpt-oss keeps experts transposed, all in one tensor."""
    folder = folders["gpt_oss"]
    for rank in range(4):
        model = load_model(folder, group=Rank(rank, 4), expert_parallel=True)
        experts = [copy for copy in names.match(model, read_checkpoint(folder)) if "experts" in copy.parameter]
        assert experts and {copy.source.shape[0] for copy in experts} == {2}


def test_a_rank_has_the_experts_of_its_placement(uneven: dict[str, Path]) -> None:
    """Each on one rank or, with room for 5, copies of those that follow; its weights are theirs."""
    for name, slots, expected in (
        ("qwen3_moe 6", 0, [(0, 1), (2,), (3, 4), (5,)]),
        ("qwen3_5_moe 7", 5, [(0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (4, 5, 6, 0, 1), (6, 0, 1, 2, 3)]),
    ):
        whole = [layer for layer in load_model(uneven[name]).modules() if isinstance(layer, RoutedExperts)]
        for rank, holds in enumerate(expected):
            model = load_model(uneven[name], group=Rank(rank, 4), expert_parallel=True, expert_slots=slots)
            ours = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
            for layer, all_experts in zip(ours, whole, strict=True):
                assert layer.slots is not None and list(layer.slots.placement.experts) == expected
                for part, full in zip(layer.experts.children(), all_experts.experts.children(), strict=True):
                    assert torch.equal(part.data, full.data[list(holds)])


@pytest.mark.parametrize("platform", ["cpu", pytest.param("fake", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_rank_reads_its_bytes_and_no_others(folders: dict[str, Path], model_type: str, platform: str) -> None:
    """A rank reads as many bytes as its parameters have, and gets its own columns."""
    folder, device = folders[model_type], platforms.make(platform)
    whole = load_model(folder, platform=device)
    for rank in range(4):
        model = load_model(folder, group=Rank(rank, 4), platform=device)
        copies = names.match(model, read_checkpoint(folder, quantized=True))
        for parameter in (parameters := dict(model.named_parameters())).values():
            parameter.data.zero_()
        sizes = {copy.parameter: DTYPES[copy.source.dtype].itemsize for copy in copies}
        held = sum(parameter.numel() * sizes[name] for name, parameter in parameters.items())
        assert read_weights(parameters, copies, device, limit=1000) == held
        for name in ("o_proj", "out_proj"):
            for path, weight in model.named_modules():
                if path.endswith(f"{name}.weight") and isinstance(weight, Weight):
                    theirs = whole.get_submodule(path)
                    assert isinstance(theirs, Weight)
                    assert torch.equal(weight.data, theirs.data.chunk(4, 1)[rank])


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "expert_parallel", "words"),
    [
        ("qwen3_moe", 3, False, "qwen3_moe: .* cannot be divided among 3 ranks; it can be among 1, 2, 4$"),
        ("qwen3_moe", 16, True, "num_experts = 8 cannot be divided among 16 ranks, at most among 8"),
        ("llama", 8, False, "4 attention heads cannot be divided among 8 ranks; it can be among 1, 2, 4$"),
        ("qwen3_5_moe", 8, True, "shared_width = 28 cannot be divided among 8 ranks; it can be among 1, 2, 4$"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    folders: dict[str, Path], model_type: str, num_ranks: int, expert_parallel: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model(folders[model_type], group=Rank(0, num_ranks), expert_parallel=expert_parallel)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe", "gemma4_text", "deepseek_v3"])
def test_a_refusal_names_the_numbers_of_ranks_that_work(
    folders: dict[str, Path], model_type: str, expert_parallel: bool
) -> None:
    config = read_config(folders[model_type])
    refused = {}
    for num_ranks in range(1, 33):
        try:
            config.divide(0, num_ranks, expert_parallel)
        except ConfigError as error:
            refused[num_ranks] = str(error).partition("; it can be among ")[2].split(", ")
    assert len(refused) > 16
    for num_ranks, named in refused.items():
        assert [int(number) for number in named] == [n for n in range(1, min(33, 2 * num_ranks)) if n not in refused]

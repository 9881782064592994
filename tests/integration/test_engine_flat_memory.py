"""Two thousand steps must not take more memory than two hundred."""

from statistics import median

import pytest

from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, run_engine

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 2000
# Plain decoding grew by 0.14 % of 448 MB, 0.4 KB a step, and n-gram drafts by none. One per cent allows 2.5 KB a step:
# less than what a step samples, so a step's rollouts that somebody keeps are seen.
GROWTH = 1.01
"""Of the median resident memory, from steps 200 to 400 to the last 200."""


@pytest.mark.parametrize(
    ("rollout", "mtp"),
    [
        ({"max_rows": 6}, {}),
        ({"drafts": {"kind": "ngram", "min_match": 1}}, {}),
        ({"drafts": {"kind": "mtp"}}, {"depth": 2}),
    ],
    ids=["plain", "ngram", "mtp"],
)
def test_memory_stays_flat(tmp_path, rollout, mtp):
    stage = rl_stage(
        num_steps=STEPS, checkpoint={"every_steps": STEPS}, evaluation={"every_steps": STEPS // 2, "num_prompts": 8}
    )
    config = tiny_config(
        sft_stage(num_steps=20), stage, deterministic=False, rollout={"backend": "torch", **rollout}, mtp=mtp
    )
    assert run_engine(config, tmp_path / "run", seconds=1700) == 0
    held = [event.values["memory/rss_bytes"] for event in named(tmp_path / "run", "metrics") if event.stage == "1-rl"]
    assert len(held) == STEPS
    before, after = median(held[200:400]), median(held[-200:])
    assert after <= GROWTH * before, f"{before / 1e6:.0f} MB grew to {after / 1e6:.0f} MB"

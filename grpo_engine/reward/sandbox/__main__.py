"""`python -m grpo_engine.reward.sandbox [tier]`: try the whole attack list on this host, print the report as JSON."""

import json
import sys
from dataclasses import asdict

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.self_test import choose_tier

if __name__ == "__main__":
    config = SandboxConfig.model_validate({"tier": sys.argv[1]} if len(sys.argv) > 1 else {})
    print(json.dumps(asdict(choose_tier(config, whole=True))))

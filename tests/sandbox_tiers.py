"""Which tiers of the sandbox this host has, for tests that run on each of them."""

from __future__ import annotations

import subprocess

from grpo_engine.reward.sandbox.tiers import TIERS, Tier, bubblewrap_command, obstacle


def available() -> list[Tier]:
    """Strongest first. bubblewrap is not, where it is installed but may not make namespaces, as in most containers."""
    return [tier for tier in TIERS if not obstacle(tier) and (tier != "bubblewrap" or _has_namespaces())]


def _has_namespaces() -> bool:
    return subprocess.run([*bubblewrap_command(1 << 20), "true"], capture_output=True).returncode == 0

"""Cohort's training engine: reinforcement learning of language models, complete without the web application.

`python -m grpo_engine run configs/demo.yaml --out DIR` trains; everything it learns is written to DIR first.
"""

__version__ = "0.1.0"

"""Naive re-statements of the training formulas: plain loops in float64, one completion and one token at a time.

They share no code with grpo_engine.training. `mutation.mutant` makes wrong copies of a module, which the comparisons
with the oracles must tell from the right one."""

"""Sampling with vLLM, inside the engine's process (`sampler`) or by servers (`pool`).

Only `sampler`, `extension` and `cpu_fixes` import vLLM, and those when they are used: everything else can be imported
and checked on a host without it.
"""

"""Configs that cannot run: one fault each, with the field, a word of the message and where it is found.

Used at every door: schema, preflight, REST, form and command line. `write_files(folder)` makes the data and model
folders that some of them name; `case.config_text(folder)` is the YAML a user would give.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal

import yaml

BASE: dict[str, Any] = {
    "name": "a run",
    "model": {"source": "tiny_llama", "max_context_tokens": 64},
    "stages": [
        {
            "kind": "rl",
            "data": {"source": "addition"},
            "rewards": [{"kind": "accuracy"}],
            "sampling": {"max_new_tokens": 16},
            "evaluation": {"num_prompts": 8},
        }
    ],
}


@dataclass(frozen=True)
class Invalid:
    """`changes`: dotted path -> value, applied to BASE (value REMOVED deletes); `text`: a whole config instead."""

    name: str
    found_by: Literal["schema", "preflight"]
    field: str
    word: str
    changes: Mapping[str, Any] = dataclass_field(default_factory=dict)
    text: str | None = None

    def config_text(self, folder: Path) -> str:
        text = self.text if self.text is not None else yaml.safe_dump(changed(self.changes), sort_keys=False)
        return text.replace("{folder}", str(folder))


REMOVED = object()


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """BASE with some values replaced."""
    data: dict[str, Any] = json.loads(json.dumps(BASE))
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = data
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        if value is REMOVED:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = value
    return data


def _file(name: str, **more: Any) -> dict[str, Any]:
    return {"stages.0.data": {"source": "file", "path": f"{{folder}}/{name}", "held_out_rows": 1, **more}}


def _folder(name: str) -> dict[str, Any]:
    return {"model": {"source": "folder", "path": f"{{folder}}/{name}"}}


def _servers(*addresses: str, **more: Any) -> dict[str, Any]:
    return {"rollout": {"backend": "vllm_server", "addresses": list(addresses), **more}}


def _by_schema(name: str, field: str, word: str, changes: Mapping[str, Any]) -> Invalid:
    return Invalid(name, "schema", field, word, changes)


def _by_preflight(name: str, field: str, word: str, changes: Mapping[str, Any]) -> Invalid:
    return Invalid(name, "preflight", field, word, changes)


def _text(name: str, word: str, text: str) -> Invalid:
    return Invalid(name, "schema", "", word, text=text)


_RL, _REWARD, _DATA = "stages.0", "stages.0.rewards.0", "stages.0.data"
_CLIP = {"kind": "clip"}
MOVED: dict[str, Any] = {
    "clip_low": 0.1, "clip_high": 0.28, "normalize_std": False, "kl_weight": 0.001, "track_kl": True,
    "max_micro_batch_rows": 64,
}  # fmt: skip
"""Fields of a stage that earlier versions had."""
_GYM = {"source": "reasoning_gym", "task": "chain_sum", "chat_template": False}

SCHEMA = [
    _by_schema("unknown field", "colour", "not a field", {"colour": "red"}),
    _by_schema("misspelt field", f"{_RL}.group_sise", "not a field", {f"{_RL}.group_sise": 4}),
    _by_schema("field of another level", f"{_RL}.temperature", "not a field", {f"{_RL}.temperature": 1.0}),
    _by_schema("group size 1", f"{_RL}.group_size", "at least 2", {f"{_RL}.group_size": 1}),
    _by_schema("negative rate", f"{_RL}.optimizer.learning_rate", "above 0", {f"{_RL}.optimizer.learning_rate": -1}),
    _by_schema(
        "rate NaN", f"{_RL}.optimizer.learning_rate", "finite", {f"{_RL}.optimizer.learning_rate": float("nan")}
    ),
    _by_schema(
        "clip infinite", f"{_RL}.loss.clip_high", "finite", {f"{_RL}.loss": {"clip_high": float("inf")} | _CLIP}
    ),
    *(
        _by_schema(f"{name} moved", f"{_RL}.{name}", "has moved", {f"{_RL}.{name}": value})
        for name, value in MOVED.items()
    ),
    _by_schema("unknown advantage", f"{_RL}.advantage.kind", "not known", {f"{_RL}.advantage": {"kind": "ppo"}}),
    _by_schema("unknown loss", f"{_RL}.loss.kind", "not known", {f"{_RL}.loss": {"kind": "gsop"}}),
    _by_schema("loss kind missing", f"{_RL}.loss.kind", "required", {f"{_RL}.loss": {"clip_high": 0.28}}),
    _by_schema(
        "lambda of another form",
        f"{_RL}.advantage.gae_lambda",
        "not a field",
        {f"{_RL}.advantage": {"kind": "grpo", "gae_lambda": 0.9}},
    ),
    _by_schema(
        "lambda above 1",
        f"{_RL}.advantage.gae_lambda",
        "at most 1",
        {f"{_RL}.advantage": {"kind": "gae", "gae_lambda": 1.5}},
    ),
    _by_schema("dual clip below 1", f"{_RL}.loss.dual_clip", "above 1", {f"{_RL}.loss": {"dual_clip": 0.5} | _CLIP}),
    _by_schema("unknown estimator", f"{_RL}.kl.estimator", "not a choice", {f"{_RL}.kl.estimator": "k4"}),
    _by_schema("no tokens by entropy", f"{_RL}.entropy.top_share", "above 0", {f"{_RL}.entropy.top_share": 0}),
    _by_schema(
        "minibatches above prompts",
        f"{_RL}.minibatches",
        "exceed",
        {f"{_RL}.minibatches": 4, f"{_RL}.prompts_per_step": 2},
    ),
    _by_schema(
        "steps that end within a batch",
        f"{_RL}.num_steps",
        "multiple",
        {f"{_RL}.minibatches": 3, f"{_RL}.num_steps": 10},
    ),
    _by_schema(
        "difference counted twice",
        f"{_RL}.correction",
        "second time",
        {f"{_RL}.correction.kind": "mask", f"{_RL}.old_logprobs": "sampler"},
    ),
    _by_schema(
        "geometric mean truncated",
        f"{_RL}.correction.level",
        "only decides",
        {f"{_RL}.correction": {"kind": "truncate", "level": "geometric"}},
    ),
    _by_schema("KL limit 0", f"{_RL}.guards.max_kl", "above 0", {f"{_RL}.guards.max_kl": 0}),
    _by_schema("unknown backend", "rollout.backend", "not known", {"rollout": {"backend": "sglang"}}),
    _by_schema("no rows at once", "rollout.max_rows", "at least 1", {"rollout": {"backend": "torch", "max_rows": 0}}),
    _by_schema(
        "drafts upside down",
        "rollout.drafts.min_tokens",
        "exceed",
        {"rollout": {"backend": "torch", "drafts": {"kind": "ngram", "min_tokens": 4, "max_tokens": 2}}},
    ),
    _by_schema(
        "drafts by heads that are not there",
        "mtp.depth",
        "heads",
        {"rollout": {"backend": "torch", "drafts": {"kind": "mtp"}}},
    ),
    _by_schema(
        "vLLM's shortest match above its longest",
        "rollout.speculation.min_match",
        "exceed",
        {"rollout": {"backend": "vllm", "speculation": {"method": "ngram", "min_match": 5}}},
    ),
    _by_schema(
        "eagle without a head",
        "rollout.speculation.model",
        "folder of its draft head",
        {"rollout": {"backend": "vllm_server", "speculation": {"method": "eagle"}}},
    ),
    _by_schema(
        "probe without tokens",
        "rollout.probe.num_tokens",
        "at least 1",
        {"rollout": {"backend": "vllm", "probe": {"num_tokens": 0}}},
    ),
    _by_schema("empty stop text", f"{_RL}.sampling.stop.0", "at least 1", {f"{_RL}.sampling.stop": [""]}),
    _by_schema("unknown adapter", "adapter.kind", "not known", {"adapter": {"kind": "qlora"}}),
    _by_schema("adapter of rank 0", "adapter.rank", "at least 1", {"adapter": {"kind": "lora", "rank": 0}}),
    _by_schema("unknown self-test mode", "self_test", "not a choice", {"self_test": "maybe"}),
    _by_schema("weight NaN", f"{_REWARD}.weight", "finite", {f"{_REWARD}.weight": float("nan")}),
    _by_schema("unknown reward", f"{_REWARD}.kind", "not known", {f"{_REWARD}.kind": "acuracy"}),
    _by_schema(
        "reward as a path", f"{_REWARD}.name", "form of a name", {_REWARD: {"kind": "custom", "name": "../x.py"}}
    ),
    _by_schema("no rewards", f"{_RL}.rewards", "at least 1", {f"{_RL}.rewards": []}),
    _by_schema("rewards missing", f"{_RL}.rewards", "required", {f"{_RL}.rewards": REMOVED}),
    _by_schema("gated by nothing", f"{_REWARD}.gated_by", "no other part", {f"{_REWARD}.gated_by": "format"}),
    _by_schema("gated by itself", f"{_REWARD}.gated_by", "no other part", {f"{_REWARD}.gated_by": "accuracy"}),
    _by_schema(
        "gates in a circle",
        f"{_REWARD}.gated_by",
        "circle",
        {_RL + ".rewards": [{"kind": "accuracy", "gated_by": "format"}, {"kind": "format", "gated_by": "accuracy"}]},
    ),
    _by_schema("clip upside down", f"{_REWARD}.clip", "must not exceed", {f"{_REWARD}.clip": [1, 0]}),
    _by_schema("reward clip upside down", f"{_RL}.reward_clip", "must not exceed", {f"{_RL}.reward_clip": [2, 1]}),
    _by_schema("clip of one end", f"{_REWARD}.clip", "low and high", {f"{_REWARD}.clip": [1]}),
    _by_schema("unknown sandbox tier", "sandbox.tier", "not a choice", {"sandbox": {"tier": "docker"}}),
    _by_schema(
        "judge without an address",
        f"{_REWARD}.base_url",
        "http",
        {_REWARD: {"kind": "judge", "base_url": "localhost", "model": "m", "rubric": "r"}},
    ),
    _by_schema("unknown stage kind", f"{_RL}.kind", "not known", {f"{_RL}.kind": "ppo"}),
    _by_schema("stage kind missing", f"{_RL}.kind", "required", {f"{_RL}.kind": REMOVED}),
    _by_schema("empty stages", "stages", "at least 1", {"stages": []}),
    _by_schema("stages as a mapping", "stages", "a list", {"stages": {"kind": "rl"}}),
    _by_schema("unknown data source", f"{_DATA}.source", "not known", {f"{_DATA}.source": "csv"}),
    _by_schema("model source missing", "model.source", "required", {"model": {"path": "x"}}),
    _by_schema("model without path", "model.path", "required", {"model": {"source": "folder"}}),
    _by_schema("uneven heads", "model.hidden_size", "multiple", {"model.hidden_size": 100, "model.num_heads": 3}),
    _by_schema("tags of numbers", "tags.1", "text", {"tags": ["demo", 3]}),
    _by_schema("temperature 0", f"{_RL}.sampling.temperature", "temperature", {f"{_RL}.sampling.temperature": 0}),
    _by_schema("top_p 0", f"{_RL}.sampling.top_p", "above 0", {f"{_RL}.sampling.top_p": 0}),
    _by_schema("zero steps", f"{_RL}.num_steps", "at least 1", {f"{_RL}.num_steps": 0}),
    _by_schema("steps beyond count", f"{_RL}.num_steps", "at most", {f"{_RL}.num_steps": 10**12}),
    _by_schema("half a step", f"{_RL}.num_steps", "whole number", {f"{_RL}.num_steps": 1.5}),
    _by_schema("steps in words", f"{_RL}.num_steps", "whole number", {f"{_RL}.num_steps": "many"}),
    _by_schema("huge seed", "seed", "below", {"seed": 2**40}),
    _by_schema("unknown dtype", "dtype", "not a choice", {"dtype": "float16"}),
    _by_schema("yes and no", "deterministic", "true or false", {"deterministic": "perhaps"}),
    _by_schema("name empty", "name", "at least 1", {"name": ""}),
    _by_schema("name missing", "name", "required", {"name": REMOVED}),
    _by_schema("gym reward without gym", f"{_DATA}.source", "reasoning_gym", {_REWARD: {"kind": "gym"}}),
    _by_schema(
        "buffer above max",
        f"{_REWARD}.buffer_tokens",
        "exceed",
        {_REWARD: {"kind": "length", "max_tokens": 8, "buffer_tokens": 9}},
    ),
    _by_schema("options as a list", f"{_DATA}.options", "mapping", {_DATA: {**_GYM, "options": [1]}}),
    _text("key given twice", "twice", "name: a\nseed: 1\nseed: 2\n"),
    _text("not a mapping", "not fields", "- a\n- b\n"),
    _text("nothing at all", "nothing", "\n"),
    _text("broken YAML", "line 3", "name: a\nstages: [\n"),
]

PREFLIGHT = [
    _by_preflight("model path missing", "model.path", "does not exist", _folder("none")),
    _by_preflight("model without config", "model.path", "config.json", _folder("bare")),
    _by_preflight("pickled weights", "model.path", "pickled", _folder("pickled")),
    _by_preflight("tokenizer missing", "model.path", "tokenizer", _folder("mute")),
    _by_preflight("data file missing", f"{_DATA}.path", "does not exist", _file("none.jsonl")),
    _by_preflight("data of another kind", f"{_DATA}.path", "neither", _file("rows.csv")),
    _by_preflight("empty dataset", f"{_DATA}.path", "no rows", _file("empty.jsonl")),
    _by_preflight("malformed JSONL", f"{_DATA}.path", "line 2", _file("torn.jsonl")),
    _by_preflight(
        "no such column", f"{_DATA}.prompt_column", "no column", _file("rows.jsonl", prompt_column="question")
    ),
    _by_preflight("no answer column", f"{_DATA}.answer_column", "no column", _file("rows.jsonl", answer_column="gold")),
    _by_preflight(
        "accuracy without gold", f"{_DATA}.answer_column", "no gold", _file("plain.jsonl", answer_column=None)
    ),
    _by_preflight("all rows held out", f"{_DATA}.held_out_rows", "holding out", _file("rows.jsonl", held_out_rows=9)),
    _by_preflight("prompt too long", _DATA, "context", _file("long.jsonl")),
    _by_preflight(
        "chat without a template", f"{_DATA}.chat_template", "template", _file("rows.jsonl", chat_template=True)
    ),
    _by_preflight(
        "SFT without demonstrations",
        f"{_DATA}.completion_column",
        "no column",
        {"stages.0": {"kind": "sft", "data": {"source": "file", "path": "{folder}/rows.jsonl"}}},
    ),
    _by_preflight("unknown gym task", f"{_DATA}.task", "no such task", {_DATA: {**_GYM, "task": "chain_sun"}}),
    _by_preflight(
        "unknown gym option", f"{_DATA}.options.terms", "no such option", {_DATA: {**_GYM, "options": {"terms": 2}}}
    ),
    _by_preflight(
        "custom reward unknown", f"{_REWARD}.name", "source", {_REWARD: {"kind": "custom", "name": "brevity"}}
    ),
    _by_preflight(
        "extraction misses gold",
        f"{_REWARD}.extract",
        "not 1",
        {**_file("words.jsonl"), f"{_REWARD}.extract": "last_number"},
    ),
    _by_preflight("gold that explodes", f"{_REWARD}.kind", "cannot be judged", _file("towers.jsonl")),
    _by_preflight(
        "constraint that does not exist",
        f"{_REWARD}.kind",
        "cannot be judged",
        {**_file("asked.jsonl"), _REWARD: {"kind": "instruction_following"}},
    ),
    _by_preflight("code without tests", f"{_REWARD}.kind", "no tests", {_REWARD: {"kind": "code_execution"}}),
    _by_preflight(
        "language that nobody can tell",
        f"{_REWARD}.kind",
        "cannot be judged",
        {_REWARD: {"kind": "language_consistency", "language": "xx"}},
    ),
    _by_preflight(
        "encoder missing",
        f"{_REWARD}.model",
        "does not exist",
        {_REWARD: {"kind": "bertscore", "model": "{folder}/none"}},
    ),
    _by_preflight(
        "reward model without its config",
        f"{_REWARD}.model",
        "config.json",
        {_REWARD: {"kind": "reward_model", "model": "{folder}/bare"}},
    ),
    _by_preflight(
        "critic alone to the end",
        f"{_RL}.advantage.value.warmup_steps",
        "the policy never",
        {f"{_RL}.advantage": {"kind": "gae", "value": {"warmup_steps": 100}}},
    ),
    _by_preflight(
        "more ranks than completions",
        "needs.num_ranks",
        "fewer than the ranks",
        {"needs.num_ranks": 9, f"{_RL}.prompts_per_step": 2, f"{_RL}.group_size": 4},
    ),
    _by_preflight("server without a scheme", "rollout.addresses.0", "no HTTP address", _servers("10.0.0.5:8000")),
    _by_preflight("server with a path", "rollout.addresses.0", "host and port", _servers("http://localhost:8000/v1")),
    _by_preflight(
        "server named twice", "rollout.addresses.1", "twice", _servers("http://localhost:80", "http://localhost:80/")
    ),
    _by_preflight("server with a password", "rollout.addresses.0", "user name", _servers("http://me:pw@localhost:80")),
    _by_preflight("server elsewhere", "rollout.weights_folder", "another host", _servers("http://10.0.0.5:8000")),
    _by_preflight(
        "vLLM's context beyond the model's",
        "rollout.max_model_len",
        "context is 64",
        _servers("http://localhost:80", max_model_len=65),
    ),
    _by_preflight(
        "vLLM's context below the prompts",
        "rollout.max_model_len",
        "no room",
        _servers("http://localhost:80", max_model_len=4),
    ),
    _by_preflight(
        "draft head missing",
        "rollout.speculation.model",
        "config.json",
        _servers("http://localhost:80", speculation={"method": "eagle", "model": "{folder}/none"}),
    ),
    _by_preflight(
        "drafts by layers that the model lacks",
        "rollout.speculation.method",
        "no multi-token",
        _servers("http://localhost:80", speculation={"method": "mtp"}),
    ),
]

CASES = [*SCHEMA, *PREFLIGHT]


def write_files(folder: Path) -> None:
    """Everything that the preflight cases name."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    _write_rows(folder / "rows.jsonl", rows)
    _write_rows(folder / "plain.jsonl", [{"prompt": row["prompt"]} for row in rows])
    _write_rows(folder / "words.jsonl", [{"prompt": f"say {word}", "answer": word} for word in ("yes", "no", "so")])
    _write_rows(folder / "towers.jsonl", [{"prompt": f"{n}+{n}=", "answer": "9^9^9^9"} for n in range(4)])
    _write_rows(folder / "asked.jsonl", [row | {"constraints": [{"kind": "rhymes"}]} for row in rows])
    _write_rows(folder / "long.jsonl", [row | {"prompt": "1+" * 40 + row["prompt"]} for row in rows])
    (folder / "empty.jsonl").write_text("")
    (folder / "torn.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n')
    (folder / "rows.csv").write_text("prompt,answer\n1+1=,2\n")
    for name, files in {
        "bare": ("model.safetensors", "tokenizer.json"),
        "pickled": ("config.json", "pytorch_model.bin", "tokenizer.json"),
        "mute": ("config.json", "model.safetensors"),
    }.items():
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_bytes(struct.pack("<Q", 2) + b"{}" if file.endswith("tensors") else b"{}")


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

"""The form generated from the config's schema, and the way back."""

import copy
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from app.form_nodes import Choice, Items, Leaf, Section, kind_label
from app.forms import SchemaForm
from grpo_engine.config import RLStage, RunConfig, SFTStage

FORM = SchemaForm(RunConfig.model_json_schema())
CONFIG = RunConfig.model_validate(
    {
        "name": "a, b <c>",
        "tags": ["x", "y"],
        "model": {"source": "folder", "path": "/m"},
        "stages": [
            {"kind": "sft", "data": {"source": "addition"}},
            {
                "kind": "rl",
                "data": {"source": "reasoning_gym", "task": "chain_sum", "options": {"min_terms": 2}},
                "rewards": [{"kind": "accuracy"}, {"kind": "length", "max_tokens": 40, "buffer_tokens": 10}],
                "optimizer": {"learning_rate": 3e-6},
            },
        ],
    }
).model_dump(mode="json")


def posted(node: Any) -> dict[str, str]:
    """What a browser would send for the rendered form."""
    if isinstance(node, Leaf):
        return {} if node.kind == "checkbox" and not node.value else {node.path: node.value}
    fields: dict[str, str] = {}
    if isinstance(node, Items):
        fields[f"{node.path}.length"] = str(len(node.items))
    if isinstance(node, Choice):
        fields[f"{node.path}.{node.key}"] = fields[f"{node.path}.{node.key}.shown"] = node.value
    for child in node.items if isinstance(node, Items) else node.children:
        fields |= posted(child)
    return fields


def with_part(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """CONFIG with one part of the run or of its RL stage replaced."""
    data = copy.deepcopy(CONFIG)
    (data if path in ("adapter", "rollout") else data["stages"][1])[path] = value
    return RunConfig.model_validate(data).model_dump(mode="json")


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("advantage", {"kind": "grpo", "smooth_rewards": True}), ("advantage", {"kind": "seed_paper"}),
    ("advantage", {"kind": "dr_grpo"}), ("advantage", {"kind": "rloo"}), ("advantage", {"kind": "rank"}),
    ("advantage", {"kind": "gae", "gae_lambda": 0.9, "value": {"backbone": "shared", "clip": None}}),
    ("loss", {"kind": "clip", "dual_clip": 3.0, "normalizer": "constant"}), ("loss", {"kind": "gspo"}),
    ("loss", {"kind": "cispo", "clip_low": 0.5}), ("adapter", {"kind": "none"}),
    ("adapter", {"kind": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj"]}),
    ("kl", {"weight": 0.001, "place": "reward", "track": False}), ("guards", {"action": "rollback"}),
    ("correction", {"kind": "mask", "level": "geometric", "min_weight": 0.5}), ("entropy", {"top_share": 0.2}),
    ("sampling", {"stop": ["\n\n", "a, b", " END ", "\\boxed"], "top_k": 4}),
    ("rollout", {"backend": "torch", "max_rows": 64, "sub_batches": False, "drafts": {"kind": "none"}}),
    ("rollout", {"backend": "torch", "drafts": {"kind": "ngram", "allow_zero": False, "max_match": 8}}),
    ("rollout", {"backend": "vllm", "sleep": True, "enforce_eager": False, "probe": {"tolerance_nats": 0.01}}),
    ("rollout", {"backend": "vllm", "speculation": {"method": "eagle", "model": "/heads", "num_tokens": 2}}),
    ("rollout", {"backend": "vllm_server", "addresses": ["http://a:1", "http://b:2"], "enforce_eager": True}),
    ("rollout", {"backend": "vllm_server", "num_servers": 2, "enforce_eager": None, "speculation": None}),
]  # fmt: skip


def find(section: Section, path: str) -> Any:
    stack: list[Any] = [section]
    while stack:
        node = stack.pop()
        if node.path == path and node is not section:
            return node
        stack += getattr(node, "children", []) + getattr(node, "items", [])
    raise KeyError(path)


def test_a_config_survives_the_way_through_the_form() -> None:
    data = FORM.parse(posted(FORM.build(CONFIG)))
    assert RunConfig.model_validate(data).model_dump(mode="json") == CONFIG


@pytest.mark.parametrize(("path", "part"), VARIANTS, ids=lambda value: str(value))
def test_every_form_of_training_survives_the_way_through_the_form(path: str, part: dict[str, Any]) -> None:
    config = with_part(path, part)
    data = FORM.parse(posted(FORM.build(config)))
    assert RunConfig.model_validate(data).model_dump(mode="json") == config


def test_every_kind_of_a_choice_is_among_the_tested() -> None:
    for path in ("stages.1.advantage", "stages.1.loss", "adapter", "rollout"):
        choice = find(FORM.build(CONFIG), path)
        tested = {part[choice.key] for name, part in VARIANTS if name == path.removeprefix("stages.1.")}
        assert tested == set(choice.choices)


REWARDS: list[dict[str, Any]] = [
    {"kind": "accuracy", "compare": "number", "tolerance": 0.01, "gated_by": "format", "clip": [0.0, 0.5]},
    {"kind": "format", "structure": "think_answer", "allow_empty_thinking": False, "normalize": "batch"},
    {"kind": "length", "shape": "cosine", "max_tokens": 40, "buffer_tokens": 10, "clip": [-1.5, 1.0]},
    {"kind": "code_execution", "credit": "share"}, {"kind": "step_validity", "min_steps": 2},
    {"kind": "logical_consistency"}, {"kind": "language_consistency", "language": "de"}, {"kind": "readability"},
    {"kind": "information_density"}, {"kind": "repetition", "ngram": 3}, {"kind": "instruction_following"},
    {"kind": "code_quality", "forbidden_calls": ["os.system", "eval"]}, {"kind": "code_quality"}, {"kind": "gym"},
    {"kind": "bertscore", "model": "/m", "layer": None}, {"kind": "bertscore", "model": "/m", "layer": 4},
    {"kind": "reward_model", "model": "/m", "squash": "none"}, {"kind": "custom", "name": "mine", "time_limit_s": 5.0},
    {"kind": "judge", "base_url": "http://a/v1", "model": "m", "rubric": "Is it\nkind?", "max_cost": 2.5},
]  # fmt: skip


@pytest.mark.parametrize("parts", [REWARDS, REWARDS[::-1]], ids=["in order", "reversed"])
def test_every_reward_survives_the_way_through_the_form(parts: list[dict[str, Any]]) -> None:
    config = with_part("rewards", parts)
    config["stages"][1]["reward_clip"] = [-1.0, 2.0]
    data = FORM.parse(posted(FORM.build(config)))
    assert RunConfig.model_validate(data).model_dump(mode="json") == config


def test_every_kind_of_reward_is_among_the_tested() -> None:
    kinds = find(FORM.build(with_part("rewards", REWARDS)), "stages.1.rewards").choices
    assert {part["kind"] for part in REWARDS} == set(kinds)


def test_the_ends_of_a_range_stand_in_one_field() -> None:
    tree = FORM.build(with_part("rewards", REWARDS))
    assert find(tree, "stages.1.rewards.2.clip").value == "-1.5, 1.0"
    assert find(tree, "stages.1.reward_clip").value == ""
    fields = posted(tree) | {"stages.1.reward_clip": "0, much"}
    assert FORM.parse(fields)["stages"][1]["reward_clip"] == ["0", "much"]


def test_another_loss_starts_from_its_own_bounds_and_keeps_what_means_the_same() -> None:
    before = posted(FORM.build(with_part("loss", {"kind": "clip", "clip_low": 0.1, "clip_high": 0.28})))
    shown = {"stages.1.loss.kind.shown": "clip", "stages.1.loss.kind": "gspo"}
    assert FORM.parse(before | shown)["stages"][1]["loss"] == {"kind": "gspo"}
    gae = {"stages.1.advantage.kind.shown": "grpo", "stages.1.advantage.kind": "gae"}
    smooth = posted(FORM.build(with_part("advantage", {"kind": "grpo", "smooth_rewards": True}))) | gae
    assert FORM.parse(smooth)["stages"][1]["advantage"]["smooth_rewards"] is True


def test_a_box_that_the_old_form_did_not_show_keeps_its_default() -> None:
    gae = {"stages.1.advantage.kind.shown": "grpo", "stages.1.advantage.kind": "gae"}
    assert find(FORM.build(FORM.parse(posted(FORM.build(CONFIG)) | gae)), "stages.1.advantage.whiten").value == "true"
    shown = posted(FORM.build(with_part("advantage", {"kind": "gae", "whiten": False})))
    assert FORM.parse(shown)["stages"][1]["advantage"]["whiten"] is False


def test_kinds_and_fields_have_the_names_that_people_use() -> None:
    tree = FORM.build(with_part("advantage", {"kind": "gae"}))
    assert find(tree, "stages.1.advantage.gae_lambda").label == "GAE lambda"
    assert find(tree, "stages.1.kl").label == "KL"
    assert find(tree, "stages.1.advantage.value").label == "value model"
    assert [kind_label(kind) for kind in ("gae", "gspo", "dr_grpo", "last_number")] == [
        "GAE (PPO)", "GSPO", "Dr. GRPO", "last number",
    ]  # fmt: skip


def test_another_kind_than_the_default_counts_as_a_change() -> None:
    assert find(FORM.build(CONFIG), "stages.1.loss").num_changed == 0
    assert find(FORM.build(with_part("loss", {"kind": "gspo"})), "stages.1.loss").num_changed == 1
    assert find(FORM.build(with_part("adapter", {"kind": "lora"})), "adapter").num_changed == 1


def test_a_field_carries_its_description_as_help_and_knows_when_it_was_changed() -> None:
    leaf = find(FORM.build(CONFIG), "stages.1.optimizer.learning_rate")
    assert "AdamW" in leaf.help
    assert (leaf.value, leaf.default, leaf.changed, leaf.kind) == ("3e-06", "1e-06", True, "number")
    assert find(FORM.build(CONFIG), "stages.1.optimizer").num_changed == 1


def test_an_error_is_shown_at_its_field_and_opens_its_section() -> None:
    tree = FORM.build(CONFIG, {"stages.1.sampling.top_k": "must be at least 0"})
    assert find(tree, "stages.1.sampling.top_k").error == "must be at least 0"
    assert find(tree, "stages.1.sampling").has_error
    assert not find(tree, "stages.1.optimizer").has_error


@pytest.mark.parametrize(("text", "value"), [("abc", "abc"), ("1e-3", 1e-3), ("7", 7), ("−3", -3)])
def test_text_that_is_no_number_stays_text_so_that_the_schema_names_it(text: str, value: object) -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.kl.weight": text}
    assert FORM.parse(fields)["stages"][1]["kl"]["weight"] == value


def test_an_emptied_field_takes_its_default_and_a_nullable_one_none() -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.group_size": "", "num_threads": ""}
    data = FORM.parse(fields)
    assert "group_size" not in data["stages"][1]
    assert data["num_threads"] is None


def test_another_kind_shows_another_form() -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.data.source": "file", "stages.1.data.path": "/d.jsonl"}
    choice = find(FORM.build(FORM.parse(fields)), "stages.1.data")
    assert choice.value == "file"
    assert [leaf.value for leaf in choice.leaves if leaf.path.endswith(".path")] == ["/d.jsonl"]


def test_a_blank_item_is_of_the_kind_asked_for() -> None:
    assert FORM.blank("stages", "rl") == {"kind": "rl"}
    assert FORM.blank("stages.1.rewards", "length") == {"kind": "length"}
    with pytest.raises(KeyError):
        FORM.blank("nonsense", "rl")


# ---------------------------------------------------------------- sections that may be absent
def test_a_section_that_is_switched_on_shows_its_defaults_and_switched_off_is_none() -> None:
    before = posted(FORM.build(with_part("rollout", {"backend": "vllm"})))
    assert find(FORM.build(FORM.parse(before)), "rollout.speculation").children == []
    shown = FORM.build(FORM.parse(before | {"rollout.speculation.given": "on"}))
    assert find(shown, "rollout.speculation.num_tokens").value == "3"
    assert find(shown, "rollout.speculation").num_changed == 1
    after = posted(shown) | {"rollout.speculation.method": "ngram", "rollout.speculation.num_tokens": "2"}
    assert FORM.parse(after)["rollout"]["speculation"]["num_tokens"] == 2
    assert FORM.parse(after | {"rollout.speculation.given": "off"})["rollout"]["speculation"] is None


class Part(BaseModel):
    on: bool = True


class Whole(BaseModel):
    part: Part | None = None
    stages: list[Annotated[SFTStage | RLStage, Field(discriminator="kind")]] = []


def test_a_box_in_a_section_just_switched_on_has_its_default() -> None:
    form = SchemaForm(Whole.model_json_schema())
    assert form.parse({"part.given": "on", "part.given.shown": "off"})["part"] == {}
    assert form.parse({"part.given": "on", "part.given.shown": "on"})["part"] == {"on": False}
    assert form.parse({"part.given": "off", "part.given.shown": "on"})["part"] is None
    assert "part" not in form.parse({})


def test_an_item_of_which_nothing_was_posted_is_refused_by_the_schema_not_by_the_form() -> None:
    assert SchemaForm(Whole.model_json_schema()).parse({"stages.length": "1"})["stages"] == [{}]


def test_another_backend_starts_from_its_own_defaults() -> None:
    shown = {"rollout.backend": "vllm", "rollout.backend.shown": "torch"}
    fields = posted(FORM.build(with_part("rollout", {"backend": "torch", "max_rows": 64}))) | shown
    rollout = RunConfig.model_validate(FORM.parse(fields)).model_dump()["rollout"]
    assert (rollout["max_rows"], rollout["sleep"], rollout["speculation"]) == (64, False, None)
    back = posted(FORM.build(with_part("rollout", {"backend": "vllm"})))
    back |= {"rollout.backend": "torch", "rollout.backend.shown": "vllm"}
    assert RunConfig.model_validate(FORM.parse(back)).model_dump()["rollout"]["sub_batches"] is True


def test_a_method_that_must_be_chosen_is_not_chosen_for_people() -> None:
    fields = posted(FORM.build(with_part("rollout", {"backend": "vllm"}))) | {"rollout.speculation.given": "on"}
    leaf = find(FORM.build(FORM.parse(fields)), "rollout.speculation.method")
    assert (leaf.kind, leaf.value, leaf.required) == ("select", "", True)
    assert leaf.choices == ["ngram", "mtp", "eagle", "eagle3"]


def test_kinds_of_sampling_have_the_names_that_people_use() -> None:
    tree = FORM.build(with_part("rollout", {"backend": "vllm"}))
    assert [kind_label(kind) for kind in find(tree, "rollout").choices] == [
        "own decoder", "vLLM in process", "vLLM servers",
    ]  # fmt: skip
    assert find(tree, "rollout.cpu_cache_gib").label == "CPU cache GiB"
    assert (find(tree, "rollout").key_label, find(tree, "rollout.speculation").key_label) == ("backend", "speculation")

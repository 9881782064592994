"""Commands that need no server, as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.typed import Typed


def test_a_token_is_printed_alone(typed: Typed) -> None:
    status, output, _ = typed("token", "create", "laptop")
    assert status == 0
    assert output.startswith("cht_")
    assert len(output.split()) == 1


def test_a_short_password_is_refused_with_a_remedy(typed: Typed) -> None:
    status, _, shown = typed("user", "create", "grace", "--password", "short")
    assert status == 2
    assert "use 10 or more" in shown


def test_an_unknown_user_is_named(typed: Typed) -> None:
    status, _, shown = typed("user", "password", "grace", "--password", "long enough words")
    assert (status, shown) == (1, "There is no user grace: create one with `cohort user create grace`.\n")


def test_login_prints_a_link_of_the_configured_address(typed: Typed) -> None:
    status, output, _ = typed("login")
    assert status == 0
    assert output.startswith("http://127.0.0.1:8000/login/")


def test_a_home_without_a_house_says_how_to_get_one(typed: Typed, tmp_path: Path) -> None:
    status, _, shown = typed("run", "list")
    assert status == 1
    assert f"There is no Cohort in {tmp_path}/home: start one with `cohort up`" in shown


def test_a_url_without_a_token_says_how_to_get_one(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_URL", "http://elsewhere:8000")
    status, _, shown = typed("run", "list")
    assert status == 1
    assert "COHORT_TOKEN is not set" in shown


def test_a_config_that_is_no_yaml_is_named_with_its_line(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\nstages: [")
    status, _, shown = typed("run", "start", "-f", str(tmp_path / "bad.yaml"))
    assert status == 2
    assert f"{tmp_path / 'bad.yaml'}, line 2" in shown


def test_checking_an_invalid_config_ends_with_2_and_names_the_field(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nmodel: {source: tiny_llama}\nstages: []\nsede: 1\n")
    status, output, _ = typed("config", "check", "-f", str(tmp_path / "bad.yaml"))
    assert status == 2
    assert "did you mean seed?" in output


def test_importing_a_folder_that_is_no_run_says_which_folder_to_give(typed: Typed, tmp_path: Path) -> None:
    status, _, shown = typed("run", "import", str(tmp_path))
    assert status == 2
    assert "python -m grpo_engine run" in shown

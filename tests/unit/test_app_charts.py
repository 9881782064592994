"""Which metrics share a chart, and in which order charts come."""

from app.metrics.display import _by_family, all_charts, display, family_of
from app.models import Run
from tests import seed


def test_metrics_that_differ_by_a_number_share_one_chart_in_its_order() -> None:
    names = [
        "rollout/accepted_share_10",
        "rollout/accepted_share_2",
        "rollout/accepted_share",
        "mtp/loss_2",
        "mtp/loss_1",
    ]
    charts = dict(_by_family(names))
    assert charts["rollout/accepted_share_"] == ["rollout/accepted_share_2", "rollout/accepted_share_10"]
    assert charts["mtp/loss_"] == ["mtp/loss_1", "mtp/loss_2"]
    assert ("", ["rollout/accepted_share"]) in _by_family(names)


def test_only_known_families_are_joined() -> None:
    assert family_of("mtp/accuracy_3") == "mtp/accuracy_"
    assert family_of("behaviour/reflection") == "behaviour/"
    assert [family_of(name) for name in ("gradient/position/0-63", "reward/part/try_2/mean", "loss", "part/x_2")] == [
        ""
    ] * 4


def test_a_family_has_one_label_and_a_legend_of_depths() -> None:
    run = Run(number=1, config=seed.config().model_dump(mode="json"))
    chart_set = all_charts(run, "1-rl", {"rollout/draft_length_share_0": [0.5], "rollout/draft_length_share_3": [0.5]})
    [chart] = chart_set.charts
    assert (chart.label, chart.format) == ("Draft lengths", "percent")
    assert [text for _, text in chart.legend] == ["0 drafted", "3 drafted"]


def test_behaviours_are_one_chart_beside_the_rewards() -> None:
    run = Run(number=1, config=seed.config().model_dump(mode="json"))
    names = ("policy/kl", "behaviour/reflection", "behaviour/language_switches", "reward/mean")
    chart_set = all_charts(run, "1-rl", {name: [0.5] for name in names})
    assert [chart.label for chart in chart_set.charts][:2] == ["Mean reward", "Behaviours"]
    assert [text for _, text in chart_set.charts[1].legend] == ["language switches", "reflection"]


def test_a_very_short_time_is_written_in_milliseconds() -> None:
    assert display("time/step_s", 0.0083) == ("8.30 ms", "")
    assert display("time/step_s", 0.3) == ("0.3 s", "")

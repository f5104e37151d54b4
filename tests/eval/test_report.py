import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from eval.report import headline, write_report
from eval.summary import summarise
from eyas.errors import EyasError
from tests.eval.recorded import (
    BASELINE_S,
    CYCLE_S,
    FIRST_S,
    RESULT,
    STARTER,
    TOKENS,
    apart,
    conditions,
    config_at,
    measurements,
    record,
    record_training,
    request,
)


@pytest.fixture
def config(tmp_path):
    return config_at(tmp_path)


def test_every_histogram_of_the_recorded_set_emits_the_tokens_of_its_request():
    for histogram in STARTER + RESULT:
        assert sum((accepted + 1) * count for accepted, count in enumerate(histogram)) == TOKENS - 1


def test_the_three_acceptance_lengths_are_kept_apart():
    cut = replace(request(0, "result", [8, 8, 8, 3]), completion_tokens=60, engine_length=60 / 27)  # the last cycle lost one token
    result = summarise([request(0, "none"), cut], 0.0, 100, 0).variant("result")
    assert result.length.value == pytest.approx(59 / 27)
    assert result.cross_engine_length.value == pytest.approx(1 + (8 + 16 + 9) / 27)
    assert result.engine_length == pytest.approx(60 / 27)


def test_acceptance_length_is_a_ratio_of_sums_over_prompts():
    result = summarise(measurements(), 0.0, 100, 0).variant("result")
    assert result.length.value == pytest.approx(24 * 60 / (8 * (27 + 30 + 30)))


def test_rates_by_position_come_from_the_histograms():
    result = summarise(measurements(3), 0.0, 100, 0).variant("result")
    assert result.histogram == [30, 27, 24, 6]
    assert result.unconditional == pytest.approx([57 / 87, 30 / 87, 6 / 87])
    assert result.conditional == pytest.approx([57 / 87, 30 / 57, 6 / 30])


def test_decoding_is_faster_than_the_baseline_by_exactly_length_over_break_even():
    for name in ("starter", "result"):
        variant = summarise(measurements(), 0.0, 100, 0).variant(name)
        assert variant.break_even.value == pytest.approx(CYCLE_S / BASELINE_S)
        assert variant.decode_speedup.value == pytest.approx(variant.length.value / variant.break_even.value)


def test_end_to_end_speed_counts_the_time_to_the_first_token():
    summary = summarise(measurements(), 0.0, 100, 0)
    assert summary.variant("none").tokens_per_second.value == pytest.approx(61 / (0.1 + 60 * 0.02))
    assert summary.variant("none").decode_tokens_per_second.value == pytest.approx(50)
    assert summary.variant("none").first_token_ms.value == pytest.approx(100)


def test_the_gain_over_the_starter_is_paired_by_prompt_and_excludes_0():
    gain = summarise(measurements(), 0.0, 500, 0).gain
    assert gain.value == pytest.approx(24 * 60 / (8 * 87) - 24 * 60 / (8 * (44 + 46 + 43)))
    assert gain.excludes(0)


def test_the_parts_of_a_cycle_add_up_to_it():
    parts = summarise(measurements(), 0.0, 100, 0).variant("result").parts
    assert parts.cycle_ms == pytest.approx(26)
    assert parts.verify_ms == pytest.approx(21)
    assert parts.verify_ms + parts.extend_ms + parts.draft_ms + parts.prompt_ms + parts.overhead_ms == pytest.approx(parts.cycle_ms)


def test_the_prediction_for_the_measured_number_of_drafts_is_the_measured_speed():
    summary = summarise(measurements(), 0.0, 100, 0)
    predicted = next(prediction for prediction in summary.predictions if prediction.steps == 3)
    measured = summary.variant("result").decode_tokens_per_second.value
    assert predicted.tokens_per_second == pytest.approx(measured, rel=0.005)  # the extension is priced without the prompt's


def test_prompts_that_some_variant_lacks_are_left_out_and_counted():
    found = [m for m in measurements(6) if not (m.key == "key-02" and m.variant == "result")]
    summary = summarise(found, 0.0, 100, 0)
    assert (summary.prompts, summary.incomplete) == (5, 1)
    assert all(variant.requests == 5 for variant in summary.variants)


def test_looping_prompts_are_left_out_of_the_low_repetition_length_for_every_variant():
    found = [replace(m, looping=True) if m.key == "key-00" and m.variant == "none" else m for m in measurements(3)]
    summary = summarise(found, 0.0, 100, 0)
    assert summary.looping_prompts == 1
    assert summary.variant("result").low_repetition_length.value == pytest.approx(2 * 60 / (30 + 30))
    assert summary.variant("result").length.value == pytest.approx(3 * 60 / 87)


def test_greedy_replies_that_differ_are_counted_with_their_first_difference():
    found = measurements(3)
    other = found[2].output_ids.copy()
    other[40] += 1
    found[2] = replace(found[2], output_ids=other)
    differences = summarise(found, 0.0, 100, 0).variant("result").differences
    assert (differences.requests, differences.first) == (3, {"key-00": 40})


def test_sampled_replies_are_not_compared():
    assert summarise(measurements(3), 1.0, 100, 0).variant("result").differences is None


def test_categories_and_prompt_lengths_split_the_prompts():
    summary = summarise(measurements(), 0.0, 100, 0)
    assert {group.name: group.prompts for group in summary.categories} == {"chat <b>": 12, "code": 12}
    assert [(group.name, group.prompts) for group in summary.prompt_lengths] == [("<256", 8), ("256-511", 13), ("512-1023", 3)]


def test_the_baseline_of_two_legs_counts_with_their_mean_prompt_by_prompt():
    once, twice = summarise([m for m in apart() if m.leg != "after"], 0.0, 100, 0), summarise(apart(drift=0.5), 0.0, 100, 0)
    mean = 1.5 * (FIRST_S + (TOKENS - 1) * BASELINE_S)  # the second leg takes twice as long
    assert twice.variant("none").tokens_per_second.value == pytest.approx(TOKENS / mean)
    assert twice.variant("none").requests == 48
    assert twice.variant("result").speedup.value == pytest.approx(1.5 * once.variant("result").speedup.value)
    assert twice.variant("result").break_even.value == pytest.approx(once.variant("result").break_even.value / 1.5)


def test_the_drift_is_the_baseline_after_over_before_and_hides_what_is_smaller():
    drift = summarise(apart(drift=0.97), 0.0, 200, 0).drift
    assert drift.change.value == pytest.approx(0.97)
    assert drift.after.value == pytest.approx(0.97 * drift.before.value)
    assert (drift.prompts, drift.differing, drift.hides) == (24, 0, [])
    # without a drift the starter is 1.04 times as fast as the baseline, the result 1.52 times
    assert summarise(apart(drift=1.12), 0.0, 200, 0).drift.hides == ["starter"]
    hidden = summarise(apart(drift=1.4), 0.0, 200, 0)
    assert hidden.drift.hides == ["starter", "result"]
    assert hidden.pays is None


def test_replies_of_the_baseline_that_differ_between_its_legs_are_counted():
    found = [replace(m, output_ids=m.output_ids[::-1]) if m.leg == "after" and m.key == "key-03" else m for m in apart()]
    assert summarise(found, 0.0, 100, 0).drift.differing == 1
    assert summarise(found, 1.0, 100, 0).drift.differing is None


def test_variants_side_by_side_have_no_drift():
    assert summarise(measurements(), 0.0, 100, 0).drift is None


def test_the_headline_is_of_the_lowest_level_and_every_level_is_there():
    summary = summarise([*apart(level=4), *apart()], 0.0, 100, 0)
    assert [level.concurrency for level in summary.levels] == [1, 4]
    assert summary.concurrency == 1
    assert summary.variant("result").tokens_per_second == summarise(apart(), 0.0, 100, 0).variant("result").tokens_per_second


def test_requests_in_flight_together_are_counted_together():
    one, four = (summarise(apart(level=level), 0.0, 100, 0).variant("none") for level in (1, 4))
    assert four.tokens_per_second.value == pytest.approx(4 * one.tokens_per_second.value)
    assert four.request_tokens_per_second.value == pytest.approx(one.tokens_per_second.value)


def slow(found, cycle_s):
    return [replace(m, total_s=m.first_token_s + m.verify_ct * cycle_s) if m.verify_ct else m for m in found]


def test_the_verdict_is_pays_only_when_the_interval_lies_above_1():
    assert headline(summarise(measurements(), 0.0, 300, 0)).verdict == "pays"
    losing = headline(summarise(slow(measurements(), 0.060), 0.0, 300, 0))
    assert losing.verdict == "does not pay"
    assert "must bring 3.00 to break even: below by" in losing.reason
    assert "The verify step takes 21.0 of the cycle's 60.0 ms; the largest other cost is overhead (35.9 ms)" in losing.reason
    generator = np.random.default_rng(0)
    even = [replace(m, total_s=1.3 * generator.lognormal(0, 0.1)) for m in measurements()]
    assert headline(summarise(even, 0.0, 300, 0)).verdict == "cannot be told"


def test_without_a_baseline_nothing_is_claimed():
    found = [m for m in measurements() if m.variant != "none"]
    assert headline(summarise(found, 0.0, 100, 0)).verdict == "cannot be told"


class References(HTMLParser):
    """Everything in a page that a browser might fetch, and all ids."""

    def __init__(self):
        super().__init__()
        self.found, self.ids, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in {"src", "href", "xlink:href", "srcset", "data", "action", "poster"} and not value.startswith("#"):
                self.found.append((tag, name, value))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Written once; its tests only read."""
    config = config_at(tmp_path_factory.mktemp("run"))
    record(config, measurements(), template={"prompt_tokens": 5, "server_prompt_tokens": 5})
    record_training(config)
    return write_report(config)


def test_the_page_refers_to_nothing_outside_itself(report):
    page = report.read_text()
    references = References()
    references.feed(page)
    assert references.found == []
    assert not references.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert "@import" not in page
    assert "//" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_ids_are_unique_and_every_reference_within_the_page_has_its_target(report):
    page = report.read_text()
    references = References()
    references.feed(page)
    assert len(set(references.ids)) == len(references.ids)
    assert set(re.findall(r'(?:href="|url\()#([\w.-]+)', page)) <= set(references.ids)


def test_the_page_draws_every_figure_in_the_pages_own_colours(report):
    page = report.read_text()
    assert page.count("<svg") == 10
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", page)) == set()
    assert "prefers-color-scheme: dark" in page


def test_what_comes_from_outside_is_escaped_in_the_page(report):
    page = report.read_text()
    assert "some/&lt;target&gt;" in page
    assert "chat &lt;b&gt;" in page
    assert "<b>code" not in page
    assert "<target>" not in page


def test_the_json_twin_is_strict_json_and_holds_the_numbers_of_the_page(report):
    def refuse(name):
        raise ValueError(name)

    twin = json.loads((report.parent / "report.json").read_text(), parse_constant=refuse)
    result = next(variant for variant in twin["summary"]["variants"] if variant["name"] == "result")
    page, text = report.read_text(), (report.parent / "report.md").read_text()
    for name in ("length", "speedup", "break_even"):
        interval = result[name]
        assert interval["low"] <= interval["value"] <= interval["high"]
        assert f"{interval['value']:.2f}" in page
        assert f"{interval['value']:.2f} ({interval['low']:.2f} to {interval['high']:.2f})" in text
    assert twin["headline"]["sentence"] in text
    assert twin["conditions"]["versions"]


def test_training_curves_start_with_the_warm_start_and_name_the_kept_step(report):
    assert "1.390 before, 1.960 at step 100, which was kept" in (report.parent / "report.md").read_text()


DRIFTED = {"none": {"max_running_requests": 48}, "result": {"max_running_requests": 48, "disable_overlap_schedule": True}}


@pytest.fixture(scope="module")
def report_of_legs(tmp_path_factory):
    """Of an engine that is started for each leg, at two levels of concurrency, on a machine with two GPUs."""
    config = config_at(tmp_path_factory.mktemp("legs"))
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "sglang"})})
    lines = conditions(gpus=[(2400.0, 61.0, 300.0), (2350.0, 66.0, 310.0)], environment={"NCCL_ALGO": "Ring"})
    found = [*apart(drift=1.01), *apart(drift=1.02, level=4)]
    record(config, found, lines=lines, servers=DRIFTED, equalised={"max-running-requests": 48})
    return write_report(config)


def test_the_report_of_legs_tells_the_drift_of_every_level(report_of_legs):
    text = (report_of_legs.parent / "report.md").read_text()
    assert "| 1 | 24 | 46.9 (46.9 to 46.9) | 47.4 (47.4 to 47.4) | 1.010 (1.010 to 1.010) | 0 | nothing |" in text
    assert "| 4 | 24 | 187.7 (187.7 to 187.7) | 191.4" in text
    assert "| 1.020 (1.020 to 1.020) | 0 | starter |" in text


def test_the_report_of_legs_tells_the_rates_together_and_of_each_request(report_of_legs):
    rows = [line for line in (report_of_legs.parent / "report.md").read_text().splitlines() if line.startswith("| 4 | no speculation |")]
    assert len(rows) == 1
    together, each = rows[0].split("|")[3], rows[0].split("|")[5]
    assert together.split()[0] == f"{4 * float(each.split()[0]):.1f}" or float(together.split()[0]) == pytest.approx(
        4 * float(each.split()[0]), abs=0.3
    )


def test_the_report_of_legs_names_what_was_made_equal_and_what_remains(report_of_legs):
    text = (report_of_legs.parent / "report.md").read_text()
    assert "Made equal by giving them to the baseline: max-running-requests 48." in text
    assert "| disable_overlap_schedule | result | true | null |" in text
    assert "Servers differ in disable_overlap_schedule: true (result), null (baseline)." in text


def test_the_report_of_legs_tells_the_conditions_of_each(report_of_legs):
    text = (report_of_legs.parent / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| before: ", "| between: ", "| after: "))]
    assert [row.split("|")[1].strip() for row in rows] == ["before: no speculation", "between: result", "after: no speculation"]
    assert all(row.endswith("| 5.0 | 1.0 | 2600 | 2350 – 2400 | 66 | 610 | 0.0 % |") for row in rows)
    assert "- NCCL_ALGO: Ring" in text
    assert "sglang, bfloat16, 1, 4 requests in flight" in text
    assert "the baseline before and after the drafters" in text


def test_one_server_for_all_variants_has_nothing_to_be_compared_with(config):
    record(config, measurements(), servers={"none": {"version": "eyas", "eyas": {}}, "result": {"version": "eyas", "eyas": {}}})
    assert "Server arguments compared" not in (write_report(config).parent / "report.md").read_text()


def test_an_engines_own_figure_stands_under_its_own_name(report, report_of_legs):
    assert "| embedded engine: spec_accept_length | verify steps |" in (report.parent / "report.md").read_text()
    assert "| SGLang: spec_accept_length | verify steps |" in (report_of_legs.parent / "report.md").read_text()


def test_a_speed_up_that_is_not_larger_than_the_drift_is_no_verdict(config):
    record(config, apart(drift=1.40), servers=DRIFTED)
    text = (write_report(config).parent / "report.md").read_text()
    assert "It cannot be told whether speculation pays" in text
    assert "after the drafters it was 1.40 times as fast as before them" in text
    assert "The drift of the baseline is as large as the speed-up of result" in text


def test_a_baseline_measured_once_beside_other_servers_says_that_its_drift_is_unknown(config):
    record(config, [m for m in apart() if m.leg != "after"], servers=DRIFTED)
    assert "The baseline was measured once" in (write_report(config).parent / "report.md").read_text()


def test_every_table_of_the_markdown_has_as_many_cells_in_each_row(report):
    lines = (report.parent / "report.md").read_text().splitlines()
    tables = [lines[i] for i in range(len(lines)) if lines[i].startswith("|")]
    assert len(tables) > 25
    for above, below in pairwise(lines):
        if above.startswith("|") and below.startswith("|"):
            assert above.count("|") == below.count("|"), above


def test_a_report_is_the_same_when_written_again(report):
    first = {path.name: path.read_text() for path in report.parent.iterdir()}
    write_report(config_at(report.parents[1]))
    assert {path.name: path.read_text() for path in report.parent.iterdir()} == first


def test_a_server_without_parts_untrained_and_with_one_prompt_still_makes_a_report(config):
    record(config, [replace(m, parts={}) for m in measurements(1)])
    page = write_report(config).read_text()
    assert "does not tell the parts of a cycle" in page
    assert "Only 1 prompts" in page


def test_only_a_baseline_still_makes_a_report(config):
    record(config, [m for m in measurements() if m.variant == "none"])
    assert "Only the baseline was measured" in write_report(config).read_text()


def test_drafters_of_different_chain_lengths_stand_side_by_side(config):
    extra = [replace(request(number, "sibling", [40, 10]), proposed=50) for number in range(24)]
    record(config, [*measurements(), *extra])
    text = (write_report(config).parent / "report.md").read_text()
    assert "| sibling | 20.0 % (20.0 %) | – | – |" in text


def test_draft_positions_that_an_engine_left_out_of_its_histogram_were_never_accepted():
    found = [request(0, "none"), request(0, "result", [60])]
    result = summarise(found, 0.0, 100, 0).variant("result")
    assert result.unconditional == [0, 0, 0]
    assert result.conditional == [0, None, None]


def test_the_report_names_what_a_careful_reader_must_know(config):
    found = [replace(m, cached_tokens=4) if m.key == "key-00" else m for m in measurements()]
    servers = {"none": {"max_running_requests": 256}, "result": {"max_running_requests": 48}}
    record(config, found, template={"prompt_tokens": 5, "server_prompt_tokens": 30}, servers=servers)
    text = (write_report(config).parent / "report.md").read_text()
    assert "12 prompt tokens came from the prefix cache" in text
    assert "other prompts than training saw (30 tokens, expected 5)" in text
    assert "max_running_requests: 48 (result), 256 (baseline)" in text
    # two servers cannot take turns, and their machine is not this one
    assert "24 held-out chat prompts, one server after the other, cache flushed" in text
    assert "- machine of the client: some, 2 cores" in text


def test_a_report_names_what_was_measured_not_what_the_config_says_by_now(config):
    record(config, measurements())
    other = config.model_copy(update={"target": config.target.model_copy(update={"model": "another/target"}), "seed": 9})
    text = (write_report(other).parent / "report.md").read_text()
    assert "some/<target>" in text
    assert "another/target" not in text
    assert "- seed: 0" in text


def test_greedy_replies_that_differ_are_told_to_the_reader(config):
    found = measurements(3)
    found[2] = replace(found[2], output_ids=found[2].output_ids[::-1])
    record(config, found)
    assert "1 of 3 greedy replies of result differ from the baseline's." in (write_report(config).parent / "report.md").read_text()


def test_a_baseline_that_decoded_nothing_predicts_nothing():
    found = [replace(m, completion_tokens=1, total_s=m.first_token_s) if m.variant == "none" else m for m in measurements(3)]
    summary = summarise(found, 1.0, 100, 0)
    assert (summary.cost, summary.predictions) == (None, [])


def test_a_report_before_any_bench_is_one_clear_line(config):
    with pytest.raises(EyasError, match=r"bench.*does not exist"):
        write_report(config)


def test_no_number_of_a_summary_is_nan():
    def numbers(value):
        if isinstance(value, dict):
            return [n for inner in value.values() for n in numbers(inner)]
        if isinstance(value, list | tuple):
            return [n for inner in value for n in numbers(inner)]
        return [value] if isinstance(value, float) else []

    one_token = [
        replace(m, completion_tokens=1, total_s=m.first_token_s, verify_ct=0 if m.verify_ct else None, histogram=[])
        for m in measurements(3)
    ]
    assert all(math.isfinite(number) for number in numbers(asdict(summarise(one_token, 0.0, 100, 0))))

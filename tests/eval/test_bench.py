import json
from collections import Counter
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from eval.arguments import public_info
from eval.bench import bench, bench_prompts, default_drafters
from eval.conditions import read_conditions
from eval.measurement import first_difference, loops, read_measurements
from eval.schedule import server_variants
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.manifest import read_manifest


def config_at(output, kind="embedded", **evaluated):
    return Config.model_validate(
        {
            "output": str(output),
            "engine": {"kind": kind},
            "target": {"model": "some/target"},
            "prep": {"sources": [{"source": "prompts.jsonl"}]},
            "drafter": {"init": str(output / "starter")},
            "eval": {"prompts": 6, "max_new_tokens": 24, "warmup_prompts": 1, "bootstrap": 200, **evaluated},
        }
    )


@pytest.fixture
def config(tmp_path):
    """A run whose held-out prompts lie ready: 8 of one category, 3 of another."""
    rows = [
        {
            "key": f"key-{number}",
            "category": "code" if number < 8 else "chat",
            "family": "some",
            "messages": [{"role": "user", "content": "x" * (number + 2)}],
            "prompt_ids": [number + 1] * (number + 2),
            "reply_ids": [1, 2],
            "finished": True,
            "temperature": 0.0,
        }
        for number in range(11)
    ]
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_at(tmp_path)


def generated(server):
    return [body for path, body in server.log if path == "/generate"]


def test_every_prompt_is_measured_under_every_variant(config, toy_server):
    measured = read_measurements(bench(config, toy_server.url, {}))
    assert Counter(m.variant for m in measured) == {"none": 6, "starter": 6, "result": 6}
    assert len({(m.key, m.variant) for m in measured}) == 18


def test_prompts_are_spread_evenly_over_categories_and_always_the_same(config):
    prompts = bench_prompts(config)
    assert Counter(prompt.category for prompt in prompts) == {"code": 3, "chat": 3}
    assert prompts == bench_prompts(config)


def test_the_variants_of_a_prompt_run_back_to_back_in_a_rotating_order(config, toy_server):
    measured = read_measurements(bench(config, toy_server.url, {}))
    groups = [measured[start : start + 3] for start in range(0, 18, 3)]
    assert all(len({m.key for m in group}) == 1 for group in groups)
    assert {tuple(m.variant for m in group) for group in groups} == {
        ("none", "starter", "result"),
        ("starter", "result", "none"),
        ("result", "none", "starter"),
    }


def test_the_cache_is_flushed_before_every_measured_request(config, toy_server):
    bench(config, toy_server.url, {})
    paths = [path for path, _ in toy_server.log if path in {"/generate", "/flush_cache"}]
    warm = paths.index("/flush_cache")
    assert warm == 3  # one warm-up prompt, three variants, not counted
    assert paths[warm:] == ["/flush_cache", "/generate"] * 18


def test_acceptance_and_ids_are_those_of_the_request(config, toy_server):
    for m in read_measurements(bench(config, toy_server.url, {})):
        cycles = toy_server.cycles(None if m.variant == "none" else m.variant, 24)
        assert m.verify_ct == (len(cycles) or None)
        assert m.emitted == 23
        assert m.output_ids == toy_server.reply([int(m.key[4:]) + 1], 24)


def test_a_killed_run_resumes_with_nothing_lost_and_nothing_twice(config, toy_server):
    toy_server.break_after = 3 + 7
    with pytest.raises(EyasError, match="answered 500"):
        bench(config, toy_server.url, {})
    path = config.folder("bench") / "measurements.jsonl"
    before = path.read_text()
    assert len(before.splitlines()) == 7
    assert not read_manifest(config.folder("bench")).complete
    path.write_text(before + '{"key": "key-3", "vari')  # the kill tore the last line
    toy_server.break_after, asked = None, len(generated(toy_server))
    measured = read_measurements(bench(config, toy_server.url, {}))
    assert path.read_text().startswith(before)
    assert len({(m.key, m.variant) for m in measured}) == len(measured) == 18
    assert len(generated(toy_server)) - asked == 3 + 11
    assert read_manifest(config.folder("bench")).complete


def test_a_finished_bench_measures_nothing_again(config, toy_server):
    bench(config, toy_server.url, {})
    asked = len(generated(toy_server))
    bench(config, toy_server.url, {})
    assert len(generated(toy_server)) == asked


def test_measurements_of_another_drafter_make_room_and_are_kept(config, tmp_path, toy_server, capsys):
    drafter = tmp_path / "export"
    drafter.mkdir()
    bench_folder = config.folder("bench")
    for number, weights in enumerate((b"first", b"second", b"third")):
        (drafter / "model.safetensors").write_bytes(weights)
        bench(config, toy_server.url, {"result": str(drafter)})
        assert len(generated(toy_server)) == (number + 1) * (3 + 18)
        assert len(read_measurements(bench_folder)) == 18
    notes = [line for line in capsys.readouterr().err.splitlines() if "measured anew" in line]
    for number, said in zip((1, 2), notes, strict=True):
        kept = tmp_path / f"bench.{number}"
        assert said == f"bench: drafter.result changed, so all is measured anew; earlier measurements are kept in {kept}"
        assert len(read_measurements(kept)) == 18
        assert read_manifest(kept, "bench").complete
    inputs = [read_manifest(folder).inputs["drafter.result"] for folder in (tmp_path / "bench.1", tmp_path / "bench.2", bench_folder)]
    assert len(set(inputs)) == 3


def test_other_settings_do_not_mix_with_old_measurements(config, tmp_path, toy_server, capsys):
    bench(config, toy_server.url, {})
    changed = config_at(tmp_path, max_new_tokens=30)
    assert {m.completion_tokens for m in read_measurements(bench(changed, toy_server.url, {}))} == {30}
    assert {m.completion_tokens for m in read_measurements(tmp_path / "bench.1")} == {24}
    assert "bench: eval.max_new_tokens changed" in capsys.readouterr().err


def test_two_servers_of_one_behaviour_each_are_measured_into_one_folder(config, plain_servers):
    plain, drafting = plain_servers
    drafters = {"result": "drafters/result"}
    bench(config, plain.url, drafters)
    measured = read_measurements(bench(config, drafting.url, drafters))
    assert Counter(m.variant for m in measured) == {"none": 6, "result": 6}
    assert all("speculative" not in body for server in plain_servers for body in generated(server))
    holds = read_manifest(config.folder("bench")).holds
    assert holds["servers"]["none"]["max_running_requests"] == 256
    assert holds["servers"]["result"]["max_running_requests"] == 48


def test_a_baseline_server_measured_again_after_the_drafter_is_the_leg_after_it(config, plain_servers):
    plain, drafting = plain_servers
    drafters = {"result": "drafters/result"}
    for server in (plain, plain, drafting, plain, plain):
        folder = bench(config, server.url, drafters)
    legs = Counter((m.variant, m.leg) for m in read_measurements(folder))
    assert legs == {("none", "before"): 6, ("result", "between"): 6, ("none", "after"): 6}


DRAFTERS = {"starter": "drafters/starter", "result": "drafters/result"}


@pytest.fixture
def apart(config):
    """The same run on an engine that cannot switch speculation per request."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "sglang"})})


def at_levels(config, *levels):
    return config.model_copy(update={"eval": config.eval.model_copy(update={"concurrency": list(levels)})})


def test_an_engine_that_cannot_switch_is_started_for_each_leg_with_the_baseline_before_and_after(apart, toy_engine):
    measured = read_measurements(bench(apart, None, DRAFTERS))
    assert [variant for variant, _ in toy_engine.starts] == ["starter", "none", "starter", "result", "none"]  # the first is the trial
    legs = [(m.variant, m.leg) for m in measured]
    assert legs == [("none", "before")] * 6 + [("starter", "between")] * 6 + [("result", "between")] * 6 + [("none", "after")] * 6
    assert {m.concurrency for m in measured} == {1}
    assert all("speculative" not in body for server in toy_engine.servers for body in generated(server))


def test_the_baseline_gets_the_limits_that_the_speculating_server_resolved_and_nothing_else(apart, toy_engine):
    holds = read_manifest(bench(apart, None, DRAFTERS)).holds
    flags = [given for _, given in toy_engine.starts]
    assert flags == [{}, {"max-running-requests": 48}, {}, {}, {"max-running-requests": 48}]
    assert holds["equalised"] == {"max-running-requests": 48}
    assert holds["servers"]["none"]["max_running_requests"] == holds["servers"]["result"]["max_running_requests"] == 48
    assert "disable_overlap_schedule" not in holds["servers"]["none"]


def test_a_drafter_that_does_not_speculate_is_noticed_before_the_baseline_is_measured(apart, toy_engine):
    toy_engine.patterns = {**toy_engine.patterns, "starter": []}
    with pytest.raises(EyasError, match="counts no verify steps"):
        bench(apart, None, DRAFTERS)
    assert [variant for variant, _ in toy_engine.starts] == ["starter"]


def test_a_killed_schedule_goes_on_with_the_leg_it_was_in(apart, toy_engine):
    toy_engine.break_start = 3  # in the first drafter's leg: one warm-up, one measured request
    with pytest.raises(EyasError, match="answered 500"):
        bench(apart, None, DRAFTERS)
    before = (apart.folder("bench") / "measurements.jsonl").read_text()
    assert len(before.splitlines()) == 7
    toy_engine.break_start, toy_engine.starts = None, []
    measured = read_measurements(bench(apart, None, DRAFTERS))
    assert toy_engine.starts == [("starter", {}), ("result", {}), ("none", {"max-running-requests": 48})]
    assert (apart.folder("bench") / "measurements.jsonl").read_text().startswith(before)
    assert len({m.place for m in measured}) == len(measured) == 24
    toy_engine.starts = []
    bench(apart, None, DRAFTERS)
    assert toy_engine.starts == []


def test_a_level_has_exactly_so_many_requests_in_flight_on_a_cache_flushed_once(apart, toy_engine):
    toy_engine.together = 3  # a server that answers only three at a time
    silent = apart.model_copy(update={"eval": apart.eval.model_copy(update={"concurrency": [3], "warmup_prompts": 0})})
    measured = read_measurements(bench(silent, None, {"result": "drafters/result"}))
    assert Counter((m.variant, m.leg, m.concurrency) for m in measured) == {
        ("none", "before", 3): 6,
        ("result", "between", 3): 6,
        ("none", "after", 3): 6,
    }
    for server in toy_engine.servers[1:]:
        paths = [path for path, _ in server.log if path in {"/generate", "/flush_cache"}]
        assert paths == ["/generate"] * 3 + ["/flush_cache"] + ["/generate"] * 6  # three warm-ups at once, not counted


def test_a_level_that_is_added_later_is_measured_beside_what_is_there(apart, toy_engine):
    bench(apart, None, DRAFTERS)
    toy_engine.starts, toy_engine.servers = [], []
    measured = read_measurements(bench(at_levels(apart, 1, 2), None, DRAFTERS))
    assert [variant for variant, _ in toy_engine.starts] == ["none", "starter", "result", "none"]
    assert Counter(m.concurrency for m in measured) == {1: 24, 2: 24}


def test_an_error_while_several_requests_are_in_flight_keeps_what_came_before_it(apart, toy_engine):
    toy_engine.break_start, toy_engine.break_after = 2, 3 + 3  # of which three are warm-ups
    with pytest.raises(EyasError, match=r"answered 500|the stream ended"):
        bench(at_levels(apart, 2), None, {"result": "drafters/result"})
    toy_engine.break_start, kept = None, read_measurements(apart.folder("bench"))
    assert 1 <= len(kept) <= 3
    measured = read_measurements(bench(at_levels(apart, 2), None, {"result": "drafters/result"}))
    assert len({m.place for m in measured}) == len(measured) == 18


def test_every_leg_has_its_conditions_at_its_start_and_end(apart, toy_engine):
    folder = bench(apart, None, {"result": "drafters/result"})
    lines = read_conditions(folder)
    assert [(line["leg"], line["variants"], line["moment"]) for line in lines] == [
        (leg, [variant], moment)
        for leg, variant in (("before", "none"), ("between", "result"), ("after", "none"))
        for moment in ("start", "end")
    ]
    assert all(line["engine"] == "0.5.23" and line["versions"]["python"] for line in lines)
    assert lines[0]["flags"]["flags"] == {"max-running-requests": 48}
    assert lines[2]["flags"]["flags"] == {}


def test_prompts_that_were_only_held_out_can_be_measured(config, toy_server):
    (config.output / "prompts").mkdir()
    (config.output / "replies" / "greedy.jsonl").rename(config.output / "prompts" / "heldout.jsonl")
    assert len(read_measurements(bench(config, toy_server.url, {}))) == 18


def test_the_embedded_engine_has_one_request_in_flight(tmp_path):
    with pytest.raises(ValidationError, match="the embedded engine decodes one request at a time"):
        config_at(tmp_path, concurrency=[1, 4])
    with pytest.raises(ValidationError, match="a level is there twice"):
        config_at(tmp_path, kind="vllm", concurrency=[2, 2])


def test_a_drafter_that_the_server_does_not_use_is_noticed(config, plain_servers):
    plain, _ = plain_servers
    plain.info = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "some/drafter"}
    with pytest.raises(EyasError, match="counts no verify steps"):
        bench(config, plain.url, {})


def test_a_baseline_that_speculates_is_noticed(config, plain_servers):
    _, drafting = plain_servers
    drafting.info = {"speculative_algorithm": None}
    with pytest.raises(EyasError, match="speculates on the baseline"):
        bench(config, drafting.url, {})


def test_another_chat_template_on_the_server_is_recorded(config, toy_server):
    toy_server.extra_template_tokens = 9
    template = read_manifest(bench(config, toy_server.url, {})).holds["template"]
    assert template["server_prompt_tokens"] == template["prompt_tokens"] + 9


def test_a_server_that_dies_keeps_what_was_measured(config, toy_server):
    toy_server.failure, toy_server.break_after = "death", 3 + 4
    with pytest.raises(EyasError, match="stream ended before the reply was finished"):
        bench(config, toy_server.url, {})
    assert len(read_measurements(config.folder("bench"))) == 4


def test_missing_or_broken_prompts_are_one_clear_line(config, tmp_path):
    path = tmp_path / "replies" / "greedy.jsonl"
    path.write_text('{"key": "a"}\n')
    with pytest.raises(EyasError, match=r"greedy\.jsonl, line 1: not a row"):
        bench_prompts(config)
    path.write_text("")
    with pytest.raises(EyasError, match="is empty"):
        bench_prompts(config)
    path.unlink()
    with pytest.raises(EyasError, match="run `eyas prep` first"):
        bench_prompts(config)


def test_repeating_text_is_flagged_and_ordinary_text_is_not():
    assert loops([7] * 10)
    assert loops([*range(50), *(list(range(100, 120)) * 3)])
    assert not loops(list(range(128)))
    assert not loops([*range(64), *range(64)])  # said twice is no loop yet
    assert not loops([7] * 9)


def test_the_first_difference_is_found_token_by_token():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_running_server_tells_its_variants():
    assert server_variants({"eyas": {"drafters": ["a", "b"]}}, {}) == {"none": "none", "a": "a", "b": "b"}
    assert server_variants({"speculative_algorithm": None}, {}) == {"none": None}
    eagle = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "owner/drafter"}
    assert server_variants(eagle, {"starter": "hub:owner/drafter@abc"}) == {"starter": None}
    assert server_variants(eagle, {}) == {"drafter": None}


def test_no_secret_and_no_running_average_of_a_server_is_recorded():
    info = {"api_key": "secret", "dtype": "auto", "internal_states": [1], "avg_spec_accept_length": 2.9}
    assert public_info(info) == {"dtype": "auto"}


def test_the_export_is_measured_once_it_is_there_beside_the_warm_start_and_what_is_compared(tmp_path):
    config = config_at(tmp_path, compare=["some/sibling"])
    assert default_drafters(config) == {"starter": str(tmp_path / "starter"), "sibling": "some/sibling"}
    (tmp_path / "export").mkdir()
    assert list(default_drafters(config)) == ["starter", "result", "sibling"]


def test_a_run_without_any_drafter_says_what_is_missing(tmp_path):
    config = config_at(tmp_path)
    scratch = config.model_copy(update={"drafter": config.drafter.model_copy(update={"init": "scratch"})})
    with pytest.raises(EyasError, match=r"there is no drafter: .*export does not exist \(run `eyas export`\)"):
        default_drafters(scratch)


def test_two_drafters_of_one_name_are_refused(tmp_path):
    with pytest.raises(EyasError, match="two drafters are called 'sibling'"):
        default_drafters(config_at(tmp_path, compare=["some/sibling", "other/sibling"]))


def test_a_measurement_survives_the_file(config, toy_server):
    folder = bench(config, toy_server.url, {})
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    assert [asdict(m) for m in read_measurements(folder)] == [json.loads(line) for line in lines]


def test_the_module_measures_and_writes_the_report(config, tmp_path, toy_server, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    for arguments in (["bench", "-c", str(path), "--url", toy_server.url], ["report", "-c", str(path)]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert (tmp_path / "report" / "report.html").exists()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "-c", str(path), "--url", "nonsense"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "eyas: --url nonsense: expected http://HOST:PORT"

import json
from dataclasses import replace

import pytest

from eval.compare import compare_runs
from eyas.cli import main
from eyas.errors import EyasError
from tests.eval.recorded import CYCLE_S, apart, conditions, config_at, measurements, record

FAST, SLOW = [(2430.0, 61.0, 300.0)] * 8, [(2250.0, 78.0, 300.0)] * 8


def slower(found, by):
    return [replace(m, total_s=by * m.total_s, first_token_s=by * m.first_token_s) for m in found]


@pytest.fixture
def runs(tmp_path):
    """Two folders; ``write(place, ...)`` records a bench into one of them."""

    def write(place, found=None, engine=None, **recorded):
        config = config_at(tmp_path / place)
        if engine:
            config = config.model_copy(update={"engine": config.engine.model_copy(update=engine)})
        record(config, apart() if found is None else found, **recorded)
        return tmp_path / place

    return write


def names(comparison):
    return [cause.name for cause in comparison.causes]


def test_two_equal_runs_differ_in_nothing(runs):
    found = compare_runs(runs("one"), runs("two"), 200)
    assert [variant.name for variant in found.variants] == ["none", "result", "starter"]
    assert all(variant.tokens_per_second.change.value == 1 for variant in found.variants)
    assert found.causes == []
    assert found.findings[-1] == "Nothing that was recorded differs."


def test_a_drift_is_told_with_its_size_and_the_clock_that_fell_with_it_comes_first(runs):
    one = runs("one", lines=conditions(FAST), servers={"none": {"version": "0.5.23"}})
    two = runs("two", slower(apart(), 88.8 / 82.2), lines=conditions(SLOW), servers={"none": {"version": "0.5.23"}})
    found = compare_runs(one, two, 200)
    assert found.variants[0].tokens_per_second.change.value == pytest.approx(82.2 / 88.8)
    assert found.findings[0] == "no speculation: 46.9 -> 43.4 tok/s, -7.4 % (-7.4 to -7.4 %): slower."
    assert names(found)[0] == "gpu0.sm_clock_mhz"
    assert found.causes[0].note == "-7.4 %"
    assert "gpu0.temperature_c" in names(found)
    assert "Look first at gpu0.sm_clock_mhz: 2430.0 -> 2250.0." in found.findings
    assert "The server without speculation changed too: the machine or the engine did it, not the drafter." in found.findings


def test_a_clock_that_moved_the_other_way_explains_nothing_and_goes_last(runs):
    one = runs("one", lines=conditions(SLOW, environment={"NCCL_ALGO": "Ring"}))
    two = runs("two", slower(apart(), 1.08), lines=conditions(FAST, environment={"NCCL_ALGO": "Tree"}))
    found = compare_runs(one, two, 200)
    assert names(found)[0] == "NCCL_ALGO"
    assert found.causes[-1].note.endswith("which would move the speed the other way")


def test_a_machine_that_only_breathes_is_no_cause(runs):
    one, two = (
        runs("one", lines=conditions([(2430.0, 61.0, 300.0)], load=1.0)),
        runs("two", lines=conditions([(2420.0, 63.0, 280.0)], load=1.1)),
    )
    assert compare_runs(one, two, 200).causes == []


def test_everything_that_was_recorded_is_compared_and_what_makes_runs_incomparable_comes_first(runs):
    lines = conditions(FAST)
    changed = [
        {**line, "versions": {**line["versions"], "torch": "2.14.0"}, "machine": {**line["machine"], "gpus": line["machine"]["gpus"][:7]}}
        for line in lines
    ]
    inputs = {"prompts": "a" * 64, "drafter.result": "b" * 64}
    one = runs("one", lines=lines, inputs=inputs, servers={"none": {"version": "0.5.23", "tp_size": 8, "port": 1}})
    two = runs(
        "two",
        lines=changed,
        temperature=1.0,
        inputs={**inputs, "drafter.result": "c" * 64},
        servers={"none": {"version": "0.5.24", "tp_size": 4, "port": 2}},
        engine={"flags": {"tp": 4}},
        machine={"processor": "some", "cores": 1},
    )
    found = compare_runs(one, two, 200)
    assert names(found) == [
        "eval.temperature",
        "GPUs",
        "cores",
        "version (baseline)",
        "engine.flags.tp",
        "drafter.result",
        "tp_size (baseline)",
        "torch",
    ]
    assert [(cause.first, cause.second) for cause in found.causes if cause.name == "drafter.result"] == [("b" * 12, "c" * 12)]


def test_arguments_of_another_engine_are_not_compared_only_its_version(runs):
    one = runs("one", servers={"none": {"version": "0.5.23", "tp_size": 8}})
    two = runs("two", servers={"none": {"version": "vllm 0.32.0", "tensor_parallel_size": 8}}, engine={"kind": "vllm"})
    assert names(compare_runs(one, two, 200)) == ["engine.kind", "version (baseline)"]


def test_the_change_of_a_drafter_is_taken_apart_into_acceptance_and_cycle_time(runs):
    found = compare_runs(runs("one"), runs("two", apart(cycle_s=1.1 * CYCLE_S)), 200)
    result = next(variant for variant in found.variants if variant.name == "result")
    assert result.length.change.value == 1
    assert result.cycle_ms.change.value == pytest.approx(1.1)
    assert any(line.endswith("(+0.0 %), cycle 26.0 -> 28.6 ms (+10.0 %).") for line in found.findings)
    assert "The server without speculation did not change: look at the drafter and the flags of speculation." in found.findings


def test_only_common_prompts_are_compared_and_pairs_compare_with_legs(runs):
    found = compare_runs(runs("one", measurements(10)), runs("two", apart()), 200)
    assert (found.prompts, found.common) == ([10, 24], 10)
    assert {variant.prompts for variant in found.variants} == {10}


def test_levels_are_compared_each_with_its_own(runs):
    found = compare_runs(runs("one", [*apart(), *apart(level=4)]), runs("two", apart(level=4)), 200)
    assert {variant.concurrency for variant in found.variants} == {4}


def test_runs_without_a_common_variant_are_refused(runs):
    with pytest.raises(EyasError, match="have no variant measured in both"):
        compare_runs(runs("one", [m for m in apart() if m.variant == "none"]), runs("two", [m for m in apart() if m.variant != "none"]))


def test_a_folder_that_is_no_run_is_named(tmp_path, runs):
    with pytest.raises(EyasError, match=f"{tmp_path} is no run"):
        compare_runs(tmp_path, runs("one"))


def test_the_command_takes_output_folders_and_bench_folders_and_speaks_json(runs, capsys):
    one, two = runs("one"), runs("two", slower(apart(), 1.08))
    for arguments in ([str(one), str(two / "bench")], [str(one / "bench"), str(two), "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *arguments])
        assert ended.value.code == 0
    said = capsys.readouterr().out
    text, _, twin = said.partition("{")
    assert "-7.4 %" in text
    found = json.loads("{" + twin)
    assert found["format"] == 1
    assert found["variants"][0]["tokens_per_second"]["change"]["value"] == pytest.approx(1 / 1.08)

"""The sweep: what it concludes from points of known numbers, how it goes over SGLang-style servers, and once for real, embedded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import eval.sweep as module
from eval.cost_model import Setting
from eval.sweep import chosen_drafters, grid, sweep
from eval.sweep_points import Point, read_points
from eval.sweep_report import markdown, write_report
from eval.sweep_result import SweepResult, paste, summarise
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from tests.eval.conftest import ToyServer
from tests.eval.points import baseline, chain
from tests.eval.tiny import tiny_config, tiny_target, write_tiny_drafter
from tests.http_server import running

ONE, TWO, THREE = Setting(1, 1, 2), Setting(2, 1, 3), Setting(3, 1, 4)


def config_at(output: Path, kind: str = "sglang", **swept: object) -> Config:
    return Config.model_validate(
        {
            "output": str(output),
            "target": {"model": "some/target"},
            "prep": {"sources": [{"source": "prompts.jsonl"}]},
            "drafter": {"init": "hub:owner/starter"},
            "engine": {"kind": kind},
            "eval": {"bootstrap": 200},
            "sweep": {"prompts": 4, "max_new_tokens": 24, "steps": [1, 2, 3], "margin": None} | swept,
        }
    )


def concluded(points: list[Point], kind: str = "sglang") -> SweepResult:
    return summarise(config_at(Path("nowhere"), kind), {"result": "some/export", "starter": "hub:owner/starter"}, points, {}, {})


# What is concluded.


def test_the_users_node_does_not_pay_and_the_sentence_says_why():
    """Kimi-K2.5 on eight PCIe GPUs: 82.2 tok/s; 2 steps take 30 ms a cycle and bring 2.0 tokens; 3 steps decode 60 tok/s."""
    two = chain("result", [0.6, 2 / 3], 0.030)
    three = chain("result", [0.6, 2 / 3, 0.4], 2.16 / 60)
    result = concluded([baseline(82.2), two, three])
    assert result.pays is False
    assert result.flags == {}
    assert result.sentence == (
        "Speculation does not pay here, because a draft+verify cycle of 3 tokens costs 30.0 ms = 2.47 baseline steps; "
        "it would take an acceptance length of 2.47 (each draft accepted in 81% of the cycles that reach it). "
        "result reaches 2.00 at 2 steps, its fastest point: 66.8 tok/s instead of 82.2."
    )
    assert [row.speedup.value for row in result.rows] == pytest.approx([66.7 / 82.2, 60 / 82.2], rel=0.01)


def test_where_trees_tell_the_verify_step_apart_the_sentence_names_it():
    """10 ms a token; a cycle: 10 + 3 (once) + 2 a draft forward + 4 a token more to verify + 0.5 a branch."""
    settings = [ONE, THREE, Setting(5, 1, 6), Setting(3, 2, 6), Setting(3, 2, 10), Setting(5, 4, 10)]
    points = [baseline(100.0)]
    for setting in settings:
        steps, topk, tokens = setting.steps, setting.topk, setting.tokens
        cycle_s = (10 + 3 + 2 * (steps - 1) + 4 * (tokens - 1) + 0.5 * (steps - 1) * (topk - 1)) / 1000
        points.append(chain("result", [0.4] + [0.3] * (steps - 1), cycle_s, setting=setting))
    result = concluded(points)
    costs = result.costs[0]
    assert (costs.token, costs.forward, costs.branch) == pytest.approx((0.4, 0.2, 0.05), rel=0.001)
    assert costs.verify == pytest.approx({2: 1.4, 4: 2.2, 6: 3.0, 10: 4.6}, rel=0.001)
    assert result.sentence == (
        "Speculation does not pay here, because a verify step of 2 tokens costs 14.0 ms = 1.40 baseline steps (with its drafting, a cycle "
        "costs 17.0 ms = 1.70 baseline steps); it would take an acceptance length of 1.70 (each draft accepted in 70% of the cycles that "
        "reach it). result reaches 1.40 at 1 step, its fastest point: 82.4 tok/s instead of 100.0."
    )


def test_a_cycle_that_no_acceptance_could_pay_for_is_called_that():
    result = concluded([baseline(100.0), chain("result", [0.5], 0.025)])
    assert "it would take an acceptance length of 2.50, more than the 2 that 1 step can bring." in result.sentence


def test_what_pays_is_recommended_with_flags_and_an_interval():
    points = [baseline(100.0), *(chain("result", [0.9, 0.8, 0.3][:steps], 0.012 + 0.002 * steps) for steps in (3, 1, 2))]
    result = concluded(points)
    assert result.pays is True
    assert (result.best.variant, result.best.setting) == ("result", TWO)
    expected = 100 * (1 + 0.9 + 0.72) / 1.6
    assert result.expected_tps.value == pytest.approx(expected, rel=0.01)
    assert result.expected_tps.low < expected < result.expected_tps.high
    assert result.sentence.startswith("Speculation pays here: result at 2 steps decodes 16")
    assert result.flags["sglang"] == (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path some/export --speculative-num-steps 2 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
    )
    assert """--speculative-config '{"method": "eagle3", "model": "some/export", "num_speculative_tokens": 2}'""" in result.flags["vllm"]


def test_a_tree_is_recommended_for_sglang_alone():
    config = config_at(Path("nowhere"), topk=[1, 4], draft_tokens=[16])
    assert paste(config, Setting(3, 4, 16), "hub:owner/starter@abc") == {
        "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path owner/starter --speculative-draft-model-revision abc "
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    }


def test_what_differs_less_than_the_prompts_do_is_left_open():
    result = concluded([baseline(100.0), chain("result", [0.5], 0.0149)])
    assert result.pays is None
    assert result.sentence.startswith("Whether speculation pays here cannot be told: result at 1 step, the fastest point, decodes 10")
    assert result.flags  # to measure it further


def test_points_that_cannot_be_told_from_the_best_are_named():
    close, far = chain("starter", [0.901, 0.8], 0.0161), chain("starter", [0.5], 0.016)
    result = concluded([baseline(100.0), chain("result", [0.9, 0.8], 0.016), far, close])
    assert [(row.variant, row.setting) for row in result.rivals] == []  # paired by prompt, even 0.6 % can be told
    noisy = chain("starter", [0.9, 0.8], 0.016)
    turned = Point(**{**vars(noisy), "samples": [*noisy.samples[1:], noisy.samples[0]]})
    renamed = [type(s)(**{**vars(s), "key": f"p{n}"}) for n, s in enumerate(turned.samples)]  # other prompts are its easy ones
    result = concluded([baseline(100.0), chain("result", [0.9, 0.8], 0.016), Point(**{**vars(noisy), "samples": renamed}), far])
    assert [(row.variant, row.setting) for row in result.rivals] == [("starter", TWO)]


def test_the_engines_own_clocks_are_set_beside_the_fit():
    """A baseline step of 10 ms; verify 9 + 1 a token, extend 2 + 0.5 a step, 1.5 a draft forward, 1 of nobody."""
    points = [baseline(100.0)]
    for steps in (1, 2, 4):
        parts = {"verify": 0.010 + 0.001 * steps, "extend": 0.002 + 0.0005 * steps, "draft": 0.0015 * (steps - 1)}
        points.append(chain("result", [0.9] * steps, sum(parts.values()) + 0.001, parts=parts))
    costs = concluded(points, "embedded").costs[0]
    assert costs.parts.further == pytest.approx({"verify": 0.1, "extend": 0.05, "rest": 0, "forward": 0.15}, abs=1e-3)
    assert costs.parts.first == pytest.approx({"verify": 0.1, "extend": 0.25, "rest": 0.1}, abs=1e-3)
    assert (sum(costs.parts.first.values()), sum(costs.parts.further.values())) == pytest.approx(
        (costs.first_draft, costs.further_draft), abs=2e-3
    )
    assert (costs.verify_source, costs.verify) == ("parts", pytest.approx({2: 1.1, 3: 1.2, 5: 1.4}, rel=0.001))


def test_pretended_acceptance_gives_the_length_that_breaks_even():
    """A cycle of 1.8 baseline steps and 0.1 more for each token accepted: L = 1.8 + 0.1 L."""
    points = [baseline(100.0)]
    for length in (1.5, 2.5):
        points.append(chain("result", [(length - 1) / 2, 1.0], (1.8 + 0.1 * length) / 100, simulated=length))
    result = concluded(points)
    assert result.rows == []
    assert result.best is None
    (found,) = result.simulations
    assert found.break_even == pytest.approx(2.0, rel=0.01)
    assert [point.asked for point in found.points] == [1.5, 2.5]
    assert result.sentence.startswith("With pretended acceptance, speculation pays from an acceptance length of 2.0")


# What is written.


def test_the_report_has_every_number_and_a_figure(tmp_path):
    points = [baseline(100.0), *(chain("result", [0.9, 0.8, 0.3][:steps], 0.012 + 0.002 * steps) for steps in (3, 1))]
    reasons = {("result", TWO): "at most 0.9 x"}, {("starter", ONE): "out of memory"}
    result = summarise(config_at(tmp_path), {"result": "some/export", "starter": "x"}, points, *reasons)
    write_report(tmp_path, result)
    numbers = json.loads((tmp_path / "sweep.json").read_text())
    assert numbers["rows"][0]["setting"] == {"steps": 1, "topk": 1, "tokens": 2}
    assert numbers["costs"][0]["further_draft"] == pytest.approx(0.2, rel=0.01)
    assert numbers["skipped"][0]["foretold"] == pytest.approx((1 + 0.9 + 0.72) / 1.6, rel=0.01)
    page = (tmp_path / "sweep.md").read_text()
    assert f"**{result.sentence}**" in page
    assert f"| result | 2 steps | hopeless: at most 0.9 x | {numbers['skipped'][0]['foretold']:.2f} |" in page
    assert "| starter | 1 step | failed: out of memory | – |" in page
    assert "--speculative-num-steps 3" in page
    drawing = ElementTree.parse(tmp_path / "sweep.svg").getroot()
    texts = {"".join(text.itertext()).strip() for text in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"result", "no speculation", "draft steps", "tokens a second, decoding", "expected by the cost model"} <= texts
    assert "sweep.svg" not in markdown(concluded([baseline(100.0)]), figure=False)


def test_a_baseline_that_moves_is_said_aloud():
    steady, moving = ([baseline(100.0), chain("result", [0.9], 0.012), baseline(second)] for second in (95.0, 80.0))
    assert "Beware" not in markdown(concluded(steady), figure=False)
    assert "Beware: the baseline itself moved between 80.0 and 100.0 tok/s" in markdown(concluded(moving), figure=False)


# How it goes.


class Node:
    """Stands in for the machine: every server start is a ToyServer that speculates as it was told to. ``starts`` lists them."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, Setting | None, dict[str, str]]] = []
        self.refuse: set[Setting] = set()
        self.break_in: Setting | None = None
        self.pretends = True

    @contextmanager
    def serving(self, config: Config, drafters: dict[str, str], variant: str | None = None) -> Iterator[str]:
        engine = config.engine
        setting = None if variant == "none" else Setting(engine.draft_steps, engine.topk, engine.draft_tokens or engine.draft_steps + 1)
        variables = yaml.safe_load(engine.environment.read_text()) if engine.environment else {}
        self.starts.append((variant, setting, variables))
        if setting in self.refuse:
            raise EyasError("the server died while loading: out of memory")
        if setting is None:
            server = ToyServer(accepts={}, info={"speculative_algorithm": None})
        else:
            pattern = [min(accepted, setting.steps) for accepted in (2, 1, 3)]
            if self.pretends and "SGLANG_SIMULATE_ACC_LEN" in variables:
                pattern = {"1.5": [0, 1], "2.5": [1, 2]}[variables["SGLANG_SIMULATE_ACC_LEN"]]
            server = ToyServer(accepts={"toy": pattern}, info={"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "toy"})
        if setting is not None and setting == self.break_in:
            server.break_after = 3
        with running(server):
            yield server.url


@pytest.fixture
def node(monkeypatch) -> Node:
    node = Node()
    monkeypatch.setattr(module, "serving", node.serving)
    return node


@pytest.fixture
def run(tmp_path) -> Path:
    """Output folder of a run with held-out prompts."""
    rows = [
        {"key": f"k{n}", "category": "chat", "messages": [{"role": "user", "content": "x"}], "prompt_ids": [n + 1, 5, 6]} for n in range(6)
    ]
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def kinds(node: Node) -> list[tuple[str, int | None]]:
    return [(variant, setting and setting.steps) for variant, setting, _ in node.starts]


def test_every_point_has_a_server_between_two_of_the_baseline(run, node):
    result = sweep(config_at(run))
    assert kinds(node) == [("none", None), ("starter", 3), ("starter", 1), ("starter", 2), ("none", None)]
    assert [(row.variant, row.setting) for row in result.rows] == [("starter", ONE), ("starter", TWO), ("starter", THREE)]
    assert all(row.requests == 4 for row in result.rows)
    points = read_points(run / "sweep")
    assert [point.start for point in points] == [1, 2, 3, 4, 5]
    assert {sample.key for point in points for sample in point.samples} == {sample.key for sample in points[0].samples}
    assert {sample.completion_tokens for point in points for sample in point.samples} == {24}
    assert points[3].forecast.setting == TWO  # foretold by 3 steps and 1 step, before it was measured
    assert [point.forecast for point in points if point.setting != TWO] == [None] * 4
    assert result.rows[1].foretold == points[3].forecast.speedup


def test_the_same_command_goes_on_behind_the_last_point_and_a_wider_grid_adds_only_what_is_new(run, node):
    node.break_in = ONE
    with pytest.raises(EyasError, match="answered 500"):
        sweep(config_at(run, steps=[1]))
    assert len(read_points(run / "sweep")) == 1  # the baseline; of the broken point nothing
    node.break_in = None
    node.starts.clear()
    sweep(config_at(run, steps=[1, 3]))
    assert kinds(node) == [("none", None), ("starter", 3), ("starter", 1), ("none", None)]
    path = run / "sweep" / "points.jsonl"
    before = path.read_text()
    path.write_text(before + '{"variant": "starter", "sett')  # a kill tore the last line
    node.starts.clear()
    sweep(config_at(run, steps=[1, 3]))
    assert node.starts == []
    assert path.read_text() == before
    assert len(sweep(config_at(run, steps=[1, 2, 3])).rows) == 3
    assert kinds(node) == [("none", None), ("starter", 2), ("none", None)]


def test_points_of_other_settings_are_kept_but_not_used(run, node, capsys):
    sweep(config_at(run, steps=[1]))
    node.starts.clear()
    result = sweep(config_at(run, steps=[1], max_new_tokens=16))
    assert kinds(node) == [("none", None), ("starter", 1), ("none", None)]
    assert len(result.rows) == 1
    assert len(read_points(run / "sweep")) == 6
    assert "3 lines of" in capsys.readouterr().err


def test_a_point_that_does_not_start_is_named_and_the_others_are_measured(run, node):
    node.refuse = {ONE}
    result = sweep(config_at(run))
    assert kinds(node) == [("none", None), ("starter", 3), ("starter", 1), ("starter", 2), ("none", None)]
    assert [row.setting for row in result.rows] == [TWO, THREE]
    assert [(failed.setting, failed.reason) for failed in result.failed] == [(ONE, "the server died while loading: out of memory")]
    node.refuse, node.starts = set(), []
    assert len(sweep(config_at(run)).rows) == 3
    assert kinds(node) == [("none", None), ("starter", 1), ("none", None)]


def test_a_first_point_that_does_not_start_ends_the_sweep(run, node):
    node.refuse = {ONE, TWO, THREE}
    with pytest.raises(EyasError, match="out of memory"):
        sweep(config_at(run))
    assert kinds(node) == [("none", None), ("starter", 3)]


def test_a_long_sweep_looks_at_the_baseline_in_between(run, node, monkeypatch):
    monkeypatch.setattr(module, "BASELINE_EVERY", 2)
    sweep(config_at(run, topk=[1, 2], draft_tokens=[3, 4], steps=[1, 2, 3]))
    pairs = [variant for variant, _, _ in node.starts]
    assert pairs == ["none", "starter", "starter"] * 4 + ["none"]


def test_hopeless_points_are_not_started(run, node, monkeypatch):
    """Every cycle costs far more than it can bring: after the third point the others have no chance."""
    generate = module.connect

    def slow(url):
        client = generate(url)
        real = client.generate

        def stretched(*arguments):
            reply = real(*arguments)
            cycles = reply.counts.verify_ct if reply.counts else 0
            decode_s = 0.5 * cycles if cycles else 0.1 * (reply.completion_tokens - 1)
            return type(reply)(**{**vars(reply), "first_token_s": 0.1, "total_s": 0.1 + decode_s})

        client.generate = stretched
        return client

    monkeypatch.setattr(module, "connect", slow)
    result = sweep(config_at(run, steps=[1, 2, 3, 4, 5, 6], margin=0.03))
    assert [steps for _, steps in kinds(node)] == [None, 6, 1, 5, None]
    assert [skipped.setting.steps for skipped in result.skipped] == [2, 3, 4]
    assert all("x the baseline: a cycle costs 5.00 baseline steps" in skipped.reason for skipped in result.skipped)
    assert result.pays is False


def test_pretending_tells_sglang_the_length_and_keeps_the_users_environment(run, node):
    profile = run / "nccl.yaml"
    profile.write_text("NCCL_PROTO: LL\n")
    config = config_at(run, steps=[1, 2], topk=[1, 2], draft_tokens=[4], simulated_lengths=[1.5, 2.5])
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"environment": profile})})
    result = sweep(config, simulate=True)
    told = [(setting, variables.get("SGLANG_SIMULATE_ACC_LEN")) for _, setting, variables in node.starts]
    tree = Setting(2, 2, 4)
    assert told == [(None, None), (ONE, "1.5"), (TWO, "1.5"), (TWO, "2.5"), (tree, "1.5"), (tree, "2.5"), (None, None)]
    assert all(variables["NCCL_PROTO"] == "LL" for _, _, variables in node.starts)
    modes = {setting: variables["SGLANG_SIMULATE_ACC_TOKEN_MODE"] for _, setting, variables in node.starts if setting}
    assert modes == {ONE: "real-draft-token", TWO: "real-draft-token", tree: "fixed"}
    assert [(found.setting, len(found.points)) for found in result.simulations] == [(ONE, 1), (TWO, 2), (tree, 2)]
    assert result.rows == []
    node.starts.clear()
    sweep(config, simulate=True)
    assert node.starts == []


def test_an_engine_that_does_not_pretend_is_noticed(run, node):
    node.pretends = False
    with pytest.raises(EyasError, match=r"accepted 2\.\d+ tokens a cycle: this engine does not pretend"):
        sweep(config_at(run, steps=[2], simulated_lengths=[1.5]), simulate=True)


def test_only_sglang_pretends(run):
    with pytest.raises(EyasError, match=r"--simulate is for engine\.kind sglang"):
        sweep(config_at(run, kind="vllm"), simulate=True)


def test_a_drafter_that_the_server_does_not_use_is_noticed(run, node, monkeypatch):
    real = node.serving
    monkeypatch.setattr(module, "serving", lambda config, drafters, variant: real(config, drafters, "none"))
    with pytest.raises(EyasError, match="counts no verify steps"):
        sweep(config_at(run))


def test_the_grid_holds_what_exists(tmp_path):
    assert grid(config_at(tmp_path, steps=[2, 1], topk=[1, 2], draft_tokens=[3, 8])) == [ONE, Setting(1, 2, 3), TWO, Setting(2, 2, 3)]
    with pytest.raises(EyasError, match="no tree of"):
        grid(config_at(tmp_path, steps=[1], topk=[2], draft_tokens=[8]))
    with pytest.raises(ValueError, match="only sglang drafts trees"):
        config_at(tmp_path, kind="vllm", topk=[2], draft_tokens=[3])
    with pytest.raises(ValueError, match="topk 2 needs draft_tokens"):
        config_at(tmp_path, topk=[2])


def test_drafters_are_chosen_by_name(tmp_path):
    assert chosen_drafters(config_at(tmp_path)) == {"starter": "hub:owner/starter"}
    with pytest.raises(EyasError, match=r"there is no drafter 'result'; there are starter"):
        chosen_drafters(config_at(tmp_path, drafters=["result"]))


# For real.


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> tuple[Config, Path]:
    """A run with a tiny target and two drafters, its config file beside it."""
    root = tmp_path_factory.mktemp("embedded")
    target = tiny_target(root / "target")
    drafters = [str(write_tiny_drafter(root / name, target, seed)) for seed, name in enumerate(("starter", "sibling"), 1)]
    rows = [{"key": f"k{n}", "category": "chat", "messages": [], "prompt_ids": [70 + n, 71, 72]} for n in range(4)]
    (root / "replies").mkdir()
    (root / "replies" / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny_config(root, target).model_dump(mode="json")
    values |= {"drafter": {"init": drafters[0]}, "eval": {"compare": drafters[1:], "bootstrap": 200}}
    values |= {"sweep": {"prompts": 3, "max_new_tokens": 20, "steps": [1, 3], "margin": None}}
    path = root / "run.yaml"
    path.write_text(json.dumps(values))
    return Config.model_validate(values), path


def test_the_embedded_engine_is_swept_from_the_command_line(embedded, capsys):
    config, path = embedded
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "-c", str(path)])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "starter" in said.out
    assert said.out.splitlines()[-1] == str(config.folder("sweep"))
    points = read_points(config.folder("sweep"))
    assert [(point.variant, point.setting and point.setting.steps, point.start) for point in points] == [
        *(("none", None, 1), ("starter", 3, 1), ("sibling", 3, 1)),
        *(("none", None, 2), ("starter", 1, 2), ("sibling", 1, 2)),
    ]
    replies = {sample.key: sample.completion_tokens for sample in points[0].samples}
    for point in points:
        for sample in point.samples:
            assert sample.completion_tokens == replies[sample.key] <= 20  # float32: speculation changes no token
            assert sum(sample.histogram) == (sample.verify_ct or 0)
            assert len(sample.histogram) == (point.setting.steps + 1 if point.setting else 0)
    result = json.loads((config.folder("sweep") / "sweep.json").read_text())
    assert [costs["verify_source"] for costs in result["costs"]] == ["parts", "parts"]
    assert set(result["costs"][0]["verify"]) == {"2", "4"}
    for row in result["rows"]:
        parts = row["parts"]
        total = parts["verify_ms"] + parts["extend_ms"] + (parts["forward_ms"] or 0) * (row["setting"]["steps"] - 1) + parts["rest_ms"]
        assert total == pytest.approx(row["cycle_ms"])
        assert row["cycle"] / row["cycle_ms"] * 1000 == pytest.approx(baseline_beside(points, row))


def baseline_beside(points: list[Point], row: dict) -> float:
    """Tokens a second of the baseline in the server start of a row's point."""
    start = next(p.start for p in points if p.variant == row["variant"] and p.setting and p.setting.steps == row["setting"]["steps"])
    beside = next(point for point in points if point.setting is None and point.start == start)
    return beside.tokens / beside.seconds

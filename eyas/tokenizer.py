"""What eyas asks of a tokenizer: transformers' tokenizers give it, and so does our own for Kimi."""

from collections.abc import Sequence
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """Token ids of texts and chats, and back. The names and meanings are transformers'."""

    name_or_path: str
    chat_template: Any
    """The Jinja source; None where the folder has none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Marks such as <|im_end|> that stand in it become their ids, as in servers."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids; bytes that are no whole character become U+FFFD."""

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The chat as the template renders it: ids, or with ``tokenize=False`` text. ``options`` are arguments of the template."""

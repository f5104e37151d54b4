"""Text of a growing reply, piece by piece, never half a character."""

from eyas.tokenizer import ChatTokenizer

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no whole character yet


class TextStream:
    """Turns tokens into text as they come; the pieces together are the text of all tokens decoded at once.

    Only a short tail is decoded again for each piece: from the last token that began a finished piece on, because what a token looks
    like can depend on the one before it.
    """

    def __init__(self, tokenizer: ChatTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # the tail begins here
        self._shown = 0  # tokens before this one are in the text that was given out
        self.text = ""

    def add(self, new: list[int]) -> str:
        """Text that these tokens add, held back while it ends inside a character."""
        self._ids += new
        before, now = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        if now.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return self._give(now[len(before) :])

    def end(self) -> str:
        """What was held back."""
        before, now = self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :])
        self._shown = len(self._ids)
        return self._give(now[len(before) :])

    def _give(self, piece: str) -> str:
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))

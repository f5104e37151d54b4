"""TEST STAND-IN: small moves of token ids between verify step and draft step."""

from torch import Tensor


def fill_bonus_tokens_cpu(tokens_N: Tensor, lengths_B: Tensor, bonus_B: Tensor, width: int) -> None:
    """Take each request's last accepted token, which is its bonus token; each has ``width`` places in ``tokens_N``."""
    for request, length in enumerate(lengths_B.tolist()):
        bonus_B[request] = tokens_N.view(-1)[request * width + length - 1]


def rotate_input_ids_cpu(ids_N: Tensor, start_B: Tensor, lengths_B: Tensor, next_B: Tensor, place_B: Tensor | None = None) -> None:
    """Shift each request's ids one to the left and put its next token at the end, or at index ``place_B`` of all ids."""
    for request, (start, length) in enumerate(zip(start_B.tolist(), lengths_B.tolist(), strict=True)):
        if length == 0:
            continue
        ids_N[start : start + length - 1] = ids_N[start + 1 : start + length].clone()
        place = start + length - 1 if place_B is None else int(place_B[request])
        ids_N[place] = next_B.view(-1)[request]

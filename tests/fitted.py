"""A drafter fitted in closed form to a known text, so that what an engine must accept is known beforehand.

It sees one aux state, the highest: fc picks that chunk, o_proj and down_proj are zero, so the layer hands fc's result on unchanged. The
head is a ridge regression from the normed state at t to the token x_t+2. On its own text it is right about the first draft and, as the
state does not change from one draft to the next, says the same token again: draft 1 stands always, the others only where a token repeats.
The states of neighbouring layers, which lie close by, are fitted to a token that the text does not have. So a fault in layers, d2t, fc
order or shift of tokens takes draft 1 from always to hardly ever, whatever engine serves it. Rotary positions and embedding have no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_prep.template import prompt_ids
from eval.engine import Engine
from eyas.drafter import Drafter
from eyas.drafter_config import drafter_config
from eyas.folder import write_drafter
from eyas.initial import fresh_drafter
from eyas.target import Target

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short note to a colleague about a meeting on Thursday.",
    "What should I pack for a week in the mountains?",
    "Describe how bread is made, from flour to loaf.",
)
REPLY_TOKENS = 32
# Of the draft vocabulary: the texts' own tokens and as many that they do not have, spread out, so that no two offsets need be equal.
OTHER_TOKENS = 200
RIDGE = 1e-6


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy reply to it in float32, as token ids."""

    prompt_ids: list[int]
    reply_ids: list[int]


@dataclass(frozen=True)
class Fitted:
    """The drafter's folder (float32), the layers k of HF ``hidden_states[k]`` that it reads, and the texts it was fitted to."""

    folder: Path
    layers: tuple[int, ...]
    texts: tuple[Text, ...]


def fitted_drafter(
    folder: Path, target: Target, prompts: Sequence[str] = PROMPTS, reply_tokens: int = REPLY_TOKENS, layers: tuple[int, ...] | None = None
) -> Fitted:
    """Let ``target`` answer ``prompts`` greedily, fit a drafter to the replies, write its folder.

    There must be three times fewer reply tokens than hidden dimensions: then the fit is exact up to the ridge.
    SmolLM2 on one core: some 15 s, nearly all of them for the replies.
    """
    layers = layers or target.default_layers()
    texts = greedy_texts(target, [_prompt(target.tokenizer(), prompt) for prompt in prompts], reply_tokens)
    drafter = _fit(target, layers, texts)
    write_drafter(folder, drafter, drafter_config(drafter.shape, layers, target), torch.float32)
    return Fitted(folder, layers, texts)


def greedy_texts(target: Target, prompts: Sequence[list[int]], reply_tokens: int) -> tuple[Text, ...]:
    """The target's replies in float32, without speculation."""
    engine = Engine(target, {}, torch.float32, max(map(len, prompts)) + reply_tokens, 1)
    return tuple(Text(ids, engine.generate(ids, reply_tokens).output_ids) for ids in prompts)


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return prompt_ids(tokenizer, [{"role": "user", "content": text}])


def _fit(target: Target, layers: tuple[int, ...], texts: Sequence[Text]) -> Drafter:
    said_N = torch.cat([torch.tensor(text.reply_ids[1:]) for text in texts])
    spread_M = torch.linspace(0, target.shape.vocab_size - 1, OTHER_TOKENS).long()
    ids_D = torch.cat([said_N, spread_M]).unique()
    unsaid = int(spread_M[~torch.isin(spread_M, said_N)][0])
    drafter = fresh_drafter(target, ids_D, layers)
    hidden = target.shape.hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.midlayer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.fill_(1)
        right_NH, *wrong = (drafter.norm(states_NH) for states_NH in _states(target, layers[-1], texts))
        features_MH = torch.cat([right_NH, *wrong])
        tokens_M = torch.cat([said_N, *(torch.full_like(said_N, unsaid) for _ in wrong)])
        assert len(tokens_M) < hidden, f"{len(tokens_M)} states of {hidden} numbers each cannot all be fitted"
        drafter.lm_head.weight.copy_(_ridge(features_MH, torch.searchsorted(ids_D, tokens_M), len(ids_D)))
    return drafter


@torch.inference_mode()
def _states(target: Target, layer: int, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
    """States where a server starts a chain, of all texts [N, H]: inputs of ``layer``, of the layer before and of the next one."""
    model = target.load_model(torch.float32, "cpu")
    found: tuple[list[Tensor], ...] = ([], [], [])
    for text in texts:
        ids_1T = torch.tensor([[*text.prompt_ids, *text.reply_ids]])
        states = model(input_ids=ids_1T, output_hidden_states=True).hidden_states
        start = len(text.prompt_ids) - 1
        for rows, k in zip(found, (layer, layer - 1, layer + 1), strict=True):
            rows.append(states[k][0, start : start + len(text.reply_ids) - 1])
    right, before, after = (torch.cat(rows) for rows in found)
    return right, before, after


def _ridge(features_MH: Tensor, rows_M: Tensor, size: int) -> Tensor:
    """Head [size, H] whose scores are nearest to 1 for the right row and 0 for all others, in float64."""
    x_MH = features_MH.double()
    y_MD = torch.nn.functional.one_hot(rows_M, size).double()
    gram_MM = x_MH @ x_MH.T
    gram_MM.diagonal().add_(RIDGE * gram_MM.diagonal().mean())
    return (y_MD.T @ torch.linalg.solve(gram_MM, x_MH)).float()

"""Aux hidden states of a loaded target: the inputs of chosen decoder layers, kept by forward pre-hooks.

transformers' own ``output_hidden_states`` keeps those of every layer, which a capture of millions of tokens cannot afford.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eyas.errors import EyasError


class LayerInputs:
    """``states[k]`` is HF ``hidden_states[k]`` [B, T, H] of the model's last forward, for the k in ``layers``, until closed.

    Raises EyasError when the model has no such layer, or no list of decoder layers at all.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.states: dict[int, Tensor] = {}
        blocks = getattr(model.get_decoder(), "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise EyasError(f"cannot find the decoder layers of {type(model).__name__}: its decoder has no list 'layers'")
        for layer in self.layers:
            if not 0 <= layer < len(blocks):
                raise EyasError(f"hidden_states[{layer}] is no layer input of this target, it has 0 to {len(blocks) - 1}")
        self._hooks = [blocks[layer].register_forward_pre_hook(self._keeper(layer), with_kwargs=True) for layer in self.layers]

    def __enter__(self) -> "LayerInputs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the model and forget the states."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.states.clear()

    def aux(self) -> Tensor:
        """The states of all ``layers`` side by side, in their order: [B, T, A]."""
        return torch.cat([self.states[layer] for layer in self.layers], dim=-1)

    def _keeper(self, layer: int) -> Callable[..., None]:
        def keep(module: object, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.states[layer] = positional[0] if positional else named["hidden_states"]

        return keep

"""The target's key-value cache: one preallocated buffer a layer, written in place, read as views, cut by setting a length."""

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.errors import EyasError


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [1, K, capacity, d]; the first ``length`` positions hold something.

    Heads and widths are taken from the first update, so layers whose keys and values differ in width (MLA) fit as well.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for states shaped like these."""
        self.keys = key_states.new_zeros(*key_states.shape[:-2], self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:-2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append [1, K, M, d] states; returns views of everything held. A full buffer is a fault of the caller (RuntimeError)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.length, self.length + key_states.shape[-2]
        self.keys[..., start:end, :].copy_(key_states)
        self.values[..., start:end, :].copy_(value_states)
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions that ``query_length`` more tokens will see, offset of the first)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Positions the buffer can hold."""
        return self.capacity

    def reset(self) -> None:
        """Forget everything; the buffer stays."""
        self.length = 0


class PreallocatedCache(Cache):
    """A cache of ``capacity`` tokens for a model whose layers all use full attention."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        super().__init__(layers=[PreallocatedLayer(capacity) for _ in range(num_layers)])

    def keep(self, length: int) -> None:
        """Keep the first ``length`` positions of every layer: no copies."""
        for layer in self.layers:
            assert isinstance(layer, PreallocatedLayer)
            layer.length = min(length, layer.length)


def cache_for(config: PreTrainedConfig, capacity: int) -> PreallocatedCache:
    """An empty cache for a model; raises EyasError, naming the kind, for layers that are no full attention."""
    text = config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if other:
        raise EyasError(f"the embedded engine serves full attention only; {text.model_type} has {', '.join(sorted(other))} layers")
    return PreallocatedCache(text.num_hidden_layers, capacity)

"""States off the device, behind the forward that made them and before the next can overwrite them, without making anybody wait.

On CUDA an engine's tensors can be views of buffers that the next graph replay fills anew. So they are first cloned on the device, on the
stream on which the engine has just queued its forward (the clone comes in order, before anything queued later), and the clone travels to
pinned host memory on a stream of its own, beside the next forward. Cost on the device: the bytes of states under way; on a CPU: one copy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """A tensor that is arriving in host memory."""

    _values: Tensor
    _arrived: "torch.cuda.Event | None"

    def values(self) -> Tensor:
        """The tensor, waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    @property
    def bytes(self) -> int:
        """Its size, known before it has arrived."""
        return self._values.nbytes


class HostCopier:
    """Copies states ``[T, ...]`` to the host as bfloat16, which is all that a store keeps of them. For one thread: the engine's."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, states: Tensor) -> HostCopy:
        """Begin to copy; the caller may forget, and its engine overwrite, ``states`` at once."""
        clone = states.detach().to(torch.bfloat16, copy=True)
        if not clone.is_cuda:
            return HostCopy(clone, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(clone.device)
        self._stream.wait_stream(torch.cuda.current_stream(clone.device))
        host = torch.empty(clone.shape, dtype=clone.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(clone, non_blocking=True)
        clone.record_stream(self._stream)
        return HostCopy(host, self._stream.record_event())

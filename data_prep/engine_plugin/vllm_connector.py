"""vLLM's connector: hidden states of finished prefills go from the worker into the store.

vLLM (0.32) with the method ``extract_hidden_states`` keeps the states of a request's tokens in a cache of their own; a connector fetches
them when the request has finished. This one hands them to the outbox; requests without an order of ours leave nothing behind. The last of
the states comes from before the final norm, so the norm is applied here, as the target's own code does it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    extract_from_kv_cache,
)

from data_prep.engine_plugin.host_copy import HostCopier
from data_prep.engine_plugin.orders import NORM, CaptureJob, FlushOrder, RowOrder, read_order
from data_prep.engine_plugin.outbox import Outbox, Parcel
from eyas.errors import EyasError

# What of vLLM's connector, beside its public methods, this one stands on.
INNER = ("_pending_saves", "_req_copy_events", "_kv_cache", "_block_size", "_is_tp_rank_zero")


@dataclass
class PendingRow:
    """What the scheduler tells the worker of a finished request."""

    req_id: str
    order: RowOrder | FlushOrder
    ids: list[int]
    block_ids: list[int]


class Copied:
    """Stands for the event of a copy that has been made: the request's blocks may be used again."""

    @staticmethod
    def query() -> bool:
        """It has."""
        return True


class EyasStates(ExampleHiddenStatesConnector):
    """Half of it lives in the scheduler, which sees the requests, half in the workers, which have the states; rank 0 writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._job = CaptureJob.from_environment()
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1 or parallel.data_parallel_size != 1:
            raise EyasError("capture with pipeline or data parallelism is refused: rank 0 must have the states of all layers and requests")
        if vllm_config.cache_config.enable_prefix_caching:
            raise EyasError("capture with the prefix cache on is refused: a prefix found there has no states; no-enable-prefix-caching")
        super().__init__(vllm_config, role, kv_cache_config)
        if missing := [name for name in INNER if not hasattr(self, name)]:
            raise EyasError(f"this vLLM's hidden-states connector has no {', '.join(missing)}: this eyas knows that of 0.32")
        if self.num_hidden_states != len(self._job.spec.layers) + 1:
            raise EyasError(f"vLLM captures {self.num_hidden_states} states a token, {len(self._job.spec.layers) + 1} are wanted")
        self._copy = HostCopier()
        self._outbox: Outbox | None = None
        self._norm: dict[str, Tensor] = {}

    def build_connector_meta(self, scheduler_output: Any) -> ExampleHiddenStatesConnectorMetadata:
        """Tell the workers which requests have finished. (Scheduler.)"""
        meta = ExampleHiddenStatesConnectorMetadata()
        meta.pending_saves = list(self._pending_saves.values())
        self._pending_saves.clear()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep a request's blocks until its states were copied, if it is one of ours; what is returned is in its answer. (Scheduler.)"""
        order = read_order(request.kv_transfer_params)
        if order is None:
            return False, None
        row = PendingRow(request.request_id, order, list(request.prompt_token_ids or ()), list(block_ids))
        self._pending_saves[request.request_id] = row
        return True, {"eyas": "taken"}

    def _submit_async_write(self, pending: PendingRow) -> None:
        """Hand a finished request's states over. (Worker; vLLM's get_finished calls it.)"""
        if not self._is_tp_rank_zero:
            return
        if self._outbox is None:
            self._outbox = Outbox(self._job, "vllm")
        order = pending.order
        try:
            if isinstance(order, FlushOrder):
                self._outbox.put(order)
            else:
                states_TLH = self._states(pending)
                final_TH = self._normed(states_TLH[:, -1])
                chunk = (self._copy(states_TLH[:, :-1].flatten(1)), self._copy(final_TH))
                self._outbox.put(Parcel(order, pending.ids, [chunk]))
        except EyasError as error:
            self._outbox.fail(str(error))
        self._req_copy_events[pending.req_id] = Copied()

    def _states(self, pending: PendingRow) -> Tensor:
        """States [T, layers and the last, H] of a request, out of its blocks."""
        assert self._kv_cache is not None
        tokens, hidden = len(pending.ids), self._job.spec.hidden_size
        blocks_B1 = torch.tensor(pending.block_ids).unsqueeze(1)
        slots_S = (blocks_B1 * self._block_size + torch.arange(self._block_size)).flatten()
        states_TLH = extract_from_kv_cache(self._kv_cache, slots_S.to(self._kv_cache.device), tokens)
        if states_TLH.shape != (tokens, self.num_hidden_states, hidden):
            raise EyasError(f"vLLM keeps states of shape {list(states_TLH.shape)}, {[tokens, self.num_hidden_states, hidden]} are wanted")
        return states_TLH

    def _normed(self, states_TH: Tensor) -> Tensor:
        """The final RMSNorm, in float32 with the weight multiplied in the states' own dtype."""
        if not self._norm:
            loaded = load_file(self._job.root / NORM)
            self._norm = {"weight": loaded["weight"].to(states_TH), "epsilon": loaded["epsilon"].to(states_TH.device, torch.float32)}
        wide_TH = states_TH.float()
        scaled_TH = wide_TH * torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + self._norm["epsilon"])
        return self._norm["weight"] * scaled_TH.to(states_TH.dtype)

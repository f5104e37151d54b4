"""SGLang's plug-in: hidden states of finished prefills go from the worker into the store, and the HTTP answer says only that they did.

Where SGLang (0.5.23 on, with --enable-return-aux-hidden-states) turns a prefill's states into lists of numbers, ``StateHook`` takes them
for requests that carry an order of ours; other requests are served as ever. Only tensor-parallel rank 0 writes: all ranks have the same
states. SGLang logs what a plug-in raises and serves on, so what must not be served on with ends the process instead.
"""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from data_prep.engine_plugin.host_copy import HostCopier, HostCopy
from data_prep.engine_plugin.orders import CaptureJob, FlushOrder, RowOrder, read_order
from data_prep.engine_plugin.outbox import Outbox, Parcel
from eyas.errors import EyasError

STATES = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._append_prefill_hidden_states"
ARGUMENTS = "sglang.srt.server_args.ServerArgs.check_server_args"
KEYWORDS = ("req", "logits_output", "hidden_state_offset", "capture_hidden_mode", "extend_input_len", "store")
TAKEN, REFUSED = 1.0, 0.0
"""The answer, in the field for hidden states, whose type has room for lists of numbers only."""
# Resolved server argument -> the one value with which the hook sees every state of every token, once.
WANTED = {
    "pp_size": (1, "pipeline parallelism splits the layers over processes; use tensor parallelism (tp)"),
    "attn_dp_size": (1, "data-parallel attention splits a batch over ranks; leave it out for capture"),
    "dp_size": (1, "data parallelism has several workers, one answers for all; start a server for each instead"),
    "disaggregation_mode": ("null", "prefill and decode must be in one server"),
    "disable_radix_cache": (True, "a prefix found in the cache has no states; add disable-radix-cache"),
    "disable_overlap_schedule": (True, "the next forward would overwrite states; add disable-overlap-schedule"),
    "aux_hidden_state_capture": ("eagle3", "add enable-return-aux-hidden-states and speculative-algorithm EAGLE3"),
    "return_hidden_states_mode": ("full", "the states of all tokens are wanted, not the last one's"),
}


def load() -> None:
    """What SGLang calls in each of its processes as it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        job = CaptureJob.from_environment()
        require_hook_point(STATES, KEYWORDS)
        require_hook_point(ARGUMENTS, ())
    except EyasError as error:
        raise SystemExit(f"EyasError: {error}") from None
    HookRegistry.register(ARGUMENTS, check_arguments, HookType.AROUND)
    HookRegistry.register(STATES, StateHook(job).append_prefill_hidden_states, HookType.AROUND)


def require_hook_point(target: str, keywords: tuple[str, ...]) -> None:
    """Raise EyasError when this SGLang has no such function, or it takes other arguments than were seen in 0.5.23."""
    from sglang import __version__

    try:
        found = inspect.signature(pkgutil.resolve_name(target)).parameters
    except (ImportError, AttributeError):
        told = "has no"
    else:
        if set(keywords) <= set(found):
            return
        told = f"has other arguments ({', '.join(found)}) of"
    raise EyasError(f"SGLang {__version__} {told} {target}, where eyas takes the states (0.5.23 has it): use that, or backend hf or vllm")


def check_arguments(original: Callable[..., Any], arguments: Any, *rest: Any, **more: Any) -> Any:
    """Around SGLang's own check of its arguments, before any weight is read: raise EyasError naming the first that capture cannot use."""
    result = original(arguments, *rest, **more)
    resolved = arguments.resolved_dict()
    for name, (wanted, reason) in WANTED.items():
        if name not in resolved:
            raise EyasError(f"this SGLang has no argument {name}: this eyas knows those of 0.5.23")
        if resolved[name] != wanted:
            raise EyasError(f"capture with {name}={resolved[name]!r} is refused: {reason}")
    return result


class StateHook:
    """One worker's hook."""

    def __init__(self, job: CaptureJob) -> None:
        self._spec = job.spec
        self._job = job
        self._outbox: Outbox | None = None
        self._copy = HostCopier()
        # Chunks of prefills that are not finished; they go when their request goes, aborted ones too.
        self._chunks: WeakKeyDictionary[Any, list[tuple[HostCopy, HostCopy]]] = WeakKeyDictionary()

    def append_prefill_hidden_states(
        self,
        original: Callable[..., int],
        processor: Any,
        *,
        req: Any,
        logits_output: Any,
        hidden_state_offset: int,
        capture_hidden_mode: Any,
        extend_input_len: int,
        store: bool,
        **more: Any,
    ) -> int:
        """Take one request's part of a prefill batch; return where the next one's begins.

        ``extend_input_len`` tokens of it were computed now; ``store`` is False for all chunks but the last of a prefill in chunks.
        """
        more |= {"req": req, "logits_output": logits_output, "hidden_state_offset": hidden_state_offset}
        more |= {"capture_hidden_mode": capture_hidden_mode, "extend_input_len": extend_input_len, "store": store}
        if not req.return_hidden_states:
            return original(processor, **more)
        try:
            order = read_order(req.sampling_params.custom_params)
            if order is None:
                return original(processor, **more)
            end = hidden_state_offset + extend_input_len
            if _is_writer():
                self._take(order, req, self._slices(logits_output, capture_hidden_mode, hidden_state_offset, end), store)
        except EyasError as error:
            self._box().fail(str(error))
        if store:
            req.hidden_states.append([TAKEN if self._outbox is None or self._outbox.fault is None else REFUSED])
        return hidden_state_offset + extend_input_len

    def _slices(self, logits_output: Any, mode: Any, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Aux [t, A] and final states [t, H] of the tokens computed now. Raises EyasError when SGLang has not what was asked for."""
        aux, final = logits_output.hidden_states, logits_output.last_hidden_states
        if final is None or not mode.is_full():
            raise EyasError("SGLang kept no last_hidden_states for this model: capture through backend hf or vllm")
        if (aux.shape[1], final.shape[1]) != (self._spec.aux_width, self._spec.hidden_size):
            wanted = f"{self._spec.aux_width} and {self._spec.hidden_size}"
            raise EyasError(f"SGLang captured aux and final states of width {aux.shape[1]} and {final.shape[1]}, {wanted} are wanted")
        if min(len(aux), len(final)) < end:
            raise EyasError(f"SGLang captured {len(aux)} aux and {len(final)} final states, at least {end} are wanted")
        return aux[start:end], final[start:end]

    def _take(self, order: RowOrder | FlushOrder, req: Any, states: tuple[Tensor, Tensor], last: bool) -> None:
        if isinstance(order, FlushOrder):
            if last:
                self._box().put(order)
            return
        aux_tA, final_tH = states
        chunks = [*self._chunks.pop(req, []), (self._copy(aux_tA), self._copy(final_tH))]
        if not last:
            self._chunks[req] = chunks
            return
        parcel = Parcel(order, list(req.origin_input_ids), chunks)
        if parcel.tokens != len(parcel.ids):
            raise EyasError(f"row {order.key[:12]}: SGLang computed states of {parcel.tokens} of {len(parcel.ids)} tokens")
        self._box().put(parcel)

    def _box(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._job, "sglang")
        return self._outbox


def _is_writer() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank) == 0

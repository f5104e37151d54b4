"""SGLang as capture speaks to it: how the server is started, one request a row, and what its answers mean.

The states themselves never come here: data_prep.engine_plugin, loaded by SGLang in every worker, writes them from there.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from data_prep.capture_request import Next, ServerNeeds, address, exchange, python_path
from data_prep.engine_plugin.orders import VARIABLE, CaptureJob, FlushOrder, RowOrder
from data_prep.engine_plugin.sglang_hook import REFUSED, TAKEN
from eyas.conventions import SGLANG, family_of, layers_from_written, written_ids
from eyas.errors import EyasError
from eyas.target import Target

PLUGIN = "eyas_capture"


@dataclass(frozen=True)
class SglangCapture:
    """A server as ``needs`` had it started, at ``http``'s base URL."""

    http: httpx.AsyncClient
    name: ClassVar = "sglang"

    @staticmethod
    def needs(target: Target, job: CaptureJob, version: str | None) -> ServerNeeds:
        """Flags and variables of a server that captures ``job``. Raises EyasError for layers that this SGLang cannot capture."""
        return ServerNeeds(
            flags={
                "enable-return-aux-hidden-states": True,
                "speculative-algorithm": "EAGLE3",  # names the convention of the layer ids; there is no draft
                "return-aux-hidden-state-layer-ids": [*_written(target, job, version)],
                "disable-radix-cache": True,
                "disable-overlap-schedule": True,
            },
            environment={VARIABLE: job.variable(), "PYTHONPATH": python_path(), "SGLANG_PLUGINS": PLUGIN},
        )

    async def checked_version(self, target: Target, job: CaptureJob, version: str | None) -> str:
        """The server's version. Raises EyasError when it is one that takes the ids in its flags for other layers."""
        found = str((await exchange(self.http, "GET", "/server_info")).get("version"))
        read = layers_from_written(_written(target, job, version), "sglang", found, family_of(target.shape.model_type))
        if read != job.spec.layers:
            raise EyasError(
                f"SGLang {found} captures hidden_states{list(read)} where {list(job.spec.layers)} are wanted: set engine.version to {found}"
            )
        return found

    async def send(self, ids: list[int], order: RowOrder | FlushOrder, logprob: bool = False) -> Next:
        """One prefill; returns once its states are in the worker's hands.

        Raises EyasError when the server refuses it, does not answer, or answers states instead of writing them. ``taken`` is False when the
        plug-in failed of something, which STATUS tells.
        """
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, "custom_params": order.parameters()},
            "return_hidden_states": True,
            "return_logprob": logprob,
        }
        answer = await exchange(self.http, "POST", "/generate", body)
        try:
            said = answer["meta_info"]["hidden_states"]
        except (KeyError, TypeError):
            said = None
        if said not in ([[TAKEN]], [[REFUSED]]):
            raise EyasError(
                f"the server at {address(self.http)} answered without eyas' plug-in ({PLUGIN}): it must be able to read "
                f"{python_path().replace(':', ' and ')} at these very paths, in a container too"
            )
        return _next(answer, said == [[TAKEN]], logprob)


def _written(target: Target, job: CaptureJob, version: str | None) -> tuple[int, ...]:
    return written_ids(job.spec.layers, "sglang", version or SGLANG, family_of(target.shape.model_type))


def _next(answer: dict[str, Any], taken: bool, logprob: bool) -> Next:
    if not logprob:
        return Next(taken)
    try:
        value, token = answer["meta_info"]["output_token_logprobs"][0][:2]
        return Next(taken, int(token), float(value))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EyasError(f"SGLang's answer has no log-probability of the next token ({error!r})") from None

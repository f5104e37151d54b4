"""vLLM as capture speaks to it: how the server is started, one request a row, and what its answers mean.

The states themselves never come here: data_prep.engine_plugin.vllm_connector, which vLLM loads by name, writes them from its worker.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import torch
from safetensors.torch import save_file

from data_prep.capture_request import Next, ServerNeeds, address, exchange, python_path
from data_prep.engine_plugin.orders import NORM, VARIABLE, CaptureJob, FlushOrder, RowOrder
from eyas.conventions import VLLM, family_of, written_ids
from eyas.errors import EyasError
from eyas.files import atomic_path
from eyas.target import Target


@dataclass(frozen=True)
class VllmCapture:
    """A server as ``needs`` had it started, at ``http``'s base URL."""

    http: httpx.AsyncClient
    name: ClassVar = "vllm"

    @staticmethod
    def needs(target: Target, job: CaptureJob, version: str | None) -> ServerNeeds:
        """Flags and variables of a server that captures ``job``; the final norm's weight is put into the job's root for it."""
        norm = {"weight": target.final_norm(torch.float32), "epsilon": torch.tensor([target.shape.rms_norm_eps])}
        with atomic_path(job.root / NORM) as temporary:
            save_file(norm, temporary)
        layers = written_ids((*job.spec.layers, target.shape.num_layers), "vllm", version or VLLM, family_of(target.shape.model_type))
        speculation = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        }
        connector = {
            "kv_connector": "EyasStates",
            "kv_connector_module_path": "data_prep.engine_plugin.vllm_connector",
            "kv_role": "kv_producer",
        }
        return ServerNeeds(
            flags={
                "speculative-config": json.dumps(speculation),
                "kv-transfer-config": json.dumps(connector),
                "no-enable-prefix-caching": True,
            },
            environment={VARIABLE: job.variable(), "PYTHONPATH": python_path()},
        )

    async def checked_version(self, target: Target, job: CaptureJob, version: str | None) -> str:
        """The server's version; all of them take ids as they are."""
        return str((await exchange(self.http, "GET", "/version")).get("version"))

    async def send(self, ids: list[int], order: RowOrder | FlushOrder, logprob: bool = False) -> Next:
        """One prefill; its states are on their way when it is answered.

        Raises EyasError when the server refuses it, does not answer, or has another connector than ours.
        """
        body: dict[str, Any] = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": order.parameters(),
        }
        answer = await exchange(self.http, "POST", "/v1/completions", body | ({"logprobs": 1} if logprob else {}))
        if answer.get("kv_transfer_params") != {"eyas": "taken"}:
            raise EyasError(f"the server at {address(self.http)} answered without eyas' connector: it was not started for capture")
        if not logprob:
            return Next(taken=True)
        try:
            choice = answer["choices"][0]
            return Next(True, int(choice["token_ids"][0]), float(choice["logprobs"]["token_logprobs"][0]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EyasError(f"vLLM's answer has no log-probability of the next token ({error!r})") from None

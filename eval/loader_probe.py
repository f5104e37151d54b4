"""Runs inside an engine's own Python: what does its loader make of a drafter folder? No server, no GPU, the target without its weights.

    PYTHON -c "$(cat eval/loader_probe.py)" sglang|vllm FLAGS OF THE SERVER

It prints one line: RESULT and a JSON object. Every parameter of the engine's draft model is filled with a value that no file holds, then
the file's tensors are given to the engine's ``load_weights`` one by one. What a tensor wrote must be its own values in its own order
(a fused matrix takes q, k and v as blocks of rows), what nothing wrote is still unset. Written for SGLang 0.5.23 and vLLM 0.32; imports
the engine and torch, nothing of eyas.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

RESULT = "eyas-loader: "
UNSET_INTEGER = -(1 << 40)
ROPE_POSITIONS = (1, 100, 1000)


def observed(model: Any, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Load tensor by tensor; per tensor its elements, how many it wrote, into which parameters, and whether they are its own."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNSET_INTEGER)
    unset = {name: _unset(parameter) for name, parameter in parameters.items()}
    tensors = {}
    for name, tensor in weights:
        refused = _refused(model, name, tensor)
        written, equal, into = 0, True, []
        for parameter_name, parameter in parameters.items():
            now = _unset(parameter)
            new = unset[parameter_name] & ~now
            unset[parameter_name] = now
            if not bool(new.any()):
                continue
            values = parameter.data[new]
            own = tensor.to(values.dtype).flatten().to(values.device)
            # a padded vocabulary has rows of zeros behind its own
            equal = equal and torch.equal(values[: len(own)], own) and not bool(values[len(own) :].any())
            written += min(len(values), len(own))
            into.append(parameter_name)
        tensors[name] = {"elements": tensor.numel(), "written": written, "into": into, "equal": equal, "refused": refused}
    return {"tensors": tensors, "unset": [name for name, mask in unset.items() if bool(mask.any())]}


def _refused(model: Any, name: str, tensor: Tensor) -> str | None:
    """Give the tensor to the engine; what it says when it will not have it, in one line."""
    try:
        model.load_weights([(name, tensor)])
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is the finding
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _unset(parameter: nn.Parameter) -> Tensor:
    return parameter.data.isnan() if parameter.is_floating_point() else parameter.data == UNSET_INTEGER


def rope(model: Any) -> dict[str, Any]:
    """Rows of the table of rotary factors that the engine computed: cosines then sines, of ROPE_POSITIONS as far as it reaches."""
    table = next((module.cos_sin_cache for module in model.modules() if hasattr(module, "cos_sin_cache")), None)
    if table is None:
        return {}
    positions = [position for position in ROPE_POSITIONS if position < len(table)]
    return {"positions": positions, "rows": table[positions].float().tolist(), "dtype": str(table.dtype).removeprefix("torch.")}


def parsed(config: Any) -> dict[str, Any]:
    """The draft's config as the engine has it in the end."""
    names = ("architectures", "max_position_embeddings", "draft_vocab_size", "num_aux_hidden_states", "tie_word_embeddings", "rms_norm_eps")
    values = {name: getattr(config, name, None) for name in (*names, "rope_theta", "rope_scaling", "rope_parameters")}
    return json.loads(json.dumps(values, default=str))


def sglang(flags: list[str]) -> dict[str, Any]:
    """As SGLang's draft worker loads it, on one rank."""
    import sglang
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import resolve_spec_aux_hidden_state_config
    from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    arguments = prepare_server_args(flags)
    for width in ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes"):
        setattr(arguments, width, 1)
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    init_distributed_environment(1, 0, _store(), 0, "gloo")
    initialize_model_parallel()
    load = LoadConfig()

    def build(config: ModelConfig) -> Any:
        with set_default_torch_dtype(config.dtype):
            return _initialize_model(config, load, _get_quantization_config(config, load))

    draft = ModelConfig.from_server_args(arguments, model_path=arguments.speculative_draft_model_path, is_draft_model=True)
    with torch.device("cpu"):
        model = build(draft)
    result = observed(model, DefaultModelLoader(load)._get_all_weights(draft, model))
    draft_ids = model.hot_token_id
    target = ModelConfig.from_server_args(arguments)
    algorithm = SpeculativeAlgorithm.from_string(arguments.speculative_algorithm)
    aux = resolve_spec_aux_hidden_state_config(
        server_args=arguments, model_config=target, spec_algorithm=algorithm, is_draft_worker=False
    ).eagle_aux_hidden_state_layer_ids

    def captured() -> list[int]:
        with torch.device("meta"):
            served = build(target)
        served.set_eagle3_layers_to_capture(aux)
        return next(list(module.layers_to_capture) for module in served.modules() if getattr(module, "layers_to_capture", None))

    return {
        **result,
        **_captured(captured),
        "version": sglang.__version__,
        "class": type(model).__name__,
        "config": parsed(draft.hf_config),
        "rope": rope(model),
        "ids": aux,
        "draft_ids": None if draft_ids is None else draft_ids.tolist(),
    }


def vllm(flags: list[str]) -> dict[str, Any]:
    """As vLLM's proposer loads it, on one rank."""
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    known, _ = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(flags)  # the others are the HTTP server's
    arguments = AsyncEngineArgs.from_cli_args(known)
    for width in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        setattr(arguments, width, 1)
    config = arguments.create_engine_config()
    draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, _store(), 0, "gloo")
        initialize_model_parallel(1)
        with set_default_torch_dtype(draft.dtype), torch.device("cpu"):
            model = initialize_model(vllm_config=config, model_config=draft)
        result = observed(model, get_model_loader(config.load_config).get_all_weights(draft, model))
    offsets = getattr(model, "draft_id_to_target_id", None)
    aux = get_eagle3_aux_layers_from_config(config.speculative_config)
    return {
        **result,
        # its layer loop keeps the input of layer k for an id k
        **_captured(lambda: list(aux or [])),
        "version": vllm.__version__,
        "class": type(model).__name__,
        "config": parsed(draft.hf_config),
        "rope": rope(model),
        "ids": aux and list(aux),
        "draft_ids": None if offsets is None else (offsets.data + torch.arange(len(offsets))).tolist(),
    }


def _captured(layers: Any) -> dict[str, Any]:
    """The layers whose inputs the target would hand over; a target that cannot be built here is no fault of the drafter."""
    try:
        return {"captures": layers(), "captures_unknown": None}
    except Exception as error:  # noqa: BLE001 - whatever the engine raises, the rest of the answer stands
        return {"captures": None, "captures_unknown": f"{type(error).__name__}: {error}".splitlines()[0]}


def _store() -> str:
    """Where the only rank of a process group meets itself."""
    return f"file://{tempfile.mkdtemp(prefix='eyas-')}/store-{os.getpid()}"


if __name__ == "__main__":
    answer = {"sglang": sglang, "vllm": vllm}[sys.argv[1]](sys.argv[2:])
    print(f"\n{RESULT}{json.dumps(answer)}", flush=True)
    os._exit(0)  # engines leave threads behind that would wait for a server

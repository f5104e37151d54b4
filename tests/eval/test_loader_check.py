"""What an engine's loader did with a folder is seen tensor by tensor and judged; the engines themselves are asked in tests/engines."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eval.checks import faults
from eval.loader_check import check_loader, judge
from eval.loader_probe import observed
from eyas.drafter import Drafter, rope_table
from eyas.errors import EyasError
from eyas.folder import tensor_contract
from eyas.target import Target
from tests.eval.tiny import LAYERS, tiny_config, tiny_drafter, tiny_target, write_tiny_drafter


class Model(nn.Module):
    """Loads as engines do: q and k into one matrix, the head into a padded one, unknown names into nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(5, 3))
        self.head = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.Parameter(torch.zeros(3))
        self.embed = nn.Parameter(torch.zeros(7, 3))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data[:3] = tensor
            elif name == "k":
                self.qk.data[3:] = tensor
            elif name == "k backwards":
                self.qk.data[3:] = tensor.flip(0)
            elif name == "head":
                self.head.data[: len(tensor)] = tensor
                self.head.data[len(tensor) :] = 0
            elif name == "unwanted":
                raise KeyError("no such parameter")
            elif name == "half a norm":
                self.norm.data[:2] = tensor[:2]


def tensor(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def test_a_tensor_is_followed_into_its_block_of_a_fused_or_padded_matrix() -> None:
    seen = observed(Model(), [("q", tensor(3, 3)), ("k", tensor(2, 3)), ("head", tensor(3, 3))])
    assert seen["tensors"] == {
        "q": {"elements": 9, "written": 9, "into": ["qk"], "equal": True, "refused": None},
        "k": {"elements": 6, "written": 6, "into": ["qk"], "equal": True, "refused": None},
        "head": {"elements": 9, "written": 9, "into": ["head"], "equal": True, "refused": None},
    }
    assert seen["unset"] == ["norm", "embed"]


def test_skipped_half_loaded_changed_and_refused_tensors_are_seen() -> None:
    seen = observed(Model(), [("other", tensor(3)), ("unwanted", tensor(3)), ("half a norm", tensor(3)), ("k backwards", tensor(2, 3))])[
        "tensors"
    ]
    assert seen["other"] == {"elements": 3, "written": 0, "into": [], "equal": True, "refused": None}
    assert seen["unwanted"]["refused"] == "KeyError: 'no such parameter'"
    assert seen["half a norm"]["written"] == 2
    assert seen["k backwards"] == {"elements": 6, "written": 6, "into": ["qk"], "equal": False, "refused": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return tiny_drafter(target, 200)


def healthy(drafter: Drafter) -> dict[str, Any]:
    """What SGLang was seen to make of an export of ``drafter``, in small."""
    shape, half = drafter.shape, drafter.shape.head_dim // 2
    tensors = {name: {"elements": 4, "written": 4, "into": [name], "equal": True, "refused": None} for name in tensor_contract(shape)}
    tensors |= {name: {"elements": 4, "written": 0, "into": [], "equal": True, "refused": None} for name in ("d2t", "t2d")}
    table = rope_table(shape)[[1, 100]]
    return {
        "tensors": tensors,
        "unset": ["model.embed_tokens.weight"],
        "captures": list(LAYERS),
        "captures_unknown": None,
        "ids": [k - 1 for k in LAYERS],
        "version": "0.5.23",
        "class": "LlamaForCausalLMEagle3",
        "draft_ids": drafter.draft_ids_D.tolist(),
        "rope": {"positions": [1, 100], "rows": torch.cat([table[:, 0, :half], table[:, 1, half:]], -1).tolist(), "dtype": "float32"},
        "config": {
            "max_position_embeddings": 256,
            "draft_vocab_size": 200,
            "num_aux_hidden_states": 3,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 5000.0},
        },
    }


def test_a_folder_that_is_loaded_as_it_was_meant_has_no_fault(drafter: Drafter) -> None:
    checks = judge(healthy(drafter), "sglang", 256, drafter, LAYERS)
    assert [check.verdict for check in checks] == ["ok"] * 6


def other_rope(seen: dict[str, Any]) -> None:
    seen["rope"]["rows"][1][0] += 0.01


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "refused": (
        lambda seen: seen["tensors"]["norm.weight"].update(refused="KeyError: 'norm'"),
        "tensors",
        "sglang refuses norm.weight: KeyError: 'norm'",
    ),
    "skipped": (lambda seen: seen["tensors"]["norm.weight"].update(written=0), "tensors", "norm.weight is not known to sglang"),
    "partly": (lambda seen: seen["tensors"]["norm.weight"].update(written=3), "tensors", "norm.weight was loaded in part"),
    "changed": (lambda seen: seen["tensors"]["fc.weight"].update(equal=False), "tensors", "fc.weight has other values"),
    "unset": (lambda seen: seen["unset"].append("lm_head.weight"), "tensors", "lm_head.weight got no values"),
    "d2t lost": (lambda seen: seen.update(draft_ids=None), "d2t", "missing or of another drafter"),
    "d2t absolute": (
        lambda seen: seen.update(draft_ids=[token + row for row, token in enumerate(seen["draft_ids"])]),
        "d2t",
        "target ids where offsets are due",
    ),
    "layers": (lambda seen: seen.update(captures=[2, 4, 5]), "layers", r"hidden_states\[2, 4, 5\], trained were hidden_states\[1, 3, 4\]"),
    "rope": (other_rope, "rope", "the engine turns by other angles; it read .*5000"),
    "positions": (lambda seen: seen["config"].update(max_position_embeddings=255), "positions", "255, the context is 256"),
    "tied": (lambda seen: seen["config"].update(tie_word_embeddings=True), "config", "tie_word_embeddings is True"),
    "class": (lambda seen: seen.update({"class": "LlamaForCausalLM"}), "config", "loaded as LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(drafter: Drafter, name: str) -> None:
    plant, where, told = FAULTS[name]
    seen = healthy(drafter)
    plant(seen)
    (found,) = faults(judge(seen, "sglang", 256, drafter, LAYERS))
    assert found.name == f"loader: {where}"
    assert re.search(told, found.told)


def test_a_target_that_cannot_be_built_leaves_the_layers_unchecked(drafter: Drafter) -> None:
    seen = healthy(drafter) | {"captures": None, "captures_unknown": "RuntimeError: no GPU"}
    checks = judge(seen, "sglang", 256, drafter, LAYERS)
    assert [check.told for check in checks if check.verdict == "not checked"] == ["the target cannot be built here (RuntimeError: no GPU)"]


def test_an_interpreter_without_the_engine_is_an_error_that_says_what_to_set(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", target)
    with pytest.raises(EyasError, match=r"No module named 'sglang'; set engine.kind=sglang and engine.python to an interpreter"):
        check_loader(tiny_config(tmp_path, target), folder, "sglang", drafter, LAYERS)


def test_an_interpreter_that_is_not_there_is_an_error(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, target, kind="sglang", python=str(tmp_path / "python"))
    with pytest.raises(EyasError, match=r"cannot run .*python \(engine.python\): No such file"):
        check_loader(config, tmp_path, "sglang", drafter, LAYERS)

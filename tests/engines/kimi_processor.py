"""TEST STAND-IN for the processor that Kimi-K2.5's repository ships as Python code. Engines load it from the model's folder. Text only."""

from types import SimpleNamespace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin

MEDIA = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 16,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Also of preprocessor_config.json, where vLLM, which has a processor of its own, looks for it."""


class KimiK25Processor(ProcessorMixin):
    """What SGLang asks of a processor before there is any image."""

    attributes: ClassVar = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"
    image_processor = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **_: Any) -> None:
        super().__init__(tokenizer)
        self.media_processor = SimpleNamespace(media_proc_cfg=MEDIA)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("this stand-in knows no images")

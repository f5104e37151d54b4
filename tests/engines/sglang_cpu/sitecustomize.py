"""TEST STAND-IN. Python runs this file at start when its folder is on PYTHONPATH.

torchvision's wheel for GPUs cannot load its compiled operators on a machine without CUDA libraries, and its import then fails on the two it
describes without having them. Declaring their names is enough to import it; nothing here calls them.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

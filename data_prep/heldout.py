"""Held-out prompts alone, unanswered: all that measuring takes when the drafters exist already and nothing is to be trained.

    eyas prep --heldout -c configs/categories.yaml

Writes ``output/prompts/heldout.jsonl`` within seconds, with the prompts that a whole `eyas prep` of the same config would hold out.
"""

import json
from collections import Counter
from pathlib import Path

from data_prep.prompts import Unusable, heldout_prompts
from data_prep.replies import question, question_ids, template_options
from data_prep.rows import require_share
from eyas.config import Config
from eyas.files import digest_json, write_text
from eyas.manifest import NAME, begin, finish, is_current
from eyas.target import open_target

FILE = "heldout.jsonl"


def write_heldout(config: Config) -> Path:
    """Write the held-out prompts of a config and return their folder.

    Raises EyasError for unusable sources or target, and when more than ``prep.max_quarantine`` of the prompts cannot be sent.
    """
    folder, target = config.folder("prompts"), open_target(config.target)
    prompts = heldout_prompts(config.prep, config.seed)
    identity = {"max_length": config.prep.max_length, "seed": config.seed, **template_options(config)}
    inputs = {"tokenizer": target.tokenizer_digest, "heldout": digest_json(sorted(prompt.key for prompt in prompts))}
    if is_current(folder, "prompts", identity, inputs):
        return folder
    tokenizer, lines, reasons = target.tokenizer(), list[str](), Counter[str]()
    for prompt in prompts:
        try:
            row = question(prompt, question_ids(prompt, tokenizer, config), config)
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        except Unusable as reason:
            reasons[str(reason)] += 1
    require_share(reasons.total(), len(prompts), reasons, config.prep)
    for name in (NAME, FILE):  # cheap, so always written anew
        (folder / name).unlink(missing_ok=True)
    begin(folder, "prompts", identity, inputs)
    write_text(folder / FILE, "".join(lines))
    categories = Counter(json.loads(line)["category"] for line in lines)
    finish(folder, {"prompts": len(lines), "categories": dict(categories), "quarantined": dict(reasons)})
    return folder

"""The offline walk of texts that a server wrote: states captured from the target, then the drafter alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data_prep.capture_hf import Probe
from data_prep.rows import Row
from data_prep.template import reply_row
from eyas.acceptance import Cycle, walk
from eyas.attention_hf import NAME
from eyas.folder import read_drafter
from eyas.states import StateRow
from eyas.target import Target
from train.batches import pack
from train.ttt import TrainingTimeTest, evaluate_hits


def walk_offline(
    target: Target, drafter_folder: Path, texts: Sequence[tuple[list[int], list[int]]], dtype: torch.dtype, steps: int
) -> Iterator[list[Cycle]]:
    """Verify steps of each text, given as its prompt's ids and its reply's."""
    folder = read_drafter(str(drafter_folder))
    drafter = folder.drafter
    drafter.set_embedding(target.embedding(dtype))
    test = TrainingTimeTest(drafter, target.lm_head(dtype)[drafter.draft_ids_D], steps, 1.0)
    model = target.load_model(dtype, torch.device("cpu"), NAME)
    with Probe(model, folder.layers or ()) as probe:
        for prompt_ids, output_ids in texts:
            tokens = reply_row(prompt_ids, output_ids)
            aux_1TA, final_1TH = probe([Row(key="", prompt_key="", category="", tokens=tokens)], target.shape.pad_id)
            row = StateRow("", "", torch.tensor(tokens.ids), torch.tensor(tokens.supervised), aux_1TA[0].clone(), final_1TH[0].clone())
            (reply,) = evaluate_hits(test, pack([row])).replies
            yield walk(reply.hits_MJ, reply.chain_t_M)

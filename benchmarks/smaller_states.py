"""What smaller states cost: acceptance length of drafters trained on them, against those trained on bfloat16 final states.

    python -m benchmarks.smaller_states -c configs/smollm2.yaml --steps 50

Takes some of the rows that ``eyas prep`` left (with final, in bfloat16), rewrites them as fp8 and as the target's top log-probabilities,
trains the configured drafter on each kind with the same rows in the same order, and walks the held-out replies with each result: on the
bfloat16 states always, as a server computes them. For comparison it trains on the first kind once more, in another order. Two tables:

- bytes a token, acceptance length, and its paired difference to the first kind with a 95 % interval by bootstrap over replies;
- how far the gradient of all weights is from that of the whole distribution when the rest of the vocabulary is treated in other ways
  (norm of the difference over norm): one class, as ``train.loss`` has it, its mass spread evenly, or dropped and the top scaled up.

Found with --steps 24 --rows 100 --set train.batch_tokens=2048 (acceptance length 1.527 untouched, 1.554 on bfloat16 final states, 112
replies): fp8 top 128 +0.001 (-0.001 .. +0.003), fp8 top 32 +0.002 (-0.001 .. +0.005), fp8 final +0.002 (+0.000 .. +0.004); the same states
in another order +0.005 (-0.004 .. +0.020). Error of the gradient at k 128: 1.4 % as one class, 2.5 % spread evenly, 5.1 % dropped; after
the training, which leaves less gradient, 3.9, 6.4 and 13.1 %.
"""

import argparse
import copy
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eyas.acceptance import Acceptance
from eyas.config import Config, load_config
from eyas.distribution import TopLogProbs, top_log_probs
from eyas.drafter import Drafter
from eyas.offline import walk_row
from eyas.state_row import StateRow, StateSpec
from eyas.states import StateStore, StateWriter, finish_store
from eyas.statistics import paired_difference
from eyas.target import Target, open_target
from eyas.vocab import vocab_digest
from train.batches import pack
from train.checkpoint import latest
from train.inputs import HELD_OUT, open_inputs
from train.loss import soft_cross_entropy, top_cross_entropy
from train.trainer import train
from train.ttt import counted_chains, unroll

TOKEN_COUNTS = "token_counts.safetensors"
SHARD_BYTES = 256 << 20
RESAMPLES = 4000
GRADIENT_ROWS = 8
GRADIENT_KS = (8, 32, 128)
UNUSED_ROWS = 1  # held-out rows given to the trainings: what they measure on their way is not looked at
RESTS = ("one class", "spread evenly", "dropped")


@dataclass(frozen=True)
class Kind:
    """One way to keep states: dtype, and how many log-probabilities in place of final; None: final. ``seed``: of the order of the rows."""

    dtype: Literal["bfloat16", "fp8"]
    top: int | None
    seed: int

    def __str__(self) -> str:
        return f"{self.dtype}, {'final' if self.top is None else f'top {self.top}'}, order {self.seed}"


@dataclass(frozen=True)
class Replies:
    """Tokens and verify steps of every held-out reply, in the same order for every drafter."""

    tokens: list[int]
    cycles: list[int]


def rows_of(store: StateStore) -> Iterator[StateRow]:
    return (store.read(i) for i in range(len(store)))


def with_top(row: StateRow, head_VH: Tensor, ids_D: Tensor, k: int) -> StateRow:
    """The row with log-probabilities where a reply's next token is predicted. Elsewhere zeros: a capture has them there too, unread."""
    label_T = row.supervised_T.roll(-1)
    found = top_log_probs(row.final_TH[label_T], head_VH, ids_D, k)
    return replace(
        row,
        final_TH=row.final_TH[:, :0],
        top=found.map(lambda part: part.new_zeros(len(label_T), *part.shape[1:]).index_put_((label_T,), part)),
    )


def narrowed(row: StateRow, k: int) -> StateRow:
    """The row with the first ``k`` of its log-probabilities."""
    assert row.top is not None
    top = row.top
    rest_T = top.rest_N + top.logprob_NK[:, k:].exp().sum(-1)
    return replace(row, top=TopLogProbs(top.index_NK[:, :k], top.logprob_NK[:, :k], rest_T, top.outside_N))


def write(folder: Path, rows: Iterable[StateRow], spec: StateSpec) -> None:
    with StateWriter(folder, spec, SHARD_BYTES) as writer:
        for row in rows:
            writer.add(row)
    finish_store(folder, {})


def trained(config: Config, kind: Kind, folder: Path, rows: dict[str, list[StateRow]], spec: StateSpec, drafter: Drafter) -> int:
    """Train ``drafter`` on rows kept as ``kind``; bytes a token. Of ``rows`` (by set) some have final states and some log-probabilities."""
    spec = replace(spec, dtype=kind.dtype)
    if kind.top is not None:
        spec = replace(spec, top_logprobs=kind.top, vocab_digest=vocab_digest(drafter.draft_ids_D))
    for name, of_set in rows.items():
        kept = of_set if kind.top is None else [narrowed(row, kind.top) for row in of_set]
        write(folder / "states" / name, kept, spec)
    (folder / "states" / TOKEN_COUNTS).symlink_to((config.folder("states") / TOKEN_COUNTS).resolve())
    last = latest(train(config.model_copy(update={"output": folder, "seed": kind.seed})) / "checkpoints")
    assert last is not None
    drafter.load_state_dict(last.tensors("model"))
    return spec.bytes_per_token()


def walked(drafter: Drafter, target: Target, held_out: list[StateStore], steps: int) -> Replies:
    drafter.set_embedding(target.embedding(torch.float32))
    parts = [
        Acceptance.of(walk_row(drafter, row.ids_T, row.supervised_T, row.aux_TA, steps), steps)
        for store in held_out
        for row in rows_of(store)
    ]
    return Replies([part.tokens for part in parts], [part.cycles for part in parts])


def gradient_errors(drafter: Drafter, target: Target, rows: list[StateRow], ks: Sequence[int], steps: int) -> dict[tuple[int, str], float]:
    """Relative error of the gradient of all weights, by k and treatment of the rest."""
    drafter.set_embedding(target.embedding(torch.float32))
    head_VH, ids_D = target.lm_head(torch.float32), drafter.draft_ids_D
    batch = pack(rows).to(torch.device("cpu"), torch.float32)
    chains = counted_chains(batch.ids_N, batch.supervised_N, batch.starts_B1, drafter.t2d, steps)
    weight_P = torch.cat([torch.full(t.shape, 0.8**j) for j, t in enumerate(chains.t_by_step)])
    normed_PH = drafter.norm(torch.cat(unroll(drafter, batch, chains)))
    label_P, lm_head_DH = chains.label_P(), drafter.lm_head.weight

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(drafter.parameters()), retain_graph=True)])

    def formula(p_PD: Tensor) -> Tensor:
        return -((p_PD * torch.log_softmax(normed_PH @ lm_head_DH.T, -1)).sum(-1) * weight_P).sum()

    whole = gradient(soft_cross_entropy(normed_PH, lm_head_DH, batch.final_NH, head_VH[ids_D], label_P, weight_P).loss_sum)
    errors = {}
    for k in ks:
        top = top_log_probs(batch.final_NH, head_VH, ids_D, k)
        p_PK, index_PK, rest_P1 = top.logprob_NK.exp()[label_P], top.index_NK[label_P].long(), top.rest_N[label_P, None]
        inside_P1 = p_PK.sum(-1, keepdim=True) + rest_P1
        none_PD = torch.zeros(len(label_P), len(ids_D))
        even_PD = (none_PD + rest_P1 / max(len(ids_D) - k, 1)).scatter(1, index_PK, p_PK) / inside_P1
        dropped_PD = none_PD.scatter(1, index_PK, p_PK / p_PK.sum(-1, keepdim=True))
        one_class = top_cross_entropy(normed_PH, lm_head_DH, top, label_P, weight_P).loss_sum
        for name, loss in zip(RESTS, (one_class, formula(even_PD), formula(dropped_PD)), strict=True):
            errors[k, name] = float((gradient(loss) - whole).norm() / whole.norm())
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps of each training")
    parser.add_argument("--rows", type=int, default=240, help="training rows, of the first of the store")
    parser.add_argument("--top", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--folder", type=Path, help="where to write (1 GB for configs/smollm2.yaml); default: the temporary folder")
    arguments = parser.parse_args()
    steps = arguments.steps
    config = load_config(
        arguments.config, [*arguments.set, f"train.max_steps={steps}", f"train.evaluate_every={steps}", "train.epochs=100"]
    )
    inputs, target = open_inputs(config), open_target(config.target)
    spec, seed, held_out = inputs.train.spec, config.seed, [inputs.held_out[name] for name in HELD_OUT]
    console = Console(width=120)
    probe = [inputs.train.read(i) for i in range(min(GRADIENT_ROWS, len(inputs.train)))]
    head_VH = target.lm_head(torch.float32)

    table = Table("states", "bytes a token", "acceptance length", "difference", "95 %", title=f"{steps} steps on each kind of states")
    gradients = Table("drafter", "k", *RESTS, title="error of the gradient")

    def tell_gradients(name: str, drafter: Drafter) -> None:
        errors = gradient_errors(drafter, target, probe, GRADIENT_KS, config.train.ttt_steps)
        for k in GRADIENT_KS:
            gradients.add_row(name, str(k), *(f"{errors[k, rest]:.2%}" for rest in RESTS))

    rows = {"train": [inputs.train.read(i) for i in range(min(arguments.rows, len(inputs.train)))]}
    rows |= {name: [store.read(i) for i in range(UNUSED_ROWS)] for name, store in inputs.held_out.items()}
    tops = {name: [with_top(row, head_VH, inputs.drafter.draft_ids_D, max(arguments.top)) for row in part] for name, part in rows.items()}
    kinds = [Kind("bfloat16", None, seed), *(Kind("fp8", k, seed) for k in arguments.top), Kind("fp8", None, seed)]
    first: Replies | None = None
    trained_on_first: Drafter | None = None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for number, kind in enumerate([*kinds, Kind("bfloat16", None, seed + 1)]):
            drafter = copy.deepcopy(inputs.drafter)
            size = trained(config, kind, Path(name) / str(number), rows if kind.top is None else tops, spec, drafter)
            own = walked(drafter, target, held_out, config.engine.draft_steps)
            first = first or own
            change = paired_difference(own.tokens, own.cycles, first.tokens, first.cycles, RESAMPLES, seed)
            interval = "" if own is first else f"{change.low or 0:+.4f} .. {change.high or 0:+.4f}"
            table.add_row(str(kind), f"{size:,}", f"{sum(own.tokens) / sum(own.cycles):.4f}", f"{change.value or 0:+.4f}", interval)
            console.print(table)
            trained_on_first = trained_on_first or drafter
    assert trained_on_first is not None
    tell_gradients("untouched", inputs.drafter)
    tell_gradients("trained", trained_on_first)
    console.print(gradients)


if __name__ == "__main__":
    main()

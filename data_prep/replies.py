"""Replies: every training prompt answered at the training temperature, every held-out prompt greedily and at the serving one.

Writes ``output/replies/{train,greedy,sampled}.jsonl``, one conversation a line as it ends, and ``quarantine.jsonl`` (what cannot be
used, with the reason). The run may be killed at any time: lines already there are kept, and their prompts are not answered again.
With ``prep.replies.mode: given`` the training replies are those of the data; held-out rows are always the target's own.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data_prep.prompts import NO_REPLY, Messages, Prompt, PromptSplit, Unusable
from data_prep.rows import Quarantined, Rows, build_rows, require_share
from data_prep.sampler import Reply, Request, Sampling, is_looping, sample
from data_prep.template import conversation, prompt_ids
from eyas.config import Config
from eyas.files import FileLock, JsonlAppender, digest_json, read_jsonl, write_text
from eyas.manifest import begin, finish, is_current
from eyas.progress import Task
from eyas.target import Target

SETS = ("train", "greedy", "sampled")
QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True)
class ReplySet:
    """One of the three sets: its prompts, and how they are answered (``sampling`` None: replies are given)."""

    name: str
    prompts: list[Prompt]
    sampling: Sampling | None


@dataclass
class Answered:
    """Outcome of one set in this process: prompts that cannot be answered, and the rate of sampling (None: nothing was left to do)."""

    quarantined: list[Quarantined] = field(default_factory=list)
    tokens_per_second: float | None = None


def reply_sets(config: Config, split: PromptSplit) -> list[ReplySet]:
    """The three sets of a run."""
    replies = config.prep.replies

    def sampling(name: str, *temperatures: float) -> Sampling:
        return Sampling(temperatures, replies.top_p, config.seed, name)

    train = sampling("train", *replies.temperatures) if replies.mode == "generate" else None
    return [
        ReplySet("train", split.train, train),
        ReplySet("greedy", split.heldout, sampling("greedy", 0.0)),
        ReplySet("sampled", split.heldout, sampling("sampled", replies.serving_temperature)),
    ]


def write_replies(config: Config, target: Target, split: PromptSplit, load_model: Callable[[], PreTrainedModel]) -> Path:
    """Answer what is not answered yet and return the folder; ``load_model`` is called only when there is something to answer.

    Raises EyasError when the folder was begun from other prompts or settings, when another process writes it, or when more than
    ``prep.max_quarantine`` of the prompts and replies are unusable.
    """
    folder = config.folder("replies")
    identity, inputs = _identity(config), _inputs(config, target, split)
    if is_current(folder, "replies", identity, inputs):
        return folder
    begin(folder, "replies", identity, inputs)
    lock = FileLock(folder / ".replies.lock", f"another process writes replies into {folder}")
    try:
        sets = reply_sets(config, split)
        tokenizer = target.tokenizer()
        answered = {chosen.name: _answer(chosen, config, target, tokenizer, folder, load_model) for chosen in sets}
        faults = {name: list(result.quarantined) for name, result in answered.items()}
        rows = {chosen.name: read_rows(config, target, chosen.name) for chosen in sets}
        for name in SETS:
            faults[name] += rows[name].quarantined
        write_quarantine(folder, faults)
        reasons = Counter(fault.reason for found in faults.values() for fault in found)
        unusable = reasons + Counter({NO_REPLY: split.dropped.get(NO_REPLY, 0)})
        require_share(unusable.total(), sum(len(chosen.prompts) for chosen in sets) + unusable[NO_REPLY], unusable, config.prep)
        holds = {
            name: {**_count(folder / f"{name}.jsonl", rows[name]), "tokens_per_second": answered[name].tokens_per_second} for name in SETS
        }
        finish(folder, {"sets": holds, "quarantined": dict(reasons), "dropped": split.dropped})
    finally:
        lock.release()
    return folder


def read_rows(config: Config, target: Target, name: str) -> Rows:
    """Rows of a finished or half-finished set, from its replies file."""
    records = (record for _, record in read_jsonl(config.folder("replies") / f"{name}.jsonl"))
    return build_rows(records, config.prep, target.shape.eos_ids)


def _identity(config: Config) -> dict[str, Any]:
    replies = config.prep.replies.model_dump(exclude={"batch_size"})
    return {**replies, "max_length": config.prep.max_length, "seed": config.seed, "dtype": config.target.dtype}


def _inputs(config: Config, target: Target, split: PromptSplit) -> dict[str, str]:
    prompts = {
        name: digest_json(sorted(prompt.key for prompt in part)) for name, part in (("train", split.train), ("heldout", split.heldout))
    }
    return {"target": target.digest, "tokenizer": target.tokenizer_digest, **prompts}


def _answer(
    chosen: ReplySet,
    config: Config,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    load_model: Callable[[], PreTrainedModel],
) -> Answered:
    """Append the missing lines of one set."""
    path = folder / f"{chosen.name}.jsonl"
    result = Answered()
    with JsonlAppender(path) as file:
        done = {record["key"] for _, record in read_jsonl(path)}
        missing = [prompt for prompt in chosen.prompts if prompt.key not in done]
        requests: dict[str, tuple[Prompt, Request]] = {}
        for prompt in missing:
            try:
                if chosen.sampling is None:
                    file.append(_given(prompt, tokenizer, target))
                else:
                    requests[prompt.key] = (prompt, _request(prompt, tokenizer, config))
            except Unusable as reason:
                result.quarantined.append(Quarantined(prompt.key, prompt.category, str(reason)))
        if chosen.sampling is not None and requests:
            result.tokens_per_second = _sample(chosen, chosen.sampling, requests, len(done), config, target, load_model(), file)
    return result


def _sample(
    chosen: ReplySet,
    sampling: Sampling,
    requests: dict[str, tuple[Prompt, Request]],
    done: int,
    config: Config,
    target: Target,
    model: PreTrainedModel,
    file: JsonlAppender,
) -> float:
    """Answer the requests, each reply written as it ends; return the tokens generated a second, prefill included."""
    start, tokens, finished = time.monotonic(), 0, 0
    slots, stop_ids = config.prep.replies.batch_size, target.shape.eos_ids
    with Task(f"replies ({chosen.name})", total=done + len(requests), unit="replies", done=done) as task:
        waiting = [request for _, request in requests.values()]
        for count, reply in enumerate(sample(model, waiting, sampling, slots=slots, stop_ids=stop_ids), 1):
            prompt, request = requests[reply.key]
            file.append(_record(prompt, request, reply, sampling.temperature(request)))
            tokens, finished = tokens + len(reply.ids), finished + reply.finished
            rate = tokens / (time.monotonic() - start)
            task.advance(note=f"{rate:,.0f} tok/s, {finished / count:.0%} finished")
    return round(rate, 1)


def _request(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: Config) -> Request:
    ids = question_ids(prompt, tokenizer, config.prep.max_length)
    return Request(prompt.key, ids, min(config.prep.replies.max_new_tokens, config.prep.max_length - len(ids)))


def question_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[int]:
    """Token ids of a prompt as it is sent. Raises Unusable for one that leaves no room for a reply, or is no prompt at all."""
    ids = prompt_ids(tokenizer, _question(prompt))
    if len(ids) >= max_length:
        raise Unusable("prompt over prep.max_length")
    if len(ids) < 2:
        raise Unusable("prompt of less than two tokens")
    return ids


def _question(prompt: Prompt) -> Messages:
    return prompt.messages[:-1] if prompt.reply_given else prompt.messages


def _given(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, target: Target) -> dict[str, Any]:
    tokens = conversation(tokenizer, prompt.messages, target.shape.eos_ids)
    supervised = [int(flag) for flag in tokens.supervised]
    return {**_origin(prompt), "messages": prompt.messages, "ids": tokens.ids, "supervised": supervised, "finished": True}


def _record(prompt: Prompt, request: Request, reply: Reply, temperature: float) -> dict[str, Any]:
    return {
        **question(prompt, request.prompt_ids),
        "reply_ids": reply.ids,
        "finished": reply.finished,
        "temperature": temperature,
    }


def question(prompt: Prompt, ids: list[int]) -> dict[str, Any]:
    """A prompt that is to be answered, as a row of a file; ``ids`` are its tokens as they are sent."""
    return {**_origin(prompt), "messages": _question(prompt), "prompt_ids": ids}


def _origin(prompt: Prompt) -> dict[str, str]:
    return {"key": prompt.key, "category": prompt.category, "family": prompt.family}


def write_quarantine(folder: Path, faults: dict[str, list[Quarantined]]) -> None:
    """Write ``folder/quarantine.jsonl``: set, key of the prompt, category and reason of each, by set."""
    lines = [json.dumps({"set": name, **fault.to_json()}, ensure_ascii=False) + "\n" for name, found in faults.items() for fault in found]
    write_text(folder / QUARANTINE, "".join(lines))


def _count(path: Path, rows: Rows) -> dict[str, int]:
    """Counts of one finished set for the manifest."""
    counts: Counter[str] = Counter({"replies": 0, "finished": 0, "looping": 0})
    for _, record in read_jsonl(path):
        reply = record.get("reply_ids") or record["ids"]
        counts.update(replies=1, finished=int(record["finished"]), looping=int(is_looping(reply)))
    supervised = sum(sum(row.tokens.supervised) for row in rows.usable)
    tokens = sum(len(row.tokens.ids) for row in rows.usable)
    return {
        **counts,
        "rows": len(rows.usable),
        "tokens": tokens,
        "supervised": supervised,
        "quarantined": len(rows.quarantined),
        "omitted": rows.omitted,
    }

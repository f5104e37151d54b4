"""Replies: every training prompt answered at the training temperature, every held-out prompt greedily and at the serving one.

Writes ``output/replies/{train,greedy,sampled}.jsonl``, one conversation a line as it ends, and ``quarantine.jsonl`` (what cannot be
used, with the reason). The run may be killed at any time: lines already there are kept, and their prompts are not answered again.
With ``prep.replies.mode: given`` the training replies are those of the data; held-out rows are always the target's own. With ``server``
all are asked from servers of the target, as token ids; a prompt that they fail at is quarantined, and asked again when the run is resumed.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data_prep.prompts import NO_REPLY, Messages, Prompt, PromptSplit, Unusable
from data_prep.reply_server import Chats, answer_by_server
from data_prep.reply_wire import Answer, Asking
from data_prep.rows import Quarantined, Rows, build_rows, require_share
from data_prep.sampler import Request, Sampling, is_looping, sample
from data_prep.template import THINKING_OFF, conversation, prompt_ids, think_ids
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import FileLock, JsonlAppender, digest_json, read_jsonl, write_text
from eyas.manifest import begin, finish, is_current
from eyas.progress import Task
from eyas.target import Target
from eyas.tokenizer import ChatTokenizer

SETS = ("train", "greedy", "sampled")
QUARANTINE = "quarantine.jsonl"
THINKS = "it thinks, asked not to"
TEMPLATE_SAMPLES = 8
"""Chats of which servers are asked how they render them: one of each order of roles, at most so many."""


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

    train = None if replies.mode == "given" else sampling("train", *replies.temperatures)
    return [
        ReplySet("train", split.train, train),
        ReplySet("greedy", split.heldout, sampling("greedy", 0.0)),
        ReplySet("sampled", split.heldout, sampling("sampled", replies.serving_temperature)),
    ]


@dataclass(frozen=True)
class Stage:
    """What answering takes besides the prompts. ``load_model`` and ``servers`` (URLs) are called when there is something to answer.

    ``total`` counts the prompts of all sets.
    """

    config: Config
    target: Target
    tokenizer: ChatTokenizer
    folder: Path
    total: int
    load_model: Callable[[], PreTrainedModel]
    servers: Callable[[], Sequence[str]]


def write_replies(
    config: Config,
    target: Target,
    split: PromptSplit,
    load_model: Callable[[], PreTrainedModel],
    servers: Callable[[], Sequence[str]] | None = None,
) -> Path:
    """Answer what is not answered yet and return the folder.

    ``load_model``, or with ``prep.replies.mode: server`` what gives the URLs (``servers``; by default those of ``prep.replies.servers``),
    is called only when there is something to answer.

    Raises EyasError when the folder was begun from other prompts or settings, when another process writes it, when servers cannot
    answer, or when more than ``prep.max_quarantine`` of the prompts and replies are unusable.
    """
    folder = config.folder("replies")
    identity, inputs = _identity(config), _inputs(config, target, split)
    if is_current(folder, "replies", identity, inputs):
        return folder
    begin(folder, "replies", identity, inputs)
    lock = FileLock(folder / ".replies.lock", f"another process writes replies into {folder}")
    try:
        sets = reply_sets(config, split)
        total = sum(len(chosen.prompts) for chosen in sets)
        stage = Stage(config, target, target.tokenizer(), folder, total, load_model, servers or (lambda: config.prep.replies.servers))
        answered = {chosen.name: _answer(chosen, stage) for chosen in sets}
        faults = {name: list(result.quarantined) for name, result in answered.items()}
        rows = {chosen.name: read_rows(config, target, chosen.name) for chosen in sets}
        for name in SETS:
            faults[name] += rows[name].quarantined
        write_quarantine(folder, faults)
        reasons = Counter(fault.reason for found in faults.values() for fault in found)
        unusable = reasons + Counter({NO_REPLY: split.dropped.get(NO_REPLY, 0)})
        require_share(unusable.total(), total + unusable[NO_REPLY], unusable, config.prep)
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
    """What changes replies: not how many are made at a time, nor by which servers."""
    left_out = {"batch_size", "servers", "concurrency", "timeout_s", "retries", "give_up_s"}
    if config.prep.replies.reasoning == "keep":  # folders from before there was a choice are still current
        left_out.add("reasoning")
    replies = config.prep.replies.model_dump(exclude=left_out)
    if config.target.template:
        replies["template"] = config.target.template
    if config.prep.replies.mode == "given":
        replies["rows"] = "as prompts show replies"
    return {**replies, "max_length": config.prep.max_length, "seed": config.seed, "dtype": config.target.dtype}


def _inputs(config: Config, target: Target, split: PromptSplit) -> dict[str, str]:
    prompts = {
        name: digest_json(sorted(prompt.key for prompt in part)) for name, part in (("train", split.train), ("heldout", split.heldout))
    }
    return {"target": target.digest, "tokenizer": target.tokenizer_digest, **prompts}


def _answer(chosen: ReplySet, stage: Stage) -> Answered:
    """Append the missing lines of one set."""
    path = stage.folder / f"{chosen.name}.jsonl"
    result = Answered()
    with JsonlAppender(path) as file:
        done = {record["key"] for _, record in read_jsonl(path)}
        missing = [prompt for prompt in chosen.prompts if prompt.key not in done]
        requests: dict[str, tuple[Prompt, Request]] = {}
        for prompt in missing:
            try:
                if chosen.sampling is None:
                    file.append(_given(prompt, stage.tokenizer, stage.target, stage.config))
                else:
                    requests[prompt.key] = (prompt, _request(prompt, stage.tokenizer, stage.config))
            except Unusable as reason:
                result.quarantined.append(Quarantined(prompt.key, prompt.category, str(reason)))
        if chosen.sampling is not None and requests:
            serve_or_sample = _serve if stage.config.prep.replies.mode == "server" else _sample
            result.tokens_per_second = serve_or_sample(chosen, chosen.sampling, requests, len(done), stage, file, result)
    return result


def _sample(
    chosen: ReplySet,
    sampling: Sampling,
    requests: dict[str, tuple[Prompt, Request]],
    done: int,
    stage: Stage,
    file: JsonlAppender,
    result: Answered,
) -> float:
    """Answer the requests, each reply written as it ends; return the tokens generated a second, prefill included."""
    model = stage.load_model()
    start, tokens, finished, thinks = time.monotonic(), 0, 0, _thinking(stage)
    slots, stop_ids = stage.config.prep.replies.batch_size, stage.target.shape.eos_ids
    waiting = [request for _, request in requests.values()]
    with _task(chosen, requests, done) as task:
        for count, reply in enumerate(sample(model, waiting, sampling, slots=slots, stop_ids=stop_ids), 1):
            prompt, request = requests[reply.key]
            if thinks(reply.ids):
                result.quarantined.append(Quarantined(prompt.key, prompt.category, THINKS))
            else:
                file.append(_record(prompt, request, stage, reply.ids, reply.finished, sampling.temperature(request)))
            tokens, finished = tokens + len(reply.ids), finished + reply.finished
            rate = tokens / (time.monotonic() - start)
            task.advance(note=f"{rate:,.0f} tok/s, {finished / count:.0%} finished")
    return round(rate, 1)


def _serve(
    chosen: ReplySet,
    sampling: Sampling,
    requests: dict[str, tuple[Prompt, Request]],
    done: int,
    stage: Stage,
    file: JsonlAppender,
    result: Answered,
) -> float:
    """Have servers answer the requests, each reply written as it comes; return the tokens generated a second.

    Raises EyasError as soon as too many prompts are unusable, and what ``answer_by_server`` does.
    """
    urls = stage.servers()
    if not urls:
        raise EyasError("prep.replies.servers is empty: name the servers that answer, e.g. [http://127.0.0.1:30000]")
    start, tokens, thinks = time.monotonic(), 0, _thinking(stage)

    def take(request: Request, outcome: Answer | Unusable) -> None:
        nonlocal tokens
        prompt, _ = requests[request.key]
        if isinstance(outcome, Answer) and thinks(outcome.ids):
            outcome = Unusable(THINKS)
        if isinstance(outcome, Unusable):
            result.quarantined.append(Quarantined(prompt.key, prompt.category, str(outcome)))
            if len(result.quarantined) > stage.config.prep.max_quarantine * stage.total:  # said now, not after hours
                write_quarantine(stage.folder, {chosen.name: result.quarantined})
                reasons = Counter(fault.reason for fault in result.quarantined)
                require_share(reasons.total(), stage.total, reasons, stage.config.prep)
            return
        record = _record(prompt, request, stage, outcome.ids, outcome.finish_reason == "stop", sampling.temperature(request))
        file.append({**record, "finish_reason": outcome.finish_reason})
        tokens += len(outcome.ids)

    by_roles: dict[tuple[str, ...], tuple[Messages, list[int]]] = {}
    for prompt, request in requests.values():
        if prompt.tools:  # not every server's /tokenize takes them
            continue
        messages = _question(prompt)
        by_roles.setdefault(tuple(message["role"] for message in messages), (messages, request.prompt_ids))
    chats = Chats(list(by_roles.values())[:TEMPLATE_SAMPLES], template_options(stage.config))
    asking = Asking(sampling, stage.target.shape.eos_ids, stage.tokenizer)
    with _task(chosen, requests, done) as task:
        answer_by_server([request for _, request in requests.values()], urls, asking, chats, stage.config.prep.replies, take, task)
    return round(tokens / (time.monotonic() - start), 1)


def _task(chosen: ReplySet, requests: dict[str, tuple[Prompt, Request]], done: int) -> Task:
    return Task(f"replies ({chosen.name})", total=done + len(requests), unit="replies", done=done)


def _thinking(stage: Stage) -> Callable[[list[int]], bool]:
    """What tells replies that think although they were asked not to (``prep.replies.reasoning: drop``)."""
    marks = set(think_ids(stage.tokenizer) or ()) if stage.config.prep.replies.reasoning == "drop" else set()
    return lambda ids: not marks.isdisjoint(ids)


def _request(prompt: Prompt, tokenizer: ChatTokenizer, config: Config) -> Request:
    ids = question_ids(prompt, tokenizer, config)
    return Request(prompt.key, ids, min(config.prep.replies.max_new_tokens, config.prep.max_length - len(ids)))


def question_ids(prompt: Prompt, tokenizer: ChatTokenizer, config: Config) -> list[int]:
    """Token ids of a prompt as it is sent. Raises Unusable for one that leaves no room for a reply, or is no prompt at all."""
    ids = prompt_ids(tokenizer, _question(prompt), prompt_options(prompt, config))
    if len(ids) >= config.prep.max_length:
        raise Unusable("prompt over prep.max_length")
    if len(ids) < 2:
        raise Unusable("prompt of less than two tokens")
    return ids


def template_options(config: Config) -> dict[str, Any]:
    """Arguments of the chat template with which prompts are rendered."""
    return {**config.target.template, **(THINKING_OFF if config.prep.replies.reasoning == "drop" else {})}


def prompt_options(prompt: Prompt, config: Config) -> dict[str, Any]:
    """Arguments of the chat template for one prompt: those of all, and the tools that it declares."""
    return {**template_options(config), **({"tools": list(prompt.tools)} if prompt.tools else {})}


def _question(prompt: Prompt) -> Messages:
    return prompt.messages[:-1] if prompt.reply_given else prompt.messages


def _given(prompt: Prompt, tokenizer: ChatTokenizer, target: Target, config: Config) -> dict[str, Any]:
    found = conversation(tokenizer, prompt.messages, target.shape.eos_ids, prompt_options(prompt, config))
    rows = [{"ids": tokens.ids, "supervised": [int(flag) for flag in tokens.supervised]} for tokens in found]
    return {**_origin(prompt), "messages": prompt.messages, "rows": rows, "finished": True}


def _record(prompt: Prompt, request: Request, stage: Stage, reply_ids: list[int], finished: bool, temperature: float) -> dict[str, Any]:
    return {
        **question(prompt, request.prompt_ids, stage.config),
        "reply_ids": reply_ids,
        "finished": finished,
        "temperature": temperature,
    }


def question(prompt: Prompt, ids: list[int], config: Config) -> dict[str, Any]:
    """A prompt that is to be answered, as a row of a file; ``ids`` are its tokens as they are sent, ``template`` what else rendered it."""
    options = prompt_options(prompt, config)
    return {**_origin(prompt), "messages": _question(prompt), "prompt_ids": ids, **({"template": options} if options else {})}


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
        reply = record.get("reply_ids") or record["rows"][-1]["ids"]
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

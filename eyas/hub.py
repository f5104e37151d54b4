"""A model repository of the hub, of which only the files that are needed are fetched: Kimi-K2.5 is 600 GB, what training reads of it 5.

Opening it fetches config, tokenizer and the index of the shards. A shard comes when a tensor of it is read, all of them when the whole
model is loaded. Files land in the hub's own cache, where engines find them too.
"""

from pathlib import Path

from huggingface_hub import hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined] # of whichever library it asks with
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from eyas.errors import EyasError, first_line

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = "*.safetensors"
_FAULTS = (OSError, ValueError, EntryNotFoundError, HTTPError)


class HubFolder:
    """One repository at one commit, as far as it is on this machine.

    Args:
        repository: ``owner/name``.
        revision: branch, tag or commit; None takes the default branch.
        with_code: fetch its Python files too.

    Raises:
        EyasError: the hub does not give it.
    """

    def __init__(self, repository: str, revision: str | None, with_code: bool) -> None:
        self.repository = repository
        self.folder = self._snapshot(revision, [*SMALL, *(["*.py"] if with_code else [])])
        self.commit = self.folder.name

    def fetch(self, name: str) -> Path:
        """One file, fetched if it is not here. Raises EyasError when the repository has none of that name, or the hub does not answer."""
        try:
            return Path(hf_hub_download(self.repository, name, revision=self.commit))
        except _FAULTS as error:
            raise EyasError(f"cannot fetch {name} of {self.repository} from the hub: {first_line(error)}") from error

    def fetch_weights(self) -> None:
        """All safetensors files. Raises EyasError when the hub does not give them."""
        self._snapshot(self.commit, [WEIGHTS])

    def beginning(self, name: str, size: int) -> bytes:
        """The first ``size`` bytes of a file, without the rest of it. Raises EyasError when they cannot be had."""
        data = b""
        try:
            url = hf_hub_url(self.repository, name, revision=self.commit)
            headers = {**build_hf_headers(), "Range": f"bytes=0-{size - 1}"}
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) >= size:  # a server that knows no ranges would go on
                        break
        except _FAULTS as error:
            raise EyasError(f"cannot read {name} of {self.repository} on the hub: {first_line(error)}") from error
        return data[:size]

    def _snapshot(self, revision: str | None, patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(self.repository, revision=revision, allow_patterns=patterns))
        except _FAULTS as error:
            at = f" at revision {revision}" if revision else ""
            raise EyasError(f"{self.repository} is no local folder, and the hub does not give it{at}: {first_line(error)}") from error

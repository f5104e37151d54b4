"""Which files hold a model's weights, target or drafter: safetensors, by their index or by their ending. A pickle is never opened."""

from pathlib import Path

from eyas.errors import EyasError
from eyas.files import read_object

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in order of name; those of its index, if it has one.

    Raises EyasError when there is no such folder, its index is broken, a file of that is missing, or there are no safetensors weights.
    """
    if not folder.is_dir():
        raise EyasError(f"{folder} is {'no folder' if folder.exists() else 'not there'}: name a folder with *.safetensors weights")
    if (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(read_index(folder).values()))]
        if missing := [file.name for file in files if file.parent != folder or not file.is_file()]:
            raise EyasError(f"{folder} lacks {len(missing)} of its {len(files)} shards, the first is {missing[0]}: download it again")
        return files
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
        raise EyasError(f"{folder} has its weights only in {pickles[0]}, a pickle, which can run code when read: convert to safetensors")
    raise EyasError(f"{folder} has no *.safetensors weights")


def read_index(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, by the folder's index. Raises EyasError when it is broken."""
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise EyasError(f"{index} has no weight_map")
    return weight_map

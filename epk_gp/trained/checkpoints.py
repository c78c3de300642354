"""Checkpoints of a network as the states of a path, read one after another."""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

# A state dict, a file of one, or a folder written by transformers or Lightning.
Checkpoint = Mapping[str, Tensor] | str | os.PathLike[str]

_KEYS = ("state_dict", "model_state_dict", "model")  # keys of the weights in files with other content
_SUFFIXES = (".safetensors", ".ckpt", ".pth.tar", ".pt", ".pth", ".bin")  # suffixes of files with one checkpoint
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_COUNT = "num_batches_tracked"  # a counter that evaluation does not use
_OF_FOLDER = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")  # by transformers and PEFT

_WORDS = (  # words before a number of epochs, of steps, of a name's own count, or of another training
    "epoch epochs ep",
    "step steps iter iters iteration iterations update updates",
    "checkpoint ckpt model net network weights state snapshot ema",
    "v version run stage phase part",
)
_RANKS = {word: rank for rank, words in enumerate(_WORDS) for word in words.split()}
_DATE = re.compile(r"(?:0[1-9]|[12]\d|3[01]){2}(?:19|20)?\d\d")  # day and month in any order, then the year
_DATES = (lambda date: (date[4:], date[:4]), lambda date: (date[4:], date[2:4], date[:2]))


def listed(checkpoints: Any) -> list[Checkpoint]:
    """Return the checkpoints one by one; those of a folder in the order of their names.

    Raises:
        TypeError: They are not a sequence of state dicts and paths.
        ValueError: There are fewer than two, or the names in a folder do not give their order.
    """
    if isinstance(checkpoints, str | os.PathLike):
        folder = Path(checkpoints)
        inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder  # Lightning
        checkpoints = _in_order([path for path in inner.glob("checkpoint-*") if path.is_dir()] or _files(inner))
    if isinstance(checkpoints, Mapping) or not isinstance(checkpoints, Sequence):
        raise TypeError(f"checkpoints must be a sequence of them, or a folder: got {type(checkpoints).__name__}.")
    if len(checkpoints) < 2:
        raise ValueError(f"there must be at least two checkpoints, the first and the last: got {len(checkpoints)}.")
    for each in checkpoints:
        if not isinstance(each, Mapping | str | os.PathLike):
            raise TypeError(f"a checkpoint must be a state dict or a path: got {type(each).__name__}.")
    return list(checkpoints)


def _files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, without those of optimizers and similar ones."""
    found = [file for suffix in _SUFFIXES for file in folder.glob(f"*{suffix}")]
    return [file for file in found if not file.name.startswith(_NO_WEIGHTS)]


def _stem(path: Path) -> str:
    """Return the name of a checkpoint without the suffix of its file type."""
    return path.name.removesuffix(next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), ""))


def _in_order(paths: list[Path]) -> list[Path]:
    """Return checkpoints in the order of their epochs and steps.

    Raises:
        ValueError: Their names differ in other words, in other numbers, or in nothing that can be ordered.
    """
    if len(paths) < 2:
        return paths
    names = {path: re.split(r"(\d+(?:\.\d+)*)", _stem(path)) for path in sorted(paths)}  # words and numbers in turn
    first, *_, last = names.values()
    other = next((name for name in names.values() if name[::2] != first[::2]), last)
    ranks = dict[int, int | None]()
    for k in reversed(range(1, len(first), 2) if first[::2] == other[::2] else ()):
        if len({*(column := [name[k] for name in names.values()])}) > 1:
            ranks[k] = _rank(column, first[k - 1], first[k + 1], is_first=k == 1, is_last=k + 2 not in ranks)
    counts = sorted((rank, k) for k, rank in ranks.items() if rank is not None)
    if [rank for rank, _ in counts] in ([0], [1], [0, 1], [2]):
        numbers = {path: tuple(int(name[k]) for _, k in counts) for path, name in names.items()}
        if len({*numbers.values()}) == len(paths):
            return sorted(paths, key=numbers.__getitem__)
    differ = " and ".join(f"{a!r} / {b!r}" for a, b in zip(first, other, strict=False) if a != b) or "nothing"
    raise ValueError(
        "the names of checkpoints in a folder must tell their order, by a number of epochs or steps alone, or by both: "
        f"{''.join(first)!r} and {''.join(other)!r} differ in {differ}. Pass a list of those that are meant, in the "
        "order of training."
    )


def _rank(numbers: list[str], before: str, after: str, *, is_first: bool, is_last: bool) -> int | None:
    """Return the kind of a number in names: epochs (0), steps (1), the name's own count (2), something else (3).

    Decimal numbers with a name, such as a loss, are None: they count nothing. Words after a number belong to it, as in
    90_acc, unless they precede another number that is not the same in all names.
    """
    words = re.findall(r"[^\W\d_]+(?=[\W_]*$)", before.lower())
    if not all(map(str.isdigit, numbers)):
        is_measured = words and words[0] not in _RANKS and all(number.count(".") <= 1 for number in numbers)
        return None if is_measured else 3
    rank = _RANKS.get(words[0], 3) if words else 3 if before or not is_first else 2
    are_dates = all(map(_DATE.fullmatch, numbers)) and any(sorted(numbers, key=d) != sorted(numbers) for d in _DATES)
    own = re.findall(r"[^\W\d_]+", after.lower()) if is_last or after[:1].isalpha() else []
    return 3 if rank == 2 and (any(_RANKS.get(word, 3) == 3 for word in own) or are_dates) else rank


def titles_of(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a distinct name for each checkpoint."""
    titles = list[str]()
    for k, each in enumerate(checkpoints):
        path = None if isinstance(each, Mapping) else Path(each)
        titles.append(f"state {k}" if path is None else _stem(path) or str(path))
    for k, each in enumerate(checkpoints):
        if titles.count(titles[k]) > 1 and not isinstance(each, Mapping):
            titles[k] = f"{Path(each).parent.name}/{Path(each).name}"
    return tuple(title if titles.count(title) == 1 else f"{title} ({k})" for k, title in enumerate(titles))


def read(checkpoint: Any) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; tensors of a file stay on disk until they are used.

    Raises:
        FileNotFoundError: The checkpoint does not exist.
        ValueError: The file is damaged, or contains other objects than tensors.
    """
    if isinstance(checkpoint, str | os.PathLike):
        return _read_path(Path(checkpoint))
    inner = next((checkpoint[key] for key in _KEYS if isinstance(checkpoint.get(key), Mapping)), checkpoint)
    return {name: value for name, value in inner.items() if isinstance(value, Tensor)}


def _read_path(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        index = next(iter(sorted(path.glob("*.index.json"))), None)
        if index is not None:  # split into several files
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            return {name: value for file in files for name, value in _read_path(path / file).items()}
        named = [path / name for name in _OF_FOLDER if (path / name).is_file()]
        found = named[:1] or _files(path)
        if len(found) != 1:
            raise FileNotFoundError(f"{path} must hold the weights of one checkpoint: it holds {len(found)} files.")
        return _read_path(found[0])
    if not path.exists():
        raise FileNotFoundError(f"a checkpoint must exist: there is no {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        is_mapped = zipfile.is_zipfile(path)  # torch's format since 1.6
        return read(torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped))
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} must hold weights that torch or safetensors wrote: {error}") from error
    except Exception as error:  # from pickle: the file contains other objects than tensors
        raise ValueError(
            f"{path} must hold nothing but tensors and numbers: it holds other objects. If you trust it, pass what "
            'torch.load(path, weights_only=False)["state_dict"] returns, or .state_dict() of a whole network.'
        ) from error


def _of_adapter(name: str) -> str:
    """Return the name of a parameter in PEFT's own files: without the adapter's name."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


class Named:
    """The tensors of checkpoints by the network's names.

    Names in the checkpoint may have a common prefix, such as "module." of DistributedDataParallel or "net." of a
    LightningModule; a parameter that occurs twice in the network may be stored under either name.

    Args:
        net: The network.
        checkpoints: The checkpoints.
    """

    def __init__(self, net: nn.Module, checkpoints: Sequence[Checkpoint]) -> None:
        self.checkpoints, self._names = checkpoints, dict[int, list[str]]()
        self.titles = titles_of(checkpoints)
        every = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        for name, value in every:
            self._names.setdefault(id(value), []).append(name)
        self._own = {name: (value.shape, value.dtype) for name, value in every}
        self.needed = {name for name, p in net.named_parameters() if p.requires_grad}
        owners = {name.rpartition(".")[0] for name in self.needed}
        moved = {n for n, b in net.named_buffers() if b.is_floating_point() and n.rpartition(".")[0] in owners}
        self._places = {name: value.data_ptr() for name, value in every if name in self.needed | moved}
        self._stored = net.state_dict().keys()
        self._known = self._stored | {alias for name in self._own for alias in (name, _of_adapter(name))}
        surplus = getattr(net, "_keys_to_ignore_on_load_unexpected", None) or ()  # from transformers' older versions
        self._surplus = re.compile("|".join([f"{_COUNT}$", *surplus]))
        self._reader: Callable[[int], dict[str, Tensor]] = self._read

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        """Read the k-th checkpoint, by the network's names.

        Raises:
            ValueError: A tensor is missing or superfluous, as for `load_state_dict`, or has another shape or dtype than
                the network's. In a file of PEFT the base may be missing.
        """
        return self._reader(k)

    def _read(self, k: int) -> dict[str, Tensor]:
        stored, where = read(self.checkpoints[k]), f"checkpoint {self.titles[k]!r}"
        stored = {name.replace("_orig_mod.", ""): value for name, value in stored.items()}  # from torch.compile
        some, matches = min(self.needed, default=""), list[tuple[str, dict[str, Tensor]]]()
        ends = (f".{some}", f".{_of_adapter(some)}")
        begins = {name[: 1 + len(name) - len(end)] for end in ends for name in stored if f".{name}".endswith(end)}
        for begin in sorted(begins, key=lambda begin: (len(begin), begin)) or [""]:
            found = dict[str, Tensor]()
            for names in self._names.values():
                aliases = {begin + alias for name in names for alias in (name, _of_adapter(name))}
                own = [stored[alias] for alias in aliases if alias in stored]
                if any(not torch.equal(own[0], other) for other in own[1:]):
                    raise ValueError(
                        f"{where} must hold one value of weights that the network shares: {names[0]!r} and "
                        f"{names[-1]!r} have different ones."
                    )
                found |= dict.fromkeys(names, own[0]) if own else {}
            matches.append((begin, found))
        whole = [match for match in matches if self.needed <= match[1].keys()]
        begin, found = (whole or matches)[0]
        if any(not torch.equal(found[name], other[name]) for _, other in whole[1:] for name in found.keys() & other):
            raise ValueError(
                f"{where} must hold one network: it has {len(whole)} with all of these parameters, such as an average "
                "of the weights beside them. Pass the state dict of the one that is meant."
            )
        is_adapter = any(begin + _of_adapter(n) in stored and begin + n not in stored for n in self.needed)
        required = self.needed if is_adapter else self.needed | (self._stored & self._own.keys())
        missing = sorted(name for name in required - found.keys() if not name.endswith(_COUNT))
        if missing:
            other = ", ".join(sorted(stored)[:3]) or "nothing"
            raise ValueError(
                f"{where} must have all parameters and buffers of the network: {missing[0]!r} is missing, one of "
                f"{len(missing)}. It has {other}, ... If the network's own are meant, such as a frozen base, pass "
                "{**net.state_dict(), **checkpoint}."
            )
        used = {at + name for at, _ in whole for name in self._known}
        left = [name for name in stored.keys() - used if name.startswith(begin) and not self._surplus.search(name)]
        if left:
            raise ValueError(
                f"{where} must be of this network, which has no {min(left)!r}: it is left over, one of {len(left)}. "
                "Pass the network that was trained."
            )
        for name, value in found.items():
            shape, dtype = self._own[name]
            if value.shape != shape:
                got = f"{tuple(value.shape)}, the network's {tuple(shape)}"
                raise ValueError(f"{where} must have tensors of the network's shapes: {name!r} has {got}.")
            if value.dtype != dtype:
                raise ValueError(
                    f"{where} must have the dtype of the network: {name!r} has {value.dtype}, the network's "
                    f"{dtype}. Convert the network, net.to({value.dtype}), or the checkpoint."
                )
            if name in self.needed and not value.isfinite().all():
                raise ValueError(f"{where} must hold finite numbers: {name!r} has NaN or infinity.")
        return found

    def at_first(self, net: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
        """Return a copy of a network at the first checkpoint, and the names of the buffers that change after it.

        The frozen base of adapters, which PEFT's files do not contain, is the network's own.

        Raises:
            ValueError: A frozen parameter, or an integer buffer, differs in a later checkpoint; or checkpoints share
                the memory of trained tensors.
        """
        copied = deepcopy(net)
        own, buffers, first = dict(copied.named_parameters()), dict(copied.named_buffers()), self[0]
        constants = {name: value for name, value in (own | buffers).items() if name not in self.needed}
        with torch.no_grad():
            for name in (own | buffers).keys() & first.keys():
                (own | buffers)[name].copy_(first[name])
        moving, places = set[str](), dict[int, int]()
        for k in range(len(self.checkpoints)):
            here = self[k]
            self._require_copies(net, k, here, places)
            kept = [name for name in here.keys() & constants.keys() if not name.endswith(_COUNT)]
            changed = {name for name in kept if not torch.equal(here[name].to(constants[name]), constants[name])}
            if fixed := sorted(n for n in changed if n not in buffers or not buffers[n].is_floating_point()):
                raise ValueError(
                    "frozen parameters and buffers of whole numbers must be the same in all checkpoints: "
                    f"{fixed[0]!r} is another one in {self.titles[k]!r}. Call requires_grad_(True) of parameters that "
                    "were trained."
                )
            moving |= changed
        if moving:  # weights and statistics of a state are read in turn
            self._reader = lru_cache(maxsize=1)(self._read)
        return copied, tuple(name for name in buffers if name in moving)

    def _require_copies(self, net: nn.Module, k: int, here: Mapping[str, Tensor], places: dict[int, int]) -> None:
        """Raise if trained tensors share the memory of another state, or of a network that was trained since.

        Statistics are trained if a parameter of their own module is. A state that is passed twice is not another state.
        """
        if not isinstance(self.checkpoints[k], Mapping):
            return
        trained = {name: here[name].data_ptr() for name in here.keys() & self._places if here[name].numel()}
        others = {name: places.setdefault(place, k) for name, place in trained.items()}
        shared = {n: repr(self.titles[j]) for n, j in others.items() if self.checkpoints[j] is not self.checkpoints[k]}
        live = [name for name, place in trained.items() if place == self._places[name]]
        if live and k + 1 < len(self.checkpoints):
            last = self[len(self.checkpoints) - 1]
            if any(p.grad is not None for p in net.parameters()) or all(here[n].equal(last[n]) for n in live):
                shared |= dict.fromkeys(live, "the network, which was trained since")
        if shared:
            name, other = min(shared.items())
            raise ValueError(
                f"checkpoints must be copies: {name!r} of {self.titles[k]!r} lies in the memory of {other}. Use "
                "copy.deepcopy(net.state_dict())."
            )


@dataclass(frozen=True, eq=False)
class CheckpointStates:
    """States of a path that are read from checkpoints: weights, or moving statistics.

    Attributes:
        named: The checkpoints.
        flatten: Joins named tensors to one vector.
    """

    named: Named
    flatten: Callable[[Mapping[str, Tensor]], Tensor]

    def __len__(self) -> int:
        """Count the checkpoints."""
        return len(self.named.checkpoints)

    def __getitem__(self, state: int) -> Float[Tensor, " n"]:
        """Read one checkpoint."""
        return self.flatten(self.named[state % len(self)])

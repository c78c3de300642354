"""Checkpoints of a network as the states of a path, read one after another."""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from epk_gp.core.show import warn_caller

# A state dict, a file of one, or a folder that transformers or Lightning wrote.
Checkpoint = Mapping[str, Tensor] | str | os.PathLike[str]

_KEYS = ("state_dict", "model_state_dict", "model")  # under which others keep the weights beside their own things
_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
_FILES = tuple(f"*{suffix}" for suffix in _SUFFIXES)  # of one checkpoint
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_OF_FOLDER = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")  # as transformers and PEFT write


def listed(checkpoints: Any) -> list[Checkpoint]:
    """Return the checkpoints one by one, those of a folder in the order of the numbers in their names.

    Raises:
        TypeError: They are no sequence of state dicts and paths.
        ValueError: There are fewer than two, or the numbers of steps in their names do not ascend.
    """
    if isinstance(checkpoints, str | os.PathLike):
        folder = Path(checkpoints)
        inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder  # Lightning
        paths = [*inner.glob("checkpoint-*")] or _files(inner)
        if unnumbered := [path.name for path in paths if _number(path) is None]:
            raise ValueError(
                f"checkpoints of a folder must have numbers in their names, by which they are ordered: {unnumbered[0]} "
                f"in {inner} has none. Pass a list of those that are meant, in the order of training."
            )
        checkpoints = sorted(paths, key=lambda path: (_number(path), path.name))
    if isinstance(checkpoints, Mapping) or not isinstance(checkpoints, Sequence):
        raise TypeError(f"checkpoints must be a sequence of them, or a folder: got {type(checkpoints).__name__}.")
    if len(checkpoints) < 2:
        raise ValueError(f"there must be at least two checkpoints, the first and the last: got {len(checkpoints)}.")
    for each in checkpoints:
        if not isinstance(each, Mapping | str | os.PathLike):
            raise TypeError(f"a checkpoint must be a state dict or a path: got {type(each).__name__}.")
    places = {id(c): tuple(map(Tensor.data_ptr, read(c).values())) for c in checkpoints if isinstance(c, Mapping)}
    if any(a and a == b for a, b in combinations(places.values(), 2)):
        raise ValueError("checkpoints must be copies: two share their memory. Use copy.deepcopy(net.state_dict()).")
    numbers = [None if isinstance(each, Mapping) else _number(Path(each)) for each in checkpoints]
    for (before, after), titles in zip(pairwise(numbers), pairwise(titles_of(checkpoints)), strict=True):
        if before is not None and after is not None and before > after:
            raise ValueError(
                f"checkpoints must be in the order of training: {titles[0]} comes before {titles[1]}. Sort them by "
                "their numbers, or rename them."
            )
    return list(checkpoints)


def _files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, without those of optimizers and the like."""
    found = [file for kind in _FILES for file in sorted(folder.glob(kind))]
    return [file for file in found if not file.name.startswith(_NO_WEIGHTS)]


def _number(path: Path) -> int | None:
    """Return the number of steps, or of epochs, in the name of a checkpoint; None of a name without.

    A number behind a dot or "=" is a metric's, but that of steps and epochs.
    """
    name = path.stem if path.suffix in _SUFFIXES else path.name
    ways = (r"step[=_-]?(\d+)", r"epoch[=_-]?(\d+)", r"(?:^|[^\d.=])(\d+)$", r"^(\d+)")
    found = next((match for way in ways if (match := re.search(way, name))), None)
    return None if found is None else int(found[1])


def titles_of(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return what the checkpoints are called: each by another name."""
    titles = list[str]()
    for k, each in enumerate(checkpoints):
        path = None if isinstance(each, Mapping) else Path(each)
        titles.append(
            f"state {k}" if path is None else path.stem if path.suffix in _SUFFIXES else path.name or str(path)
        )
    for k, each in enumerate(checkpoints):
        if titles.count(titles[k]) > 1 and not isinstance(each, Mapping):
            titles[k] = f"{Path(each).parent.name}/{Path(each).name}"
    return tuple(title if titles.count(title) == 1 else f"{title} ({k})" for k, title in enumerate(titles))


def read(checkpoint: Any) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; those of a file stay on disk until they are used.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The file is damaged, or holds something else than tensors.
    """
    if isinstance(checkpoint, str | os.PathLike):
        return _read_path(Path(checkpoint))
    inner = next((checkpoint[key] for key in _KEYS if isinstance(checkpoint.get(key), Mapping)), checkpoint)
    return {name: value for name, value in inner.items() if isinstance(value, Tensor)}


def _read_path(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        index = next(iter(sorted(path.glob("*.index.json"))), None)
        if index is not None:  # of several files
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
    except Exception as error:  # pickle's: it holds other objects than tensors
        raise ValueError(
            f"{path} must hold nothing but tensors and numbers: it holds other objects. If you trust it, pass what "
            'torch.load(path, weights_only=False)["state_dict"] returns, or .state_dict() of a whole network.'
        ) from error


class Named:
    """The tensors of checkpoints by the names that a network has for them.

    Names may have a common beginning in the checkpoint, as "module." of DistributedDataParallel or "net." of a
    LightningModule; a parameter that the network has twice may be stored under either name.

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
        self._reader: Callable[[int], dict[str, Tensor]] = self._read

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        """Read the k-th checkpoint, by the network's names.

        Raises:
            ValueError: A trained parameter is missing, or a tensor has another shape or dtype than the network's.
        """
        return self._reader(k)

    def _read(self, k: int) -> dict[str, Tensor]:
        stored, where = read(self.checkpoints[k]), f"checkpoint {self.titles[k]!r}"
        stored = {name.replace("_orig_mod.", ""): value for name, value in stored.items()}  # of torch.compile
        some, matches = next(iter(sorted(self.needed))), list[dict[str, Tensor]]()
        ends = (some, some.replace(".default.", "."))  # PEFT leaves the adapter's name out
        begins = {name.removesuffix(end) for end in ends for name in stored if name.endswith(end)}
        for begin in sorted(begins, key=lambda begin: (len(begin), begin)) or [""]:
            found = dict[str, Tensor]()
            for names in self._names.values():
                aliases = [begin + alias for name in names for alias in (name, name.replace(".default.", "."))]
                own = list({alias: stored[alias] for alias in aliases if alias in stored}.values())
                if any(not torch.equal(own[0], other) for other in own[1:]):
                    raise ValueError(
                        f"{where} must hold one value of weights that the network shares: {names[0]!r} and "
                        f"{names[-1]!r} have different ones."
                    )
                found |= dict.fromkeys(names, own[0]) if own else {}
            matches.append(found)
        whole = [found for found in matches if self.needed <= found.keys()]
        if any(not torch.equal(whole[0][name], other[name]) for other in whole[1:] for name in self.needed):
            raise ValueError(
                f"{where} must hold one network: it has {len(whole)} with all of these parameters, such as an average "
                "of the weights beside them. Pass the state dict of the one that is meant."
            )
        found = (whole or matches)[0]
        missing = sorted(self.needed - found.keys())
        if missing:
            other = ", ".join(sorted(stored)[:3]) or "nothing"
            raise ValueError(
                f"{where} must have all trained parameters of the network: {missing[0]!r} is missing, one of "
                f"{len(missing)}. It has {other}, ... Freeze what it need not have: p.requires_grad_(False)."
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
        """Return a copy of a network at the first checkpoint, and the names of the buffers that move after it.

        What no checkpoint has is the network's own, such as the frozen base of adapters; of buffers it says so.

        Raises:
            ValueError: A frozen parameter, or a buffer of whole numbers, is another one in a later checkpoint; or some
                checkpoints have one and others have not.
        """
        copied = deepcopy(net)
        own, buffers, first = dict(copied.named_parameters()), dict(copied.named_buffers()), self[0]
        constants = {name: value for name, value in (own | buffers).items() if name not in self.needed}
        kept = {name for name in constants if name in first}
        with torch.no_grad():
            for name in (own | buffers).keys() & first.keys():
                (own | buffers)[name].copy_(first[name])
        moving, stored = set[str](), net.state_dict().keys()
        for k in range(1, len(self.checkpoints)):
            here = self[k]
            if odd := sorted(kept ^ (here.keys() & constants.keys())):
                raise ValueError(
                    f"all checkpoints must have the same frozen parameters and buffers: {odd[0]!r} is in one of "
                    f"{self.titles[0]!r} and {self.titles[k]!r} alone."
                )
            changed = {name for name in kept if not torch.equal(here[name].to(constants[name]), constants[name])}
            changed = {name for name in changed if not name.endswith("num_batches_tracked")}
            if fixed := sorted(n for n in changed if n not in buffers or not buffers[n].is_floating_point()):
                raise ValueError(
                    "frozen parameters and buffers of whole numbers must be the same in all checkpoints: "
                    f"{fixed[0]!r} is another one in {self.titles[k]!r}. Call requires_grad_(True) of parameters that "
                    "were trained."
                )
            moving |= changed
        absent = sorted(n for n in buffers.keys() & stored - kept if not n.endswith("num_batches_tracked"))
        if absent:
            warn_caller(f"the checkpoints have no buffer {absent[0]!r}: that of the network you pass is taken.")
        if moving:  # weights and statistics of a state are read one after the other
            self._reader = lru_cache(maxsize=1)(self._read)
        return copied, tuple(name for name in buffers if name in moving)


@dataclass(frozen=True, eq=False)
class CheckpointStates:
    """States of a path that are read from checkpoints: weights, or moving statistics.

    Attributes:
        named: The checkpoints.
        flatten: Makes one vector of named tensors.
    """

    named: Named
    flatten: Callable[[Mapping[str, Tensor]], Tensor]

    def __len__(self) -> int:
        """Count the checkpoints."""
        return len(self.named.checkpoints)

    def __getitem__(self, state: int) -> Float[Tensor, " n"]:
        """Read one."""
        return self.flatten(self.named[state % len(self)])

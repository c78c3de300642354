"""Checkpoints of a network as the states of a path, read one after another."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

# A state dict, a file of one, or a folder that transformers or Lightning wrote.
Checkpoint = Mapping[str, Tensor] | str | os.PathLike[str]

_KEYS = ("state_dict", "model_state_dict", "model")  # under which others keep the weights beside their own things
_FILES = ("*.safetensors", "*.ckpt", "*.pt", "*.pth", "*.bin")  # of one checkpoint
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
        paths = [*inner.glob("checkpoint-*"), *(file for kind in _FILES for file in inner.glob(kind))]
        paths.sort(key=lambda path: (_number(path) is None, _number(path) or 0, path.name))
        checkpoints = paths
    if isinstance(checkpoints, Mapping) or not isinstance(checkpoints, Sequence):
        raise TypeError(f"checkpoints must be a sequence of them, or a folder: got {type(checkpoints).__name__}.")
    if len(checkpoints) < 2:
        raise ValueError(f"there must be at least two checkpoints, the first and the last: got {len(checkpoints)}.")
    for each in checkpoints:
        if not isinstance(each, Mapping | str | os.PathLike):
            kind = type(each).__name__
            raise TypeError(f"a checkpoint must be a state dict, or the path of a file or folder: got {kind}.")
    numbers = [None if isinstance(each, Mapping) else _number(Path(each)) for each in checkpoints]
    for k, (before, after) in enumerate(pairwise(numbers)):
        if before is not None and after is not None and before > after:
            raise ValueError(
                "checkpoints must be in the order of training: "
                f"{name_of(checkpoints[k], k)} comes before {name_of(checkpoints[k + 1], k + 1)}. Sort them by their "
                "numbers, or rename them."
            )
    return list(checkpoints)


def _number(path: Path) -> int | None:
    """Return the number of steps in the name of a checkpoint: the last one; None of a name without."""
    found = re.findall(r"step[=_-]?(\d+)", path.name) or re.findall(r"\d+", path.name)
    return int(found[-1]) if found else None


def name_of(checkpoint: Checkpoint, k: int) -> str:
    """Return what the k-th checkpoint is called."""
    return f"state {k}" if isinstance(checkpoint, Mapping) else Path(checkpoint).stem or str(checkpoint)


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
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return {name: value for file in files for name, value in _read_path(path / file).items()}
        named = [path / name for name in _OF_FOLDER if (path / name).is_file()]
        found = named[:1] or [file for kind in _FILES for file in sorted(path.glob(kind))]
        if len(found) != 1:
            raise FileNotFoundError(
                f"{path} must hold the weights of one checkpoint: it holds {len(found)} files of such."
            )
        return _read_path(found[0])
    if not path.exists():
        raise FileNotFoundError(f"a checkpoint must exist: there is no {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return read(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} must hold weights that torch or safetensors wrote: {error}") from error
    except Exception as error:  # pickle's: it holds other objects than tensors
        raise ValueError(
            f"{path} must hold nothing but tensors and numbers: {str(error).splitlines()[0]} Pass its state dict: "
            'torch.load(path, weights_only=False)["state_dict"], of a file that you trust.'
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
        self.titles = tuple(name_of(each, k) for k, each in enumerate(checkpoints))
        every = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        for name, value in every:
            self._names.setdefault(id(value), []).append(name)
        self._own = {name: (value.shape, value.dtype) for name, value in every}
        self.needed = {name for name, p in net.named_parameters() if p.requires_grad}
        self.holds_last = False  # where a state is read twice
        self._last: tuple[int, dict[str, Tensor]] = -1, {}

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        """Read the k-th checkpoint, by the network's names.

        Raises:
            ValueError: A trained parameter is missing, or a tensor has another shape or dtype than the network's.
        """
        if self._last[0] == k:
            return self._last[1]
        found = self._read(k)
        if self.holds_last:
            self._last = k, found
        return found

    def _read(self, k: int) -> dict[str, Tensor]:
        stored, where = read(self.checkpoints[k]), f"checkpoint {self.titles[k]!r}"
        stored = {name.replace("_orig_mod.", ""): value for name, value in stored.items()}  # of torch.compile
        some, matches = next(iter(sorted(self.needed))), list[dict[str, Tensor]]()
        for begin in sorted({name.removesuffix(some) for name in stored if name.endswith(some)}, key=len) or [""]:
            found = dict[str, Tensor]()
            for names in self._names.values():
                own = [stored[begin + name] for name in names if begin + name in stored]
                found |= dict.fromkeys(names, own[0]) if own else {}
            matches.append(found)
        whole = [found for found in matches if self.needed <= found.keys()]
        if len(whole) > 1 and any(not torch.equal(whole[0][some], other[some]) for other in whole[1:]):
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
            if not value.isfinite().all():
                raise ValueError(f"{where} must hold finite numbers: {name!r} has NaN or infinity.")
        return found

    def at_first(self, net: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
        """Return a copy of a network at the first checkpoint, and the names of the buffers that move after it.

        Raises:
            ValueError: A frozen parameter is another one in a later checkpoint.
        """
        copied = deepcopy(net)
        own = dict(copied.named_parameters()) | dict(copied.named_buffers())
        first = {name: value for name, value in self[0].items() if name in own}
        with torch.no_grad():
            for name, value in first.items():
                own[name].copy_(value)
        frozen = {name: own[name].detach().clone() for name in first if name not in self.needed}
        buffers, moving = dict(copied.named_buffers()), set[str]()
        for k in range(1, len(self.checkpoints)):
            here = self[k]
            changed = {
                name for name, value in frozen.items() if name in here and not torch.equal(here[name].to(value), value)
            }
            if fixed := sorted(changed - buffers.keys()):
                raise ValueError(
                    f"frozen parameters must be the same in all checkpoints: {fixed[0]!r} is another one in "
                    f"{self.titles[k]!r}. Call requires_grad_(True) of those that were trained."
                )
            moving |= {name for name in changed if buffers[name].is_floating_point()}
        self.holds_last = bool(moving)
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

"""Callbacks that record the training loops of PyTorch Lightning and Hugging Face.

`RecorderCallback` (also `LightningRecorderCallback`) is for `pytorch_lightning.Trainer`, and needs the extra
`lightning`. `HuggingFaceRecorderCallback` is for `transformers.Trainer`, and needs the extra `huggingface`.
`IndexedDataset` gives either the indices of a batch's rows.
"""

from importlib import import_module

from epk_gp.callbacks import IndexedDataset

__all__ = [  # noqa: F822  # callbacks are imported by __getattr__
    "HuggingFaceRecorderCallback",
    "IndexedDataset",
    "LightningRecorderCallback",
    "RecorderCallback",
]

# name of the callback: its module, its name there, and the package and extra that it needs
_CALLBACKS = {
    "RecorderCallback": ("lightning", "RecorderCallback", "pytorch_lightning"),
    "LightningRecorderCallback": ("lightning", "RecorderCallback", "pytorch_lightning"),
    "HuggingFaceRecorderCallback": ("huggingface", "HuggingFaceRecorderCallback", "transformers"),
}


def __getattr__(name: str) -> object:
    """Import a callback when it is first used (PEP 562): nobody needs the packages of all of them."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, package = _CALLBACKS[name]
    try:
        callback: object = getattr(import_module(f"epk_gp.recording.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{name} needs the package {package}: it is not installed. Run pip install 'epk-gp[{module}]'.",
            name=error.name,
        ) from error
    return callback


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)

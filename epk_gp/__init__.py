"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epk_gp.analysis.labels import label_errors, next_to_label
    from epk_gp.core.checks import ComputeOptions
    from epk_gp.core.graphs import Graph
    from epk_gp.core.inputs import Points
    from epk_gp.core.losses import CrossEntropy, MeanSquaredError, PerSampleLoss
    from epk_gp.core.show import CertificateWarning
    from epk_gp.core.trajectory import Trajectory, network_outputs
    from epk_gp.gp.models import LogitGP
    from epk_gp.gp.softmax import softmax_uncertainty
    from epk_gp.gp.uncertain_classifier import UncertainClassifier
    from epk_gp.gram.path_features import path_features
    from epk_gp.gram.path_kernel import PathKernel, gram_block
    from epk_gp.kernel_machine.attribute import attribute
    from epk_gp.kernel_machine.influence import Smoothing, influence, self_influence
    from epk_gp.kernel_machine.reconstruct import reconstruct
    from epk_gp.kernel_machine.retrain import retrain
    from epk_gp.kernels.epk import EPKKernel
    from epk_gp.kernels.tagging import test_copy, train_copy
    from epk_gp.quadrature.rules import (
        adaptive,
        chords,
        gauss_legendre,
        layerwise,
        left_endpoint,
        left_riemann,
        midpoint,
        straight,
    )
    from epk_gp.recording.causes import StepMismatchError
    from epk_gp.recording.recorder import Recorder
    from epk_gp.recording.train import train
    from epk_gp.report.write import write_report
    from epk_gp.storage.run import load_trajectory
    from epk_gp.storage.writer import Storage
else:
    # The same names, imported when they are first used (PEP 562): PyTorch and GPyTorch take seconds to import, and
    # `epk-gp --help` needs neither of them.
    _MODULES = {
        "analysis.labels": ("label_errors", "next_to_label"),
        "core.graphs": ("Graph",),
        "core.inputs": ("Points",),
        "core.losses": ("CrossEntropy", "MeanSquaredError", "PerSampleLoss"),
        "core.checks": ("ComputeOptions",),
        "core.show": ("CertificateWarning",),
        "core.trajectory": ("Trajectory", "network_outputs"),
        "gp.models": ("LogitGP",),
        "gp.softmax": ("softmax_uncertainty",),
        "gp.uncertain_classifier": ("UncertainClassifier",),
        "gram.path_features": ("path_features",),
        "gram.path_kernel": ("PathKernel", "gram_block"),
        "kernel_machine.attribute": ("attribute",),
        "kernel_machine.influence": ("Smoothing", "influence", "self_influence"),
        "kernel_machine.reconstruct": ("reconstruct",),
        "kernel_machine.retrain": ("retrain",),
        "kernels.epk": ("EPKKernel",),
        "kernels.tagging": ("test_copy", "train_copy"),
        "quadrature.rules": (
            "adaptive",
            "chords",
            "gauss_legendre",
            "layerwise",
            "left_endpoint",
            "left_riemann",
            "midpoint",
            "straight",
        ),
        "recording.causes": ("StepMismatchError",),
        "recording.recorder": ("Recorder",),
        "recording.train": ("train",),
        "storage.run": ("load_trajectory",),
        "storage.writer": ("Storage",),
    }

    def __getattr__(name: str) -> object:
        """Import all public names if one is asked for, or a folder."""
        if name == "write_report":  # imported by itself, for it needs matplotlib
            globals()[name] = import_module("epk_gp.report.write").write_report
            return globals()[name]
        if name not in __all__ and (name.startswith("_") or find_spec(f"epk_gp.{name}") is None):
            raise AttributeError(f"module 'epk_gp' has no attribute {name!r}")
        # all of them, so that `import epk_gp` is enough for epk_gp.gp.models.LogitGP, whatever was used before it
        for module, names in _MODULES.items():
            globals().update({public: getattr(import_module(f"epk_gp.{module}"), public) for public in names})
        return globals()[name] if name in globals() else import_module(f"epk_gp.{name}")

    def __dir__() -> list[str]:
        """List the public names and folders, imported or not."""
        folders = {module.partition(".")[0] for module in _MODULES}
        return sorted({*__all__, *folders, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.2.0.dev0"

__all__ = [
    "CertificateWarning",
    "ComputeOptions",
    "CrossEntropy",
    "EPKKernel",
    "Graph",
    "LogitGP",
    "MeanSquaredError",
    "PathKernel",
    "PerSampleLoss",
    "Points",
    "Recorder",
    "Smoothing",
    "StepMismatchError",
    "Storage",
    "Trajectory",
    "UncertainClassifier",
    "adaptive",
    "attribute",
    "chords",
    "gauss_legendre",
    "gram_block",
    "influence",
    "label_errors",
    "left_endpoint",
    "left_riemann",
    "load_trajectory",
    "layerwise",
    "midpoint",
    "network_outputs",
    "next_to_label",
    "path_features",
    "reconstruct",
    "retrain",
    "self_influence",
    "softmax_uncertainty",
    "straight",
    "test_copy",
    "train",
    "train_copy",
    "write_report",
]

"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epk_gp.analysis.labels import label_errors, next_to_label
    from epk_gp.core.inputs import Graph, Points
    from epk_gp.core.losses import CrossEntropy, MeanSquaredError, PerSampleLoss
    from epk_gp.core.options import ComputeOptions
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
    from epk_gp.kernels.tagging import split_copy, test_copy, train_copy
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
        "CertificateWarning": "core.show",
        "ComputeOptions": "core.options",
        "CrossEntropy": "core.losses",
        "EPKKernel": "kernels.epk",
        "Graph": "core.inputs",
        "LogitGP": "gp.models",
        "MeanSquaredError": "core.losses",
        "PathKernel": "gram.path_kernel",
        "PerSampleLoss": "core.losses",
        "Points": "core.inputs",
        "Recorder": "recording.recorder",
        "Smoothing": "kernel_machine.influence",
        "StepMismatchError": "recording.causes",
        "Storage": "storage.writer",
        "Trajectory": "core.trajectory",
        "UncertainClassifier": "gp.uncertain_classifier",
        "adaptive": "quadrature.rules",
        "attribute": "kernel_machine.attribute",
        "chords": "quadrature.rules",
        "gauss_legendre": "quadrature.rules",
        "gram_block": "gram.path_kernel",
        "influence": "kernel_machine.influence",
        "label_errors": "analysis.labels",
        "left_endpoint": "quadrature.rules",
        "left_riemann": "quadrature.rules",
        "load_trajectory": "storage.run",
        "layerwise": "quadrature.rules",
        "midpoint": "quadrature.rules",
        "network_outputs": "core.trajectory",
        "next_to_label": "analysis.labels",
        "path_features": "gram.path_features",
        "reconstruct": "kernel_machine.reconstruct",
        "retrain": "kernel_machine.retrain",
        "self_influence": "kernel_machine.influence",
        "softmax_uncertainty": "gp.softmax",
        "split_copy": "kernels.tagging",
        "straight": "quadrature.rules",
        "test_copy": "kernels.tagging",
        "train": "recording.train",
        "train_copy": "kernels.tagging",
    }
    _DRAWING = {"write_report": "report.write"}  # imported by itself, for it needs matplotlib
    _FOLDERS = (
        "analysis",
        "autodiff",
        "callbacks",
        "core",
        "gp",
        "gram",
        "kernel_machine",
        "kernels",
        "quadrature",
        "report",
        "storage",
        "training",
    )

    def __getattr__(name: str) -> object:
        """Import all public names if one is asked for, or a folder."""
        if name in _DRAWING:
            globals()[name] = getattr(import_module(f"epk_gp.{_DRAWING[name]}"), name)
            return globals()[name]
        if name not in _MODULES and name not in _FOLDERS:
            raise AttributeError(f"module 'epk_gp' has no attribute {name!r}")
        # all of them, so that `import epk_gp` is enough for epk_gp.gp.models.LogitGP, whatever was used before it
        modules = {module: import_module(f"epk_gp.{module}") for module in sorted(set(_MODULES.values()))}
        globals().update({public: getattr(modules[module], public) for public, module in _MODULES.items()})
        return globals()[name] if name in globals() else import_module(f"epk_gp.{name}")

    def __dir__() -> list[str]:
        """List the public names and folders, imported or not."""
        return sorted({*__all__, *_FOLDERS, *(name for name in globals() if name.startswith("__"))})


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
    "split_copy",
    "straight",
    "test_copy",
    "train",
    "train_copy",
    "write_report",
]

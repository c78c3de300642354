"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epk_gp.analysis.labels import label_errors as label_errors
    from epk_gp.analysis.labels import next_to_label as next_to_label
    from epk_gp.analysis.score_check import check_scores as check_scores
    from epk_gp.autodiff.scalars import RowFunction as RowFunction
    from epk_gp.core.graphs import Graph as Graph
    from epk_gp.core.graphs import Ragged as Ragged
    from epk_gp.core.inputs import Points as Points
    from epk_gp.core.losses import CrossEntropy as CrossEntropy
    from epk_gp.core.losses import MeanSquaredError as MeanSquaredError
    from epk_gp.core.losses import PerSampleLoss as PerSampleLoss
    from epk_gp.core.losses import next_words as next_words
    from epk_gp.core.show import CertificateWarning as CertificateWarning
    from epk_gp.core.trajectory import Trajectory as Trajectory
    from epk_gp.core.trajectory import network_outputs as network_outputs
    from epk_gp.datamodels.fit import datamodel as datamodel
    from epk_gp.estimators import EPKClassifier as EPKClassifier
    from epk_gp.estimators import EPKRegressor as EPKRegressor
    from epk_gp.gp.models import LogitGP as LogitGP
    from epk_gp.gp.uncertain_classifier import UncertainClassifier as UncertainClassifier
    from epk_gp.gram.path_features import path_features as path_features
    from epk_gp.gram.path_kernel import PathKernel as PathKernel
    from epk_gp.gram.path_kernel import gram_block as gram_block
    from epk_gp.kernel_machine.attribute import attribute as attribute
    from epk_gp.kernel_machine.influence import Smoothing as Smoothing
    from epk_gp.kernel_machine.influence import influence as influence
    from epk_gp.kernel_machine.reconstruct import reconstruct as reconstruct
    from epk_gp.kernel_machine.retrain import retrain as retrain
    from epk_gp.kernel_machine.tokens import attribute_tokens as attribute_tokens
    from epk_gp.kernels.epk import EPKKernel as EPKKernel
    from epk_gp.kernels.tagging import test_copy as test_copy
    from epk_gp.kernels.tagging import train_copy as train_copy
    from epk_gp.quadrature.rules import QuadratureRule as QuadratureRule
    from epk_gp.quadrature.rules import adaptive as adaptive
    from epk_gp.quadrature.rules import chords as chords
    from epk_gp.quadrature.rules import gauss_legendre as gauss_legendre
    from epk_gp.quadrature.rules import layerwise as layerwise
    from epk_gp.quadrature.rules import straight as straight
    from epk_gp.recording.causes import StepMismatchError as StepMismatchError
    from epk_gp.recording.recorder import Recorder as Recorder
    from epk_gp.recording.train import train as train
    from epk_gp.report.write import write_report as write_report
    from epk_gp.storage.rows import Stream as Stream
    from epk_gp.storage.run import load_trajectory as load_trajectory
    from epk_gp.storage.writer import Storage as Storage
    from epk_gp.trained.between import between as between
    from epk_gp.trained.ntk import NTKKernel as NTKKernel
    from epk_gp.trained.ntk import ntk as ntk
else:
    # The same names, imported at their first use (PEP 562): PyTorch and GPyTorch take seconds to import, and `epk-gp
    # --help` needs neither of them.
    _MODULES = {
        "analysis.labels": "label_errors next_to_label",
        "analysis.score_check": "check_scores",
        "estimators": "EPKClassifier EPKRegressor",
        "core.graphs": "Graph Ragged",
        "core.inputs": "Points",
        "core.losses": "CrossEntropy MeanSquaredError PerSampleLoss next_words",
        "autodiff.scalars": "RowFunction",
        "core.show": "CertificateWarning",
        "core.trajectory": "Trajectory network_outputs",
        "datamodels.fit": "datamodel",
        "gp.models": "LogitGP",
        "gp.uncertain_classifier": "UncertainClassifier",
        "gram.path_features": "path_features",
        "gram.path_kernel": "PathKernel gram_block",
        "kernel_machine.attribute": "attribute",
        "kernel_machine.influence": "Smoothing influence",
        "kernel_machine.reconstruct": "reconstruct",
        "kernel_machine.retrain": "retrain",
        "kernel_machine.tokens": "attribute_tokens",
        "kernels.epk": "EPKKernel",
        "kernels.tagging": "test_copy train_copy",
        "quadrature.rules": "QuadratureRule adaptive chords gauss_legendre layerwise straight",
        "recording.causes": "StepMismatchError",
        "recording.recorder": "Recorder",
        "recording.train": "train",
        "storage.rows": "Stream",
        "storage.run": "load_trajectory",
        "storage.writer": "Storage",
        "trained.between": "between",
        "trained.ntk": "NTKKernel ntk",
    }
    _PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}
    _PLACES["write_report"] = "report.write"  # not with a folder: matplotlib
    _FOLDERS = {module.partition(".")[0] for module in _MODULES}
    __all__ = sorted(_PLACES)

    def __getattr__(name: str) -> object:
        """Import the module of a public name; or a folder, and with it the modules of all names."""
        if name in _PLACES:
            value: object = getattr(import_module(f"epk_gp.{_PLACES[name]}"), name)
            for folder in _FOLDERS:  # a folder requested later must have all of its modules
                globals().pop(folder, None)
        elif name.startswith("_") or find_spec(f"epk_gp.{name}") is None:
            raise AttributeError(f"module 'epk_gp' has no attribute {name!r}")
        else:
            for module in _MODULES:
                import_module(f"epk_gp.{module}")
            value = import_module(f"epk_gp.{name}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the public names and the modules, imported or not."""
        modules = {module.name for module in iter_modules(__path__)}
        return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.2.0"

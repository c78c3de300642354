"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from typing import TYPE_CHECKING

from epk_gp import _moved
from epk_gp.core.certificate import CertificateWarning
from epk_gp.core.compute_options import ComputeOptions
from epk_gp.core.losses import CrossEntropy, MeanSquaredError, PerSampleLoss
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.models import LogitGP
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.gram.path_kernel import PathKernel, gram_block
from epk_gp.kernel_machine.attribute import attribute
from epk_gp.kernel_machine.reconstruct import reconstruct
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import split_copy, test_copy, train_copy
from epk_gp.quadrature.rules import adaptive, gauss_legendre, left_endpoint, left_riemann, midpoint
from epk_gp.storage.run import load_trajectory
from epk_gp.storage.writer import Storage
from epk_gp.training.diagnosis import StepMismatchError
from epk_gp.training.recorder import Recorder
from epk_gp.training.train import train

__version__ = "0.2.0.dev0"

__all__ = [
    "CertificateWarning",
    "ComputeOptions",
    "CrossEntropy",
    "EPKKernel",
    "LogitGP",
    "MeanSquaredError",
    "PathKernel",
    "PerSampleLoss",
    "Points",
    "Recorder",
    "StepMismatchError",
    "Storage",
    "Trajectory",
    "adaptive",
    "attribute",
    "gauss_legendre",
    "gram_block",
    "left_endpoint",
    "left_riemann",
    "load_trajectory",
    "midpoint",
    "network_outputs",
    "reconstruct",
    "softmax_uncertainty",
    "split_copy",
    "test_copy",
    "train",
    "train_copy",
]

if not TYPE_CHECKING:  # a type checker must go on reporting names that do not exist

    def __getattr__(name: str) -> object:
        """Return what the name stood for in version 0.1, with a warning that says where it is now."""
        return _moved.resolve(name)

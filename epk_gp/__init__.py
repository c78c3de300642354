"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from epk_gp.core.losses import CrossEntropy, MeanSquaredError, NegativeLogLikelihood, PerSampleLoss
from epk_gp.core.model import zero_final_layer
from epk_gp.core.points import Points
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.core.update_rules import LinearStep, UpdateRule
from epk_gp.gp.calibration import Temperature, calibrated_temperature
from epk_gp.gp.leave_one_out import LeaveOneOut, leave_one_out
from epk_gp.gp.likelihoods import MultitaskFixedNoiseGaussianLikelihood
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.sampling import MonteCarlo, QuasiMonteCarlo, sample_functions
from epk_gp.gp.softmax import SoftmaxUncertainty, softmax_uncertainty
from epk_gp.gram.ntk import tangent_trajectory
from epk_gp.gram.path_kernel import gram_block, gram_block_per_class, gram_diagonal_blocks
from epk_gp.gram.thinning import Thinning, thin_path
from epk_gp.kernel_machine.attribute import Attribution, GroupedAttribution, attribute, attribute_by, attribute_many
from epk_gp.kernel_machine.axes import Axis, by_label, by_layer, by_parameter, by_sample, by_step
from epk_gp.kernel_machine.baselines import Baseline, chen_machine, domingos_machine, k_prime_block
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.kernel_machine.single_machine import SingleMachine, single_machine
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.infinite_width import ArcCosineKernel, ErfKernel
from epk_gp.kernels.precomputed import epk_gram
from epk_gp.kernels.tagging import split_copy, test_copy, train_copy
from epk_gp.quadrature.rules import (
    AdaptiveRule,
    QuadratureRule,
    adaptive,
    gauss_legendre,
    left_endpoint,
    left_riemann,
    midpoint,
)
from epk_gp.storage.loading import load_trajectory
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import ClipNorm, ClipValue
from epk_gp.training.diagnosis import StepMismatchError
from epk_gp.training.indexed_dataset import IndexedDataset
from epk_gp.training.recorder import Recorder
from epk_gp.training.train import train

__version__ = "0.1.0"

__all__ = [
    "AdaptiveRule",
    "ArcCosineKernel",
    "Attribution",
    "Axis",
    "Baseline",
    "ClipNorm",
    "ClipValue",
    "CrossEntropy",
    "EPKKernel",
    "ErfKernel",
    "GroupedAttribution",
    "IndexedDataset",
    "LeaveOneOut",
    "LinearStep",
    "LogitGP",
    "LogitPosterior",
    "MeanSquaredError",
    "MonteCarlo",
    "MultitaskFixedNoiseGaussianLikelihood",
    "NegativeLogLikelihood",
    "PerSampleLoss",
    "Points",
    "QuadratureRule",
    "QuasiMonteCarlo",
    "Reconstruction",
    "Recorder",
    "SingleMachine",
    "SoftmaxUncertainty",
    "Step",
    "UpdateRule",
    "Storage",
    "Temperature",
    "Thinning",
    "Trajectory",
    "StepMismatchError",
    "adaptive",
    "attribute",
    "attribute_by",
    "attribute_many",
    "by_label",
    "by_layer",
    "by_parameter",
    "by_sample",
    "by_step",
    "calibrated_temperature",
    "chen_machine",
    "domingos_machine",
    "epk_gram",
    "gauss_legendre",
    "gram_block",
    "gram_block_per_class",
    "gram_diagonal_blocks",
    "k_prime_block",
    "leave_one_out",
    "left_endpoint",
    "left_riemann",
    "load_trajectory",
    "midpoint",
    "network_outputs",
    "reconstruct",
    "sample_functions",
    "single_machine",
    "softmax_uncertainty",
    "split_copy",
    "tangent_trajectory",
    "test_copy",
    "thin_path",
    "train",
    "train_copy",
    "zero_final_layer",
]

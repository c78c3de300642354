"""Exact path kernels: which training points made a prediction, exactly, and how sure can it be?"""

from epk_gp.engine.gram import gram_block, gram_block_per_class, gram_diagonal_blocks
from epk_gp.engine.points import Points
from epk_gp.engine.quadrature import (
    AdaptiveRule,
    QuadratureRule,
    adaptive,
    gauss_legendre,
    left_endpoint,
    left_riemann,
    midpoint,
)
from epk_gp.engine.tangent import tangent_trajectory
from epk_gp.engine.thinning import Thinning, thin_path
from epk_gp.gp.calibration import Temperature, calibrated_temperature
from epk_gp.gp.draws import MonteCarlo, QuasiMonteCarlo
from epk_gp.gp.functions import sample_functions
from epk_gp.gp.leave_one_out import LeaveOneOut, leave_one_out
from epk_gp.gp.likelihoods import MultitaskFixedNoiseGaussianLikelihood
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.softmax import SoftmaxUncertainty, softmax_uncertainty
from epk_gp.kernels.copies import split_copy, test_copy, train_copy
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.infinite_width import ArcCosineKernel, ErfKernel
from epk_gp.kernels.matrix import epk_gram
from epk_gp.machines.attribute import Attribution, GroupedAttribution, attribute, attribute_by, attribute_by_each
from epk_gp.machines.axes import Axis, by_label, by_layer, by_parameter, by_sample, by_step
from epk_gp.machines.baselines import Baseline, chen_machine, domingos_machine, k_prime_block
from epk_gp.machines.reconstruct import Reconstruction, SingleMachine, reconstruct, single_machine
from epk_gp.recording.chunks import Step
from epk_gp.recording.clipping import ClipNorm, ClipValue
from epk_gp.recording.diagnosis import UnexplainedStepError
from epk_gp.recording.indexed import IndexedDataset
from epk_gp.recording.loading import load_trajectory
from epk_gp.recording.losses import CrossEntropy, MeanSquaredError, NegativeLogLikelihood, PerSampleLoss
from epk_gp.recording.networks import zero_final_layer
from epk_gp.recording.optimizers import LinearStep, StepLaw
from epk_gp.recording.recorder import Recorder
from epk_gp.recording.training import train
from epk_gp.recording.trajectory import Trajectory, network_outputs
from epk_gp.recording.writer import Storage

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
    "StepLaw",
    "Storage",
    "Temperature",
    "Thinning",
    "Trajectory",
    "UnexplainedStepError",
    "adaptive",
    "attribute",
    "attribute_by",
    "attribute_by_each",
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

"""Names that `epk_gp` exported in version 0.1 and that are imported from a submodule now."""

import importlib
import warnings

MOVED = {
    "AdaptiveRule": "epk_gp.quadrature.rules.AdaptiveRule",
    "ArcCosineKernel": "epk_gp.kernels.infinite_width.ArcCosineKernel",
    "Attribution": "epk_gp.kernel_machine.attribute.Attribution",
    "Axis": "epk_gp.kernel_machine.axes.Axis",
    "Baseline": "epk_gp.kernel_machine.baselines.Baseline",
    "ClipNorm": "epk_gp.training.clipping.ClipNorm",
    "ClipValue": "epk_gp.training.clipping.ClipValue",
    "ErfKernel": "epk_gp.kernels.infinite_width.ErfKernel",
    "GroupedAttribution": "epk_gp.kernel_machine.attribute.GroupedAttribution",
    "IndexedDataset": "epk_gp.training.indexed_dataset.IndexedDataset",
    "LeaveOneOut": "epk_gp.gp.leave_one_out.LeaveOneOut",
    "LinearStep": "epk_gp.core.update_rules.LinearStep",
    "LogitPosterior": "epk_gp.gp.posterior.LogitPosterior",
    "MonteCarlo": "epk_gp.gp.sampling.MonteCarlo",
    "MultitaskFixedNoiseGaussianLikelihood": "epk_gp.gp.likelihoods.MultitaskFixedNoiseGaussianLikelihood",
    "NegativeLogLikelihood": "epk_gp.core.losses.NegativeLogLikelihood",
    "QuadratureRule": "epk_gp.quadrature.rules.QuadratureRule",
    "QuasiMonteCarlo": "epk_gp.gp.sampling.QuasiMonteCarlo",
    "Reconstruction": "epk_gp.kernel_machine.reconstruct.Reconstruction",
    "SingleMachine": "epk_gp.kernel_machine.single_machine.SingleMachine",
    "SoftmaxUncertainty": "epk_gp.gp.softmax.SoftmaxUncertainty",
    "Step": "epk_gp.core.step.Step",
    "StepLaw": "epk_gp.core.update_rules.UpdateRule",
    "Temperature": "epk_gp.gp.calibration.Temperature",
    "Thinning": "epk_gp.gram.thinning.Thinning",
    "UnexplainedStepError": "epk_gp.training.diagnosis.StepMismatchError",
    "attribute_by": "epk_gp.kernel_machine.attribute.attribute_by",
    "attribute_by_each": "epk_gp.kernel_machine.attribute.attribute_many",
    "by_label": "epk_gp.kernel_machine.axes.by_label",
    "by_layer": "epk_gp.kernel_machine.axes.by_layer",
    "by_parameter": "epk_gp.kernel_machine.axes.by_parameter",
    "by_sample": "epk_gp.kernel_machine.axes.by_sample",
    "by_step": "epk_gp.kernel_machine.axes.by_step",
    "calibrated_temperature": "epk_gp.gp.calibration.calibrated_temperature",
    "chen_machine": "epk_gp.kernel_machine.baselines.chen_machine",
    "domingos_machine": "epk_gp.kernel_machine.baselines.domingos_machine",
    "epk_gram": "epk_gp.kernels.precomputed.epk_gram",
    "gram_block_per_class": "epk_gp.gram.path_kernel.gram_block_per_class",
    "gram_diagonal_blocks": "epk_gp.gram.path_kernel.gram_diagonal_blocks",
    "k_prime_block": "epk_gp.kernel_machine.baselines.k_prime_block",
    "leave_one_out": "epk_gp.gp.leave_one_out.leave_one_out",
    "sample_functions": "epk_gp.gp.sampling.sample_functions",
    "single_machine": "epk_gp.kernel_machine.single_machine.single_machine",
    "tangent_trajectory": "epk_gp.gram.ntk.tangent_trajectory",
    "thin_path": "epk_gp.gram.thinning.thin_path",
    "zero_final_layer": "epk_gp.core.model.zero_final_layer",
}


def resolve(name: str) -> object:
    """Return the object that a former name of the package stands for, and warn the caller's caller.

    Raises:
        AttributeError: The package never had this name.
    """
    if name not in MOVED:
        raise AttributeError(f"module 'epk_gp' has no attribute {name!r}")
    module, _, attribute = MOVED[name].rpartition(".")
    message = (
        f"epk_gp.{name} has moved, and its old name will go in version 0.3. Write: from {module} import {attribute}"
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    found: object = getattr(importlib.import_module(module), attribute)
    return found

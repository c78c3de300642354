"""Which representation of a layer's Jacobian costs less (docs/engine.md, section 4)."""

from dataclasses import dataclass

import torch

from epk_gp.core.losses import Head

# What an entry of the block costs beside the multiply-adds of its matrix products, in multiply-adds. Rates measured on
# two cores with AVX-512, float32: matrix products 265 to 295 GFLOP/s, elementwise passes over 36 MB 42 to 57 GB/s. A
# product that adds to the block (`addmm_`, beta = 1) reads and writes its entry: 8 bytes, the time of 20 to 28
# multiply-adds. A product into a scratch block, which is then scaled and added (`addcmul_`), moves 20 bytes: 46 to 70.
# Both are rounded to powers of two.
_SCALE_AND_ADD = 64
_ADD = 32

# Gradients with more numbers than so many times k are sketched by their factors, which takes two Fourier transforms of
# k numbers. Measured on one thread, float32, k = 1024 and 4096: written out, 2 k numbers take 2.6 microseconds a point,
# 4 k numbers 5 and 33; by their factors, 1.7 and 7.2.
_SKETCHED_FACTORS = 2


@dataclass(frozen=True)
class ContractionCost:
    """What the cost of a layer's representation depends on, beside the layer's shape.

    Attributes:
        num_output_pairs: K K', pairs of outputs in the block.
        num_contractions: Inner products that a step costs if the layer is factored and its factors cannot be averaged
            over t: Q for a fixed rule, the order of an adaptive one, or 1.
        cotangents_are_constant: The test side's cotangents do not depend on the weights (the logits head).
        all_dense: Every parameter takes the dense representation: where the plan does not support interpolation, in
            Gram blocks under an adaptive rule, and in attributions under any rule.
        num_features: k, where gradients are not multiplied but sketched (`autodiff.sketches`).
        tries_pool_windows: Gradients of convolutions end at a max-pool where that costs less for all outputs, however
            few are asked for: to be verified.
    """

    num_output_pairs: int
    num_contractions: int
    cotangents_are_constant: bool = False
    all_dense: bool = False
    num_features: int | None = None
    tries_pool_windows: bool = False

    def factored_is_cheaper(self, num_positions: int, n_in: int, n_out: int, *, is_averaged: bool) -> bool:
        """Compare factored with dense inner products, per pair of points and outputs.

        Args:
            num_positions: L, positions at which the layer's weight is used for one sample.
            n_in: Inputs of the layer at a position.
            n_out: Outputs of the layer at a position.
            is_averaged: One factor does not depend on t, so that averages over t cost no product per node.
        """
        if self.num_features is not None:
            return num_positions == 1 and n_in * n_out > _SKETCHED_FACTORS * self.num_features
        contractions = 1 if is_averaged else self.num_contractions
        factored = contractions * num_positions**2 * (n_in / self.num_output_pairs + n_out + _SCALE_AND_ADD)
        return factored < n_in * n_out + _ADD

    def factored_last_layer_is_cheaper(self, shape: torch.Size, head: Head) -> bool:
        """Compare the last layer's factors with its dense Jacobian, as `factored_is_cheaper` does.

        Args:
            shape: Of the last layer's weight, (C, n_in).
            head: Under the logits, one product of the inputs serves all pairs of outputs. Under the softmax, C + 1
                products of averages do, and two passes over the block.
        """
        n_out, n_in = shape[0], shape[1:].numel()
        dense = n_in * n_out + _ADD
        if head == "logits":
            return n_in / self.num_output_pairs < dense
        return (n_out + 1) * n_in / self.num_output_pairs + 2 * _SCALE_AND_ADD < dense

"""The network as a kernel machine, and each training point's share of a prediction."""

from epk_gp.kernel_machine.attribute import plan_attribution as plan_attribution
from epk_gp.kernel_machine.axes import Axis as Axis
from epk_gp.kernel_machine.axes import by_label as by_label
from epk_gp.kernel_machine.axes import by_layer as by_layer
from epk_gp.kernel_machine.axes import by_parameter as by_parameter
from epk_gp.kernel_machine.axes import by_sample as by_sample
from epk_gp.kernel_machine.axes import by_step as by_step
from epk_gp.kernel_machine.reconstruct import single_machine as single_machine
from epk_gp.kernel_machine.reconstruct import tangent_trajectory as tangent_trajectory

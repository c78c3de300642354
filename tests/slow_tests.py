"""Tests whose cases are fast one by one and slow together; `make test-fast` leaves them out as it does slow ones."""

# Measured with `pytest -n 2 -m "not slow" --durations=0` on two cores that others used too: all cases of one of these
# tests took 6 to 140 seconds together, and no test that is missing here took more than 26.
SLOW_TOGETHER = {
    "test_a_second_plan_does_not_resume_from_the_firsts_sums",
    "test_a_symmetric_tile_is_computed_in_halves",
    "test_contributions_equal_the_definition",
    "test_every_combination_of_axes_is_a_sum_of_the_finest",
    "test_float32_adam_is_no_false_alarm",
    "test_no_more_outputs_are_taken_back_than_fit",
    "test_one_class_per_point_is_a_column_of_all",
    "test_rows_that_go_different_ways_are_differentiated_row_by_row",
    "test_the_error_is_reported_and_falls_with_the_step",
    "test_the_host_waits_as_often_for_many_steps_as_for_few",
    "test_written_out_gradients_are_in_the_order_of_the_flat_weights",
}

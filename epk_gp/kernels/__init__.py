"""The exact path kernel in GPyTorch; imports core, autodiff, quadrature and gram.

Start with `epk.EPKKernel`. Points are rows with a copy column (`tagging`); what is made of a C x C block is a value
(`output_structure`); blocks are computed once and kept (`blocks`); `values` divides them by norms or makes them of
sketched features, `derivatives` attaches what a backward pass asks for. Other kernels: `hidden_features`, and
`infinite_width` to compare with.
"""

"""The exact path kernel in GPyTorch; imports core, autodiff, quadrature and gram.

Start with `epk.EPKKernel`. Points are rows with a copy column, which are checked and parsed at the public functions
(`tagging`); blocks, and values made from a C x C block, are computed once and kept (`blocks`); `values` divides them by
norms and attaches the derivatives that a backward pass needs.
"""

"""A fault simulator for the whole control plane, in virtual time under a seed.

It is a program and a library of developers and of the suite, not a part of the product: it drives the product from
outside through its seams, contains everything that may go wrong, and nothing that serves needs it. So it lies among
the tests. ``python tests/faults --help`` says how it is run.
"""

"""Computation on tensors: attention, linear layers, norms, rotary positions, sampling.

Plain functions and small classes over torch tensors that know nothing of plans, slots or models. Every operation
that a row passes through gives that row the same bits whatever other rows are in the batch.
"""

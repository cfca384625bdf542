"""Model architectures: configuration and the computation of one pipeline stage."""

"""The control plane: the decision core, the wire, and the shell around them. Starts without torch."""

from .compiled import prefer

prefer(__path__)

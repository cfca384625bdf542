"""What is raised when something cannot be simulated."""


class CannotSimulate(ValueError):
    """A device, model, trace or way to use them that cannot be simulated, in one sentence for whoever asked."""
